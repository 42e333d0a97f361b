"""The dense layers of a Llama model in NumPy: all of the model but attention."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .attention import Step
from .model_file import Floats, ModelConfig, ModelFile

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Weights of one layer, each matrix [inputs, outputs] and contiguous, so that `x @ w` streams it once.

    Matrices that read the same input stand side by side in one: three products become one.
    """

    attention_norm: Floats  # [embedding_size]
    qkv: Floats  # [embedding_size, (num_q_heads + 2 * num_kv_heads) * head_dim]
    attention_output: Floats  # [num_q_heads * head_dim, embedding_size]
    feed_forward_norm: Floats  # [embedding_size]
    gate_up: Floats  # [embedding_size, 2 * feed_forward_size]
    down: Floats  # [feed_forward_size, embedding_size]


class Llama:
    """A Llama model without memory: what it has read lives wherever `step` keeps it."""

    def __init__(self, file: ModelFile) -> None:
        self.config = file.config()
        self._embedding = file.tensor("token_embd.weight")  # [vocabulary_size, embedding_size], also the output matrix
        self._layers = [_read_layer(file, f"blk.{i}.") for i in range(self.config.num_layers)]
        self._output_norm = file.tensor("output_norm.weight")
        self._turns = _turns(self.config)

    def forward(self, token_ids: Ints, positions: Ints, last_rows: Ints, step: Step) -> Floats:
        """Reads new tokens and returns the scores of each token that may come next.

        Args:
            token_ids: int64 [tokens], of all sequences of the step, one sequence after the other.
            positions: int64 [tokens], place of each token in its sequence, from 0.
            last_rows: int64 [sequences], row of each sequence's last token: only these rows are scored.
            step: Attention for this step.

        Returns:
            float32 [sequences, vocabulary_size].
        """
        config = self.config
        num_rotated = config.num_q_heads + config.num_kv_heads  # queries and keys are rotated, values are not
        turns = self._turns[positions][:, None, :]
        x = self._embedding[token_ids]
        for i, layer in enumerate(self._layers):
            qkv = _normalize(x, layer.attention_norm, config) @ layer.qkv
            heads = qkv.reshape(len(x), -1, config.head_dim)
            pairs = heads[:, :num_rotated].view(np.complex64)
            pairs *= turns
            q, k, v = heads[:, : config.num_q_heads], heads[:, config.num_q_heads : num_rotated], heads[:, num_rotated:]
            x += step.attend(i, q, k, v).reshape(len(x), -1) @ layer.attention_output
            x += _feed_forward(_normalize(x, layer.feed_forward_norm, config), layer)
        return _normalize(x[last_rows], self._output_norm, config) @ self._embedding.T


def _read_layer(file: ModelFile, prefix: str) -> Layer:
    def side_by_side(*names: str) -> Floats:
        matrices = [file.tensor(f"{prefix}{name}.weight") for name in names]
        return np.ascontiguousarray(np.concatenate(matrices).T)

    return Layer(
        attention_norm=file.tensor(f"{prefix}attn_norm.weight"),
        qkv=side_by_side("attn_q", "attn_k", "attn_v"),
        attention_output=side_by_side("attn_output"),
        feed_forward_norm=file.tensor(f"{prefix}ffn_norm.weight"),
        gate_up=side_by_side("ffn_gate", "ffn_up"),
        down=side_by_side("ffn_down"),
    )


def _turns(config: ModelConfig) -> NDArray[np.complex64]:
    """Returns the rotary embedding (arXiv:2104.09864) of each position as unit complex numbers.

    GGUF orders the weights of a Llama model so that neighbours (x0, x1), (x2, x3), ... are turned together. Seen as
    x0 + i x1, a pair is turned by multiplying it with e^(i * position * base^(-2 pair / head_dim)).

    Returns:
        complex64 [context_length, head_dim / 2].
    """
    frequencies = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.arange(config.context_length)[:, None] * frequencies
    turns: NDArray[np.complex64] = np.exp(1j * angles).astype(np.complex64)
    return turns


def _normalize(x: Floats, weight: Floats, config: ModelConfig) -> Floats:
    """Returns x / rms(x) * weight, row by row (arXiv:1910.07467)."""
    mean_square = np.einsum("ij,ij->i", x, x)[:, None] / np.float32(config.embedding_size)
    normal: Floats = x / np.sqrt(mean_square + np.float32(config.norm_epsilon))
    normal *= weight
    return normal


def _feed_forward(x: Floats, layer: Layer) -> Floats:
    """Returns (silu(gate) * up) @ down, the gated unit of arXiv:2002.05202."""
    gate_up = x @ layer.gate_up
    middle = gate_up.shape[1] // 2
    gate, up = gate_up[:, :middle], gate_up[:, middle:]
    with np.errstate(over="ignore"):  # exp(-gate) overflows to infinity, and gate / infinity is the right limit
        hidden = gate / (1 + np.exp(-gate))
    hidden *= up
    out: Floats = hidden @ layer.down
    return out
