"""Plain JAX on the host's CPU, over pages that NumPy owns and JAX aliases."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped

from attnd.kernels.contract import Attended, AttentionOptions, CacheSpec, KernelHints, KernelTimings, RaggedBatch
from attnd.kernels.host_pages import HostPages
from attnd.kernels.stored import poison
from attnd.kernels.xla_kernel import Pool, ProgramShape
from attnd.kernels.xla_programs import BUCKETS, Program, Staging, alias_pages, program_shape
from attnd.kernels.xla_results import Results
from attnd.kernels.xla_work import Bucket, Call, Paging, Work, plan

ShareT = TypeVar("ShareT")


@dataclass(frozen=True, slots=True, kw_only=True)
class XlaPages:
    """Pages that NumPy owns and writes, and JAX's aliases of them by layer."""

    host: HostPages
    pools: tuple[Pool[jax.Array], ...]

    @property
    def spec(self) -> CacheSpec:
        """Shape of the cache."""
        return self.host.spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """The work of a batch and its programs. The layers of a step share their batch, so that it is planned once."""

    batch: RaggedBatch
    sliding_window: int | None
    spec: CacheSpec
    num_q_heads: int
    work: Work
    programs: Mapping[Bucket, Program]

    def serves(self, batch: RaggedBatch, sliding_window: int | None, spec: CacheSpec, num_q_heads: int) -> bool:
        """Returns whether it is the plan of this call."""
        known = (self.batch is batch, self.sliding_window == sliding_window, self.spec is spec)
        return all(known) and self.num_q_heads == num_q_heads


class Xla:
    """Attends with XLA:CPU in float32; pages change in place.

    Programs depend on the cache's shape, the number of query heads and a bucket; everything else is a run-time
    argument. NumPy writes pages and inputs only while no program runs.
    """

    name = "xla"

    def __init__(self) -> None:
        self._device = jax.devices("cpu")[0]
        self._num_threads = os.cpu_count() or 1
        self._workers = ThreadPoolExecutor(max_workers=self._num_threads, thread_name_prefix="attnd-xla")
        self._programs: dict[ProgramShape, Program] = {}
        self._planned: Planned | None = None

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def unsupported(self, spec: CacheSpec) -> str | None:  # noqa: ARG002 - part of the protocol
        """Returns None: every shape is served."""
        return None

    def allocate(self, spec: CacheSpec) -> XlaPages:
        """Returns zeroed pages whose memory has been touched."""
        host = HostPages.zeros(spec)
        return XlaPages(host=host, pools=alias_pages(host, self._device))

    def write(
        self,
        pages: XlaPages,
        layer: int,
        page_indices: Int32[np.ndarray, " n"],
        kv_pages: Shaped[np.ndarray, "..."],
        scales: Float32[np.ndarray, "..."] | None = None,
    ) -> None:
        """Overwrites whole pages of a layer."""
        pages.host.write(layer, page_indices, kv_pages, scales)

    def read(
        self, pages: XlaPages, layer: int, page_indices: Int32[np.ndarray, " n"]
    ) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """Returns copies of whole pages of a layer, and their scales."""
        return pages.host.read(layer, page_indices)

    def clear(self, pages: XlaPages, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Zeroes pages in every layer."""
        pages.host.clear(page_indices)

    def copy(self, pages: XlaPages, sources: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, " n"]) -> None:
        """Copies pages over others in every layer."""
        pages.host.copy(sources, targets)

    def poison(self, pages: XlaPages, page: int) -> None:
        """Fills a page with NaN in every layer."""
        poison(self, pages, page)

    def warm_up(self, spec: CacheSpec, num_q_heads: int, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Compiles every program that calls with `num_q_heads` can need; returns how many were new.

        Args:
            spec: Shape of the cache.
            num_q_heads: Query heads.
            on_progress: Told how many programs of how many are ready, after each.
        """
        shapes = [program_shape(spec, num_q_heads, bucket) for bucket in BUCKETS]
        missing = [shape for shape in shapes if shape not in self._programs]
        for done, program in enumerate(self._workers.map(self._compile, missing)):
            self._programs[missing[done]] = program
            if on_progress is not None:
                on_progress(len(shapes) - len(missing) + done + 1, len(shapes))
        return len(missing)

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
        hints: KernelHints,  # noqa: ARG002 - part of the protocol
    ) -> Attended:
        """Writes k and v to their slots, if given, then attends. Padding rows of the output are zero."""
        started_ns = time.perf_counter_ns()
        if k is not None and v is not None:
            pages.host.append(layer, batch, k, v)
        written_ns = time.perf_counter_ns()
        num_compiled = self.num_compiled_programs
        planned = self._plan(batch, options.sliding_window, pages.spec, q.shape[1])
        work, programs = planned.work, planned.programs
        compile_ns = time.perf_counter_ns() - written_ns if self.num_compiled_programs > num_compiled else 0
        results = Results(q, num_tokens=batch.num_tokens, v_scale=options.v_scale or 1.0, merges=work.merges)
        # Inputs are written before any program runs: what computes takes the cores from threads of Python.
        shares = [(calls, programs[calls[0].bucket].stage(calls[0], q, options)) for calls in work.threads]

        def run(share: tuple[Sequence[Call], Staging | None]) -> None:
            calls, staged = share
            with np.errstate(over="ignore", invalid="ignore"):  # what a dtype cannot hold is infinite
                for call in calls:
                    program = programs[call.bucket]
                    staging, staged = staged or program.stage(call, q, options), None
                    results.add(call, *program.run(pages.pools[layer], staging))

        self._side_by_side(run, shares)
        results.merge()
        return Attended(
            out=results.out,
            lse_natural=results.lse if options.return_lse else None,
            timings=KernelTimings(
                write_ns=written_ns - started_ns,
                compile_ns=compile_ns,
                kernel_ns=time.perf_counter_ns() - written_ns - compile_ns,
            ),
        )

    def _side_by_side(self, run: Callable[[ShareT], None], shares: Sequence[ShareT]) -> None:
        """Runs shares of a call's work on a thread each, the first on this one, and returns when all have ended."""
        others = [self._workers.submit(run, share) for share in shares[1:]]
        try:
            run(shares[0])
        finally:
            if others:
                wait(others)  # what still ran would read what the next call writes
        for other in others:
            other.result()

    def _plan(self, batch: RaggedBatch, sliding_window: int | None, spec: CacheSpec, num_q_heads: int) -> Planned:
        if self._planned is not None and self._planned.serves(batch, sliding_window, spec, num_q_heads):
            return self._planned
        work = plan(
            batch,
            sliding_window,
            paging=Paging.of(spec),
            key_size=spec.num_kv_heads * spec.head_dim,
            buckets=BUCKETS,
            num_threads=self._num_threads,
        )
        self._planned = Planned(
            batch=batch,
            sliding_window=sliding_window,
            spec=spec,
            num_q_heads=num_q_heads,
            work=work,
            programs={bucket: self._program(spec, num_q_heads, bucket) for bucket in work.buckets},
        )
        return self._planned

    def _program(self, spec: CacheSpec, num_q_heads: int, bucket: Bucket) -> Program:
        """Returns a program, compiled now if `warm_up` has not."""
        shape = program_shape(spec, num_q_heads, bucket)
        program = self._programs.get(shape)
        if program is None:
            program = self._programs[shape] = self._compile(shape)
        return program

    def _compile(self, shape: ProgramShape) -> Program:
        return Program(shape, self._device)
