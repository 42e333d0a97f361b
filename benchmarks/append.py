"""Section "append": what writing a step's keys and values costs, in a small and in a large pool.

An implementation that copies its pool to change it shows here at once: the ratio of the pools' sizes is 16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import numpy as np
import psutil

from attnd.kernels import registry
from attnd.kernels.contract import (
    Attended,
    AttentionOptions,
    CacheSpec,
    Implementation,
    KernelHints,
    Layout,
    RaggedBatch,
)
from benchmarks.report import Section, Target
from benchmarks.timing import Call, interleave, ratio, timed
from benchmarks.workloads import BFLOAT16

GIB: Final = 2**30
POOLS_BYTES: Final = (GIB // 4, 4 * GIB)
RATIO_MAX: Final = 3.0
ROWS: Final = 32
KV_LEN: Final = 64
# Steps at different pages, so that the writes do not always meet the same cached lines.
NUM_BATCHES: Final = 64


@dataclass(frozen=True, kw_only=True)
class Pool:
    """A cache of one layer and steps that append to it.

    Attributes:
        name: Its size.
        append: Writes one step's keys and values; the implementation's own clock.
        step: The same, and the attention over them; wall clock.
        attend: The attention alone; wall clock.
    """

    name: str
    append: Call
    step: Call
    attend: Call


def run(budget_s: float, pools_bytes: tuple[int, ...] = POOLS_BYTES) -> Section:
    """Measures an append to each pool, side by side."""
    section = Section(name="append")
    section.notes.append(
        f"one decode step of {ROWS} rows of {KV_LEN} tokens at random pages: 8 KV heads, head_dim 128, pages of 16, "
        "bfloat16; pools of one layer, their memory touched before"
    )
    fitting = tuple(size for size in pools_bytes if size < psutil.virtual_memory().available * 0.7)
    if fitting != pools_bytes:
        section.notes.append("the memory that is free does not hold all pools: the largest is missing")
    pools = [make_pool("xla", size) for size in fitting]
    calls = {f"append, {pool.name}": pool.append for pool in pools}
    calls |= {f"attend with append, {pool.name}": pool.step for pool in pools}
    calls |= {f"attend alone, {pool.name}": pool.attend for pool in pools}
    timings = interleave(calls, budget_s=budget_s, warmups=3, rounds_max=400, settle_s=0.001)
    section.timings("attnd xla", timings, lambda timing: f"{timing.median_s / ROWS * 1e6:.2f}", "us per token")
    small, large = pools[0].name, pools[-1].name
    if small != large:
        for kind in ("append", "attend with append"):
            section.ratio(
                f"{kind}: time in {large} relative to {small}",
                ratio(timings[f"{kind}, {large}"], timings[f"{kind}, {small}"]),
                Target(bound=RATIO_MAX, side="at most"),
            )
    for pool in pools:
        section.ratio(
            f"{pool.name}: attend with append relative to attend alone",
            ratio(timings[f"attend with append, {pool.name}"], timings[f"attend alone, {pool.name}"]),
        )
    return section


def make_pool(name: str, size_bytes: int) -> Pool:
    """Returns a pool of about `size_bytes` with its calls."""
    implementation: Implementation[Any] = registry.create(name)
    page_size, num_kv_heads, head_dim = 16, 8, 128
    page_bytes = page_size * 2 * num_kv_heads * head_dim * BFLOAT16.itemsize
    spec = CacheSpec(
        layout=Layout.INTERLEAVED,
        num_layers=1,
        num_pages=size_bytes // page_bytes,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=BFLOAT16,
    )
    pages = implementation.allocate(spec)
    rng = np.random.default_rng(0)
    batches = cycle(list(_batches(spec, rng)))
    q = rng.standard_normal((ROWS, 4 * num_kv_heads, head_dim), np.float32).astype(BFLOAT16)
    k, v = rng.standard_normal((2, ROWS, num_kv_heads, head_dim), np.float32).astype(BFLOAT16)
    options, hints = AttentionOptions(sm_scale=head_dim**-0.5), KernelHints()

    def step(k: np.ndarray | None, v: np.ndarray | None, batch: RaggedBatch) -> Attended:
        return implementation.attend(pages, 0, batch, q, k=k, v=v, options=options, hints=hints)

    batch = next(batches)
    step(k, v, batch)
    check_append(implementation, pages, batch, (k, v))
    return Pool(
        name=f"{size_bytes / GIB:g} GiB pool",
        append=lambda: step(k, v, next(batches)).timings.write_ns / 1e9,
        step=timed(lambda: step(k, v, next(batches))),
        attend=timed(lambda: step(None, None, next(batches))),
    )


def check_append(
    implementation: Implementation[Any], pages: Any, batch: RaggedBatch, kv: tuple[np.ndarray, np.ndarray]
) -> None:
    """Makes sure that a step has written its keys and values where they belong.

    Raises:
        AssertionError: It has not.
    """
    page, offset = batch.token_slots(pages.spec.page_size)
    stored, _ = implementation.read(pages, 0, page)
    tokens = stored[np.arange(len(page)), offset]
    for side, expected in enumerate(kv):
        if not np.array_equal(tokens[:, side::2], expected):
            raise AssertionError(f"{implementation.name} did not append what it was given")


def _batches(spec: CacheSpec, rng: np.random.Generator) -> Iterator[RaggedBatch]:
    pages_per_seq = KV_LEN // spec.page_size
    for _ in range(NUM_BATCHES):
        table = rng.choice(spec.num_pages, (ROWS, pages_per_seq), replace=False).astype(np.int32)
        yield RaggedBatch(
            kv_lens=np.full(ROWS, KV_LEN, np.int32), page_indices=table, cu_q_lens=np.arange(ROWS + 1, dtype=np.int32)
        )
