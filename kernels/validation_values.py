"""Rules that several calls share: scalars, new keys and values, page tables, written slots."""

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from jaxtyping import Int, Int32, Shaped

from attnd.kernels.contract import Q_DTYPES, AttentionOptions, CacheSpec, KernelHints, RaggedBatch
from attnd.kernels.validation_rules import ArrayLike, Facts, Rule, Violations

# Scalars reach the kernels as float32. This one rounds to infinity, half a unit in the last place above the largest.
FLOAT32_OVERFLOW: Final = 2.0**128 - 2.0**103
# The smallest normal float32: CPU and TPU flush what is smaller to zero, and a cap of zero divides by it.
FLOAT32_TINY: Final = 2.0**-126
_INT_BITS_MAX: Final = 63

_OPTION_TYPES: Final = {"sm_scale": float, "sliding_window": int, "soft_cap": float, "k_scale": float, "v_scale": float}
_TYPE_NAMES: Final = {int: "an integer of 64 bits", float: "a number"}

_KINDS_MAX: Final = 16
_LAYER_FACTS: Final = frozenset(
    ("q", "max_num_batched_tokens", "num_q_heads", "head_dim", "k", "v", "missing", "token_shape", "token_dtypes",
     *_OPTION_TYPES)
)  # fmt: skip


class Dtypes(tuple[np.dtype, ...]):
    """Dtypes to choose from; prints as their names."""

    __slots__ = ()

    def __str__(self) -> str:
        return ", ".join(dtype.name for dtype in self)


FLOATS: Final = Dtypes(Q_DTYPES.values())

Q_RULES: Final = (
    Rule("q.dtype", f"{{q.dtype=}} must be one of {FLOATS}.", lambda q: q.dtype in FLOATS),
    Rule(
        "q.shape[0]",
        "q.shape[0]={max_num_batched_tokens} must be greater or equal to 0.",
        lambda max_num_batched_tokens: max_num_batched_tokens >= 0,
    ),
    Rule("q.shape[1]", "{num_q_heads=} must be greater than 0.", lambda num_q_heads: num_q_heads > 0),
)

SLIDING_WINDOW_IS_POSITIVE: Final = Rule(
    "sliding_window", "{sliding_window=} must be positive.", lambda sliding_window: sliding_window > 0
)
SOFT_CAP_IS_NOT_ZERO: Final = Rule("soft_cap", "{soft_cap=} must not be 0.0.", lambda soft_cap: soft_cap != 0)
SOFT_CAP_IS_POSITIVE: Final = Rule(
    "soft_cap",
    "{soft_cap=} must be finite and greater than 0 in float32.",
    # Of zero, SOFT_CAP_IS_NOT_ZERO speaks.
    lambda soft_cap: soft_cap == 0 or FLOAT32_TINY <= soft_cap < FLOAT32_OVERFLOW,
)
SCALE_RULES: Final = (
    Rule("sm_scale", "{sm_scale=} must be finite in float32.", lambda sm_scale: abs(sm_scale) < FLOAT32_OVERFLOW),
    Rule(
        "k_scale",
        "{k_scale=} must be finite and greater than 0 in float32.",
        lambda k_scale: FLOAT32_TINY <= k_scale < FLOAT32_OVERFLOW,
    ),
    Rule(
        "v_scale",
        "{v_scale=} must be finite and greater than 0 in float32.",
        lambda v_scale: FLOAT32_TINY <= v_scale < FLOAT32_OVERFLOW,
    ),
    Rule(
        "k_scale",
        "{k_scale=} must be unset: each token of the cache has its own scale.",
        lambda k_scale, quantized_per_token: k_scale is None or not quantized_per_token,
    ),
    Rule(
        "v_scale",
        "{v_scale=} must be unset: each token of the cache has its own scale.",
        lambda v_scale, quantized_per_token: v_scale is None or not quantized_per_token,
    ),
)

TOKEN_RULES: Final = (
    Rule("{missing}", "{missing} must be given too: k and v go together.", lambda missing: not missing),
    Rule(
        "k.shape",
        "{k.shape=} must be {token_shape}: q's tokens, num_kv_heads, head_dim.",
        lambda k, token_shape: k.shape == token_shape,
    ),
    Rule(
        "v.shape",
        "{v.shape=} must be {token_shape}: q's tokens, num_kv_heads, head_dim.",
        lambda v, token_shape: v.shape == token_shape,
    ),
    Rule(
        "k.dtype",
        "{k.dtype=} must be one of {token_dtypes}.",
        lambda k, token_dtypes: k.dtype in token_dtypes,
    ),
    Rule(
        "v.dtype",
        "{v.dtype=} must be one of {token_dtypes}.",
        lambda v, token_dtypes: v.dtype in token_dtypes,
    ),
)


def cache_facts(spec: CacheSpec) -> Facts:
    """Returns what the rules know of a cache, under the names of JAX's kernels."""
    return {
        "total_num_pages": spec.num_pages,
        "page_size": spec.page_size,
        "num_kv_heads": spec.num_kv_heads,
        "head_dim_k": spec.head_dim,
        "quantized_per_token": spec.quantized_per_token,
    }


def q_facts(q: ArrayLike) -> Facts:
    """Returns q and its axes, under the names of JAX's kernels."""
    facts: Facts = {"q": q}
    if len(q.shape) == 3:
        facts["max_num_batched_tokens"], facts["num_q_heads"], facts["head_dim"] = q.shape
    return facts


def layer_facts(
    spec: CacheSpec, q: ArrayLike, k: ArrayLike | None, v: ArrayLike | None, options: AttentionOptions
) -> Facts:
    """Returns what each layer of a step brings anew."""
    return q_facts(q) | token_facts(spec, q, k, v) | scalar_facts(options, KernelHints(), ())


def layer_rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """Returns those of a call's rules that look at something which each layer brings anew."""
    return tuple(rule for rule in rules if not _LAYER_FACTS.isdisjoint(rule.needs))


class GoodLayers:
    """The kinds of layers of a step that have been judged: layers mostly differ in values that no rule looks at."""

    def __init__(self) -> None:
        self._kinds: set[tuple[object, ...]] = set()
        self._latest: tuple[object, ...] = ()

    def has(
        self, spec: CacheSpec, q: ArrayLike, k: ArrayLike | None, v: ArrayLike | None, options: AttentionOptions
    ) -> bool:
        """Returns whether nothing can be wrong with a layer."""
        # There, the values of k and v are looked at too.
        if spec.quantized_per_token:
            return False
        kind = self._kind(q, k, v, options)
        if kind != self._latest:  # or the options, which are the same, need not be hashed
            if kind not in self._kinds:
                return False
            self._latest = kind
        return True

    def add(self, q: ArrayLike, k: ArrayLike | None, v: ArrayLike | None, options: AttentionOptions) -> None:
        """Remembers that nothing was wrong with a layer."""
        if len(self._kinds) < _KINDS_MAX:
            self._kinds.add(self._kind(q, k, v, options))

    @staticmethod
    def _kind(q: ArrayLike, k: ArrayLike | None, v: ArrayLike | None, options: AttentionOptions) -> tuple[object, ...]:
        keys = None if k is None else (k.shape, k.dtype)
        values = None if v is None else (v.shape, v.dtype)
        return options, q.shape, q.dtype, keys, values


def without_arrays(facts: Facts) -> Facts:
    """Returns the facts that a plan keeps: rules of layers look at no array of the step, and arrays may be large."""
    return {name: fact for name, fact in facts.items() if not isinstance(fact, np.ndarray)}


def scalar_facts(options: AttentionOptions, hints: KernelHints, hint_names: Iterable[str]) -> Facts:
    """Returns the scalars of a call that are set; those that are not the numbers they should be also as `mistyped`."""
    scalars = [(name, getattr(options, name), wanted) for name, wanted in _OPTION_TYPES.items()]
    scalars += [(name, getattr(hints, name), int) for name in hint_names]
    facts: Facts = {"mistyped": []}
    for name, given, wanted in scalars:
        if given is None and name != "sm_scale":
            continue
        value = given.item() if isinstance(given, np.generic) else given
        # No number of more bits is meant, and Python refuses to print the largest ones.
        is_number = isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _INT_BITS_MAX)
        if is_number:
            facts[name] = value
        if not is_number or (wanted is int and isinstance(value, float)):
            facts["mistyped"].append((name, value, wanted))
    return facts


def token_facts(spec: CacheSpec, q: ArrayLike, k: ArrayLike | None, v: ArrayLike | None) -> Facts:
    """Returns the new keys and values of a call, if it has any, and what they should be."""
    if k is None and v is None:
        return {}
    facts: Facts = {"missing": "k" if k is None else "v" if v is None else "", "token_dtypes": token_dtypes(spec)}
    if len(q.shape) == 3:
        facts["token_shape"] = (q.shape[0], spec.num_kv_heads, spec.head_dim)
    return facts | {name: array for name, array in (("k", k), ("v", v)) if array is not None}


def token_dtypes(spec: CacheSpec) -> Dtypes:
    """Returns the dtypes of keys and values that a cache takes: those that its own dtype can stand for."""
    if spec.dtype == np.int8:
        return FLOATS if spec.quantized_per_token else Dtypes((spec.dtype,))
    return FLOATS if spec.dtype in FLOATS else Dtypes((*FLOATS, spec.dtype))


def judge_types(facts: Facts, found: Violations) -> None:
    """Refuses scalars that are not numbers of the wanted type. Whole numbers are floats too."""
    for name, value, wanted in facts.get("mistyped", ()):
        found.add(name, f"{name} must be {_TYPE_NAMES[wanted]}, not {type(value).__name__}.")


def judge_pages(
    page_indices: Int32[np.ndarray, "rows pages_per_seq"],
    kv_lens: Int[np.ndarray, " rows"],
    spec: CacheSpec,
    found: Violations,
) -> None:
    """Refuses page ids outside of the cache, in the slots that kv_lens reaches."""
    # One comparison for both ends: as uint32, negative ids lie above every page. Few tables have junk, so the slots
    # in use are only worked out for those that have.
    outside = page_indices.view(np.uint32) >= spec.num_pages
    if not np.count_nonzero(outside):
        return
    used_slots = -(-kv_lens // spec.page_size)
    used = np.arange(page_indices.shape[1]) < used_slots[:, np.newaxis]
    for i, slot in found.where(outside & used):
        page_idx, total_num_pages = int(page_indices[i, slot]), spec.num_pages
        found.add(
            f"page_indices[{i},{slot}]",
            f"Require 0 <= {page_idx=} < {total_num_pages=} at sequence {i}, slot {slot} of its page table.",
        )


def judge_tokens(
    spec: CacheSpec,
    arrays: Sequence[tuple[str, ArrayLike]],
    tokens: Shaped[np.ndarray, " n"] | slice,
    found: Violations,
) -> None:
    """Refuses new keys and values that are not finite where a cache would make a scale of them.

    Args:
        spec: The cache.
        arrays: Names and arrays, of the right shape and dtype.
        tokens: The tokens to judge; the others are padding.
        found: Where violations go.
    """
    if not spec.quantized_per_token:
        return
    for name, array in arrays:
        finite = np.isfinite(np.asarray(array)[tokens]).all(axis=(1, 2))
        token_ids = np.arange(array.shape[0])[tokens]
        for (i,) in found.where(~finite):
            token = int(token_ids[i])
            found.add(f"{name}[{token}]", f"{name}[{token}] must be finite: its largest magnitude becomes its scale.")


def judge_written_slots(batch: RaggedBatch, rows: Int[np.ndarray, " n"], page_size: int, found: Violations) -> None:
    """Refuses a batch that writes two tokens to one slot of a page.

    Args:
        batch: Validated metadata.
        rows: Each row's index in the call, which had empty rows too.
        page_size: Tokens of a page.
        found: Where violations go.
    """
    if not _may_write_twice(batch, page_size):
        return
    pages, offsets = batch.token_slots(page_size)
    slots = pages.astype(np.int64) * page_size + offsets
    order = np.argsort(slots, kind="stable")
    again = np.zeros(len(order), np.bool_)
    again[1:] = slots[order[1:]] == slots[order[:-1]]
    for (i,) in found.where(again):
        token, earlier = order[i], order[i - 1]
        page_idx, page_slot = int(pages[token]), int(offsets[token])
        sequence, other = (int(rows[batch.token_seqs[t]]) for t in (token, earlier))
        table_slot = int(batch.token_positions[token]) // page_size
        found.add(
            f"page_indices[{sequence},{table_slot}]",
            f"{page_idx=} must take one token in each slot: its slot {page_slot} is written by sequence {other} and"
            f" again by sequence {sequence}.",
        )


def _may_write_twice(batch: RaggedBatch, page_size: int) -> bool:
    """Whether a page occurs twice among those written to: cheaper to see than the tokens, and nearly never so."""
    last = (batch.kv_lens - 1) // page_size
    rows, slots = np.arange(batch.num_seqs), last
    if batch.num_tokens > batch.num_seqs:
        first = (batch.kv_lens - batch.q_lens) // page_size
        counts = last - first + 1
        rows = np.repeat(rows, counts)
        slots = np.arange(len(rows)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    pages = np.sort(batch.page_indices[rows, slots])
    return bool(np.count_nonzero(pages[1:] == pages[:-1]))
