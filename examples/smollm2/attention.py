"""What the model asks of attention, and the answer: an attnd server behind gRPC."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from attnd.client import CacheInfo, Client

from .model_file import ModelConfig

PAGE_SIZE = 16
NUM_PAGES_MIN = 64
COMPILE_TIMEOUT_S = 300.0

Floats = NDArray[np.float32]


class Step(Protocol):
    """One step of the batch: its metadata is fixed, its layers follow one by one."""

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        """Appends the new keys and values to the layer's cache and attends over all that the cache then holds.

        Args:
            layer: Layer of the model.
            q: float32 [tokens, num_q_heads, head_dim], rotated: the rows of the first sequence, then of the next.
            k: float32 [tokens, num_kv_heads, head_dim], rotated.
            v: float32 [tokens, num_kv_heads, head_dim].

        Returns:
            float32 [tokens, num_q_heads, head_dim].
        """


class Attention(Protocol):
    """Keeps the keys and values of sequences, over all layers, and attends over them."""

    def create_sequences(self, num_sequences: int) -> Sequence[Any]:
        """Returns handles of new, empty sequences."""

    def step(self, sequences: Sequence[Any], q_lens: Sequence[int], kv_lens: Sequence[int]) -> Step:
        """Begins a step in which sequence i takes q_lens[i] new tokens and then holds kv_lens[i]."""

    def release(self, sequences: Sequence[Any]) -> None:
        """Gives the memory of sequences back."""


class ServedAttention:
    """Attention by an attnd server, in a cache of its own.

    The server manages the pages: here nobody knows which pages a sequence holds.
    """

    def __init__(self, client: Client, config: ModelConfig, *, num_pages: int) -> None:
        self._cache = client.create_cache(
            f"smollm2-{secrets.token_hex(4)}",
            num_layers=config.num_layers,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="float32",
            pages_by="server",
            num_q_heads=config.num_q_heads,
            timeout_s=COMPILE_TIMEOUT_S,
        )
        self._sm_scale = config.sm_scale
        self.num_pages_peak = 0

    def create_sequences(self, num_sequences: int) -> Sequence[Any]:
        """Returns handles of new, empty sequences. They hold no page yet."""
        return self._cache.create_sequences(num_sequences)

    def step(self, sequences: Sequence[Any], q_lens: Sequence[int], kv_lens: Sequence[int]) -> Step:
        """Begins a step. Its metadata is the same for all layers, so it is given once."""
        return _ServedStep(self._cache.step(sequences, q_lens=q_lens, kv_lens=kv_lens), self._sm_scale)

    def release(self, sequences: Sequence[Any]) -> None:
        """Gives the pages of sequences back, and notes how many were held: between releases that number only grows."""
        num_pages = sum(sequence.num_pages for sequence in self._cache.list_sequences())
        self.num_pages_peak = max(self.num_pages_peak, num_pages)
        self._cache.release_sequences(sequences)

    @property
    def cache(self) -> CacheInfo:
        """The cache's shape."""
        return self._cache.info

    def close(self) -> None:
        """Deletes the cache and whatever it still holds."""
        self._cache.delete()


@dataclass(frozen=True, slots=True)
class _ServedStep:
    planned: Any
    sm_scale: float

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        out: Floats = self.planned.attend(layer, q, k, v, sm_scale=self.sm_scale)
        return out


def num_pages_needed(lengths: Sequence[int]) -> int:
    """Returns the number of pages of a cache that holds sequences of these lengths at the same time."""
    return max(NUM_PAGES_MIN, sum(-(-length // PAGE_SIZE) for length in lengths))
