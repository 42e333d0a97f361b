"""Judges the arguments of a call before any device work; what passes, implementations trust.

The rules stand in tables, one file a call: `validation_ragged`, `validation_decode`, `validation_steps`,
`validation_pages`. Documented rules of JAX's kernels come first, in JAX's order and words; ours, for what JAX lets
through to wrong answers, follow. Every function here reads NumPy only, and costs microseconds when nothing is wrong.

Arrays of metadata are taken as the caller sent them, of any rank and dtype: that is what is judged.
"""

from typing import SupportsIndex

import numpy as np
from jaxtyping import Int32, Shaped

from attnd.kernels import validation_ragged, validation_steps
from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, RaggedBatch
from attnd.kernels.errors import InvalidArgumentError
from attnd.kernels.validation_decode import DecodeBatch, judge_decode
from attnd.kernels.validation_pages import PageWrites, judge_page_ids, judge_page_writes, valid_layer
from attnd.kernels.validation_ragged import RaggedPlan, judge_ragged
from attnd.kernels.validation_rules import ArrayInfo, ArrayLike, Violations
from attnd.kernels.validation_steps import StepLens, StepPlan, judge_step
from attnd.kernels.validation_values import judge_types, scalar_facts

__all__ = [
    "ArrayInfo", "ArrayLike", "DecodeBatch", "PageWrites", "RaggedPlan", "StepLens", "StepPlan", "Violations",
    "decode_batch", "layer_index", "page_reads", "page_writes", "pages_shapes_match", "plain_options", "ragged_batch",
    "ragged_layer", "ragged_plan", "ragged_violations", "step_layer", "step_lens", "step_plan",
]  # fmt: skip


def ragged_violations(
    spec: CacheSpec,
    q: ArrayLike,
    kv_lens: Shaped[np.ndarray, "..."],
    page_indices: Shaped[np.ndarray, "..."],
    cu_q_lens: Shaped[np.ndarray, "..."],
    num_seqs: Shaped[np.ndarray, "..."],
    *,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    options: AttentionOptions,
    hints: KernelHints,
) -> Violations:
    """Finds everything that is wrong with a call of `ragged_paged_attention`.

    Args:
        spec: The cache, in place of `kv_pages`.
        q: [tokens, num_q_heads, head_dim]; its values are not read.
        kv_lens: int32 [max_num_seqs].
        page_indices: int32 [max_num_seqs, pages_per_seq].
        cu_q_lens: int32 [max_num_seqs + 1].
        num_seqs: int32 [1]. Rows past it are not judged.
        k: [tokens, num_kv_heads, head_dim], the new keys. Values are read only where a cache is quantized per token.
        v: The new values.
        options: Scalars.
        hints: Block sizes; only those of the ragged kernel are judged.
    """
    return judge_ragged(spec, q, kv_lens, page_indices, cu_q_lens, num_seqs, k=k, v=v, options=options, hints=hints)[0]


def ragged_batch(
    spec: CacheSpec,
    q: ArrayLike,
    kv_lens: Shaped[np.ndarray, "..."],
    page_indices: Shaped[np.ndarray, "..."],
    cu_q_lens: Shaped[np.ndarray, "..."],
    num_seqs: Shaped[np.ndarray, "..."],
    *,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    options: AttentionOptions,
    hints: KernelHints,
) -> RaggedBatch:
    """Returns the batch of a call of `ragged_paged_attention`, over arrays of its own.

    Takes the arguments of `ragged_violations`. A batch of no rows is legal: its answer is zeros.

    Raises:
        InvalidArgumentError: `ragged_violations` finds any.
    """
    found, batch = judge_ragged(
        spec, q, kv_lens, page_indices, cu_q_lens, num_seqs, k=k, v=v, options=options, hints=hints
    )
    found.raise_if_any()
    assert batch is not None
    return batch


def decode_batch(
    spec: CacheSpec,
    q: ArrayLike,
    lengths: Shaped[np.ndarray, "..."],
    page_indices: Shaped[np.ndarray, "..."],
    *,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    options: AttentionOptions,
    hints: KernelHints,
) -> DecodeBatch:
    """Returns the batch of a call of `paged_attention`, over arrays of its own.

    Args:
        spec: The cache, in place of `k_pages` and `v_pages`.
        q: [batch_size, num_q_heads, head_dim]; its values are not read.
        lengths: int32 [batch_size]; rows of 0 are left out.
        page_indices: int32 [batch_size, pages_per_sequence].
        k: [batch_size, num_kv_heads, head_dim], the new keys, for position length - 1. Values are read only where a
            cache is quantized per token, and never those of rows left out.
        v: The new values.
        options: Scalars; `soft_cap` is `attn_logits_soft_cap`.
        hints: Only those of the decode kernel are judged. Whether the device has megacore is the caller's to know.

    Raises:
        InvalidArgumentError: Anything is wrong.
    """
    found, batch = judge_decode(spec, q, lengths, page_indices, k=k, v=v, options=options, hints=hints)
    found.raise_if_any()
    assert batch is not None
    return batch


def step_lens(
    spec: CacheSpec,
    q: ArrayLike,
    q_lens: Shaped[np.ndarray, "..."],
    kv_lens: Shaped[np.ndarray, "..."],
    *,
    num_sequences: int,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    options: AttentionOptions,
) -> StepLens:
    """Returns the lengths of a step over sequences whose pages the server manages.

    Args:
        spec: The cache.
        q: [tokens, num_q_heads, head_dim], the rows of the first sequence, then the next; its values are not read.
        q_lens: int32 [num_sequences], the new tokens of each sequence; their sum is q's tokens.
        kv_lens: int32 [num_sequences], the length of each sequence after the step, at least its q_len.
        num_sequences: How many sequences the step names.
        k: [tokens, num_kv_heads, head_dim], the new keys. Values are read only where a cache is quantized per token.
        v: The new values.
        options: Scalars.

    Raises:
        InvalidArgumentError: Anything is wrong.
    """
    judge_step(spec, q, q_lens, kv_lens, num_sequences=num_sequences, k=k, v=v, options=options).raise_if_any()
    return StepLens(q_lens=q_lens, kv_lens=kv_lens)


def ragged_plan(
    spec: CacheSpec,
    kv_lens: Shaped[np.ndarray, "..."],
    page_indices: Shaped[np.ndarray, "..."],
    cu_q_lens: Shaped[np.ndarray, "..."],
    num_seqs: Shaped[np.ndarray, "..."],
    *,
    hints: KernelHints,
) -> RaggedPlan:
    """Returns the plan of a step whose layers are judged as they come, by `ragged_layer`.

    Takes the metadata of `ragged_violations`, and nothing of it is judged again.

    Raises:
        InvalidArgumentError: Anything is wrong.
    """
    found, plan = validation_ragged.plan_ragged(spec, kv_lens, page_indices, cu_q_lens, num_seqs, hints=hints)
    found.raise_if_any()
    assert plan is not None
    return plan


def ragged_layer(
    plan: RaggedPlan,
    q: ArrayLike,
    *,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    options: AttentionOptions,
) -> RaggedBatch:
    """Returns the batch of one layer of a planned step, shared by all of them.

    Takes what each layer brings of the arguments of `ragged_violations`.

    Raises:
        InvalidArgumentError: Anything is wrong; `ragged_batch` would say the same of the whole call.
    """
    validation_ragged.judge_layer(plan, q, k=k, v=v, options=options).raise_if_any()
    return plan.batch


def step_plan(
    spec: CacheSpec, q_lens: Shaped[np.ndarray, "..."], kv_lens: Shaped[np.ndarray, "..."], *, num_sequences: int
) -> StepPlan:
    """Returns the plan of a step over sequences whose layers are judged as they come, by `step_layer`.

    Raises:
        InvalidArgumentError: Anything is wrong.
    """
    found, plan = validation_steps.plan_step(spec, q_lens, kv_lens, num_sequences=num_sequences)
    found.raise_if_any()
    return plan


def step_layer(
    plan: StepPlan,
    q: ArrayLike,
    *,
    k: ArrayLike | None = None,
    v: ArrayLike | None = None,
    options: AttentionOptions,
) -> StepLens:
    """Returns the lengths of one layer of a planned step.

    Raises:
        InvalidArgumentError: Anything is wrong; `step_lens` would say the same of the whole call.
    """
    validation_steps.judge_layer(plan, q, k=k, v=v, options=options).raise_if_any()
    return plan.lens


def page_writes(
    spec: CacheSpec,
    page_indices: Shaped[np.ndarray, "..."],
    kv_pages: Shaped[np.ndarray, "..."],
    scales: Shaped[np.ndarray, "..."] | None = None,
) -> PageWrites:
    """Returns pages to write, as they were given.

    Raises:
        InvalidArgumentError: An id is not int32, out of range or named twice; the shape is not `spec.pages_shape(n)`;
            the dtype does not cast to the cache's; scales are missing or not wanted; a number that is or becomes a
            scale is not finite.
    """
    judge_page_writes(spec, page_indices, kv_pages, scales).raise_if_any()
    return PageWrites(page_indices=page_indices, kv_pages=kv_pages, scales=scales)


def page_reads(spec: CacheSpec, page_indices: Shaped[np.ndarray, "..."]) -> Int32[np.ndarray, " n"]:
    """Returns ids of pages to read; one may be named twice.

    Raises:
        InvalidArgumentError: An id is not int32 or out of range.
    """
    judge_page_ids(spec, page_indices).raise_if_any()
    return page_indices


def layer_index(spec: CacheSpec, layer: SupportsIndex) -> int:
    """Returns a layer as a Python integer.

    Raises:
        InvalidArgumentError: The layer is not in [0, spec.num_layers).
    """
    return valid_layer(spec, layer)


def pages_shapes_match(k_pages: ArrayLike, v_pages: ArrayLike) -> None:
    """Checks pages that a caller holds, where there is no cache: the first rule of JAX's `paged_attention`.

    Raises:
        InvalidArgumentError: The shapes differ.
    """
    if k_pages.shape != v_pages.shape:
        raise InvalidArgumentError.of(
            "v_pages.shape",
            f"k_pages and v_pages must have the same shape. Got {tuple(k_pages.shape)} and {tuple(v_pages.shape)}",
        )


def plain_options(options: AttentionOptions) -> AttentionOptions:
    """Returns the scalars of a call as Python's own, whole numbers among the factors as floats.

    Raises:
        InvalidArgumentError: One is not a number of its kind. Values are judged with the call.
    """
    facts = scalar_facts(options, KernelHints(), ())
    found = Violations()
    judge_types(facts, found)
    found.raise_if_any()
    soft_cap, k_scale, v_scale = (
        float(facts[name]) if name in facts else None for name in ("soft_cap", "k_scale", "v_scale")
    )
    return AttentionOptions(
        sm_scale=float(facts["sm_scale"]),
        sliding_window=facts.get("sliding_window"),
        soft_cap=soft_cap,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=options.return_lse,
    )
