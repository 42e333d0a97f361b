"""Our Pallas kernels for TPU behind the protocol: pages in the TPU's memory, programs for a small set of sizes."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import jax
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Float32, Int32, Shaped

from attnd.kernels import pallas_blocks
from attnd.kernels.contract import (
    Attended,
    AttentionOptions,
    CacheSpec,
    KernelHints,
    KernelTimings,
    Layout,
    RaggedBatch,
)
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.pallas_blocks import Features, Tuning
from attnd.kernels.pallas_plan import Launch, LaunchShape, launch_shapes, plan, reads_what_another_writes
from attnd.kernels.pallas_pool import PageMover, PallasPages
from attnd.kernels.pallas_programs import Program, Programs, arguments_of, features_of
from attnd.kernels.pallas_quantized import QuantizedMover, QuantizedPages, rows_of_tokens
from attnd.kernels.stored import poison
from attnd.kernels.tpu_chips import CHIPS, chip_of

COMPILE_TIMEOUT_S: Final = 900.0
AnyPages: TypeAlias = PallasPages | QuantizedPages


@dataclass(frozen=True, slots=True)
class _Planned:
    """A batch's launches, and their metadata on the device: the layers of a step share them.

    Attributes:
        fuses_append: Whether the launches may write the new tokens themselves.
    """

    batch: RaggedBatch
    spec: CacheSpec
    num_q_heads: int
    launches: list[tuple[Launch, dict[str, jax.Array]]]
    fuses_append: bool


class Pallas:
    """Attends with our Pallas kernels, in float32 over bfloat16 products (float32 caches: in float32).

    Programs depend on the cache's shape, the number of query heads, q's dtype, the sizes of a launch and which of
    append, window, cap and lse a call uses; every scalar is a run-time argument. A layer's pages are donated to each
    call and replaced by its result.

    Args:
        device: A TPU, of this machine or of a topology to compile for; None for JAX's first device.
        interpret: Runs on the CPU in TPU interpret mode, slowly: to test. Parameters of that mode may be given.
    """

    def __init__(self, device: jax.Device | None = None, *, interpret: pltpu.InterpretParams | bool = False) -> None:
        self.name = "pallas_interpret" if interpret else "pallas"
        self._missing: str | None = None
        self._tuning = Tuning.for_interpreter()
        device = device or jax.devices("cpu" if interpret else None)[0]
        if not interpret:
            chip = chip_of(device.device_kind)
            if chip is not None:
                self._tuning = Tuning(chip=chip)
            elif device.platform != "tpu":
                self._missing = f"it needs a TPU; JAX's devices here are of platform {device.platform!r}."
            else:
                kinds = ", ".join(kind for known in CHIPS.values() for kind in known.device_kinds)
                self._missing = f"device_kind={device.device_kind!r} must be one of {kinds}."
        self._mover = PageMover(device)
        self._quantized = QuantizedMover(device)
        self._programs = Programs(device, interpret=interpret)
        self._planned: _Planned | None = None

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled so far."""
        moving = self._mover.num_compiled_programs + self._quantized.num_compiled_programs
        return len(self._programs) + moving

    def unsupported(self, spec: CacheSpec) -> str | None:
        """Returns why it cannot serve a cache of this shape, decided without compiling; None if it can."""
        return self._missing or pallas_blocks.unsupported(spec, self._tuning)

    def allocate(self, spec: CacheSpec) -> AnyPages:
        """Returns zeroed pages."""
        return self._quantized.allocate(spec) if spec.quantized_per_token else self._mover.allocate(spec)

    def write(
        self,
        pages: AnyPages,
        layer: int,
        page_indices: Int32[np.ndarray, " n"],
        kv_pages: Shaped[np.ndarray, "..."],
        scales: Float32[np.ndarray, "..."] | None = None,
    ) -> None:
        """Overwrites whole pages of a layer."""
        if isinstance(pages, PallasPages):
            self._mover.write(pages, layer, page_indices, kv_pages)
        else:
            assert scales is not None
            self._quantized.write(pages, layer, page_indices, kv_pages, scales)

    def read(
        self, pages: AnyPages, layer: int, page_indices: Int32[np.ndarray, " n"]
    ) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """Returns copies of whole pages of a layer, and their scales."""
        if isinstance(pages, PallasPages):
            return self._mover.read(pages, layer, page_indices), None
        return self._quantized.read(pages, layer, page_indices)

    def clear(self, pages: AnyPages, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Zeroes pages in every layer."""
        if isinstance(pages, PallasPages):
            self._mover.clear(pages, page_indices)
        else:
            self._quantized.clear(pages, page_indices)

    def copy(self, pages: AnyPages, sources: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, " n"]) -> None:
        """Copies pages over others in every layer."""
        if isinstance(pages, PallasPages):
            self._mover.copy(pages, sources, targets)
        else:
            self._quantized.copy(pages, sources, targets)

    def poison(self, pages: AnyPages, page: int) -> None:
        """Fills a page with NaN in every layer."""
        poison(self, pages, page)

    def warm_up(self, spec: CacheSpec, num_q_heads: int, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Compiles the programs that calls with `num_q_heads` bfloat16 or float32 queries and new tokens can need.

        Window, cap and lse double the programs each, and a model uses few of their combinations: those compile at
        their first call, all sizes as they come.

        Raises:
            UnsupportedError: A program does not fit, or takes too long to compile.
        """
        q_dtype = "float32" if spec.dtype == np.float32 else "bfloat16"
        decodes = pallas_blocks.serves_decode(spec, num_q_heads, self._tuning)
        shapes = launch_shapes(spec.num_pages, self._tuning.slots_max, decodes=decodes)
        features = Features(append=not spec.quantized_per_token)
        programs = [
            self._program(spec, num_q_heads, q_dtype, shape, features)
            for shape in shapes
            if shape.is_decode or not spec.quantized_per_token
        ]
        missing = [program for program in programs if program not in self._programs]
        executor = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="attnd-compile")
        try:
            futures = [executor.submit(self._programs.compile, program) for program in missing]
            for done, future in enumerate(futures, 1):
                future.result(timeout=COMPILE_TIMEOUT_S)
                if on_progress is not None:
                    on_progress(len(programs) - len(missing) + done, len(programs))
        except FutureTimeoutError:
            raise UnsupportedError(f"a program did not compile within {COMPILE_TIMEOUT_S:g} s.") from None
        finally:
            executor.shutdown(wait=False, cancel_futures=True)
        return len(missing)

    def attend(
        self,
        pages: AnyPages,
        layer: int,
        batch: RaggedBatch,
        q: Float[np.ndarray, "tokens num_q_heads head_dim"],
        *,
        k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        options: AttentionOptions,
        hints: KernelHints,  # noqa: ARG002 - part of the protocol
    ) -> Attended:
        """Writes k and v to their slots, if given, then attends. Padding rows of the output are zero.

        Raises:
            UnsupportedError: A sequence needs a larger page table, or the heads a larger block, than the TPU can hold.
        """
        started_ns = time.perf_counter_ns()
        spec, num_q_heads = pages.spec, q.shape[1]
        q_dtype = "float32" if q.dtype == np.float16 else q.dtype.name
        planned = self._plan(batch, spec, num_q_heads)
        launches = planned.launches
        features = features_of(options, append=k is not None and planned.fuses_append)
        programs = [self._program(spec, num_q_heads, q_dtype, launch.shape, features) for launch, _ in launches]
        planned_ns = time.perf_counter_ns()
        for program in programs:
            if program not in self._programs:
                self._programs.compile(program)
        compiled_ns = time.perf_counter_ns()
        if k is not None and v is not None and not features.append:
            self._append(pages, layer, batch, k, v)
            k = v = None
        results = []
        for program, (launch, metadata) in zip(programs, launches, strict=True):
            arguments = arguments_of(program, launch, metadata, q, k, v, options)
            pool = pages.pools[layer] if isinstance(pages, PallasPages) else pages.layer(layer)
            out, lse, changed = self._programs.run(program, pool, arguments)
            if isinstance(pages, PallasPages):
                pages.pools[layer] = changed
            results.append((launch, out, lse))
        whole = np.zeros(q.shape, q.dtype)
        whole_lse = np.full(q.shape[:2], -np.inf, np.float32) if options.return_lse else None
        for launch, out, lse in results:
            with np.errstate(over="ignore"):  # float16
                whole[launch.tokens] = np.asarray(out)[: len(launch.tokens)]
            if whole_lse is not None:
                whole_lse[launch.tokens] = np.asarray(lse)[: len(launch.tokens)]
        kernel_ns = time.perf_counter_ns() - compiled_ns + planned_ns - started_ns
        timings = KernelTimings(compile_ns=compiled_ns - planned_ns, kernel_ns=kernel_ns)
        return Attended(out=whole, lse_natural=whole_lse, timings=timings)

    def _append(self, pages: AnyPages, layer: int, batch: RaggedBatch, k: np.ndarray, v: np.ndarray) -> None:
        """Writes new tokens before any kernel runs."""
        if isinstance(pages, PallasPages):
            self._mover.append(pages, layer, batch, k, v)
        else:
            self._quantized.append(pages, layer, batch, k, v)

    def _plan(self, batch: RaggedBatch, spec: CacheSpec, num_q_heads: int) -> _Planned:
        """Returns the launches of a batch; the layers of a step, which share their batch, plan it once."""
        last = self._planned
        if last is not None and last.batch is batch and last.spec is spec and last.num_q_heads == num_q_heads:
            return last
        decodes = pallas_blocks.serves_decode(spec, num_q_heads, self._tuning)
        rows = rows_of_tokens(batch) if spec.quantized_per_token else batch
        names = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
        launches = [
            (launch, self._programs.place({name: getattr(launch, name) for name in names}))
            for launch in plan(rows, spec.page_size, self._tuning.slots_max, decodes=decodes)
        ]
        fuses = not spec.quantized_per_token
        fuses = fuses and not reads_what_another_writes(batch, spec.page_size, spec.num_pages)
        self._planned = _Planned(batch, spec, num_q_heads, launches, fuses_append=fuses)
        return self._planned

    def _program(
        self, spec: CacheSpec, num_q_heads: int, q_dtype: str, shape: LaunchShape, features: Features
    ) -> Program:
        make = pallas_blocks.decode_config if shape.is_decode else pallas_blocks.chunk_config
        config = make(spec, num_q_heads, q_dtype, shape, features, self._tuning)
        # Caches that differ in layers alone, or in layout where both are stored alike, share their programs.
        alike = replace(spec, layout=spec.layout if spec.quantized_per_token else Layout.INTERLEAVED, num_layers=1)
        return Program(spec=alike, num_q_heads=num_q_heads, config=config)
