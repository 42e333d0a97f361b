"""From a ragged batch to calls of programs: blocks of queries, their keys, and who works on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from jaxtyping import Int32, Int64

from attnd.kernels.contract import CacheSpec, RaggedBatch

# A second thread costs about as much as attending over this many numbers of keys and of values, some 0.1 ms.
WORTH_A_THREAD: Final = 1 << 18


# Keys of a step. Fewer cost more steps; the numbers of more leave a core's cache.
TILE: Final = 256
# Most numbers of a key that a step of one query takes: as many heads as have them.
KEY_MAX: Final = 1024
# Where a piece of program touches as many bytes, XLA shares it among its threads. Each then finds half of its inputs in
# another core's cache, and all cores are at work anyway: that cost more than half of the time.
SHARED_BYTES: Final = 1 << 19
SLOTS: Final = 1 << 16
# A sequence of more blocks than this takes the next larger ones.
BLOCKS_MAX: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """The sizes of a program: up to `items` blocks of up to `queries` queries of one sequence."""

    queries: int
    items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Paging:
    """How programs see the pages.

    Attributes:
        page_size: Tokens of a page as programs see it: a divisor of the cache's.
        parts: Such pages in one of the cache's.
        heads: KV heads of a step of one query; a divisor of the cache's.
        tile: Keys of a step of many queries, which takes one head: whole pages.
        tile_of_one: Keys of a step of one query: whole pages.
        slots: Most pages of a call.
    """

    page_size: int
    parts: int
    heads: int
    tile: int
    tile_of_one: int
    slots: int

    @classmethod
    def of(cls, spec: CacheSpec) -> "Paging":
        """Returns the paging of a cache."""
        heads = _divisor(spec.num_kv_heads, KEY_MAX // spec.head_dim)
        read_and_written = heads * spec.head_dim * (spec.dtype.itemsize + np.dtype(np.float32).itemsize)
        tile = min(TILE, (SHARED_BYTES - 1) // read_and_written)
        part = _divisor(spec.page_size, tile)
        return cls(
            page_size=part,
            parts=spec.page_size // part,
            heads=heads,
            tile=TILE // part * part,
            tile_of_one=max(1, tile // part) * part,
            slots=SLOTS,
        )


@cache
def _divisor(number: int, most: int) -> int:
    """Returns the greatest divisor that is at most `most`, or 1."""
    return max(size for size in range(1, max(1, min(most, number)) + 1) if number % size == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a program.

    Attributes:
        bucket: Sizes of the program.
        tokens: Row in the caller's q of each item's first query.
        lengths: Queries of each item.
        items: Rows of `xla_kernel.Item`.
        table: Pages of the items, item after item.
    """

    bucket: Bucket
    tokens: Sequence[int]
    lengths: Sequence[int]
    items: Int32[np.ndarray, "n 4"]
    table: Int32[np.ndarray, " slots"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The calls of each thread, at least one, their buckets, and whether results of one query must be merged."""

    threads: Sequence[Sequence[Call]]
    buckets: frozenset[Bucket]
    merges: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of queries with ranges of keys, a column for each property; `_take` selects some."""

    seq: Int64[np.ndarray, " n"]
    token: Int64[np.ndarray, " n"]
    length: Int64[np.ndarray, " n"]
    position: Int64[np.ndarray, " n"]
    start: Int64[np.ndarray, " n"]
    end: Int64[np.ndarray, " n"]


def plan(
    batch: RaggedBatch,
    sliding_window: int | None,
    *,
    paging: Paging,
    key_size: int,
    buckets: Sequence[Bucket],
    num_threads: int,
) -> Work:
    """Returns the calls that attend over a batch.

    Args:
        batch: Validated metadata.
        sliding_window: Keys that a query sees; pages before them are not touched.
        paging: How programs see the pages.
        key_size: Numbers of a key, over all heads.
        buckets: Sizes of the programs, from few queries to many.
        num_threads: Threads that may work side by side.
    """
    queries = np.array([bucket.queries for bucket in buckets])
    # A few small blocks cost less than one that is mostly empty.
    sizes = queries[np.minimum(np.searchsorted(queries * BLOCKS_MAX, batch.q_lens), len(queries) - 1)]
    blocks = _blocks(batch, sizes, sliding_window, paging)
    whole = len(blocks.seq)
    numbers = int(np.sum((blocks.end - blocks.start) * blocks.length)) * key_size
    threads = min(num_threads, max(1, numbers // WORTH_A_THREAD))
    keys_max = paging.slots * paging.page_size
    if len(blocks.seq) < threads:
        keys_max = min(keys_max, -(-int(np.max(blocks.end - blocks.start)) // threads))
    blocks = _split(blocks, max(paging.tile, keys_max // paging.tile * paging.tile))
    size_of = sizes[blocks.seq]
    shares = _shares((blocks.end - blocks.start) * size_of, threads)
    calls: list[list[Call]] = [[] for _ in range(threads)]
    for bucket in buckets:
        of_size = size_of == bucket.queries
        for thread, mine in enumerate(calls):
            chosen = np.flatnonzero(of_size & (shares == thread))
            if len(chosen):
                mine.extend(_calls(batch, _take(blocks, chosen), paging, bucket))
    used = frozenset(call.bucket for thread in calls for call in thread)
    # There may be fewer blocks than threads: keys that fit into one tile are not shared.
    return Work(threads=[thread for thread in calls if thread], buckets=used, merges=len(blocks.seq) > whole)


def _blocks(batch: RaggedBatch, sizes: np.ndarray, sliding_window: int | None, paging: Paging) -> Blocks:
    """Cuts every sequence's queries into blocks of its size."""
    counts = -(-batch.q_lens // sizes)
    seq = np.repeat(np.arange(batch.num_seqs), counts)
    ordinal = np.arange(len(seq)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = ordinal * sizes[seq]
    length = np.minimum(sizes[seq], batch.q_lens[seq] - offset)
    position = (batch.kv_lens - batch.q_lens)[seq] + offset
    first = np.zeros_like(position) if sliding_window is None else np.maximum(position - sliding_window + 1, 0)
    return Blocks(
        seq=seq,
        token=batch.cu_q_lens[seq] + offset,
        length=length,
        position=position,
        start=first // paging.page_size * paging.page_size,
        end=position + length,
    )


def _split(blocks: Blocks, keys_max: int) -> Blocks:
    """Cuts ranges of keys that are longer than `keys_max`."""
    counts = -(-(blocks.end - blocks.start) // keys_max)
    if counts.max() == 1:
        return blocks
    index = np.repeat(np.arange(len(counts)), counts)
    part = np.arange(len(index)) - np.repeat(np.cumsum(counts) - counts, counts)
    parts = _take(blocks, index)
    start = parts.start + part * keys_max
    return Blocks(
        seq=parts.seq, token=parts.token, length=parts.length, position=parts.position,
        start=start, end=np.minimum(parts.end, start + keys_max),
    )  # fmt: skip


def _shares(costs: Int64[np.ndarray, " n"], num_threads: int) -> Int64[np.ndarray, " n"]:
    """Gives every block to a thread: the next largest to the one with the least to do."""
    shares = np.zeros(len(costs), np.int64)
    if num_threads == 1:
        return shares
    loads = [0] * num_threads
    for i in np.argsort(-costs, kind="stable"):
        shares[i] = loads.index(min(loads))
        loads[shares[i]] += int(costs[i])
    return shares


def _calls(batch: RaggedBatch, blocks: Blocks, paging: Paging, bucket: Bucket) -> list[Call]:
    """Cuts one thread's blocks of one size into calls that fit the bucket and the table."""
    calls = []
    pages = -(-(blocks.end - blocks.start) // paging.page_size)
    ends = np.cumsum(pages)
    first = 0
    while first < len(pages):
        fitting = int(np.searchsorted(ends, ends[first] - pages[first] + paging.slots, side="right"))
        last = min(fitting, first + bucket.items)
        calls.append(_call(batch, _take(blocks, slice(first, last)), pages[first:last], paging, bucket))
        first = last
    return calls


def _call(batch: RaggedBatch, blocks: Blocks, pages: Int64[np.ndarray, " n"], paging: Paging, bucket: Bucket) -> Call:
    slot = np.cumsum(pages) - pages
    index = np.arange(int(pages.sum())) + np.repeat(blocks.start // paging.page_size - slot, pages)
    table = batch.page_indices[np.repeat(blocks.seq, pages), index // paging.parts]
    if paging.parts > 1:
        table = table * np.int32(paging.parts) + (index % paging.parts).astype(np.int32)
    items = np.stack([blocks.position, slot, blocks.start, blocks.end], axis=1).astype(np.int32)
    return Call(bucket=bucket, tokens=blocks.token.tolist(), lengths=blocks.length.tolist(), items=items, table=table)


def _take(blocks: Blocks, index: np.ndarray | slice) -> Blocks:
    return Blocks(
        seq=blocks.seq[index], token=blocks.token[index], length=blocks.length[index],
        position=blocks.position[index], start=blocks.start[index], end=blocks.end[index],
    )  # fmt: skip
