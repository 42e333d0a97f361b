"""The order in which a decode program works, and its copies between HBM and VMEM. All of it runs on the scalar core."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int32

from attnd.kernels.pallas_decode_config import DecodeConfig
from attnd.kernels.pallas_words import Ref

Scalar = Int32[jax.Array, ""]


class Item(NamedTuple):
    """A block of neighbouring tokens of one row: int32 scalars, made once and carried along the pipeline.

    Attributes:
        row: The row; items of rows that do not exist are empty.
        strip: The block's first strip, counted from the start of the row's pages.
        left: Tokens of the row from the block's first on; 0 if the item is empty.
        tokens: Tokens of the block, those before the window included; 0 if the item is empty.
        skipped: Tokens at the block's start that lie before the window.
        opens: 1 if the block is its row's first, else 0.
    """

    row: Any
    strip: Any
    left: Any
    tokens: Any
    skipped: Any
    opens: Any

    @classmethod
    def nothing(cls) -> "Item":
        """Returns the empty item before the first row."""
        return cls(*(jnp.int32(x) for x in (-1, 0, 0, 0, 0, 1)))

    @property
    def closes(self) -> Any:
        """Whether the block holds its row's last token."""
        return (self.left > 0) & (self.left == self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Items:
    """The items of a call, in order: row by row, and in a row block by block.

    A row's blocks are full but for the last two, which are made equal: a pass costs the larger of two neighbouring
    items, so a long block beside a short one would waste the difference. They start at the strip (see
    `DecodeConfig.strip_tokens`) that holds the first token of the window: whatever lies before it is neither fetched
    nor computed.

    Attributes:
        config: The program.
        kv_lens: Ref int32 [num_rows] in SMEM.
        num_seqs: Rows in use.
        window: Sliding window; None without one.
    """

    config: DecodeConfig
    kv_lens: Ref
    num_seqs: Any
    window: Any

    def first(self, row: Any) -> Item:
        """Returns the first item of a row: empty if the row is, or if there is no such row."""
        exists = (row >= 0) & (row < self.num_seqs)
        length = jnp.where(exists, self.kv_lens[jnp.clip(row, 0, self.config.num_rows - 1)], 0)
        strip = skipped = jnp.int32(0)
        if self.window is not None:
            hidden = jnp.maximum(length - self.window, 0)
            strip = hidden // self.config.strip_tokens
            skipped = hidden - strip * self.config.strip_tokens
        left = jnp.maximum(length - strip * self.config.strip_tokens, 0)
        return Item(row, strip, left, self._tokens(left), skipped, jnp.int32(1))

    def following(self, item: Item) -> Item:
        """Returns the item after this one."""
        left = item.left - item.tokens
        strip = item.strip + item.tokens // self.config.strip_tokens
        same_row = Item(item.row, strip, left, self._tokens(left), jnp.int32(0), jnp.int32(0))
        fresh = self.first(item.row + 1)
        return Item(*(jnp.where(left > 0, *pair) for pair in zip(same_row, fresh, strict=True)))

    def is_full(self, item: Item) -> Any:
        """Returns whether a block has the most tokens that a block can have, and all of them count."""
        full = item.tokens == self.config.block_tokens
        return full if self.window is None else full & (item.skipped == 0)

    def _tokens(self, left: Any) -> Any:
        full, unit = self.config.block_tokens, self.config.split_tokens
        half = (left + (2 * unit - 1)) // (2 * unit) * unit
        return jnp.where(left >= 2 * full, full, jnp.where(left > full, half, left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """The copies of a decode program.

    Attributes:
        items: The items.
        page_indices: Ref int32 [num_rows * pages_per_seq] in SMEM.
        pool: Ref [num_pages, page_size * rows_per_token, lanes] in HBM.
        blocks: Ref [NUM_BUFFERS, block_tokens * rows_per_token, lanes] in VMEM.
        arrivals: DMA semaphores [NUM_BUFFERS].
        new: Ref [num_rows, aligned_tokens * rows_per_token, lanes] in VMEM, a new token repeated; None if none come.
        staged: Ref [NUM_BUFFERS, aligned_tokens * rows_per_token, lanes] in VMEM; None if a token fills whole tiles.
        departures: DMA semaphores [NUM_BUFFERS]; None if no new tokens come.
    """

    items: Items
    page_indices: Ref
    pool: Ref
    blocks: Ref
    arrivals: Ref
    new: Ref | None
    staged: Ref | None
    departures: Ref | None

    def _rows(self, token: Any, tokens: Any) -> Any:
        """Returns the slice of the rows of some tokens."""
        per_token = self.items.config.rows_per_token

        def rows(count: Any) -> Any:
            return count * per_token if isinstance(count, int) else pl.multiple_of(count * per_token, per_token)

        return pl.ds(rows(token), rows(tokens))

    def _place(self, item: Item, i: Any) -> tuple[Any, Any]:
        """Returns the page of an item's i-th strip, and the strip's first token in it."""
        config = self.items.config
        base, per_page = item.row * config.pages_per_seq, config.strips_per_page
        if per_page == 1:
            return self.page_indices[(base + item.strip) + i], 0  # in this order: one addition for each i
        strip = item.strip + i
        return self.page_indices[base + strip // per_page], strip % per_page * config.strip_tokens

    def fetch_strip(self, item: Item, slot: Any, i: Any, tokens: Any) -> None:
        """Starts the copy of the first tokens of an item's i-th strip."""
        page, offset = self._place(item, i)
        pltpu.make_async_copy(
            self.pool.at[page, self._rows(offset, tokens)],
            self.blocks.at[slot, self._rows(i * self.items.config.strip_tokens, tokens)],
            self.arrivals.at[slot],
        ).start()

    def fetch_strips(self, item: Item, slot: Any, strips: range) -> None:
        """Starts the copies of whole strips, without a branch."""
        for i in strips:
            self.fetch_strip(item, slot, i, self.items.config.strip_tokens)

    def fetch(self, item: Item, slot: Any) -> None:
        """Starts the copies of an item's tokens, rounded up to `copied_tokens`; none of an empty item."""
        config = self.items.config
        tokens = item.tokens

        @pl.when(tokens == config.block_tokens)
        def _() -> None:
            self.fetch_strips(item, slot, range(config.strips_per_block))

        @pl.when((tokens > 0) & (tokens < config.block_tokens))
        def _() -> None:
            self.fetch_part(item, slot)

    def fetch_part(self, item: Item, slot: Any) -> None:
        """Starts the copies of a block that is not full."""
        strip_tokens = self.items.config.strip_tokens
        whole = item.tokens // strip_tokens
        rest = item.tokens - whole * strip_tokens

        @pl.loop(0, whole)
        def _(i: Scalar) -> None:
            self.fetch_strip(item, slot, i, strip_tokens)

        @pl.when(rest > 0)
        def _() -> None:
            self.fetch_strip(item, slot, whole, self._copied(rest))

    def wait_full(self, slot: Any) -> None:
        """Waits for the copies of a full block."""
        self._wait_tokens(slot, self.items.config.block_tokens)

    def wait(self, item: Item, slot: Any) -> None:
        """Waits for the copies that `fetch` started."""

        @pl.when(item.tokens > 0)
        def _() -> None:
            self._wait_tokens(slot, self._copied(item.tokens))

    def _wait_tokens(self, slot: Any, tokens: Any) -> None:
        block = self.blocks.at[slot, self._rows(0, tokens)]
        copy: Any = pltpu.make_async_copy(block, block, self.arrivals.at[slot])
        copy.wait()

    def _copied(self, tokens: Any) -> Any:
        unit = self.items.config.copied_tokens
        return tokens if unit == 1 else (tokens + (unit - 1)) // unit * unit

    def _departure(self, item: Item, slot: Any) -> Any:
        """Returns the copy of an item's last token, with its neighbours in its tiles, into its page."""
        config = self.items.config
        assert self.departures is not None
        position = item.tokens - 1
        start = position // config.copied_tokens * config.copied_tokens
        strip = start // config.strip_tokens
        page, offset = self._place(item, strip)
        offset = offset + start - strip * config.strip_tokens
        if self.staged is None:
            assert self.new is not None
            source = self.new.at[item.row]
        else:
            source = self.staged.at[slot, self._rows(start % config.aligned_tokens, config.copied_tokens)]
        target = self.pool.at[page, self._rows(offset, config.copied_tokens)]
        return pltpu.make_async_copy(source, target, self.departures.at[slot])

    def append(self, item: Item, slot: Any) -> None:
        """Puts the new token of the row that ends in this item into the arrived block, and starts its way to its page.

        Tokens that share a tile with it go with it: they come from the same page, so they are written as they were.
        """
        new = self.new
        if new is None:
            return

        @pl.when(item.closes)
        def _() -> None:
            config = self.items.config
            position = item.tokens - 1
            start = position // config.aligned_tokens * config.aligned_tokens
            rows = self._rows(start, config.aligned_tokens)
            tile = new[item.row]
            if self.staged is not None:
                inside = token_bits(config, config.aligned_tokens, position - start, position - start + 1)
                tile = select_bits(inside, tile, self.blocks[slot, rows])
                self.staged[slot] = tile
            self.blocks[slot, rows] = tile
            self._departure(item, slot).start()

    def await_departure(self, item: Item, slot: Any) -> None:
        """Waits until the new token that came with an item has reached its page."""
        if self.new is None:
            return

        @pl.when(item.closes)
        def _() -> None:
            self._departure(item, slot).wait()

    def clear(self, item: Item, slot: Any, end: int) -> None:
        """Zeroes the rows of a block that do not count and lie before token `end`: what they hold may be NaN."""
        for rows in self._cleared(slot):
            self._clear_rows(rows, item, end)

    def _cleared(self, slot: Any) -> list[Ref]:
        """Returns the refs [block_tokens * rows_per_token, lanes] of which `clear` zeroes rows."""
        return [self.blocks.at[slot]]

    def _clear_rows(self, block: Ref, item: Item, end: int) -> None:
        config = self.items.config
        unit = config.cleared_tokens

        def keep(group: Any) -> None:
            rows = self._rows(group * unit, unit)
            inside = token_bits(config, unit, item.skipped - group * unit, item.tokens - group * unit)
            block[rows] = select_bits(inside, block[rows], None)

        if self.items.window is not None:
            pl.loop(0, (item.skipped + (unit - 1)) // unit)(keep)

        @pl.when(item.tokens % unit > 0)
        def _() -> None:
            keep(item.tokens // unit)

        @pl.loop((item.tokens + (unit - 1)) // unit, end // unit)
        def _(group: Scalar) -> None:
            block[self._rows(group * unit, unit)] = jnp.zeros((unit * config.rows_per_token, config.lanes), block.dtype)


def token_bits(config: DecodeConfig, tokens: int, first: Any, end: Any) -> jax.Array:
    """Returns uint32 words, one for each word of the rows of `tokens` tokens, whose bits are set in [first, end)."""
    packing = 4 // config.kv_itemsize
    shape = (tokens * config.rows_per_token // packing, config.lanes)
    row = lax.broadcasted_iota(jnp.int32, shape, 0) * packing
    bits = jnp.zeros(shape, jnp.uint32)
    ones = 0xFFFFFFFF >> (32 - 32 // packing)
    for i in range(packing):
        inside = (row + i >= first * config.rows_per_token) & (row + i < end * config.rows_per_token)
        bits = bits | jnp.where(inside, jnp.uint32(ones << (32 // packing * i)), jnp.uint32(0))
    return bits


def select_bits(bits: jax.Array, rows: jax.Array, others: jax.Array | None) -> jax.Array:
    """Returns `rows` where bits are set and `others` (None: zeros) elsewhere, as words, so that any dtype will do."""
    words = pltpu.bitcast(rows, jnp.uint32) & bits
    if others is not None:
        words = words | (pltpu.bitcast(others, jnp.uint32) & ~bits)
    selected: jax.Array = pltpu.bitcast(words, rows.dtype)
    return selected
