"""Rules of `ragged_paged_attention`: JAX's, in JAX's order and words, then ours."""

import math
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, RaggedBatch
from attnd.kernels.validation_rules import ArrayLike, Facts, Rule, Violations, judge
from attnd.kernels.validation_values import (
    Q_RULES,
    SCALE_RULES,
    SLIDING_WINDOW_IS_POSITIVE,
    SOFT_CAP_IS_NOT_ZERO,
    SOFT_CAP_IS_POSITIVE,
    TOKEN_RULES,
    GoodLayers,
    cache_facts,
    judge_pages,
    judge_tokens,
    judge_types,
    judge_written_slots,
    layer_facts,
    layer_rules,
    q_facts,
    scalar_facts,
    token_facts,
    without_arrays,
)

_HINTS: Final = ("num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes")

# JAX's validators unpack these two shapes first: with another rank they have no message to give.
_RANKS: Final = (
    Rule("q.shape", "{q.shape=} must be [tokens, num_q_heads, head_dim].", lambda q: len(q.shape) == 3),
    Rule(
        "page_indices.shape",
        "{page_indices.shape=} must be [max_num_seqs, pages_per_seq].",
        lambda page_indices: len(page_indices.shape) == 2,
    ),
)

# `static_validate_inputs` of jax/experimental/pallas/ops/tpu/ragged_paged_attention/kernel.py.
_STATIC: Final = (
    Rule("num_seqs.shape", "{num_seqs.shape=} must be (1,)", lambda num_seqs: num_seqs.shape == (1,)),
    Rule(
        "q.shape[2]",
        "Q head_dim {head_dim} must be the same as that of K/V {head_dim_k}.",
        lambda head_dim, head_dim_k: head_dim == head_dim_k,
    ),
    Rule(
        "kv_lens.shape",
        "Expected {kv_lens.shape=} to be ({max_num_seqs},) where `max_num_seqs` is `page_indices.shape[0]`.",
        lambda kv_lens, max_num_seqs: kv_lens.shape == (max_num_seqs,),
    ),
    Rule(
        "cu_q_lens.shape",
        "Expected {cu_q_lens.shape=} to be ({max_num_bounds},)  where `max_num_seqs` is `page_indices.shape[0]`.",
        lambda cu_q_lens, max_num_bounds: cu_q_lens.shape == (max_num_bounds,),
    ),
    Rule(
        "{not_int32}.dtype",
        "The dtype of `kv_lens`, `page_indices`, and `cu_q_lens` must be int32. Got {kv_lens.dtype=},"
        " {page_indices.dtype=}, {cu_q_lens.dtype=}.",
        lambda not_int32: not not_int32,
    ),
    Rule(
        "q.shape[1]",
        "{num_q_heads=} must be divisible by {num_kv_heads=}",
        lambda num_q_heads, num_kv_heads: num_q_heads % num_kv_heads == 0,
    ),
    SLIDING_WINDOW_IS_POSITIVE,
    SOFT_CAP_IS_NOT_ZERO,
    Rule(
        "num_kv_pages_per_block",
        "{num_kv_pages_per_block=} must be in range (0, {pages_per_seq}].",
        lambda num_kv_pages_per_block, pages_per_seq: 0 < num_kv_pages_per_block <= pages_per_seq,
    ),
    Rule(
        "num_queries_per_block",
        "{num_queries_per_block=} must be positive.",
        lambda num_queries_per_block: num_queries_per_block > 0,
    ),
    Rule(
        "vmem_limit_bytes",
        "{vmem_limit_bytes=} must be positive.",
        lambda vmem_limit_bytes: vmem_limit_bytes > 0,
    ),
)

# `dynamic_validate_inputs` of the same file, up to its loop over the sequences, which is `_judge_q_lens`.
_DYNAMIC: Final = (
    Rule(
        "num_seqs[0]",
        "{num_seqs[0]=} must be less or equal to {max_num_seqs=}",
        lambda count, max_num_seqs: not count > max_num_seqs,  # NaN is not more; its dtype is refused below.
    ),
    Rule(
        "kv_lens[{longest}]",
        "{pages_per_seq=} must be greater or equal to {min_pages_per_seq=} given {max_kv_len=} and {page_size=}.",
        lambda pages_per_seq, min_pages_per_seq: pages_per_seq >= min_pages_per_seq,
    ),
    Rule(
        "cu_q_lens[{last_bound}]",
        "Total q tokens {total_q_tokens} must be less or equal to {max_num_batched_tokens=}.",
        lambda total_q_tokens, max_num_batched_tokens: total_q_tokens <= max_num_batched_tokens,
    ),
)

# What JAX lets through.
_OURS: Final = (
    *Q_RULES,
    Rule("num_seqs.dtype", "{num_seqs.dtype=} must be int32.", lambda num_seqs: num_seqs.dtype == np.int32),
    Rule("num_seqs[0]", "num_seqs[0]={count} must be greater or equal to 0.", lambda count: count >= 0),
    Rule("cu_q_lens[0]", "cu_q_lens[0]={first_bound} must be 0.", lambda first_bound: first_bound == 0),
    SOFT_CAP_IS_POSITIVE,
    *SCALE_RULES,
    *TOKEN_RULES,
)


_RULES: Final = (*_RANKS, *_STATIC, *_DYNAMIC, *_OURS)
_LAYER_RULES: Final = layer_rules(_RULES)


@dataclass(frozen=True, slots=True)
class RaggedPlan:
    """Metadata of a step that has been judged, for layers that are judged later.

    Attributes:
        spec: The cache.
        batch: The batch of each layer.
        facts: What the rules know of it.
        written: Whether no slot of a page takes two of the step's tokens; matters to layers that bring k and v.
        good: Layers that were found good, so that those like them need not be judged again.
    """

    spec: CacheSpec
    batch: RaggedBatch
    facts: Facts
    written: Violations
    good: GoodLayers = field(default_factory=GoodLayers)


def plan_ragged(
    spec: CacheSpec,
    kv_lens: np.ndarray,
    page_indices: np.ndarray,
    cu_q_lens: np.ndarray,
    num_seqs: np.ndarray,
    *,
    hints: KernelHints,
) -> tuple[Violations, RaggedPlan | None]:
    """Returns every violation of a step's metadata, and its plan when there is none."""
    facts = cache_facts(spec) | scalar_facts(AttentionOptions(), hints, _HINTS)
    facts |= {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    found = Violations()
    _judge(spec, facts, found)
    if found:
        return found, None
    batch = _compacted(spec, facts)
    written = Violations()
    judge_written_slots(batch, np.flatnonzero(facts["q_lens"]), spec.page_size, written)
    return found, RaggedPlan(spec, batch, without_arrays(facts), written)


def judge_layer(
    plan: RaggedPlan, q: ArrayLike, *, k: ArrayLike | None, v: ArrayLike | None, options: AttentionOptions
) -> Violations:
    """Returns every violation of one layer of a planned step: those that a whole call would have."""
    found = Violations()
    if plan.good.has(plan.spec, q, k, v, options):
        return found
    facts = plan.facts | layer_facts(plan.spec, q, k, v, options)
    judge(_LAYER_RULES, facts, found)
    judge_types(facts, found)
    if "k" in facts and not found:
        judge_tokens(plan.spec, [(name, facts[name]) for name in ("k", "v")], slice(plan.batch.num_tokens), found)
        found.extend(plan.written)
    if not found:
        plan.good.add(q, k, v, options)
    return found


def judge_ragged(
    spec: CacheSpec,
    q: ArrayLike,
    kv_lens: np.ndarray,
    page_indices: np.ndarray,
    cu_q_lens: np.ndarray,
    num_seqs: np.ndarray,
    *,
    k: ArrayLike | None,
    v: ArrayLike | None,
    options: AttentionOptions,
    hints: KernelHints,
) -> tuple[Violations, RaggedBatch | None]:
    """Returns every violation of a call, and its batch when there is none."""
    facts = cache_facts(spec) | q_facts(q) | token_facts(spec, q, k, v) | scalar_facts(options, hints, _HINTS)
    facts |= {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    found = Violations()
    _judge(spec, facts, found)
    return found, None if found else _batch(spec, facts, found)


def _judge(spec: CacheSpec, facts: Facts, found: Violations) -> None:
    _add_table_facts(facts)
    _add_value_facts(facts)
    judge(_RANKS, facts, found)
    judge(_STATIC, facts, found)
    judge(_DYNAMIC, facts, found)
    _judge_q_lens(facts, found)
    judge(_OURS, facts, found)
    judge_types(facts, found)
    _judge_rows(spec, facts, found)


def _add_table_facts(facts: Facts) -> None:
    if len(facts["page_indices"].shape) == 2:
        facts["max_num_seqs"], facts["pages_per_seq"] = facts["page_indices"].shape
        facts["max_num_bounds"] = facts["max_num_seqs"] + 1
    names = ("kv_lens", "page_indices", "cu_q_lens")
    facts["not_int32"] = next((name for name in names if facts[name].dtype != np.int32), "")


def _add_value_facts(facts: Facts) -> None:
    """Adds what the values say, as far as shapes and dtypes allow to look at them.

    Only the first num_seqs rows count; JAX's validator judges the padding of kv_lens too. All numbers are Python's or
    int64: differences of int32 wrap.
    """
    if facts["num_seqs"].shape != (1,):
        return
    count = facts["num_seqs"].item()
    if not isinstance(count, int | float):
        return
    facts["count"] = count
    if not math.isfinite(count) or "max_num_seqs" not in facts:
        return
    # Another dtype than int32 is refused in the end, but JAX's validator looks at the lengths first.
    count, max_num_seqs = int(count), facts["max_num_seqs"]
    rows = min(max(count, 0), max_num_seqs)

    cu_q_lens = facts["cu_q_lens"]
    if cu_q_lens.shape == (max_num_seqs + 1,) and cu_q_lens.dtype == np.int32:
        # A negative count indexes from the end, here as in JAX's validator; the count itself is refused later.
        if -max_num_seqs - 1 <= count <= max_num_seqs:
            facts["last_bound"] = count if count >= 0 else count + max_num_seqs + 1
            facts["total_q_tokens"] = int(cu_q_lens[count])
        bounds = cu_q_lens[: rows + 1].astype(np.int64)
        facts["first_bound"], facts["q_lens"] = int(bounds[0]), bounds[1:] - bounds[:-1]

    kv_lens = facts["kv_lens"]
    if kv_lens.shape == (max_num_seqs,) and kv_lens.dtype == np.int32:
        used = facts["used_kv_lens"] = kv_lens[:rows].astype(np.int64)
        if rows:
            facts["longest"] = longest = int(used.argmax())
            facts["max_kv_len"] = max_kv_len = int(used[longest])
            facts["min_pages_per_seq"] = -(-max_kv_len // facts["page_size"])


def _judge_q_lens(facts: Facts, found: Violations) -> None:
    if "q_lens" not in facts or "used_kv_lens" not in facts:
        return
    q_lens, kv_lens = facts["q_lens"], facts["used_kv_lens"]
    for (i,) in found.where(q_lens > kv_lens):
        q_len, kv_len = int(q_lens[i]), int(kv_lens[i])
        found.add(f"kv_lens[{i}]", f"{q_len=} must be less or equal to {kv_len=} at sequence {i}.")


def _judge_rows(spec: CacheSpec, facts: Facts, found: Violations) -> None:
    cu_q_lens, page_indices = facts["cu_q_lens"], facts["page_indices"]
    if "q_lens" in facts:
        for (i,) in found.where(facts["q_lens"] < 0):
            found.add(
                f"cu_q_lens[{i + 1}]",
                f"cu_q_lens[{i + 1}]={cu_q_lens[i + 1]} must be greater or equal to cu_q_lens[{i}]={cu_q_lens[i]}.",
            )
    if "used_kv_lens" in facts:
        kv_lens = facts["used_kv_lens"]
        for (i,) in found.where(kv_lens < 0):
            kv_len = int(kv_lens[i])
            found.add(f"kv_lens[{i}]", f"{kv_len=} must be greater or equal to 0 at sequence {i}.")
        if page_indices.dtype == np.int32:
            judge_pages(page_indices[: len(kv_lens)], kv_lens, spec, found)


def _batch(spec: CacheSpec, facts: Facts, found: Violations) -> RaggedBatch | None:
    """Returns the batch, unless the arrays that it writes are at fault."""
    batch = _compacted(spec, facts)
    if "k" in facts:
        judge_tokens(spec, [(name, facts[name]) for name in ("k", "v")], slice(batch.num_tokens), found)
        judge_written_slots(batch, np.flatnonzero(facts["q_lens"]), spec.page_size, found)
    return None if found else batch


def _compacted(spec: CacheSpec, facts: Facts) -> RaggedBatch:
    rows = facts["count"]
    q_lens = facts["q_lens"].astype(np.int32)
    return RaggedBatch.compact(facts["kv_lens"][:rows], facts["page_indices"][:rows], q_lens, spec.page_size)
