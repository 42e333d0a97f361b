"""What the chunk kernel works on, in which order, and the copies that bring it in and out."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.pallas_chunk_config import LANES, ChunkConfig

Scalar = Any  # a traced int32, or a Python int


class Count(enum.IntEnum):
    """What a counted call counts: slots of its fourth result."""

    TILES = 0
    RERUNS = 1
    """Tiles that ran again because a score rose too far above its anchor."""
    INTERIOR_BLOCKS = 2
    EDGE_STEPS = 3
    """Steps of `edge_tokens` tokens, taken where a mask or a new anchor is needed."""
    FETCHES = 4
    """Copies from the pool: pages, or blocks of larger pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refs:
    """The kernel's references, and what it must know to use them."""

    config: ChunkConfig
    interpreted: bool
    # Scalars.
    kv_lens: Any  # [num_rows]
    cu_q_lens: Any  # [num_rows + 1]
    table: Any  # [num_rows * pages_per_seq]
    num_seqs: Any  # [1]
    window: Any  # [1]
    factors: Any  # [3] float32: of scores, of capped scores, of values
    # Inputs and outputs in HBM; the pool is both.
    q: Any  # [num_tokens * q_rows_per_token, lanes]
    new_kv: Any = None  # [num_tokens * rows_per_token, lanes]
    out: Any  # as q
    pool: Any  # [num_pages, page_size * rows_per_token, lanes]
    lse: Any = None  # [tiles_max, *lse_shape]
    counts: Any = None  # [len(Count)] in SMEM
    # Scratch, see `ChunkConfig.scratch_shapes`.
    q_buffer: Any
    out_buffer: Any
    kv_buffer: Any
    keys: Any
    values: Any
    queries: Any
    waiting: Any
    anchor: Any
    total: Any
    acc: Any
    lse_buffer: Any = None
    q_semaphore: Any
    out_semaphore: Any
    append_semaphore: Any
    kv_semaphores: Any  # one for each of the two buffers

    def count(self, what: Count, amount: Scalar = 1) -> None:
        """Adds to a counter of a counted call."""
        if self.counts is not None:
            self.counts[what] += amount


class Tile(NamedTuple):
    """Up to `query_block` consecutive queries of one sequence, and the tokens they see.

    Attributes:
        row: The sequence.
        part: Which tile of the sequence.
        first: Index of the first query in q.
        rows: Queries.
        position: Position of the first query in its sequence.
        begin: First token that any of the queries sees.
        end: One past the last.
        low: First block with a visible token.
        top: Last one.
        inner_low: First block that all queries see in full.
        inner_top: One past the last; `inner_top <= inner_low` if there is none.
    """

    row: Scalar
    part: Scalar
    first: Scalar
    rows: Scalar
    position: Scalar
    begin: Scalar
    end: Scalar
    low: Scalar
    top: Scalar
    inner_low: Scalar
    inner_top: Scalar


def tile_at(refs: Refs, row: Scalar, part: Scalar) -> Tile:
    """Returns a tile; of a row past the last, some tile of the last."""
    config = refs.config
    size, block = config.query_block, config.block_tokens
    row = jnp.minimum(row, config.num_rows - 1)
    start, kv_len = refs.cu_q_lens[row], refs.kv_lens[row]
    q_len = refs.cu_q_lens[row + 1] - start
    rows = jnp.clip(q_len - part * size, 0, size)
    position = kv_len - q_len + part * size
    end = jnp.clip(position + rows, 0, kv_len)
    top = jnp.maximum(_ceil_div(end, block) - 1, 0)
    begin: Scalar = 0
    inner_low: Scalar = 0
    if config.windowed:
        begin = jnp.maximum(position - refs.window[0] + 1, 0)
        inner_low = _ceil_div(jnp.maximum(end - refs.window[0], 0), block)
    return Tile(
        row=row,
        part=part,
        first=start + part * size,
        rows=rows,
        position=position,
        begin=begin,
        end=end,
        low=jnp.minimum(_div(begin, block), top) if config.windowed else 0,
        top=top,
        inner_low=inner_low,
        inner_top=_div(jnp.maximum(position + 1, 0), block) if config.has_interior else 0,
    )


def edge_steps(refs: Refs, tile: Tile, block: Scalar) -> tuple[Scalar, Scalar]:
    """Returns the first and one past the last step of a block that holds a visible token."""
    config = refs.config
    base = block * config.block_tokens
    stop = _ceil_div(jnp.clip(tile.end - base, 0, config.block_tokens), config.edge_tokens)
    if not config.windowed:
        return jnp.int32(0), stop
    return _div(jnp.maximum(tile.begin - base, 0), config.edge_tokens), stop


def first_tile(refs: Refs) -> tuple[Scalar, Scalar]:
    """Returns row and part of the first tile; row `num_seqs` if there is none."""
    return _row_with_queries(refs, jnp.int32(0)), jnp.int32(0)


def following_tile(refs: Refs, row: Scalar, part: Scalar) -> tuple[Scalar, Scalar]:
    """Returns row and part of the tile after a tile; row `num_seqs` after the last."""
    more = (part + 1) * refs.config.query_block < refs.cu_q_lens[row + 1] - refs.cu_q_lens[row]
    next_row = _row_with_queries(refs, jnp.where(more, row, row + 1))
    return next_row, jnp.where(more, part + 1, 0)


def _row_with_queries(refs: Refs, row: Scalar) -> Scalar:
    """Returns the first row from `row` on that has queries."""

    def is_empty(row: Scalar) -> Scalar:
        inside = jnp.minimum(row, refs.config.num_rows - 1)
        return (row < refs.num_seqs[0]) & (refs.cu_q_lens[inside + 1] <= refs.cu_q_lens[inside])

    return lax.while_loop(lambda at: at[1], lambda at: (at[0] + 1, is_empty(at[0] + 1)), (row, is_empty(row)))[0]


def _div(value: Scalar, divisor: int) -> Scalar:
    """Divides a value that is not negative: a shift where one does, for a scalar division takes tens of cycles."""
    if divisor & (divisor - 1) == 0:
        return jnp.right_shift(value, divisor.bit_length() - 1)
    return lax.div(value, divisor)


def _ceil_div(value: Scalar, divisor: int) -> Scalar:
    """Divides a value that is not negative, rounding up."""
    return _div(value + (divisor - 1), divisor)


def _span(first: Scalar, count: Scalar, rows_each: int) -> Any:
    """Returns the rows of `count` things from the first on, promising where they are aligned."""
    start = first * rows_each if isinstance(first, int) else pl.multiple_of(first * rows_each, rows_each)
    size = count * rows_each if isinstance(count, int) else pl.multiple_of(count * rows_each, rows_each)
    return pl.ds(start, size)


def _halves(config: ChunkConfig) -> list[Any]:
    """Returns the lanes of each half of a row; buffers keep halves apart, because a strided load takes 128 lanes."""
    return [pl.ds(lane, LANES) for lane in range(0, config.lanes, LANES)]


# ---- Pages.
def fetch_block(refs: Refs, tile: Tile, block: Scalar, slot: Scalar) -> None:
    """Starts the copies of a block's visible pages into a buffer."""
    first, stop = _visible_fetches(refs, tile, block)
    pl.loop(first, stop)(lambda n: _start_fetch(refs, tile, block, n, slot))
    refs.count(Count.FETCHES, stop - first)


def fetch_whole_block(refs: Refs, tile: Tile, block: Scalar, slot: Scalar) -> None:
    """Starts the copies of a block that is visible from its first token to its last."""
    for n in range(refs.config.fetches_per_block):
        _start_fetch(refs, tile, block, n, slot)
    refs.count(Count.FETCHES, refs.config.fetches_per_block)


def await_block(refs: Refs, tile: Tile, block: Scalar, slot: Scalar) -> None:
    """Waits for the copies that `fetch_block` started."""
    first, stop = _visible_fetches(refs, tile, block)
    rows = refs.config.fetch_tokens * refs.config.rows_per_token

    @pl.when(stop > first)
    def _() -> None:
        arrived = refs.kv_buffer.at[slot, :, _span(first, stop - first, rows)]
        wait(pltpu.make_async_copy(arrived, arrived, refs.kv_semaphores.at[slot]))


def _visible_fetches(refs: Refs, tile: Tile, block: Scalar) -> tuple[Scalar, Scalar]:
    """Returns the first and one past the last of a block's fetches that hold a visible token."""
    config = refs.config
    stop = jnp.minimum(
        _ceil_div(jnp.maximum(tile.end - block * config.block_tokens, 0), config.fetch_tokens), config.fetches_per_block
    )
    if not config.windowed:
        return jnp.int32(0), stop
    begin = _div(jnp.maximum(tile.begin - block * config.block_tokens, 0), config.fetch_tokens)
    return jnp.minimum(begin, stop), stop


def _start_fetch(refs: Refs, tile: Tile, block: Scalar, n: Scalar, slot: Scalar) -> None:
    """Starts one copy from the pool."""
    config = refs.config
    rows = config.fetch_tokens * config.rows_per_token
    index = tile.row * config.pages_per_seq
    if config.page_size <= config.block_tokens:
        page, source = refs.table[index + block * config.fetches_per_block + n], slice(None)
    else:
        per_page = config.page_size // config.block_tokens
        page, source = refs.table[index + _div(block, per_page)], _span(lax.rem(block, per_page), 1, rows)
    for half, lanes in enumerate(_halves(config)):
        pltpu.make_async_copy(
            refs.pool.at[page, source, lanes],
            refs.kv_buffer.at[slot, half, _span(n, 1, rows)],
            refs.kv_semaphores.at[slot],
        ).start()


def append_new_tokens(refs: Refs) -> None:
    """Copies the new k, v of every sequence to their pages; all have arrived when it returns."""
    config = refs.config

    def new_rows(first: Scalar, count: Scalar) -> Any:
        return refs.new_kv.at[_span(first, count, config.rows_per_token)]

    def of_row(row: Scalar) -> None:
        start, stop = refs.cu_q_lens[row], refs.cu_q_lens[row + 1]
        shift = refs.kv_lens[row] - stop  # from index in q to position

        def of_page(token: Scalar) -> Scalar:
            position = token + shift
            offset = lax.rem(position, config.page_size)
            count = jnp.minimum(config.page_size - offset, stop - token)
            page = refs.table[row * config.pages_per_seq + _div(position, config.page_size)]
            pltpu.make_async_copy(
                new_rows(token, count),
                refs.pool.at[page, _span(offset, count, config.rows_per_token)],
                refs.append_semaphore,
            ).start()
            return token + count

        lax.while_loop(lambda token: token < stop, of_page, start)

    pl.loop(0, refs.num_seqs[0])(of_row)
    count = refs.cu_q_lens[refs.num_seqs[0]] - refs.cu_q_lens[0]

    @pl.when(count > 0)
    def _() -> None:
        everything = new_rows(refs.cu_q_lens[0], count)
        wait(pltpu.make_async_copy(everything, everything, refs.append_semaphore))


# ---- Queries and answers.
def copy_queries(refs: Refs, tile: Tile, act: Callable[[Any], None]) -> None:
    """Starts or awaits the copy of a tile's queries into their buffer."""
    rows = refs.config.q_rows_per_token
    for half, lanes in enumerate(_halves(refs.config)):
        source = refs.q.at[_span(tile.first, tile.rows, rows), lanes]
        act(pltpu.make_async_copy(source, refs.q_buffer.at[half, _span(0, tile.rows, rows)], refs.q_semaphore))


def copy_answers(refs: Refs, first: Scalar, count: Scalar, act: Callable[[Any], None]) -> None:
    """Starts or awaits the copy of `count` tokens' answers from their buffer."""
    rows = refs.config.q_rows_per_token
    for half, lanes in enumerate(_halves(refs.config)):
        target = refs.out.at[_span(first, count, rows), lanes]
        act(pltpu.make_async_copy(refs.out_buffer.at[half, _span(0, count, rows)], target, refs.out_semaphore))


def copy_lse(refs: Refs, tile_index: Scalar, act: Callable[[Any], None]) -> None:
    """Starts or awaits the copy of a tile's log-sum-exp."""
    if refs.lse is not None:
        act(pltpu.make_async_copy(refs.lse_buffer, refs.lse.at[tile_index], refs.out_semaphore))


def zero_answers(refs: Refs, first: Scalar, stop: Scalar) -> None:
    """Zeroes the answers of tokens in [first, stop). The buffer of answers must be free."""
    size = refs.config.query_block

    @pl.when(first < stop)
    def _() -> None:
        refs.out_buffer[...] = jnp.zeros_like(refs.out_buffer)

        @pl.loop(0, _ceil_div(stop - first, size))
        def _(n: jax.Array) -> None:
            at = first + n * size
            count = jnp.minimum(stop - at, size)
            copy_answers(refs, at, count, start)
            copy_answers(refs, at, count, wait)


def start(copy: Any) -> None:
    """Starts a copy."""
    copy.start()


def wait(copy: Any) -> None:
    """Waits for a copy."""
    copy.wait()
