"""Attention in this process, by the kernels that an attnd server runs: what serving costs is measured against it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from attnd.kernels import registry
from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, Layout, RaggedBatch
from attnd.kernels.launch import launch

from .attention import PAGE_SIZE, Floats
from .model_file import ModelConfig


class InProcessAttention:
    """Attention by attnd's kernels, without a server: nobody checks what is asked, and nobody waits.

    Args:
        config: The model's shape.
        num_pages: Pages of each layer.
    """

    def __init__(self, config: ModelConfig, *, num_pages: int) -> None:
        # As a server does: a program is run by the thread that calls it.
        jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
        self._spec = CacheSpec(
            layout=Layout.INTERLEAVED,
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=np.dtype(np.float32),
        )
        self._implementation = registry.choose(self._spec, jax.default_backend())
        self._pages = self._implementation.allocate(self._spec)
        self._implementation.warm_up(self._spec, config.num_q_heads)
        self._options = AttentionOptions(sm_scale=config.sm_scale)
        self._free = list(range(num_pages))
        self.num_pages_peak = 0

    @property
    def cache(self) -> CacheSpec:
        """The shape of what holds the pages."""
        return self._spec

    def create_sequences(self, num_sequences: int) -> Sequence[Any]:
        """Returns the page tables of new, empty sequences."""
        return [_Sequence([]) for _ in range(num_sequences)]

    def step(self, sequences: Sequence[Any], q_lens: Sequence[int], kv_lens: Sequence[int]) -> "_Step":
        """Begins a step, its pages taken and its metadata made once for all layers."""
        for sequence, kv_len in zip(sequences, kv_lens, strict=True):
            while len(sequence.pages) * PAGE_SIZE < kv_len:
                sequence.pages.append(self._free.pop())
        self.num_pages_peak = max(self.num_pages_peak, self._spec.num_pages - len(self._free))
        table = np.zeros((len(sequences), max(len(sequence.pages) for sequence in sequences)), np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.pages)] = sequence.pages
        batch = RaggedBatch.compact(np.array(kv_lens, np.int32), table, np.array(q_lens, np.int32), PAGE_SIZE)
        return _Step(self._implementation, self._pages, batch, self._options)

    def release(self, sequences: Sequence[Any]) -> None:
        """Gives the pages of sequences back."""
        for sequence in sequences:
            self._free += sequence.pages
            sequence.pages.clear()


@dataclass(slots=True, eq=False)
class _Sequence:
    pages: list[int]


@dataclass(frozen=True, slots=True)
class _Step:
    implementation: Any
    pages: Any
    batch: RaggedBatch
    options: AttentionOptions

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        attended = launch(
            self.implementation,
            self.pages,
            layer,
            self.batch,
            q,
            k=k,
            v=v,
            options=self.options,
            hints=KernelHints(),
        )
        out: NDArray[np.float32] = attended.out
        return out
