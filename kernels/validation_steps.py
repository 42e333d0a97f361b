"""Rules of a step over sequences whose pages the server manages: all ours, in the words of JAX's where they fit."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Int32

from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints
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
    judge_tokens,
    judge_types,
    layer_facts,
    layer_rules,
    scalar_facts,
    without_arrays,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLens:
    """Lengths of one step after validation: 0 <= q_len <= kv_len for each sequence, and all of q's rows are used."""

    q_lens: Int32[np.ndarray, " num_sequences"]
    kv_lens: Int32[np.ndarray, " num_sequences"]


_RULES: Final = (
    Rule("q.shape", "{q.shape=} must be [tokens, num_q_heads, head_dim].", lambda q: len(q.shape) == 3),
    Rule(
        "q.shape[2]",
        "Q head_dim {head_dim} must be the same as that of K/V {head_dim_k}.",
        lambda head_dim, head_dim_k: head_dim == head_dim_k,
    ),
    Rule(
        "q_lens.shape",
        "{q_lens.shape=} must be ({num_sequences},): one for each sequence.",
        lambda q_lens, num_sequences: q_lens.shape == (num_sequences,),
    ),
    Rule(
        "kv_lens.shape",
        "{kv_lens.shape=} must be ({num_sequences},): one for each sequence.",
        lambda kv_lens, num_sequences: kv_lens.shape == (num_sequences,),
    ),
    Rule("q_lens.dtype", "{q_lens.dtype=} must be int32.", lambda q_lens: q_lens.dtype == np.int32),
    Rule("kv_lens.dtype", "{kv_lens.dtype=} must be int32.", lambda kv_lens: kv_lens.dtype == np.int32),
    Rule(
        "q.shape[1]",
        "{num_q_heads=} must be divisible by {num_kv_heads=}",
        lambda num_q_heads, num_kv_heads: num_q_heads % num_kv_heads == 0,
    ),
    SLIDING_WINDOW_IS_POSITIVE,
    SOFT_CAP_IS_NOT_ZERO,
    Rule(
        "q_lens",
        "Total q tokens {total_q_tokens} must be equal to {q.shape[0]=}.",
        lambda total_q_tokens, max_num_batched_tokens: total_q_tokens == max_num_batched_tokens,
    ),
    *Q_RULES,
    SOFT_CAP_IS_POSITIVE,
    *SCALE_RULES,
    *TOKEN_RULES,
)


_LAYER_RULES: Final = layer_rules(_RULES)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Lengths of a step that have been judged, for layers that are judged later.

    Attributes:
        spec: The cache.
        lens: The lengths.
        facts: What the rules know of them.
        good: Layers that were found good, so that those like them need not be judged again.
    """

    spec: CacheSpec
    lens: StepLens
    facts: Facts
    good: GoodLayers = field(default_factory=GoodLayers)


def plan_step(
    spec: CacheSpec, q_lens: np.ndarray, kv_lens: np.ndarray, *, num_sequences: int
) -> tuple[Violations, StepPlan]:
    """Returns every violation of a step's lengths, and its plan, which is good when there is none."""
    facts = _facts(spec, q_lens, kv_lens, num_sequences) | scalar_facts(AttentionOptions(), KernelHints(), ())
    return _judge(facts), StepPlan(spec, StepLens(q_lens=q_lens, kv_lens=kv_lens), without_arrays(facts))


def judge_layer(
    plan: StepPlan, q: ArrayLike, *, k: ArrayLike | None, v: ArrayLike | None, options: AttentionOptions
) -> Violations:
    """Returns every violation of one layer of a planned step: those that a whole call would have."""
    found = Violations()
    if plan.good.has(plan.spec, q, k, v, options):
        return found
    facts = plan.facts | layer_facts(plan.spec, q, k, v, options)
    judge(_LAYER_RULES, facts, found)
    judge_types(facts, found)
    if not found and k is not None and v is not None:
        judge_tokens(plan.spec, [("k", k), ("v", v)], slice(None), found)
    if not found:
        plan.good.add(q, k, v, options)
    return found


def judge_step(
    spec: CacheSpec,
    q: ArrayLike,
    q_lens: np.ndarray,
    kv_lens: np.ndarray,
    *,
    num_sequences: int,
    k: ArrayLike | None,
    v: ArrayLike | None,
    options: AttentionOptions,
) -> Violations:
    """Returns every violation of a step."""
    found = _judge(_facts(spec, q_lens, kv_lens, num_sequences) | layer_facts(spec, q, k, v, options))
    if not found and k is not None and v is not None:
        judge_tokens(spec, [("k", k), ("v", v)], slice(None), found)
    return found


def _facts(spec: CacheSpec, q_lens: np.ndarray, kv_lens: np.ndarray, num_sequences: int) -> Facts:
    facts: Facts = cache_facts(spec) | {"q_lens": q_lens, "kv_lens": kv_lens, "num_sequences": num_sequences}
    if q_lens.shape == (num_sequences,) and q_lens.dtype == np.int32:
        facts["total_q_tokens"] = int(q_lens.sum(dtype=np.int64))
    return facts


def _judge(facts: Facts) -> Violations:
    found = Violations()
    judge(_RULES, facts, found)
    judge_types(facts, found)
    q_lens, kv_lens, shape = facts["q_lens"], facts["kv_lens"], (facts["num_sequences"],)
    if all(array.shape == shape and array.dtype == np.int32 for array in (q_lens, kv_lens)):
        _judge_rows(q_lens, kv_lens, found)
    return found


def _judge_rows(
    q_lens: Int32[np.ndarray, " num_sequences"], kv_lens: Int32[np.ndarray, " num_sequences"], found: Violations
) -> None:
    for (i,) in found.where(q_lens < 0):
        q_len = int(q_lens[i])
        found.add(f"q_lens[{i}]", f"{q_len=} must be greater or equal to 0 at sequence {i}.")
    for (i,) in found.where(q_lens > kv_lens):
        q_len, kv_len = int(q_lens[i]), int(kv_lens[i])
        found.add(f"kv_lens[{i}]", f"{q_len=} must be less or equal to {kv_len=} at sequence {i}.")
