"""Planned steps: metadata that has been judged once, and the calls of the layers that name it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from attnd.kernels import validation
from attnd.kernels.contract import AttentionOptions, KernelHints, Layout
from attnd.service import decode
from attnd.service.attending import AttentionCall
from attnd.service.caches import Cache
from attnd.v1 import attention_pb2 as pb

_NO_HINTS: Final = KernelHints()
RAGGED_METADATA: Final = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedStep:
    """A step over pages that the client manages.

    Attributes:
        cache_id: The cache, to be looked up for each layer: it may be gone by then.
        plan: The metadata.
        hints: How the kernel should work.
        size_bytes: Bytes that its arrays hold.
    """

    cache_id: str
    plan: validation.RaggedPlan
    hints: KernelHints
    size_bytes: int

    async def call(
        self, cache: Cache, layer: int, given: Mapping[str, np.ndarray], options: AttentionOptions
    ) -> AttentionCall:
        """Returns the call of one layer.

        Raises:
            InvalidArgumentError: The layer or what it brings is wrong.
        """
        layer = validation.layer_index(cache.spec, layer)
        q, k, v = decode.array(given, "q"), given.get("k"), given.get("v")
        batch = validation.ragged_layer(self.plan, q, k=k, v=v, options=options)
        return AttentionCall(cache=cache, layer=layer, batch=batch, q=q, k=k, v=v, options=options, hints=self.hints)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """A step over sequences.

    Attributes:
        cache_id: The cache, to be looked up for each layer.
        plan: The lengths.
        sequences: The handles.
        size_bytes: Bytes that its arrays hold.
    """

    cache_id: str
    plan: validation.StepPlan
    sequences: tuple[bytes, ...]
    size_bytes: int

    async def call(
        self, cache: Cache, layer: int, given: Mapping[str, np.ndarray], options: AttentionOptions
    ) -> AttentionCall:
        """Returns the call of one layer, its sequences reserved.

        Raises:
            InvalidArgumentError: The layer or what it brings is wrong.
            RefusedError: As `SequenceTable.reserve`.
        """
        layer = validation.layer_index(cache.spec, layer)
        q, k, v = decode.array(given, "q"), given.get("k"), given.get("v")
        lens = validation.step_layer(self.plan, q, k=k, v=v, options=options)
        return await sequence_call(cache, layer, self.sequences, lens, given, options)


Step = RaggedStep | SequenceStep


def ragged_step(cache: Cache, request: pb.RaggedPagedAttentionRequest, given: Mapping[str, np.ndarray]) -> RaggedStep:
    """Returns the plan of a step over pages that the client manages.

    Raises:
        InvalidArgumentError: The metadata is wrong.
        FailedPreconditionError: The cache is of another kind.
    """
    cache.require_pages_by_client()
    cache.require_layout(Layout.INTERLEAVED)
    hints = decode.ragged_hints(request)
    metadata = decode.arrays(given, RAGGED_METADATA)
    plan = validation.ragged_plan(cache.spec, **metadata, hints=hints)
    return RaggedStep(cache_id=cache.cache_id, plan=plan, hints=hints, size_bytes=_size_bytes(given))


def sequence_step(cache: Cache, request: pb.AttendRequest, given: Mapping[str, np.ndarray]) -> SequenceStep:
    """Returns the plan of a step over sequences, which are looked up for each layer.

    Raises:
        InvalidArgumentError: The lengths are wrong.
        FailedPreconditionError: The client manages the cache's pages.
    """
    cache.require_sequences()
    # The lengths outlive the message that they lie in.
    lens = {name: array.copy() for name, array in decode.arrays(given, ("q_lens", "kv_lens")).items()}
    plan = validation.step_plan(cache.spec, **lens, num_sequences=len(request.sequences))
    handles = tuple(request.sequences)
    return SequenceStep(
        cache_id=cache.cache_id, plan=plan, sequences=handles, size_bytes=_size_bytes(given) + sum(map(len, handles))
    )


async def sequence_call(
    cache: Cache,
    layer: int,
    handles: Sequence[bytes],
    lens: validation.StepLens,
    given: Mapping[str, np.ndarray],
    options: AttentionOptions,
) -> AttentionCall:
    """Returns a call over sequences, which it reserves.

    Raises:
        RefusedError: As `SequenceTable.reserve`.
    """
    k, v = given.get("k"), given.get("v")
    table = cache.require_sequences()
    reservation = await table.reserve(handles, lens.q_lens, lens.kv_lens, layer, append=k is not None)
    try:
        if k is not None and v is not None and reservation.rewrites:
            # Tokens that are written again are compared first. In shared memory their owner could change them in
            # between, and with them what forks and saves read.
            k, v = k.copy(), v.copy()
        return AttentionCall(
            cache=cache,
            layer=layer,
            batch=reservation.batch,
            q=given["q"],
            k=k,
            v=v,
            options=options,
            hints=_NO_HINTS,
            reservation=reservation,
        )
    except BaseException:
        table.settle(reservation, commit=False)
        raise


def _size_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays.values())
