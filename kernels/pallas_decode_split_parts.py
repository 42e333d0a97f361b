"""What decoding over the split layout does its own way: shapes, copies and columns. The passes are the same.

K and V of a head lie apart, so the columns of a matrix product are the tokens of one kv head, and each kv head has a
softmax state of its own. Scales of int8 tokens multiply scores and weights, never the pages.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.pallas_decode_compute import TILE, Blocks, Columns
from attnd.kernels.pallas_decode_config import LANES, NUM_BUFFERS, SUBLANES, Chunk, DecodeConfig
from attnd.kernels.pallas_decode_items import Copies, Item
from attnd.kernels.pallas_words import Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitDecodeConfig(DecodeConfig):
    """The static part of a decode call over the split layout. `num_kv_heads` may be any number.

    Attributes:
        scaled: Whether each token of a head has a scale.
    """

    scaled: bool = False

    @property
    def heads(self) -> int:
        """KV heads."""
        return self.num_kv_heads

    @property
    def rows_per_token(self) -> int:
        """Rows of one token of one head."""
        return 1

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """Shape in which K and V should be stored; what pads it is zero. A pool without it is copied at each call."""
        return (self.num_kv_heads, self.num_pages, self.page_size, self.lanes)

    @property
    def scales_shape(self) -> tuple[int, int]:
        """Shape in which scales should be stored, a page's side by side: [num_pages, num_kv_heads * page_size]."""
        return (self.num_pages, self.num_kv_heads * self.page_size)

    @property
    def states(self) -> int:
        """Tiles of softmax state: those of each head."""
        return self.heads * self.fold

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile of scores."""
        return LANES

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one matrix product."""
        return LANES

    @property
    def scale_tokens(self) -> int:
        """Tokens for which a row of scales has room: a block may start at the last of them."""
        return -(-self.pages_per_seq * self.page_size // LANES) * LANES + self.block_tokens

    def chunks(self, tokens: int) -> list[Chunk]:
        """Returns the chunks of a block: for each group of tokens one for each head."""
        return [
            Chunk(
                number=token // self.chunk_tokens * self.heads + head,
                head=head,
                token=token,
                tile=(token // self.chunk_tokens * self.heads + head) * self.chunk_tiles,
                state=head * self.fold,
            )
            for token in range(0, tokens, self.chunk_tokens)
            for head in range(self.heads)
        ]

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of pages and scales."""
        token = 2 * self.heads * (self.lanes * self.kv_itemsize + 4 * self.scaled)
        return NUM_BUFFERS * self.block_tokens * token


class HeadColumns(Columns):
    """Columns that are the tokens of one kv head."""

    def __init__(self, config: SplitDecodeConfig) -> None:
        super().__init__(config)
        self.token = lax.broadcasted_iota(jnp.int32, TILE, 1)
        head = lax.broadcasted_iota(jnp.int32, (config.q_rows, LANES), 0) // config.group_rows
        self.own_of_head = [self._cut(head == i) for i in range(config.heads)]

    def own_of(self, chunk: Chunk) -> jax.Array:
        """Returns which rows own the columns of a chunk: those of its head's queries."""
        return self.own_of_head[chunk.head]

    def folded(self, scores: jax.Array, chunk: Chunk, tile: int) -> list[jax.Array]:
        """Takes the tiles of rows that hold the queries of the chunk's head."""
        first = chunk.head * self.config.group_rows // SUBLANES
        columns = slice(tile * LANES, (tile + 1) * LANES)
        return [scores[(first + f) * SUBLANES : (first + f + 1) * SUBLANES, columns] for f in range(self.config.fold)]

    def over_tokens(self, tile: jax.Array, combine: Any) -> jax.Array:
        """Combines all lanes."""
        over = jnp.max if combine is jnp.maximum else jnp.sum
        return jnp.broadcast_to(over(tile, axis=1, keepdims=True), TILE)

    def to_rows(self, state: list[jax.Array], lanes: int) -> jax.Array:
        """Returns the state of each row of q, [q_rows, lanes], from the tiles of all heads."""
        per_tile = max(1, SUBLANES // self.config.group_rows)
        rows = []
        for i in range(self.config.q_rows // SUBLANES):
            tile = state[i * per_tile]
            for other in range(1, per_tile):
                tile = jnp.where(self.row // self.config.group_rows == other, state[i * per_tile + other], tile)
            rows.append(tile)
        full = jnp.concatenate(rows, 0)
        return jnp.concatenate([full] * -(-lanes // LANES), 1)[:, :lanes]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadBlocks(Blocks):
    """Reads keys and values of one head.

    Attributes:
        values_ref: Ref [NUM_BUFFERS, heads, block_tokens, lanes] in VMEM, as `ref` for the keys.
        scales: Refs float32 [NUM_BUFFERS, heads, block_tokens] in VMEM, of keys and of values; None without scales.
    """

    values_ref: Ref
    scales: tuple[Ref, Ref] | None

    def keys(self, slot: Any, chunk: Chunk) -> jax.Array:
        """Returns the keys of a chunk, [chunk_tokens, lanes], in the compute dtype."""
        return self._rows_of(self.ref, slot, chunk)

    def values(self, slot: Any, chunk: Chunk) -> jax.Array:
        """Returns the values of a chunk, [chunk_tokens, lanes], in the compute dtype."""
        return self._rows_of(self.values_ref, slot, chunk)

    def _rows_of(self, ref: Ref, slot: Any, chunk: Chunk) -> jax.Array:
        rows: jax.Array = ref[slot, chunk.head, pl.ds(chunk.token, self.config.chunk_tokens)]
        return (rows.astype(jnp.float32) if rows.dtype == jnp.int8 else rows).astype(self.config.compute_dtype)

    def scaled_score(self, score: jax.Array, slot: Any, chunk: Chunk, token: int) -> jax.Array:
        """Returns a tile of scores times the scales of its keys."""
        return score if self.scales is None else score * self._scales_of(self.scales[0], slot, chunk, token)

    def scaled_weight(
        self, weight: jax.Array, slot: Any, chunk: Chunk, token: int, counts: jax.Array | None
    ) -> jax.Array:
        """Returns a tile of weights times the scales of its values, 0 where tokens do not count."""
        if self.scales is None:
            return weight
        weight = weight * self._scales_of(self.scales[1], slot, chunk, token)
        return weight if counts is None else jnp.where(counts, weight, 0.0)

    def _scales_of(self, ref: Ref, slot: Any, chunk: Chunk, token: int) -> Any:
        return ref[slot, pl.ds(chunk.head, 1), pl.ds(token, LANES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitCopies(Copies):
    """Copies of K and V of all heads; `pool` [heads, num_pages, page_size, lanes] and `blocks` are those of K.

    Attributes:
        value_pool: Ref as `pool`, of V.
        value_blocks: Ref as `blocks`, [NUM_BUFFERS, heads, block_tokens, lanes], of V.
        scales: Refs float32 [num_rows, heads, scale_tokens] in HBM and [NUM_BUFFERS, heads, block_tokens] in VMEM, of
            keys and of values; empty without scales.
    """

    value_pool: Ref
    value_blocks: Ref
    scales: tuple[tuple[Ref, Ref], ...]

    def fetch_strip(self, item: Item, slot: Any, i: Any, tokens: Any) -> None:
        """Starts the copies of the first tokens of an item's i-th strip."""
        page, offset = self._place(item, i)
        target = self._rows(i * self.items.config.strip_tokens, tokens)
        for pool, blocks in ((self.pool, self.blocks), (self.value_pool, self.value_blocks)):
            pltpu.make_async_copy(
                pool.at[:, page, self._rows(offset, tokens)], blocks.at[slot, :, target], self.arrivals.at[slot]
            ).start()

    def fetch_strips(self, item: Item, slot: Any, strips: range) -> None:
        """Starts the copies of whole strips, with the first also those of the scales."""
        if 0 in strips:
            self._fetch_scales(item, slot)
        for i in strips:
            self.fetch_strip(item, slot, i, self.items.config.strip_tokens)

    def fetch_part(self, item: Item, slot: Any) -> None:
        """Starts the copies of a block that is not full."""
        self._fetch_scales(item, slot)
        Copies.fetch_part(self, item, slot)

    def _fetch_scales(self, item: Item, slot: Any) -> None:
        config = self.items.config
        start = pl.multiple_of(item.strip * config.strip_tokens, LANES)
        for pool, block in self.scales:
            source = pool.at[item.row, :, pl.ds(start, config.block_tokens)]
            pltpu.make_async_copy(source, block.at[slot], self.arrivals.at[slot]).start()

    def _wait_tokens(self, slot: Any, tokens: Any) -> None:
        rows = self._rows(0, tokens)
        arrived = [self.blocks.at[slot, :, rows], self.value_blocks.at[slot, :, rows]]
        for block in arrived + [scales.at[slot] for _, scales in self.scales]:
            copy: Any = pltpu.make_async_copy(block, block, self.arrivals.at[slot])
            copy.wait()

    def _cleared(self, slot: Any) -> list[Ref]:
        return [self.value_blocks.at[slot, head] for head in range(self.items.config.heads)]
