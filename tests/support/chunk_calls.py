"""Calls of the chunk kernel in the interpreter: poisoned inputs, the float64 answer, and the difference."""

import functools
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, Layout, RaggedBatch
from attnd.kernels.host_pages import bits_of
from attnd.kernels.pallas_chunk import chunk_counted
from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_chunk_schedule import Count
from attnd.kernels.reference import Reference
from tests.support.interpreting import jit_quickly, without_races

# Room of every batch: calls of one shape share a program.
TOKENS, ROWS, SLOTS = 48, 5, 16
# Integers have no NaN; this is far outside what the tests store.
_INT8_POISON = 127


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a call selects a program; the fields of `ChunkConfig` that tests vary."""

    num_q_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 128
    page_size: int = 8
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    query_block: int = 16
    block_tokens: int = 32
    edge_tokens: int = 16
    fold: bool = True
    windowed: bool = False
    capped: bool = False
    append: bool = True
    return_lse: bool = True
    kv_len_max: int = SLOTS * 8

    @property
    def num_pages(self) -> int:
        return 2 * max(ROWS * SLOTS * 8, self.kv_len_max) // self.page_size

    def config(self) -> ChunkConfig:
        fields = dict(self.__dict__)
        pages_per_seq = max(1, fields.pop("kv_len_max") // self.page_size)
        return ChunkConfig(
            num_tokens=TOKENS, num_rows=ROWS, num_pages=self.num_pages, pages_per_seq=pages_per_seq, counted=True,
            **fields,
        )  # fmt: skip


@functools.cache
def program(config: ChunkConfig, mode: str) -> Any:
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan")

    def call(*arrays: Any, **options: Any) -> Any:
        return chunk_counted(config, *arrays, interpret=params, **options)

    return jit_quickly(call)


@dataclass(kw_only=True)
class Call:
    """A batch with its cache and its answer. Everything that a right kernel does not look at is poison."""

    shape: Shape
    q_lens: list[int]
    kv_lens: list[int]
    options: AttentionOptions
    seed: int = 0
    q_factor: float = 1.0
    q: Any = field(init=False)
    pool: Any = field(init=False)
    kv_lens_array: Any = field(init=False)
    page_indices: Any = field(init=False)
    cu_q_lens: Any = field(init=False)
    k: Any = field(init=False)
    v: Any = field(init=False)

    def __post_init__(self) -> None:
        shape, rng = self.shape, np.random.default_rng(self.seed)
        config = shape.config()
        kv_dtype = dtype_of(shape.kv_dtype)
        self.pool = np.full((shape.num_pages, shape.page_size, 2 * shape.num_kv_heads, shape.head_dim), self.poison)
        self.k = np.full((TOKENS, shape.num_kv_heads, shape.head_dim), self.poison)
        self.v = self.k.copy()
        self.q = np.full((TOKENS, shape.num_q_heads, shape.head_dim), np.nan)
        self.page_indices = np.full((ROWS, config.pages_per_seq), 10**8, np.int32)
        self.kv_lens_array = np.array([*self.kv_lens, *[-7] * ROWS][:ROWS], np.int32)
        self.cu_q_lens = np.full(ROWS + 1, -(10**8), np.int32)
        self.cu_q_lens[: len(self.q_lens) + 1] = np.cumsum([0, *self.q_lens])
        free = iter(rng.permutation(shape.num_pages))
        for row, (q_len, kv_len) in enumerate(zip(self.q_lens, self.kv_lens, strict=True)):
            kv = rng.standard_normal((kv_len, 2 * shape.num_kv_heads, shape.head_dim))
            kv = np.clip(np.round(kv * 30), -120, 120) if kv_dtype == np.int8 else kv
            tokens = slice(self.cu_q_lens[row], self.cu_q_lens[row + 1])
            self.q[tokens] = rng.standard_normal(self.q[tokens].shape) * self.q_factor
            self.k[tokens], self.v[tokens] = kv[kv_len - q_len :, 0::2], kv[kv_len - q_len :, 1::2]
            stored = kv_len - q_len if shape.append else kv_len
            for slot in range(-(-kv_len // shape.page_size)):
                page = self.page_indices[row, slot] = next(free)
                part = kv[slot * shape.page_size : min(stored, (slot + 1) * shape.page_size)]
                self.pool[page, : len(part)] = part
        self.q = self.q.astype(dtype_of(shape.q_dtype))
        self.k, self.v, self.pool = (x.astype(kv_dtype) for x in (self.k, self.v, self.pool))

    @property
    def poison(self) -> float:
        return _INT8_POISON if self.shape.kv_dtype == "int8" else np.nan

    def run(self, mode: str = "on_wait", **options: Any) -> "Answer":
        """Runs the kernel; `options` replace the call's own."""
        shape = self.shape
        config = shape.config()
        named = {
            "sm_scale": self.options.sm_scale, "soft_cap": self.options.soft_cap,
            "sliding_window": self.options.sliding_window, "k_scale": self.options.k_scale,
            "v_scale": self.options.v_scale,
        }  # fmt: skip
        if shape.append:
            named |= {"k": self.k, "v": self.v}
        padded = np.pad(bits_of(self.pool), ((0, 0),) * 3 + ((0, config.lanes - shape.head_dim),))
        pool = jnp.asarray(padded.view(self.pool.dtype).reshape(config.pool_shape))
        with without_races():
            out, lse, pool, counts = jax.block_until_ready(program(config, mode)(
                self.q, pool, self.kv_lens_array, self.page_indices, self.cu_q_lens,
                np.array([len(self.q_lens)], np.int32), **named | options,
            ))  # fmt: skip
        counted = {what.name.lower(): int(counts[what]) for what in Count}
        pool = np.asarray(pool).reshape(*self.pool.shape[:3], config.lanes)[..., : shape.head_dim]
        out = np.asarray(out).astype(np.float64)
        return Answer(self, out, None if lse is None else np.asarray(lse), pool, counted)

    def batch(self) -> RaggedBatch:
        return RaggedBatch.compact(
            self.kv_lens_array[: len(self.q_lens)], self.page_indices[: len(self.q_lens)],
            np.array(self.q_lens, np.int32), self.shape.page_size,
        )  # fmt: skip

    def expected(self) -> tuple[Any, Any, Any]:
        """Returns the float64 reference's out (as float32), lse and pages."""
        shape, reference = self.shape, Reference()
        spec = CacheSpec(
            layout=Layout.INTERLEAVED, num_layers=1, num_pages=shape.num_pages, page_size=shape.page_size,
            num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=self.pool.dtype,
        )  # fmt: skip
        pages = reference.allocate(spec)
        everything = np.arange(shape.num_pages, dtype=np.int32)
        reference.write(pages, 0, everything, self.pool)
        new = {"k": self.k, "v": self.v} if shape.append else {}
        q = np.nan_to_num(self.q.astype(np.float32))
        answer = reference.attend(pages, 0, self.batch(), q, **new, options=self.options, hints=KernelHints())
        return answer.out.astype(np.float64), answer.lse_natural, reference.read(pages, 0, everything)[0]


@dataclass(frozen=True)
class Answer:
    """What the kernel gave for a call."""

    call: Call
    out: Any
    lse: Any
    pool: Any
    counts: dict[str, int]

    def error(self, *, only: slice = slice(None)) -> float:
        """Returns the largest difference from the reference over out and lse, infinite if anything is not finite."""
        options = self.call.options
        assert options.return_lse == (self.lse is not None)
        out, lse, _ = self.call.expected()
        differences = [np.abs(self.out - out)[only].max() / max(1.0, np.abs(out).max())]
        used = self.call.batch().num_tokens
        if self.lse is not None and used:
            differences.append(np.abs(self.lse[:used] - lse[:used])[only].max() / max(1.0, np.abs(lse[:used]).max()))
        return float(np.nan_to_num(np.max(differences), nan=np.inf))

    def check(self, tolerance: float) -> None:
        """Asserts everything that must hold of an answer."""
        assert self.error() <= tolerance
        used = self.call.batch().num_tokens
        assert (self.out[used:] == 0).all()
        if self.lse is not None:
            assert np.isneginf(self.lse[used:]).all()
        pages = self.call.expected()[2] if self.call.shape.append else self.call.pool
        np.testing.assert_array_equal(pages.view(np.uint8), self.pool.view(np.uint8))
