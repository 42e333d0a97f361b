"""Attention in NumPy: lets tests of the model's dense layers do without a server."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(slots=True, eq=False)
class NumpySequence:
    """Keys and values of one sequence: for each layer [kv_len, num_kv_heads, head_dim]."""

    keys: dict[int, Floats] = field(default_factory=dict)
    values: dict[int, Floats] = field(default_factory=dict)


@dataclass(slots=True)
class NumpyStep:
    """One step over the sequences."""

    sequences: Sequence[NumpySequence]
    q_lens: Sequence[int]
    kv_lens: Sequence[int]

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:
        out = np.empty_like(q)
        end = 0
        for sequence, q_len, kv_len in zip(self.sequences, self.q_lens, self.kv_lens, strict=True):
            rows = slice(end, end + q_len)
            end += q_len
            keys = _append(sequence.keys, layer, k[rows])
            values = _append(sequence.values, layer, v[rows])
            assert len(keys) == kv_len
            out[rows] = _attend(q[rows], keys, values)
        return out


@dataclass(slots=True)
class NumpyAttention:
    """Keeps every sequence until it is released."""

    held: list[NumpySequence] = field(default_factory=list)

    def create_sequences(self, num_sequences: int) -> list[NumpySequence]:
        created = [NumpySequence() for _ in range(num_sequences)]
        self.held += created
        return created

    def step(self, sequences: Sequence[NumpySequence], q_lens: Sequence[int], kv_lens: Sequence[int]) -> NumpyStep:
        assert all(sequence in self.held for sequence in sequences)
        return NumpyStep(sequences, q_lens, kv_lens)

    def release(self, sequences: Sequence[NumpySequence]) -> None:
        for sequence in sequences:
            self.held.remove(sequence)


def _append(held: dict[int, Floats], layer: int, new: Floats) -> Floats:
    held[layer] = np.concatenate([held[layer], new]) if layer in held else new.copy()
    return held[layer]


def _attend(q: Floats, keys: Floats, values: Floats) -> Floats:
    """Returns softmax(q keys^T / sqrt(head_dim)) values under a causal mask: [q_len, num_q_heads, head_dim]."""
    q_len, _, head_dim = q.shape
    kv_len, num_kv_heads, _ = keys.shape
    grouped = q.reshape(q_len, num_kv_heads, -1, head_dim)
    scores = np.einsum("thgd,shd->hgts", grouped, keys, optimize=True) * np.float32(head_dim**-0.5)
    future = np.arange(kv_len) > np.arange(kv_len - q_len, kv_len)[:, None]
    scores = np.where(future, np.float32(-np.inf), scores)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    out: Floats = np.einsum("hgts,shd->thgd", scores, values, optimize=True).reshape(q.shape)
    return out
