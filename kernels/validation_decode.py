"""Rules of `paged_attention`, one query token a row: JAX's, in JAX's order and words, then ours."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Int32, Int64, Shaped

from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, RaggedBatch
from attnd.kernels.validation_rules import ArrayLike, Facts, Rule, Violations, judge
from attnd.kernels.validation_values import (
    FLOAT32_OVERFLOW,
    FLOAT32_TINY,
    Q_RULES,
    SCALE_RULES,
    SLIDING_WINDOW_IS_POSITIVE,
    TOKEN_RULES,
    cache_facts,
    judge_pages,
    judge_tokens,
    judge_types,
    judge_written_slots,
    q_facts,
    scalar_facts,
    token_facts,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBatch:
    """Metadata of one decode call after validation.

    Attributes:
        rows: Rows of q that attend over anything, in their order. The output of the others is zero, their lse -inf.
        batch: One query token for each of `rows`.
    """

    rows: Int32[np.ndarray, " num_rows"]
    batch: RaggedBatch


# JAX's kernel unpacks these two shapes first: with another rank it has no message to give.
_RANKS: Final = (
    Rule("q.shape", "{q.shape=} must be [batch_size, num_q_heads, head_dim].", lambda q: len(q.shape) == 3),
    Rule(
        "page_indices.shape",
        "{page_indices.shape=} must be [batch_size, pages_per_sequence].",
        lambda page_indices: len(page_indices.shape) == 2,
    ),
)

# `paged_attention` of jax/experimental/pallas/ops/tpu/paged_attention/paged_attention_kernel.py. Its first check, that
# k_pages and v_pages have one shape, holds in any cache; `pages_shapes_match` is for those who bring their own.
_JAX: Final = (
    Rule(
        "q.shape[1]",
        "Number of Q heads must be divisible by number of KV heads. Got {num_q_heads} and {num_kv_heads}.",
        lambda num_q_heads, num_kv_heads: num_q_heads % num_kv_heads == 0,
    ),
    Rule(
        "q.shape[2]",
        "head_dim of Q must be the same as that of K/V. Got {head_dim} and {head_dim_k}.",
        lambda head_dim, head_dim_k: head_dim == head_dim_k,
    ),
    Rule(
        "pages_per_compute_block",
        "{pages_per_compute_block=} must be positive.",
        lambda pages_per_compute_block: pages_per_compute_block != 0,  # Here JAX divides by it.
    ),
    Rule(
        "pages_per_compute_block",
        "pages_per_compute_block must be divisible by pages per sequence. Got {pages_per_compute_block} and"
        " {pages_per_sequence}.",
        lambda pages_per_compute_block, pages_per_sequence: (
            pages_per_compute_block == 0 or pages_per_sequence % pages_per_compute_block == 0
        ),
    ),
    Rule(
        "lengths.shape",
        "`lengths` and `q` must have the same batch size",
        lambda lengths, batch_size: lengths.shape == (batch_size,),
    ),
    Rule(
        "page_indices.shape[0]",
        "`page_indices` and `q` must have the same batch size",
        lambda num_rows, batch_size: num_rows == batch_size,
    ),
    Rule(
        "lengths.dtype",
        "The dtype of `lengths` must be int32. Got {lengths.dtype}",
        lambda lengths: lengths.dtype == np.int32,
    ),
    Rule(
        "megacore_mode",
        "number of KV heads must be even when megacore_mode is 'kv_head'",
        lambda megacore_mode, num_kv_heads: megacore_mode != "kv_head" or num_kv_heads % 2 == 0,
    ),
    Rule(
        "megacore_mode",
        "batch size must be even when megacore_mode is 'batch'",
        lambda megacore_mode, batch_size: megacore_mode != "batch" or batch_size % 2 == 0,
    ),
    Rule(
        "megacore_mode",
        "megacore_mode must be one of ['kv_head', 'batch', None]",
        lambda megacore_mode: megacore_mode in ("kv_head", "batch", None),
    ),
)

# What JAX lets through.
_OURS: Final = (
    *Q_RULES,
    Rule(
        "page_indices.dtype",
        "{page_indices.dtype=} must be int32.",
        lambda page_indices: page_indices.dtype == np.int32,
    ),
    Rule(
        "pages_per_compute_block",
        "{pages_per_compute_block=} must be positive.",
        lambda pages_per_compute_block: pages_per_compute_block >= 0,
    ),
    SLIDING_WINDOW_IS_POSITIVE,
    Rule(
        "attn_logits_soft_cap",
        "attn_logits_soft_cap={soft_cap} must be finite and greater than 0 in float32.",
        lambda soft_cap: FLOAT32_TINY <= soft_cap < FLOAT32_OVERFLOW,
    ),
    *SCALE_RULES,
    *TOKEN_RULES,
)


def judge_decode(
    spec: CacheSpec,
    q: ArrayLike,
    lengths: np.ndarray,
    page_indices: np.ndarray,
    *,
    k: ArrayLike | None,
    v: ArrayLike | None,
    options: AttentionOptions,
    hints: KernelHints,
) -> tuple[Violations, DecodeBatch | None]:
    """Returns every violation of a call, and its batch when there is none."""
    facts = cache_facts(spec) | q_facts(q) | token_facts(spec, q, k, v)
    facts |= scalar_facts(options, hints, ("pages_per_compute_block",))
    facts |= {"lengths": lengths, "page_indices": page_indices, "megacore_mode": hints.megacore_mode}
    if len(q.shape) == 3:
        facts["batch_size"] = q.shape[0]
    if page_indices.ndim == 2:
        facts["num_rows"], facts["pages_per_sequence"] = page_indices.shape

    found = Violations()
    judge(_RANKS, facts, found)
    judge(_JAX, facts, found)
    judge(_OURS, facts, found)
    judge_types(facts, found)
    if lengths.ndim == 1 and lengths.dtype == np.int32 and page_indices.shape[:-1] == lengths.shape:
        _judge_rows(spec, lengths.astype(np.int64), page_indices, found)
    return found, None if found else _batch(spec, lengths, page_indices, facts, found)


def _judge_rows(
    spec: CacheSpec,
    lengths: Int64[np.ndarray, " rows"],
    page_indices: Shaped[np.ndarray, "rows pages_per_sequence"],
    found: Violations,
) -> None:
    for (i,) in found.where(lengths < 0):
        length = int(lengths[i])
        found.add(f"lengths[{i}]", f"{length=} must be greater or equal to 0 at sequence {i}.")
    pages_per_sequence, page_size = page_indices.shape[1], spec.page_size
    capacity = pages_per_sequence * page_size
    for (i,) in found.where(lengths > capacity):
        length = int(lengths[i])
        found.add(
            f"lengths[{i}]",
            f"{length=} must be less or equal to {capacity=} at sequence {i}, given {pages_per_sequence=} and"
            f" {page_size=}.",
        )
    if page_indices.dtype == np.int32:
        judge_pages(page_indices, lengths, spec, found)


def _batch(
    spec: CacheSpec,
    lengths: Int32[np.ndarray, " rows"],
    page_indices: Int32[np.ndarray, "rows pages_per_sequence"],
    facts: Facts,
    found: Violations,
) -> DecodeBatch | None:
    """Returns the batch, unless the arrays that it writes are at fault."""
    rows = np.flatnonzero(lengths)
    batch = RaggedBatch.compact(lengths, page_indices, (lengths > 0).astype(np.int32), spec.page_size)
    if "k" in facts:
        judge_tokens(spec, [(name, facts[name]) for name in ("k", "v")], rows, found)
        judge_written_slots(batch, rows, spec.page_size, found)
    return None if found else DecodeBatch(rows=rows.astype(np.int32), batch=batch)
