"""Decode rows by a kernel that numba compiles, all others by plain JAX: the fastest on a CPU, for those with numba."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float, Float32, Shaped

from attnd.kernels.contract import (
    Attended,
    AttentionOptions,
    CacheSpec,
    KernelHints,
    KernelTimings,
    Layout,
    RaggedBatch,
)
from attnd.kernels.numba_work import Chunks, Decodes, merge, split
from attnd.kernels.xla import Xla, XlaPages

# Rows of so few query tokens are taken as decodes, each token by itself. Plain JAX needs a block of 16 for them: at 4
# tokens it takes three times as long, at 16 two thirds.
Q_LEN_MAX: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The work of a batch. The layers of a step share their batch, so that it is planned once."""

    batch: RaggedBatch
    sliding_window: int | None
    spec: CacheSpec
    decodes: Decodes | None
    chunks: Chunks | None

    def serves(self, batch: RaggedBatch, sliding_window: int | None, spec: CacheSpec) -> bool:
        """Returns whether it is the plan of this call."""
        return self.batch is batch and self.sliding_window == sliding_window and self.spec is spec


class Numba(Xla):
    """Attends over the pages of `Xla`, decode rows by a kernel that numba compiles for each dtype of the pages.

    The kernel runs without the GIL on the threads of `Xla`, not on numba's: of these a process has one set, whose
    simplest kind ends the process when two engines use it, and whose other kinds spin while they wait.
    """

    name = "numba"

    def __init__(self) -> None:
        super().__init__()
        self._kernels: dict[np.dtype, Callable[..., None]] = {}
        self._split: Planned | None = None

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled, or loaded from numba's cache, so far."""
        return super().num_compiled_programs + len(self._kernels)

    def unsupported(self, spec: CacheSpec) -> str | None:
        """Returns why numba cannot be had; every shape is served."""
        try:
            import attnd.kernels.numba_kernel  # noqa: F401, PLC0415 - numba is an optional dependency
        except ImportError as error:
            return f"needs numba, which `pip install 'attnd[cpu]'` brings: {error}."
        return super().unsupported(spec)

    def warm_up(self, spec: CacheSpec, num_q_heads: int, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Compiles every program that calls with `num_q_heads` can need; returns how many were new."""
        num_new = int(spec.dtype not in self._kernels)

        def report(num_done: int, num_programs: int) -> None:
            if on_progress is not None:
                on_progress(num_done, num_programs + num_new)

        num_compiled = super().warm_up(spec, num_q_heads, report)
        self._kernel(spec)
        if num_new and on_progress is not None:
            on_progress(num_compiled + 1, num_compiled + 1)
        return num_compiled + num_new

    def attend(
        self,
        pages: XlaPages,
        layer: int,
        batch: RaggedBatch,
        q: Float[np.ndarray, "tokens num_q_heads head_dim"],
        *,
        k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        options: AttentionOptions,
        hints: KernelHints,
    ) -> Attended:
        """Writes k and v to their slots, if given, then attends. Padding rows of the output are zero."""
        planned = self._plan_split(batch, options.sliding_window, pages.spec)
        decodes, chunks = planned.decodes, planned.chunks
        if decodes is None:
            return super().attend(pages, layer, batch, q, k=k, v=v, options=options, hints=hints)
        started_ns = time.perf_counter_ns()
        if k is not None and v is not None:
            pages.host.append(layer, batch, k, v)
        timings = KernelTimings(write_ns=time.perf_counter_ns() - started_ns)
        out = np.empty(q.shape, q.dtype)
        out[batch.num_tokens :] = 0
        lse = np.full(q.shape[:2], -np.inf, np.float32) if options.return_lse else None
        if chunks is not None:
            part = super().attend(pages, layer, chunks.batch, q[chunks.tokens], options=options, hints=hints)
            out[chunks.tokens] = part.out
            if lse is not None:
                lse[chunks.tokens] = part.lse_natural
            timings.compile_ns = part.timings.compile_ns
        num_compiled, compiling_ns = self.num_compiled_programs, time.perf_counter_ns()
        kernel = self._kernel(pages.spec)
        if self.num_compiled_programs > num_compiled:
            timings.compile_ns += time.perf_counter_ns() - compiling_ns
        rows = slice(len(decodes.tokens)) if chunks is None else decodes.tokens
        decoded, decoded_lse = self._decode(kernel, pages, layer, decodes, q[rows], options)
        with np.errstate(over="ignore", invalid="ignore"):  # what a dtype cannot hold is infinite
            if options.v_scale is not None:
                decoded *= np.float32(options.v_scale)
            out[rows] = decoded
        if lse is not None:
            lse[rows] = decoded_lse
        timings.kernel_ns = time.perf_counter_ns() - started_ns - timings.write_ns - timings.compile_ns
        return Attended(out=out, lse_natural=lse, timings=timings)

    def _plan_split(self, batch: RaggedBatch, sliding_window: int | None, spec: CacheSpec) -> Planned:
        if self._split is None or not self._split.serves(batch, sliding_window, spec):
            key_size = spec.num_kv_heads * spec.head_dim
            decodes, chunks = split(
                batch, sliding_window, q_len_max=Q_LEN_MAX, key_size=key_size, num_threads=self._num_threads
            )
            self._split = Planned(batch=batch, sliding_window=sliding_window, spec=spec, decodes=decodes, chunks=chunks)
        return self._split

    def _kernel(self, spec: CacheSpec) -> Callable[..., None]:
        """Returns the kernel for a dtype of pages, compiled now if `warm_up` has not."""
        kernel = self._kernels.get(spec.dtype)
        if kernel is None:
            from attnd.kernels.numba_kernel import compiled  # noqa: PLC0415 - numba is an optional dependency

            kernel = self._kernels[spec.dtype] = compiled(spec.dtype.name)
        return kernel

    def _decode(
        self,
        kernel: Callable[..., None],
        pages: XlaPages,
        layer: int,
        decodes: Decodes,
        q: Float[np.ndarray, "n num_q_heads head_dim"],
        options: AttentionOptions,
    ) -> tuple[Float32[np.ndarray, "n num_q_heads head_dim"], Float32[np.ndarray, "n num_q_heads"]]:
        """Runs the kernel on as many threads as the work was cut for."""
        spec = pages.spec
        heads = (spec.num_kv_heads, q.shape[1] // spec.num_kv_heads)
        scaled = np.empty((len(q), *heads, spec.head_dim), np.float32)
        factor = np.float32(options.sm_scale * (options.k_scale or 1.0))
        np.multiply(q.reshape(scaled.shape), factor, out=scaled, dtype=np.float32)
        out = np.empty((decodes.num_slots, *heads, spec.head_dim), np.float32)
        lse = np.empty((decodes.num_slots, *heads), np.float32)
        bits = pages.host.bits[layer].reshape(-1)
        bits = bits.view(np.uint32) if bits.itemsize == 4 else bits
        scales = pages.host.scales[layer].reshape(-1) if pages.host.scales else np.empty(0, np.float32)
        soft_cap = np.float32(options.soft_cap or 0.0)

        def run(items: np.ndarray) -> None:
            kernel(bits, scales, paging_of(spec), decodes.table, items, scaled, soft_cap, out, lse)

        self._side_by_side(run, decodes.threads)
        merge(decodes.extras, out, lse)
        return out[: len(q)].reshape(q.shape), lse[: len(q)].reshape(q.shape[:2])


def paging_of(spec: CacheSpec) -> tuple[int, int, int, int, int]:
    """Returns what the kernel calls paging: page_size, and the strides of pages, tokens, KV heads and values."""
    token = spec.head_dim
    if spec.layout is Layout.SPLIT:
        head = spec.num_pages * spec.page_size * token
        return spec.page_size, spec.page_size * token, token, head, spec.num_kv_heads * head
    row = 2 * spec.num_kv_heads * token
    return spec.page_size, spec.page_size * row, row, 2 * token, token
