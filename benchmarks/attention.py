"""Section "attention": our implementations against torch SDPA, the stream limit, JAX's reference and XLA's GEMM."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from attnd.kernels import registry
from attnd.kernels.contract import AttentionOptions, Implementation, KernelHints
from benchmarks import torch_sdpa, workloads
from benchmarks.native import PageReader
from benchmarks.report import Section, Target, progress
from benchmarks.timing import Call, Timing, fastest, interleave, ratio, timed
from benchmarks.workloads import BFLOAT16, FLOAT32, Workload

OURS: Final = {"xla": "attnd xla", "numba": "attnd numba"}
STREAM: Final = "stream limit"
JAX_REFERENCE: Final = "JAX ref_ragged_paged_attention"
GEMM: Final = "XLA f32 GEMM 1024^3"
GEMM_FLOPS: Final = 2 * 1024**3
TORCH: Final = {fetch: f"torch SDPA, {fetch}" for fetch in torch_sdpa.FETCHES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is to be met: speed against torch SDPA with a gather of the kind people write, and shares of limits."""

    decode: float = 1.7
    decode_numba: float = 2.5
    prefill: float = 0.85
    mixed: float = 1.2
    gemm_share: float = 0.55
    stream_share_bfloat16: float = 0.3
    stream_share_float32: float = 0.5

    def of(self, workload: Workload, implementation: str) -> Target:
        """Returns the bound of a workload's speed."""
        decode = self.decode_numba if implementation == "numba" else self.decode
        return Target(bound={"D": decode, "P": self.prefill, "M": self.mixed}[workload.name[0]])

    def stream_share(self, workload: Workload, implementation: str) -> Target | None:
        """Returns the bound of a decode's share of the stream limit."""
        if implementation != "numba":
            return None
        narrow = workload.spec.dtype == BFLOAT16
        return Target(bound=self.stream_share_bfloat16 if narrow else self.stream_share_float32)


def run(budget_s: float) -> Section:
    """Measures every workload in both dtypes."""
    section = Section(name="attention")
    section.notes.append(
        "32 query heads, 8 KV heads, head_dim 128, pages of 16 tokens, one layer; NumPy in and out for ours; every "
        "competitor's output was compared with float64 before it was timed; compile time is not in any figure"
    )
    torch = torch_sdpa.load()
    if torch is None:
        section.notes.append("torch is not installed: its lines are missing (`make bench` installs it)")
    reason = registry.create("numba").unsupported(workloads.decode(BFLOAT16).spec)
    section.notes.append(
        "the numba implementation leaves prefills to xla: it has lines where a batch has decodes"
        if reason is None
        else f"attnd numba {reason}"
    )
    cases = list(_cases())
    for make in cases:
        workload = make()
        progress(f"{workload.name}, {workload.spec.dtype.name}")
        _measure(section, workload, torch, budget_s / len(cases), names=list(OURS)[: 1 if reason else 2])
    return section


def _cases() -> Iterator[Callable[[], Workload]]:
    for dtype in (BFLOAT16, FLOAT32):
        yield partial(workloads.decode, dtype)
        yield partial(workloads.prefill, dtype, 512, 512)
        yield partial(workloads.prefill, dtype, 256, 2048)
        yield partial(workloads.mixed, dtype)


def _measure(section: Section, workload: Workload, torch: Any | None, budget_s: float, *, names: Iterable[str]) -> None:
    """Times the competitors of one workload side by side, ours by `names`, and adds their table and ratios."""
    expected = workloads.answer(workload)
    dtype = workload.spec.dtype
    calls: dict[str, Call] = {
        OURS[name]: ours(workload, expected, name) for name in names if name == "xla" or workload.name[0] != "P"
    }
    calls[STREAM] = stream(workload)
    used = {}
    if torch is not None:
        competitor = torch_sdpa.TorchSdpa(torch, workload)
        for fetch in torch_sdpa.FETCHES:
            variant, calls[TORCH[fetch]] = torch_call(competitor, fetch, workload, expected)
            used[TORCH[fetch]] = variant
    # It compiles some hundred programs for each batch: one shows how far it is.
    if workload.name[0] == "D" and dtype == BFLOAT16:
        calls[JAX_REFERENCE] = jax_reference(workload, expected)
    if workload.name[0] == "P" and dtype == FLOAT32:
        calls[GEMM] = gemm()
    timings = interleave(calls, budget_s=budget_s)
    size = f"{workload.pages_size_bytes / 1e6:.1f} MB of pages, {workload.flops / 1e9:.2f} GFLOP"
    section.timings(
        f"{workload.name}, {dtype.name}: {size}",
        {f"{name} ({used[name]})" if name in used else name: timing for name, timing in timings.items()},
        lambda timing: f"{workload.pages_size_bytes / timing.median_s / 1e9:.1f}",
        "GB/s of pages",
    )
    _ratios(section, workload, timings)


def _ratios(section: Section, workload: Workload, timings: Mapping[str, Timing]) -> None:
    """Adds what the timings of one workload mean, as speeds relative to each baseline."""
    for implementation, name in OURS.items():
        if name in timings:
            _ratios_of(section, workload, timings, implementation)
    if GEMM in timings:
        rate = timings[GEMM].median_s / GEMM_FLOPS * workload.flops
        section.value(
            f"{_label(workload)}, xla: share of XLA's f32 GEMM rate (useful work only)",
            rate / timings[OURS["xla"]].median_s,
            "x",
            # Half of 512/512 is masked, and tiles on the diagonal do work that does not count.
            Target(bound=Targets().gemm_share) if workload.batch.kv_lens[0] == 2048 else None,
        )


def _ratios_of(section: Section, workload: Workload, timings: Mapping[str, Timing], implementation: str) -> None:
    ours_timing = timings[OURS[implementation]]
    label = f"{_label(workload)}, {implementation}"
    bounds = dict.fromkeys(TORCH.values(), None) | {
        TORCH[torch_sdpa.FETCHES[0]]: Targets().of(workload, implementation)
    }
    for name, bound in bounds.items():
        if name in timings:
            section.ratio(f"{label}: speed against {name}", ratio(timings[name], ours_timing), bound)
    if JAX_REFERENCE in timings:
        section.ratio(f"{label}: speed against {JAX_REFERENCE}", ratio(timings[JAX_REFERENCE], ours_timing))
    if workload.name[0] == "D":
        share = ratio(timings[STREAM], ours_timing)
        section.ratio(f"{label}: share of the stream limit", share, Targets().stream_share(workload, implementation))


def _label(workload: Workload) -> str:
    return f"{workload.name.partition(' of ')[0]}, {workload.spec.dtype.name}"


def ours(workload: Workload, expected: np.ndarray, name: str = "xla") -> Call:
    """Returns the call of one of our implementations, after checking its answer."""
    implementation: Implementation[Any] = registry.create(name)
    pages = implementation.allocate(workload.spec)
    implementation.write(pages, 0, np.arange(workload.spec.num_pages, dtype=np.int32), workload.kv_pages)
    options = AttentionOptions(sm_scale=workload.sm_scale)

    def attend() -> np.ndarray:
        attended = implementation.attend(pages, 0, workload.batch, workload.q, options=options, hints=KernelHints())
        return attended.out

    workloads.check(f"{name}, {workload.name}", attend(), expected, workload.spec.dtype)
    return timed(attend)


def stream(workload: Workload) -> Call:
    """Returns the call that reads the workload's pages in the order of its page table and nothing else."""
    reader = PageReader(os.cpu_count() or 1)
    pool = workload.kv_pages.reshape(workload.spec.num_pages, -1).view(np.uint64)
    pages = workload.pages_used
    return timed(lambda: reader.read(pool, pages))


def torch_call(
    competitor: torch_sdpa.TorchSdpa, fetch: str, workload: Workload, expected: np.ndarray
) -> tuple[str, Call]:
    """Returns the fastest way of torch to run with a fetch, and its call, after checking all ways' answers."""
    variants = competitor.variants(fetch)
    for name, run_variant in variants.items():
        got = torch_sdpa.to_numpy(run_variant())
        workloads.check(f"torch, {fetch}, {name}, {workload.name}", got, expected, workload.spec.dtype)
    calls = {name: timed(run_variant) for name, run_variant in variants.items()}
    best = fastest(calls)
    return best, calls[best]


def jax_reference(workload: Workload, expected: np.ndarray) -> Call:
    """Returns the call of JAX's reference, run eagerly as its tests do, after checking its answer."""
    batch = workload.batch
    # NaN in the unused tails is masked too late there: 0 * NaN. Its pages are clean.
    clean = jnp.asarray(np.nan_to_num(workload.kv_pages, copy=True))
    kv_lens, page_indices, cu_q_lens = map(jnp.asarray, (batch.kv_lens, batch.page_indices, batch.cu_q_lens))
    num_seqs = jnp.asarray([batch.num_seqs], jnp.int32)
    q = jnp.asarray(workload.q)

    def attend() -> jax.Array:
        out: jax.Array = ref_ragged_paged_attention(
            q, clean, kv_lens, page_indices, cu_q_lens, num_seqs, sm_scale=workload.sm_scale
        )
        return out.block_until_ready()

    workloads.check(f"{JAX_REFERENCE}, {workload.name}", np.asarray(attend()), expected, workload.spec.dtype)
    return timed(attend)


def gemm() -> Call:
    """Returns the call of one float32 matrix product by XLA."""
    left = jnp.asarray(np.random.default_rng(0).standard_normal((1024, 1024), np.float32))
    product = jax.jit(jnp.matmul)
    return timed(lambda: product(left, left).block_until_ready())
