"""The arithmetic of a decode program: scores, softmax and weighted values of all kv heads at once.

A block's columns are its (token, kv head) pairs, as its rows lie in memory, so that one matrix product gives the scores
of every query head against every column. A query head needs only the columns of its own kv head, H of which share a
tile of 128 lanes. So the tiles of scores are *folded*: each lane keeps the rows of its own kv head's queries, and what
is left is `config.fold` tiles instead of q_rows / 8. Maximum, sum and exponential run on those, with a state for each
(row, kv head), repeated over the lanes. Rows of a folded tile that belong to another kv head carry numbers that nobody
reads: they are cut when the weights are spread out to all rows again for the product with V.
"""

from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.pallas_decode_config import LANES, SUBLANES, Chunk, DecodeConfig
from attnd.kernels.pallas_words import Ref, high_half, load_words, low_half, widen_e4m3fn

LOWEST: Final = float(np.finfo(np.float32).min)
TILE: Final = (SUBLANES, LANES)
_CONTRACT_LAST: Final = (((1,), (1,)), ((), ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """The tokens of a block that count: [first, end). Both run-time scalars; `first` is None without a window."""

    first: Any
    end: Any


class Columns:
    """What the lanes of a tile of scores mean, and the moves between folded tiles and the rows of q."""

    def __init__(self, config: DecodeConfig) -> None:
        self.config = config
        lane = lax.broadcasted_iota(jnp.int32, TILE, 1)
        self.row = lax.broadcasted_iota(jnp.int32, TILE, 0)
        self.token = lane // config.heads
        # Of the candidates for a folded tile, the one that each lane keeps.
        self.keeps = lane % config.heads * config.group_rows // (SUBLANES * config.fold)
        shape = (config.q_rows, LANES)
        head = lax.broadcasted_iota(jnp.int32, shape, 0) // config.group_rows
        self.own = self._cut(head == lax.broadcasted_iota(jnp.int32, shape, 1) % config.heads)

    def _cut(self, own: jax.Array) -> jax.Array:
        """Returns a mask of rows and columns as `spread` uses it: as words if the weights are of 16 bits."""
        if self.config.compute_dtype == "float32":
            return own
        halves = jnp.where(own, jnp.uint32(0xFFFF), jnp.uint32(0)).astype(jnp.uint16)
        words: jax.Array = pltpu.bitcast(halves, jnp.uint32)  # [q_rows / 2, LANES]
        return words

    def own_of(self, chunk: Chunk) -> jax.Array:  # noqa: ARG002 - see HeadColumns
        """Returns which rows own which columns of a chunk's tiles."""
        return self.own

    def visible(self, tokens: Visible, first: int) -> jax.Array:
        """Returns which lanes of the tile that starts at token `first` count."""
        inside: jax.Array = self.token < tokens.end - first
        return inside if tokens.first is None else inside & (self.token >= tokens.first - first)

    def folded(self, scores: jax.Array, chunk: Chunk, tile: int) -> list[jax.Array]:  # noqa: ARG002 - see HeadColumns
        """Folds the scores of all rows, [q_rows, columns], of one tile of a chunk's columns."""
        fold = self.config.fold
        pieces = [
            scores[i * SUBLANES : (i + 1) * SUBLANES, tile * LANES : (tile + 1) * LANES]
            for i in range(self.config.q_rows // SUBLANES)
        ]
        folded = pieces[:fold]
        for i in range(fold, len(pieces)):
            folded[i % fold] = jnp.where(self.keeps == i // fold, pieces[i], folded[i % fold])
        return folded

    def spread(self, folded: list[jax.Array], chunk: Chunk) -> jax.Array:
        """Spreads folded weights out to [q_rows, LANES] of the compute dtype; columns of other kv heads are zero."""
        fold = self.config.fold
        cut = self.own_of(chunk)
        if self.config.compute_dtype == "float32":
            rows = [folded[i % fold] for i in range(self.config.q_rows // SUBLANES)]
            return jnp.where(cut, jnp.concatenate(rows, 0), 0.0)
        pairs: dict[tuple[int, int], jax.Array] = {}
        rows = []
        for i in range(self.config.q_rows // (2 * SUBLANES)):
            pair = (2 * i % fold, (2 * i + 1) % fold)
            if pair not in pairs:
                packed = jnp.concatenate([folded[pair[0]], folded[pair[1]]], 0).astype(jnp.bfloat16)
                pairs[pair] = pltpu.bitcast(packed, jnp.uint32)
            own = cut[i * SUBLANES : (i + 1) * SUBLANES]
            rows.append(pltpu.bitcast(pairs[pair] & own, jnp.bfloat16))
        return jnp.concatenate(rows, 0)

    def over_tokens(self, tile: jax.Array, combine: Any) -> jax.Array:
        """Combines the lanes of each kv head, by independent rotations where a chain would wait for each."""
        step = self.config.heads
        while step < LANES:
            near = min(LANES // step, 16)
            tiles = [tile] + [pltpu.roll(tile, step * i, 1) for i in range(1, near)]
            while len(tiles) > 1:
                tiles = [combine(*tiles[i : i + 2]) for i in range(0, len(tiles), 2)]
            tile = tiles[0]
            step *= near
        return tile

    def to_rows(self, state: list[jax.Array], lanes: int) -> jax.Array:
        """Returns the state of each row of q, [q_rows, lanes], from tiles of (row, kv head)."""
        rows = []
        for i in range(self.config.q_rows // SUBLANES):
            head = (SUBLANES * i + self.row) // self.config.group_rows
            rows.append(jnp.take_along_axis(state[i % self.config.fold], head, axis=1))
        full = jnp.concatenate(rows, 0)
        return jnp.concatenate([full] * -(-lanes // LANES), 1)[:, :lanes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Reads keys and values of a chunk of a block.

    Attributes:
        config: The program.
        ref: Ref [NUM_BUFFERS, block_tokens * rows_per_token, lanes] in VMEM.
        interpret: Whether interpret mode runs the program.
    """

    config: DecodeConfig
    ref: Ref
    interpret: bool

    def keys(self, slot: Any, chunk: Chunk) -> jax.Array:
        """Returns the keys of a chunk, [chunk_tokens * heads, lanes], in the compute dtype."""
        if self.config.kv_dtype == "float32":
            return self._every_other(slot, chunk, 0)
        if self.config.kv_dtype == "float8_e4m3fn":
            return widen_e4m3fn(self._quads(slot, chunk))
        return low_half(self._words(slot, chunk), jnp.bfloat16)

    def values(self, slot: Any, chunk: Chunk) -> jax.Array:
        """Returns the values of a chunk, [chunk_tokens * heads, lanes], in the compute dtype."""
        if self.config.kv_dtype == "float32":
            return self._every_other(slot, chunk, 1)
        if self.config.kv_dtype == "float8_e4m3fn":
            return widen_e4m3fn(self._quads(slot, chunk) >> 8)
        return high_half(self._words(slot, chunk), jnp.bfloat16)

    def scaled_score(self, score: jax.Array, slot: Any, chunk: Chunk, token: int) -> jax.Array:  # noqa: ARG002
        """Returns a tile of scores times the scales of its keys; here there are none."""
        return score

    def scaled_weight(
        self, weight: jax.Array, slot: Any, chunk: Chunk, token: int, counts: jax.Array | None  # noqa: ARG002
    ) -> jax.Array:  # fmt: skip
        """Returns a tile of weights times the scales of its values; here there are none."""
        return weight

    def _every_other(self, slot: Any, chunk: Chunk, first: int) -> jax.Array:
        columns = self.config.chunk_tokens * self.config.heads
        rows: jax.Array = self.ref.at[slot][pl.ds(2 * chunk.number * columns + first, columns, 2), :]
        return rows

    def _quads(self, slot: Any, chunk: Chunk) -> jax.Array:
        """Returns (k, v, k, v) quadruples of 8-bit values as words."""
        words = self.config.chunk_tokens * self.config.heads // 2
        return load_words(self.ref.at[slot], chunk.number * words, words, interpret=self.interpret)

    def _words(self, slot: Any, chunk: Chunk) -> jax.Array:
        """Returns (k, v) pairs of bfloat16 as words."""
        columns = self.config.chunk_tokens * self.config.heads
        if self.config.kv_dtype == "bfloat16":
            return load_words(self.ref.at[slot], chunk.number * columns, columns, interpret=self.interpret)
        rows = self.ref[slot, pl.ds(2 * chunk.number * columns, 2 * columns)]
        if self.config.kv_dtype == "int8":
            rows = rows.astype(jnp.float32)
        words: jax.Array = pltpu.bitcast(rows.astype(jnp.bfloat16), jnp.uint32)
        return words


def products(config: DecodeConfig, q: jax.Array, keys: jax.Array) -> jax.Array:
    """Returns the unscaled scores [q_rows, columns] in float32; q has one or, if `splits_q`, two parts of q_rows."""
    scores = lax.dot_general(q, keys, _CONTRACT_LAST, precision=_precision(config), preferred_element_type=jnp.float32)
    return scores[: config.q_rows] + scores[config.q_rows :] if config.splits_q else scores


def weighted(config: DecodeConfig, weights: jax.Array, values: jax.Array) -> jax.Array:
    """Returns the sums of values [q_rows, lanes] in float32."""
    return jnp.dot(weights, values, precision=_precision(config), preferred_element_type=jnp.float32)


def operand_of_q(config: DecodeConfig, q: jax.Array, negative: Any) -> jax.Array:
    """Returns q as the operand of `products`, its sign changed if the scale of the scores is negative.

    Scores are scaled after their maximum is known, so the scale must not be negative; a sign is exact in any dtype.
    """
    packing = 4 // q.dtype.itemsize
    sign = jnp.where(negative, jnp.uint32(0x80000000 if packing == 1 else 0x80008000), jnp.uint32(0))
    q = pltpu.bitcast(pltpu.bitcast(q, jnp.uint32) ^ sign, q.dtype)
    if not config.splits_q:
        return q.astype(config.compute_dtype)
    high = q.astype(jnp.bfloat16)
    return jnp.concatenate([high, (q - high.astype(jnp.float32)).astype(jnp.bfloat16)], 0)


def _precision(config: DecodeConfig) -> lax.Precision:
    return lax.Precision.HIGHEST if config.compute_dtype == "float32" else lax.Precision.DEFAULT
