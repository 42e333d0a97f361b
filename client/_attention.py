"""The calls at kernel level, and the parts of them that `_steps.py` shares.

As in `_caches.py`, each function that returns a call is a public method of the clients, its first argument the object
that it is a method of.
"""

from __future__ import annotations  # help() shows names, not what ArrayLike stands for

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, SupportsFloat, SupportsIndex, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from attnd.client import _messages
from attnd.client._calls import CacheHandle, Call, StepMetadata
from attnd.client._errors import Violation
from attnd.v1 import attention_pb2

# An array, or with `return_lse` a pair of arrays. Any stands for the pair, so that both `out = ...` and
# `out, lse = ...` pass a type checker.
Attended: TypeAlias = np.ndarray | Any

P = ParamSpec("P")
T = TypeVar("T")


def ragged_paged_attention(
    cache: CacheHandle,
    layer: SupportsIndex,
    q: npt.ArrayLike,
    kv_lens: npt.ArrayLike,
    page_indices: npt.ArrayLike,
    cu_q_lens: npt.ArrayLike,
    num_seqs: npt.ArrayLike,
    k: npt.ArrayLike | None = None,
    v: npt.ArrayLike | None = None,
    *,
    sm_scale: SupportsFloat | None = 1.0,
    sliding_window: SupportsIndex | None = None,
    soft_cap: SupportsFloat | None = None,
    k_scale: SupportsFloat | None = None,
    v_scale: SupportsFloat | None = None,
    return_lse: bool = False,
    num_kv_pages_per_block: SupportsIndex | None = None,
    num_queries_per_block: SupportsIndex | None = None,
    vmem_limit_bytes: SupportsIndex | None = None,
    timeout_s: float | None = None,
) -> Call[Attended]:
    """Attends as JAX's `ragged_paged_attention` does, over the pages of one layer of this cache.

    With `k` and `v` the new tokens are first written at positions kv_len - q_len ... kv_len - 1 of their rows. A
    repeated call writes the same to the same place, so it may be retried. A refused call changes nothing.

    Args:
        cache: This cache.
        layer: Layer, in [0, num_layers).
        q: float32, bfloat16 or float16 [T, num_q_heads, head_dim]. Queries, row after row.
        kv_lens: int32 [S]. Tokens that each row attends over, this call's included.
        page_indices: int32 [S, P]. Page ids of each row. Slots that kv_lens does not reach are not read.
        cu_q_lens: int32 [S + 1]. Running sum of the rows' query lengths, from 0.
        num_seqs: int32 [1], or an integer. Rows in use, in [0, S].
        k: [T, num_kv_heads, head_dim]. New keys, cast to the cache's dtype. None: nothing is written.
        v: [T, num_kv_heads, head_dim]. New values. With `k` or not at all.
        sm_scale: Factor of the scores.
        sliding_window: Keys that a query sees, itself included. None: all.
        soft_cap: Caps the scores at soft_cap * tanh(score / soft_cap). None: no cap.
        k_scale: Factor of the stored keys. None: 1.0.
        v_scale: Factor of the stored values. None: 1.0.
        return_lse: Whether to return the logarithm of the sum of exponentials as well.
        num_kv_pages_per_block: Block size of JAX's kernel, in [1, P]. None: chosen by the server.
        num_queries_per_block: Block size of JAX's kernel, > 0. None: chosen by the server.
        vmem_limit_bytes: Limit of JAX's kernel, > 0. None: chosen by the server.
        timeout_s: Seconds to wait for the answer. None: the client's.

    Returns:
        `out` with q's dtype and shape, rows past cu_q_lens[num_seqs] zero; accumulated in float32. With `return_lse`,
        `(out, lse_natural)`, the latter float32 [T, num_q_heads], -inf in rows that attend over nothing.

    Raises:
        InvalidArgumentError: The metadata is wrong; the text is JAX's where JAX's kernel documents one.
        FailedPreconditionError: The server manages the cache's pages, or its layout is `split`.
        DataLossError: The call reads a page that was lost in a save.
        ResourceExhaustedError: The server's queue is full, or the message too large.
        UnimplementedError: The cache's implementation cannot do this.
    """
    request = attention_pb2.RaggedPagedAttentionRequest(
        cache_id=cache.info.cache_id,
        layer=_messages.integer(layer, "layer"),
        options=options(sm_scale, sliding_window, soft_cap, k_scale, v_scale, return_lse),
        block_sizes=_block_sizes(num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes),
    )
    arrays = {**page_tables(kv_lens, page_indices, cu_q_lens, num_seqs), **tokens(q, k, v)}
    return attending(cache, "RaggedPagedAttention", request, arrays, return_lse, timeout_s)


def paged_attention(
    cache: CacheHandle,
    layer: SupportsIndex,
    q: npt.ArrayLike,
    lengths: npt.ArrayLike,
    page_indices: npt.ArrayLike,
    *,
    pages_per_compute_block: SupportsIndex | None = None,
    attn_logits_soft_cap: SupportsFloat | None = None,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
    k: npt.ArrayLike | None = None,
    v: npt.ArrayLike | None = None,
    return_lse: bool = False,
    timeout_s: float | None = None,
) -> Call[Attended]:
    """Attends as JAX's `paged_attention` does, one query token a row, over the pages of one layer of this cache.

    Scores are not scaled: scale `q` before. With `k` and `v` the new tokens are first written at position length - 1.

    Args:
        cache: This cache.
        layer: Layer, in [0, num_layers).
        q: float32, bfloat16 or float16 [B, num_q_heads, head_dim]. Queries, one a row.
        lengths: int32 [B]. Tokens that each row attends over, in [0, P * page_size]. A row of 0 is answered with
            zeros.
        page_indices: int32 [B, P]. Page ids of each row. Slots that lengths does not reach are not read.
        pages_per_compute_block: Pages that JAX's kernel reads at a time; must divide P. None: chosen by the server.
        attn_logits_soft_cap: Caps the scores at cap * tanh(score / cap). None: no cap.
        megacore_mode: "kv_head" or "batch": how two cores share the work, on devices with megacore.
        inline_seq_dim: Whether JAX's kernel walks the pages in its body rather than in its grid.
        k: [B, num_kv_heads, head_dim]. New keys, cast to the cache's dtype. None: nothing is written.
        v: [B, num_kv_heads, head_dim]. New values. With `k` or not at all.
        return_lse: Whether to return the logarithm of the sum of exponentials as well.
        timeout_s: Seconds to wait for the answer. None: the client's.

    Returns:
        `out` with q's dtype and shape; with `return_lse`, `(out, lse_natural)`, the latter float32 [B, num_q_heads].

    Raises:
        InvalidArgumentError: The metadata is wrong; the text is JAX's where JAX's kernel documents one.
        FailedPreconditionError: The server manages the cache's pages, its layout is `interleaved`, or the device has
            no megacore.
        DataLossError: The call reads a page that was lost in a save.
        ResourceExhaustedError: The server's queue is full, or the message too large.
        UnimplementedError: The cache's implementation cannot do this.
    """
    request = attention_pb2.PagedAttentionRequest(
        cache_id=cache.info.cache_id,
        layer=_messages.integer(layer, "layer"),
        pages_per_compute_block=_messages.optional_integer(pages_per_compute_block, "pages_per_compute_block", bits=32),
        attn_logits_soft_cap=_messages.real(attn_logits_soft_cap, "attn_logits_soft_cap"),
        megacore_mode=None if megacore_mode is None else _messages.text(megacore_mode, "megacore_mode"),
        inline_seq_dim=_messages.flag(inline_seq_dim, "inline_seq_dim"),
        return_lse=_messages.flag(return_lse, "return_lse"),
    )
    arrays = {
        "lengths": _messages.integers_array(lengths, "lengths"),
        "page_indices": _messages.integers_array(page_indices, "page_indices"),
        **tokens(q, k, v),
    }
    return attending(cache, "PagedAttention", request, arrays, return_lse, timeout_s)


def validate_batch(
    cache: CacheHandle,
    q_shape: Iterable[SupportsIndex],
    kv_lens: npt.ArrayLike,
    page_indices: npt.ArrayLike,
    cu_q_lens: npt.ArrayLike,
    num_seqs: npt.ArrayLike,
    *,
    q_dtype: npt.DTypeLike = "float32",
    sm_scale: SupportsFloat | None = 1.0,
    sliding_window: SupportsIndex | None = None,
    soft_cap: SupportsFloat | None = None,
    k_scale: SupportsFloat | None = None,
    v_scale: SupportsFloat | None = None,
    num_kv_pages_per_block: SupportsIndex | None = None,
    num_queries_per_block: SupportsIndex | None = None,
    vmem_limit_bytes: SupportsIndex | None = None,
) -> Call[list[Violation]]:
    """Names what is wrong with the arguments of a `ragged_paged_attention` call, without attending.

    Args:
        cache: This cache.
        q_shape: Shape of q, [T, num_q_heads, head_dim].
        kv_lens: As in `ragged_paged_attention`, and so are the arguments below.
        page_indices: int32 [S, P].
        cu_q_lens: int32 [S + 1].
        num_seqs: int32 [1], or an integer.
        q_dtype: dtype of q.
        sm_scale: Factor of the scores.
        sliding_window: Keys that a query sees.
        soft_cap: Cap of the scores.
        k_scale: Factor of the stored keys.
        v_scale: Factor of the stored values.
        num_kv_pages_per_block: Block size of JAX's kernel.
        num_queries_per_block: Block size of JAX's kernel.
        vmem_limit_bytes: Limit of JAX's kernel.

    Returns:
        The violations, at most 16, in the order in which a call would report them; empty when it would be accepted.

    Raises:
        InvalidArgumentError: The arguments cannot be sent, such as a page id beyond int32.
    """
    request = attention_pb2.ValidateBatchRequest(
        cache_id=cache.info.cache_id,
        options=options(sm_scale, sliding_window, soft_cap, k_scale, v_scale, False),
        block_sizes=_block_sizes(num_kv_pages_per_block, num_queries_per_block, vmem_limit_bytes),
        q_shape=[_messages.integer(size, f"q_shape[{axis}]", bits=64) for axis, size in enumerate(q_shape)],
        q_dtype=_messages.dtype_name(q_dtype),
    )
    return Call(
        method="ValidateBatch",
        request=request,
        arrays=page_tables(kv_lens, page_indices, cu_q_lens, num_seqs),
        read=lambda response, _: [Violation(each.field, each.description) for each in response.violations],
        incarnation_id=cache.incarnation_id,
    )


def attending(
    cache: CacheHandle,
    method: str,
    request: Message,
    arrays: Mapping[str, np.ndarray],
    return_lse: bool,
    timeout_s: float | None,
    step: StepMetadata | None = None,
) -> Call[Attended]:
    """Returns a call whose answer has `out` and perhaps `lse_natural`."""

    def read(_: Message, arrays: Mapping[str, np.ndarray]) -> Attended:
        out = _messages.owned(arrays, "out")
        return (out, _messages.owned(arrays, "lse_natural")) if return_lse else out

    return Call(
        method=method,
        request=request,
        arrays=arrays,
        step=step,
        read=read,
        timeout_s=timeout_s,
        incarnation_id=cache.incarnation_id,
    )


def _remembered(function: Callable[P, T]) -> Callable[P, T]:
    """Keeps what a function returned for the same arguments; those that cannot be looked up are not kept."""
    kept = cast("Callable[P, T]", functools.lru_cache(maxsize=256, typed=True)(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return kept(*args, **kwargs)
        except TypeError:  # an array of no axes
            return function(*args, **kwargs)

    return call


@_remembered
def options(
    sm_scale: SupportsFloat | None,
    sliding_window: SupportsIndex | None,
    soft_cap: SupportsFloat | None,
    k_scale: SupportsFloat | None,
    v_scale: SupportsFloat | None,
    return_lse: bool,
) -> attention_pb2.AttentionOptions:
    """Returns the scalars of a call, which nobody may change: calls with the same have the same."""
    # None leaves a field unset; an explicit 0.0 travels and meets the server's checks.
    return attention_pb2.AttentionOptions(
        sm_scale=_messages.real(sm_scale, "sm_scale"),
        sliding_window=_messages.optional_integer(sliding_window, "sliding_window"),
        soft_cap=_messages.real(soft_cap, "soft_cap"),
        k_scale=_messages.real(k_scale, "k_scale"),
        v_scale=_messages.real(v_scale, "v_scale"),
        return_lse=_messages.flag(return_lse, "return_lse"),
    )


def _block_sizes(
    num_kv_pages_per_block: SupportsIndex | None,
    num_queries_per_block: SupportsIndex | None,
    vmem_limit_bytes: SupportsIndex | None,
) -> attention_pb2.RaggedBlockSizes:
    return attention_pb2.RaggedBlockSizes(
        num_kv_pages_per_block=_messages.optional_integer(num_kv_pages_per_block, "num_kv_pages_per_block"),
        num_queries_per_block=_messages.optional_integer(num_queries_per_block, "num_queries_per_block"),
        vmem_limit_bytes=_messages.optional_integer(vmem_limit_bytes, "vmem_limit_bytes"),
    )


def page_tables(
    kv_lens: npt.ArrayLike, page_indices: npt.ArrayLike, cu_q_lens: npt.ArrayLike, num_seqs: npt.ArrayLike
) -> dict[str, np.ndarray]:
    """Returns the metadata arrays of a `ragged_paged_attention` call, by field."""
    return {
        "kv_lens": _messages.integers_array(kv_lens, "kv_lens"),
        "page_indices": _messages.integers_array(page_indices, "page_indices"),
        "cu_q_lens": _messages.integers_array(cu_q_lens, "cu_q_lens"),
        "num_seqs": _messages.counts_array(num_seqs, "num_seqs"),
    }


def tokens(q: npt.ArrayLike, k: npt.ArrayLike | None, v: npt.ArrayLike | None) -> dict[str, np.ndarray]:
    """Returns the arrays of a call's tokens, by field."""
    # One of k and v alone is sent as it is: that is the server's to refuse.
    given = {"q": q, "k": k, "v": v}
    return {field: _messages.values_array(values, field) for field, values in given.items() if values is not None}
