"""Attention in process, for those who hold the pages: JAX arrays in and out, the arguments of JAX's TPU kernels."""

import functools
import threading
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Shaped

from attnd.kernels import registry, validation
from attnd.kernels.contract import (
    Attended,
    AttentionOptions,
    CacheSpec,
    Implementation,
    KernelHints,
    Layout,
    RaggedBatch,
)
from attnd.kernels.errors import InvalidArgumentError, UnsupportedError
from attnd.kernels.launch import launch


class QuantizedPages(NamedTuple):
    """int8 pages and their scales, as JAX's `quantization_utils.QuantizedTensor`, which is taken as well."""

    weight: Shaped[Array, "num_kv_heads num_pages page_size head_dim"]
    scales: Float32[Array, "num_kv_heads num_pages page_size 1"]


def ragged_paged_attention(
    q: Float[Array, "tokens num_q_heads head_dim"],
    kv_pages: Shaped[Array, "num_pages page_size num_combined_kv_heads head_dim"],
    kv_lens: Int32[Array, " max_num_seqs"],
    page_indices: Int32[Array, "max_num_seqs pages_per_seq"],
    cu_q_lens: Int32[Array, " max_num_seqs+1"],
    num_seqs: Int32[Array, " 1"],
    *,
    k: Shaped[Array, "tokens num_kv_heads head_dim"] | None = None,
    v: Shaped[Array, "tokens num_kv_heads head_dim"] | None = None,
    sm_scale: float = 1.0,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    return_lse: bool = False,
    num_kv_pages_per_block: int | None = None,
    num_queries_per_block: int | None = None,
    vmem_limit_bytes: int | None = None,
    implementation: str = registry.AUTO,
) -> Any:
    """Attends over ragged sequences in pages with K and V interleaved; bottom-right causal, summed in float32.

    Pages come from and go to host memory: a call costs the pages that it names, and with `k`, `v` a copy of all.

    Args:
        q: float32, bfloat16 or float16. Rows past `cu_q_lens[num_seqs]` are padding.
        kv_pages: Pages, K at even and V at odd head index. Not changed.
        kv_lens: Tokens that each row attends over, this call's included. Entries past num_seqs are not read.
        page_indices: Page ids of each row. Entries that kv_lens does not reach are not read.
        cu_q_lens: Running sum of the rows' query lengths. A row may be empty.
        num_seqs: Rows in use.
        k: New keys, cast to the pages' dtype and written at positions kv_len - q_len ... kv_len - 1 first.
        v: New values.
        sm_scale: Factor of the scores.
        sliding_window: Keys that a query sees, itself included.
        soft_cap: Scores become soft_cap * tanh(score / soft_cap), before masking.
        k_scale: Factor of the stored keys.
        v_scale: Factor of the stored values.
        return_lse: Whether the natural log-sum-exp of the scores is returned.
        num_kv_pages_per_block: Checked by JAX's rules; an implementation may choose its own.
        num_queries_per_block: As num_kv_pages_per_block.
        vmem_limit_bytes: As num_kv_pages_per_block.
        implementation: A name of `registry.names()`, or "auto".

    Returns:
        out, of q's shape and dtype, its padding rows zero. A tuple if more is asked for: out, then
        lse float32 [tokens, num_q_heads] (-inf in padding rows) if `return_lse`, then the updated pages if `k`, `v`.

    Raises:
        InvalidArgumentError: An argument breaks a rule of `validation`; also a ValueError.
        UnsupportedError: The implementation is not in this build or cannot serve the shape.
    """
    options = validation.plain_options(
        AttentionOptions(
            sm_scale=sm_scale,
            sliding_window=sliding_window,
            soft_cap=soft_cap,
            k_scale=k_scale,
            v_scale=v_scale,
            return_lse=return_lse,
        )
    )
    hints = KernelHints(
        num_kv_pages_per_block=num_kv_pages_per_block,
        num_queries_per_block=num_queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
    )
    held = np.asarray(kv_pages)
    spec = _interleaved_spec(held)
    queries, new_k, new_v = np.asarray(q), _host(k), _host(v)
    metadata = [np.asarray(x) for x in (kv_lens, page_indices, cu_q_lens, num_seqs)]
    batch = validation.ragged_batch(spec, queries, *metadata, k=new_k, v=new_v, options=options, hints=hints)
    served = _served(spec, implementation)
    used, own = _used_pages(batch)
    attended, updated, _ = served.attend(
        spec, held[used], None, own, queries, rows=None, k=new_k, v=new_v, options=options, hints=hints
    )
    if k is None:
        return _answer(attended)
    changed = held.copy()
    changed[used] = updated
    return _answer(attended, jnp.asarray(changed))


def paged_attention(
    q: Float[Array, "batch_size num_q_heads head_dim"],
    k_pages: Shaped[Array, "num_kv_heads num_pages page_size head_dim"] | QuantizedPages,
    v_pages: Shaped[Array, "num_kv_heads num_pages page_size head_dim"] | QuantizedPages,
    lengths: Int32[Array, " batch_size"],
    page_indices: Int32[Array, "batch_size pages_per_sequence"],
    *,
    pages_per_compute_block: int,
    k: Shaped[Array, "batch_size num_kv_heads head_dim"] | None = None,
    v: Shaped[Array, "batch_size num_kv_heads head_dim"] | None = None,
    attn_logits_soft_cap: float | None = None,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
    return_lse: bool = False,
    implementation: str = registry.AUTO,
) -> Any:
    """Attends with one query a row, over pages with K and V apart. Scores are not scaled; summed in float32.

    Args:
        q: float32, bfloat16 or float16.
        k_pages: Pages of keys; of int8, with their scales. Not changed.
        v_pages: Pages of values, of the same shape and kind.
        lengths: Tokens that each row attends over; a row of 0 is answered with zeros.
        page_indices: Page ids of each row. Entries that lengths does not reach are not read.
        pages_per_compute_block: Must divide pages_per_sequence; an implementation may choose its own.
        k: New keys, written at position lengths - 1 first; quantized per token and head where pages are int8.
        v: New values.
        attn_logits_soft_cap: Scores become cap * tanh(score / cap), before masking.
        megacore_mode: Refused unless None: no implementation here runs on two cores of one chip.
        inline_seq_dim: Accepted as JAX does; the answer is the same.
        return_lse: Whether the natural log-sum-exp of the scores is returned.
        implementation: A name of `registry.names()`, or "auto".

    Returns:
        As `ragged_paged_attention`; the updated pages are two, those of the keys and those of the values.

    Raises:
        InvalidArgumentError: An argument breaks a rule of `validation`; also a ValueError.
        UnsupportedError: The implementation is not in this build or cannot serve the shape, or a megacore mode.
    """
    options = validation.plain_options(AttentionOptions(soft_cap=attn_logits_soft_cap, return_lse=return_lse))
    hints = KernelHints(
        pages_per_compute_block=pages_per_compute_block, megacore_mode=megacore_mode, inline_seq_dim=inline_seq_dim
    )
    held, scales = _split_arrays(k_pages, v_pages)
    validation.pages_shapes_match(*held)
    spec = _split_spec(held[0], scales)
    queries, new_k, new_v = np.asarray(q), _host(k), _host(v)
    metadata = [np.asarray(x) for x in (lengths, page_indices)]
    decode = validation.decode_batch(spec, queries, *metadata, k=new_k, v=new_v, options=options, hints=hints)
    if megacore_mode is not None:
        raise UnsupportedError(f"{megacore_mode=} needs a device with megacore.")
    served = _served(spec, implementation)
    used, own = _used_pages(decode.batch)
    used_scales = None if scales is None else np.stack([x[:, used] for x in scales])
    attended, updated, updated_scales = served.attend(
        spec, np.stack([x[:, used] for x in held]), used_scales, own, queries,
        rows=decode.rows, k=new_k, v=new_v, options=options, hints=hints,
    )  # fmt: skip
    if k is None:
        return _answer(attended)
    changed = [_replaced(x, used, updated[i]) for i, x in enumerate(held)]
    if scales is None or updated_scales is None:
        return _answer(attended, *changed)
    changed_scales = [_replaced(x, used, updated_scales[i]) for i, x in enumerate(scales)]
    return _answer(attended, *map(QuantizedPages, changed, changed_scales))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    """An implementation, for one caller at a time."""

    implementation: Implementation[Any]
    lock: threading.Lock

    def attend(
        self,
        spec: CacheSpec,
        kv_pages: Shaped[np.ndarray, "..."],
        scales: Float32[np.ndarray, "..."] | None,
        batch: RaggedBatch,
        q: Float[np.ndarray, "tokens num_q_heads head_dim"],
        **call: Any,
    ) -> tuple[Attended, Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """Attends over a cache of the given pages alone; returns the answer, the pages and their scales."""
        num_pages = kv_pages.shape[0 if spec.layout is Layout.INTERLEAVED else 2]
        ids = np.arange(num_pages, dtype=np.int32)
        # A power of two, so that programs are few: they depend on the number of pages.
        own = replace(spec, num_pages=1 << (num_pages - 1).bit_length())
        with self.lock:
            pages = self.implementation.allocate(own)
            self.implementation.write(pages, 0, ids, kv_pages, scales)
            attended = launch(self.implementation, pages, 0, batch, q, **call)
            return attended, *self.implementation.read(pages, 0, ids)


def _served(spec: CacheSpec, name: str) -> _Served:
    return _shared(registry.choose(spec, jax.default_backend(), name).name)


@functools.cache
def _shared(name: str) -> _Served:
    """Returns the one implementation of a name: as with jax.jit, programs outlive the call that compiled them."""
    return _Served(implementation=registry.create(name), lock=threading.Lock())


def _used_pages(batch: RaggedBatch) -> tuple[Int32[np.ndarray, " n"], RaggedBatch]:
    """Returns the pages that a batch names, and the batch over those pages alone."""
    used = np.unique(batch.page_indices) if batch.page_indices.size else np.zeros(1, np.int32)
    return used, replace(batch, page_indices=np.searchsorted(used, batch.page_indices).astype(np.int32))


def _host(array: Array | None) -> np.ndarray | None:
    return None if array is None else np.asarray(array)


def _interleaved_spec(kv_pages: Shaped[np.ndarray, "..."]) -> CacheSpec:
    if kv_pages.ndim != 4:
        raise InvalidArgumentError.of(
            "kv_pages.shape",
            f"kv_pages.shape={kv_pages.shape} must be [num_pages, page_size, num_combined_kv_heads, head_dim].",
        )
    num_pages, page_size, num_combined_kv_heads, head_dim = kv_pages.shape
    if num_combined_kv_heads % 2:
        raise InvalidArgumentError.of("kv_pages.shape[2]", f"{num_combined_kv_heads=} must be even.")
    return CacheSpec(
        layout=Layout.INTERLEAVED,
        num_layers=1,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_combined_kv_heads // 2,
        head_dim=head_dim,
        dtype=kv_pages.dtype,
    )


def _split_arrays(k_pages: Any, v_pages: Any) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """Returns K and V, and their scales if they are quantized: both or neither."""
    quantized = [hasattr(pages, "weight") for pages in (k_pages, v_pages)]
    if quantized[0] != quantized[1]:
        raise InvalidArgumentError.of("v_pages", "k_pages and v_pages must both carry scales, or neither.")
    if not quantized[0]:
        return [np.asarray(k_pages), np.asarray(v_pages)], None
    scales = [np.asarray(pages.scales, np.float32)[..., :1] for pages in (k_pages, v_pages)]
    return [np.asarray(pages.weight) for pages in (k_pages, v_pages)], scales


def _split_spec(k_pages: Shaped[np.ndarray, "..."], scales: list[np.ndarray] | None) -> CacheSpec:
    if k_pages.ndim != 4:
        raise InvalidArgumentError.of(
            "k_pages.shape", f"k_pages.shape={k_pages.shape} must be [num_kv_heads, num_pages, page_size, head_dim]."
        )
    if (k_pages.dtype == np.int8) != (scales is not None):
        raise InvalidArgumentError.of("k_pages.dtype", "Pages carry scales if and only if they are int8.")
    num_kv_heads, num_pages, page_size, head_dim = k_pages.shape
    return CacheSpec(
        layout=Layout.SPLIT,
        num_layers=1,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=k_pages.dtype,
    )


def _replaced(pages: np.ndarray, used: np.ndarray, new: np.ndarray) -> Array:
    changed = pages.copy()
    changed[:, used] = new
    return jnp.asarray(changed)


def _answer(attended: Attended, *pages: Any) -> Any:
    lse = () if attended.lse_natural is None else (jnp.asarray(attended.lse_natural),)
    answer = (jnp.asarray(attended.out), *lse, *pages)
    return answer if len(answer) > 1 else answer[0]
