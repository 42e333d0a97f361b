"""AttentionService: one handler for each RPC; errors meet the table in `status.py`."""

import time
from collections.abc import Mapping

import numpy as np

from attnd.kernels import validation
from attnd.kernels.contract import Layout
from attnd.service import decode, encode, plans
from attnd.service.attending import AttentionCall
from attnd.service.caches import Cache, CacheRegistry
from attnd.service.dispatch import Caller, Receive, Reply, Send
from attnd.service.engine import Engine
from attnd.service.session import Handlers, Plans, Session
from attnd.v1 import attention_pb2 as pb


class AttentionHandlers:
    """Handlers of attnd.v1.AttentionService."""

    def __init__(self, caches: CacheRegistry, engine: Engine) -> None:
        self._caches = caches
        self._engine = engine
        self._sessions: set[Session] = set()
        self._conversation = Handlers(
            whole={
                "ragged_paged_attention": self.ragged_paged_attention,
                "paged_attention": self.paged_attention,
                "attend": self.attend,
            },
            plan={"ragged_paged_attention": self._plan_ragged, "attend": self._plan_sequences},
            planned=self._planned,
        )

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
        call = await _sequence_call(self._caches.by_id(request.cache_id, caller.tenant), request, caller.arrays)
        return await self._answer(call, caller, pb.AttendResponse)

    async def validate_batch(self, request: pb.ValidateBatchRequest, caller: Caller) -> pb.ValidateBatchResponse:
        """Names every violation of a batch."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        violations = validation.ragged_violations(
            cache.spec,
            decode.array_info(request),
            **decode.arrays(caller.arrays, plans.RAGGED_METADATA),
            options=decode.options(request.options),
            hints=decode.ragged_hints(request),
        )
        return encode.violations(violations)

    async def session(self, receive: Receive, send: Send, caller: Caller) -> None:
        """Serves a stream of calls."""
        opened = Session(self._conversation, send, caller)
        self._sessions.add(opened)
        try:
            await opened.run(receive)
        finally:
            self._sessions.discard(opened)

    def new_plans(self) -> Plans:
        """Returns the plans of a caller who has made none yet."""
        return Plans(self._conversation)

    def end_sessions(self) -> None:
        """Ends open sessions once they have answered what they have read: an idle one would never end by itself."""
        for opened in self._sessions:
            opened.end()

    def _plan_ragged(self, request: pb.RaggedPagedAttentionRequest, caller: Caller) -> plans.RaggedStep:
        return plans.ragged_step(self._caches.by_id(request.cache_id, caller.tenant), request, caller.arrays)

    def _plan_sequences(self, request: pb.AttendRequest, caller: Caller) -> plans.SequenceStep:
        return plans.sequence_step(self._caches.by_id(request.cache_id, caller.tenant), request, caller.arrays)

    async def _planned(self, step: plans.Step, request: pb.PlannedAttendRequest, caller: Caller) -> tuple[str, Reply]:
        cache = self._caches.by_id(step.cache_id, caller.tenant)
        call = await step.call(cache, request.layer, caller.arrays, decode.options(request.options))
        if isinstance(step, plans.RaggedStep):
            return "ragged_paged_attention", await self._answer(call, caller, pb.RaggedPagedAttentionResponse)
        return "attend", await self._answer(call, caller, pb.AttendResponse)

    async def _answer(
        self, call: AttentionCall, caller: Caller, response_class: type[encode.AttentionResponse]
    ) -> Reply:
        validate_ns = time.monotonic_ns() - caller.received_at_ns
        await call.room()
        ran = await self._engine.run(
            call,
            lane=call.cache.tenant,
            expires_at=caller.expires_at,
            settle=call.settle,
            connection=caller.connection,
        )
        return encode.attended(response_class, ran, call.cache.implementation.name, validate_ns)


def _ragged_call(
    cache: Cache, request: pb.RaggedPagedAttentionRequest, given: Mapping[str, np.ndarray]
) -> AttentionCall:
    layer = validation.layer_index(cache.spec, request.layer)
    q, k, v = decode.array(given, "q"), given.get("k"), given.get("v")
    options, hints = decode.options(request.options), decode.ragged_hints(request)
    metadata = decode.arrays(given, plans.RAGGED_METADATA)
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
    cache.require_sequences()
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
    return await plans.sequence_call(cache, layer, request.sequences, lens, given, options)
