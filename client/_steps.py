"""Steps: what all layers of one step of a model share, and the call that carries one layer."""

from __future__ import annotations  # help() shows names, not what ArrayLike stands for

from collections.abc import Iterable, Mapping
from typing import Final, SupportsFloat, SupportsIndex

import numpy as np
import numpy.typing as npt

from attnd.client import _attention, _messages
from attnd.client._calls import CacheHandle, Call, SequenceHandle, StepMetadata, handles_of
from attnd.v1 import attention_pb2

_METHODS: Final = {"attend": "Attend", "ragged_paged_attention": "RaggedPagedAttention"}


class StepHandle:
    """One step over some sequences, ready to attend layer by layer.

    Attributes:
        cache: The cache.
        metadata: What its layers share.
    """

    def __init__(self, cache: CacheHandle, metadata: StepMetadata) -> None:
        self.cache = cache
        self.metadata = metadata

    def __repr__(self) -> str:
        lengths = self.metadata.arrays["kv_lens"]
        return f"<{type(self).__name__} of {self.cache.name!r}: {len(lengths)} sequences>"


def sequence_step(
    cache: CacheHandle, sequences: Iterable[SequenceHandle], q_lens: npt.ArrayLike, kv_lens: npt.ArrayLike
) -> StepMetadata:
    """Returns the metadata of a step over sequences whose pages the server manages."""
    request = attention_pb2.AttendRequest(cache_id=cache.info.cache_id, sequences=handles_of(cache, sequences))
    arrays = {
        "q_lens": _messages.integers_array(q_lens, "q_lens"),
        "kv_lens": _messages.integers_array(kv_lens, "kv_lens"),
    }
    return StepMetadata(field="attend", request=request, arrays=_kept(arrays))


def planned_step(
    cache: CacheHandle,
    kv_lens: npt.ArrayLike,
    page_indices: npt.ArrayLike,
    cu_q_lens: npt.ArrayLike,
    num_seqs: npt.ArrayLike,
) -> StepMetadata:
    """Returns the metadata of a step over pages that the client manages."""
    request = attention_pb2.RaggedPagedAttentionRequest(cache_id=cache.info.cache_id)
    arrays = _attention.page_tables(kv_lens, page_indices, cu_q_lens, num_seqs)
    return StepMetadata(field="ragged_paged_attention", request=request, arrays=_kept(arrays))


def _kept(arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    """Returns arrays that nobody changes: whether a step has been sent by then must make no difference."""
    return {name: array.copy() for name, array in arrays.items()}


def attend(
    step: StepHandle,
    layer: SupportsIndex,
    q: npt.ArrayLike,
    k: npt.ArrayLike | None = None,
    v: npt.ArrayLike | None = None,
    *,
    sm_scale: SupportsFloat | None = 1.0,
    sliding_window: SupportsIndex | None = None,
    soft_cap: SupportsFloat | None = None,
    k_scale: SupportsFloat | None = None,
    v_scale: SupportsFloat | None = None,
    return_lse: bool = False,
    timeout_s: float | None = None,
) -> Call[_attention.Attended]:
    """Writes the new tokens of one layer and attends over all tokens of the step's sequences.

    A repeated call writes the same to the same place, so it may be retried. A refused call changes nothing.

    Args:
        step: This step.
        layer: Layer, in [0, num_layers).
        q: float32, bfloat16 or float16 [T, num_q_heads, head_dim]. Queries: the rows of the first sequence, then of
            the next.
        k: [T, num_kv_heads, head_dim]. New keys, cast to the cache's dtype. None: the layer holds the tokens already.
        v: [T, num_kv_heads, head_dim]. New values. With `k` or not at all.
        sm_scale: Factor of the scores.
        sliding_window: Keys that a query sees, itself included. None: all.
        soft_cap: Caps the scores at soft_cap * tanh(score / soft_cap). None: no cap.
        k_scale: Factor of the stored keys. None: 1.0.
        v_scale: Factor of the stored values. None: 1.0.
        return_lse: Whether to return the logarithm of the sum of exponentials as well.
        timeout_s: Seconds to wait for the answer. None: the client's.

    Returns:
        `out` with q's dtype and shape, accumulated in float32. With `return_lse`, `(out, lse_natural)`, the latter
        float32 [T, num_q_heads], -inf in rows that attend over nothing.

    Raises:
        InvalidArgumentError: Lengths, shapes or dtypes are wrong.
        NotFoundError: The cache or a sequence is gone.
        FailedPreconditionError: The step leaves a hole in a sequence, contradicts tokens that the layer already
            holds, or the cache's pages belong to the other side.
        ResourceExhaustedError: The pages or the server's queue are full, or the message is too large.
    """
    request = attention_pb2.PlannedAttendRequest(
        layer=_messages.integer(layer, "layer"),
        options=_attention.options(sm_scale, sliding_window, soft_cap, k_scale, v_scale, return_lse),
    )
    metadata = step.metadata
    tokens = _attention.tokens(q, k, v)
    return _attention.attending(step.cache, _METHODS[metadata.field], request, tokens, return_lse, timeout_s, metadata)
