"""AttentionService: one handler for each RPC; errors meet the table in `status.py`."""

import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from attnd.kernels import validation
from attnd.kernels.contract import KernelHints, Layout
from attnd.service import decode, encode
from attnd.service.attending import AttentionCall
from attnd.service.caches import Cache, CacheRegistry
from attnd.service.dispatch import Caller, Reply, unimplemented
from attnd.service.engine import Engine
from attnd.v1 import attention_pb2 as pb

_RAGGED_METADATA: Final = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")


class AttentionHandlers:
    """Handlers of attnd.v1.AttentionService."""

    session = staticmethod(unimplemented)

    def __init__(self, caches: CacheRegistry, engine: Engine) -> None:
        self._caches = caches
        self._engine = engine

    async def ragged_paged_attention(self, request: pb.RaggedPagedAttentionRequest, caller: Caller) -> Reply:
        """Attends over pages of the client's, as JAX's `ragged_paged_attention` does."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        cache.require_pages_by_client()
        cache.require_layout(Layout.INTERLEAVED)
        return await self._answer(_ragged_call(cache, request, caller.arrays), caller, pb.RaggedPagedAttentionResponse)

    async def paged_attention(self, request: pb.PagedAttentionRequest, caller: Caller) -> Reply:
        """Attends over pages of the client's, as JAX's `paged_attention` does."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        cache.require_pages_by_client()
        cache.require_layout(Layout.SPLIT)
        return await self._answer(_decode_call(cache, request, caller.arrays), caller, pb.PagedAttentionResponse)

    async def attend(self, request: pb.AttendRequest, caller: Caller) -> Reply:
        """Attends over sequences, taking pages as they grow."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        sequences = cache.require_sequences()
        call = await _sequence_call(cache, request, caller.arrays)
        reservation = call.reservation
        assert reservation is not None
        return await self._answer(
            call, caller, pb.AttendResponse, lambda done: sequences.settle(reservation, commit=done)
        )

    async def validate_batch(self, request: pb.ValidateBatchRequest, caller: Caller) -> pb.ValidateBatchResponse:
        """Names every violation of a batch."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        violations = validation.ragged_violations(
            cache.spec,
            decode.array_info(request),
            **decode.arrays(caller.arrays, _RAGGED_METADATA),
            options=decode.options(request.options),
            hints=decode.ragged_hints(request),
        )
        return encode.violations(violations)

    async def _answer(
        self,
        call: AttentionCall,
        caller: Caller,
        response_class: type[encode.AttentionResponse],
        settle: Callable[[bool], None] = lambda _done: None,
    ) -> Reply:
        validate_ns = time.monotonic_ns() - caller.received_at_ns
        ran = await self._engine.run(call, lane=call.cache.tenant, expires_at=caller.expires_at, settle=settle)
        return encode.attended(response_class, ran, call.cache.implementation.name, validate_ns)


def _ragged_call(
    cache: Cache, request: pb.RaggedPagedAttentionRequest, given: Mapping[str, np.ndarray]
) -> AttentionCall:
    layer = validation.layer_index(cache.spec, request.layer)
    q, k, v = decode.array(given, "q"), given.get("k"), given.get("v")
    options, hints = decode.options(request.options), decode.ragged_hints(request)
    metadata = decode.arrays(given, _RAGGED_METADATA)
    batch = validation.ragged_batch(cache.spec, q, **metadata, k=k, v=v, options=options, hints=hints)
    return AttentionCall(cache=cache, layer=layer, batch=batch, q=q, k=k, v=v, options=options, hints=hints)


def _decode_call(cache: Cache, request: pb.PagedAttentionRequest, given: Mapping[str, np.ndarray]) -> AttentionCall:
    layer = validation.layer_index(cache.spec, request.layer)
    q, k, v = decode.array(given, "q"), given.get("k"), given.get("v")
    options, hints = decode.decode_options(request), decode.decode_hints(request)
    metadata = decode.arrays(given, ("lengths", "page_indices"))
    decoded = validation.decode_batch(cache.spec, q, **metadata, k=k, v=v, options=options, hints=hints)
    cache.require_megacore(hints.megacore_mode)
    return AttentionCall(
        cache=cache,
        layer=layer,
        batch=decoded.batch,
        q=q,
        k=k,
        v=v,
        options=options,
        hints=hints,
        rows=decoded.rows,
    )


async def _sequence_call(cache: Cache, request: pb.AttendRequest, given: Mapping[str, np.ndarray]) -> AttentionCall:
    layer = validation.layer_index(cache.spec, request.layer)
    q, k, v = decode.array(given, "q"), given.get("k"), given.get("v")
    options = decode.options(request.options)
    lens = validation.step_lens(
        cache.spec,
        q,
        **decode.arrays(given, ("q_lens", "kv_lens")),
        num_sequences=len(request.sequences),
        k=k,
        v=v,
        options=options,
    )
    reservation = await cache.require_sequences().reserve(
        request.sequences, lens.q_lens, lens.kv_lens, layer, append=k is not None
    )
    return AttentionCall(
        cache=cache,
        layer=layer,
        batch=reservation.batch,
        q=q,
        k=k,
        v=v,
        options=options,
        hints=KernelHints(),
        reservation=reservation,
    )
