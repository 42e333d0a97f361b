"""From a ragged batch to launches of the two kernels, each padded to one of a few sizes.

Rows with one query go to the decode kernel, the others to the chunk kernel, in small tiles if they bring few queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from jaxtyping import Int32, Int64

from attnd.kernels.contract import RaggedBatch
from attnd.kernels.errors import UnsupportedError

# Slots that a row of the page table has room for.
SLOT_BUCKETS: Final = (64, 512, 4096, 32768)
DECODE_ROW_BUCKETS: Final = (8, 64, 256)
SHORT_QUERIES: Final = 32
SHORT_ROWS: Final = 32
SHORT_TOKENS: Final = 256
LONG_ROWS: Final = 8
LONG_TOKEN_BUCKETS: Final = (512, 2048, 8192)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class LaunchShape:
    """The sizes of a launch.

    Attributes:
        query_block: Queries of a tile of the chunk kernel; 1 for the decode kernel.
        num_tokens: Rows of q; the rows of the batch if `query_block` is 1.
        num_rows: Rows of the batch.
        pages_per_seq: Slots of a row of the page table.
    """

    query_block: int
    num_tokens: int
    num_rows: int
    pages_per_seq: int

    @property
    def is_decode(self) -> bool:
        """Whether the decode kernel serves it."""
        return self.query_block == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One call of a kernel.

    Attributes:
        shape: Its sizes.
        tokens: Rows in the batch's q, in the launch's order.
        kv_lens: Padded with 0.
        page_indices: Padded with 0.
        cu_q_lens: Padded with its last entry.
        num_seqs: Rows that count.
    """

    shape: LaunchShape
    tokens: Int64[np.ndarray, " tokens"]
    kv_lens: Int32[np.ndarray, " num_rows"]
    page_indices: Int32[np.ndarray, "num_rows pages_per_seq"]
    cu_q_lens: Int32[np.ndarray, " num_rows+1"]
    num_seqs: Int32[np.ndarray, " 1"]


def launch_shapes(num_pages: int, slots_max: int, *, decodes: bool) -> list[LaunchShape]:
    """Returns the sizes of all launches that calls with tables of up to `num_pages` distinct pages can need.

    Args:
        num_pages: Pages of the pool.
        slots_max: Slots that a page table may have.
        decodes: Whether the decode kernel serves the cache.
    """
    needed = [slots for slots in SLOT_BUCKETS if slots <= slots_max]
    enough = next((i for i, slots in enumerate(needed) if slots >= num_pages), len(needed) - 1)
    shapes = []
    for slots in needed[: enough + 1]:
        if decodes:
            shapes += [_decode_shape(rows, slots) for rows in _row_buckets(DECODE_ROW_BUCKETS, slots, slots_max)]
        rows = _row_buckets((SHORT_ROWS,), slots, slots_max)[-1]
        shapes.append(_chunk_shape(SHORT_QUERIES, SHORT_TOKENS, rows, slots))
        rows = _row_buckets((LONG_ROWS,), slots, slots_max)[-1]
        shapes += [_chunk_shape(128, tokens, rows, slots) for tokens in LONG_TOKEN_BUCKETS]
    return shapes


def plan(batch: RaggedBatch, page_size: int, slots_max: int, *, decodes: bool) -> list[Launch]:
    """Returns the launches that attend over a batch.

    Args:
        batch: Validated metadata.
        page_size: Tokens of a page.
        slots_max: Slots that a page table may have, padding included.
        decodes: Whether the decode kernel serves the cache; if not, the chunk kernel serves all rows.

    Raises:
        UnsupportedError: A row needs more pages than a table has room for.
    """
    q_lens = batch.q_lens
    bounds = [0, *([1] if decodes else []), SHORT_QUERIES, 2**31 - 1]
    launches: list[Launch] = []
    for low, high in pairwise(bounds):
        rows = np.flatnonzero((q_lens > low) & (q_lens <= high))
        if not len(rows):
            continue
        used = -(-batch.kv_lens[rows].astype(np.int64) // page_size)
        slots = slots_for(int(used.max()), slots_max)
        if high == 1:
            buckets = _row_buckets(DECODE_ROW_BUCKETS, slots, slots_max)
            for part in _parts(rows, buckets[-1]):
                shape = _decode_shape(next(size for size in buckets if size >= len(part)), slots)
                launches.append(_launch(batch, shape, _whole(batch, part)))
        else:
            short = high == SHORT_QUERIES
            row_limit = _row_buckets((SHORT_ROWS if short else LONG_ROWS,), slots, slots_max)[-1]
            token_buckets = (SHORT_TOKENS,) if short else LONG_TOKEN_BUCKETS
            for group in _groups(_cut(batch, rows, token_buckets[-1]), row_limit, token_buckets[-1]):
                tokens = sum(piece.count for piece in group)
                size = next(size for size in token_buckets if size >= tokens)
                shape = _chunk_shape(SHORT_QUERIES if short else 128, size, row_limit, slots)
                launches.append(_launch(batch, shape, group))
    return launches


def reads_what_another_writes(batch: RaggedBatch, page_size: int, num_pages: int) -> bool:
    """Returns whether a page that gets new tokens is read by another row too, or at another place of its own.

    Kernels that append row by row could then read a token before it is there.
    """
    slots = np.arange(batch.page_indices.shape[1])
    used = slots < -(-batch.kv_lens // np.int32(page_size))[:, np.newaxis]
    written = used & (slots >= ((batch.kv_lens - batch.q_lens) // page_size)[:, np.newaxis])
    flags = np.zeros(num_pages, np.bool_)
    flags[batch.page_indices[written]] = True
    return bool(np.count_nonzero(flags[batch.page_indices[used]]) > np.count_nonzero(written))


def slots_for(pages: int, slots_max: int) -> int:
    """Returns the slots of a row that has room for so many pages.

    Raises:
        UnsupportedError: No table has that much room.
    """
    for slots in SLOT_BUCKETS:
        if pages <= slots <= slots_max:
            return slots
    limit = max((slots for slots in SLOT_BUCKETS if slots <= slots_max), default=0)
    raise UnsupportedError(
        f"a sequence of {pages} pages needs a page table of {4 * pages} bytes; the kernels have room for {limit} "
        f"pages a sequence ({4 * slots_max} bytes of SMEM in all). Larger pages need fewer."
    )


@dataclass(frozen=True, slots=True)
class _Piece:
    """Consecutive queries of a row."""

    row: int
    first: int
    count: int


def _whole(batch: RaggedBatch, rows: Sequence[int] | np.ndarray) -> list[_Piece]:
    return [_Piece(int(row), 0, int(batch.q_lens[row])) for row in rows]


def _cut(batch: RaggedBatch, rows: np.ndarray, tokens_max: int) -> Iterator[_Piece]:
    """Cuts rows with more queries than a launch takes; a piece attends as if the later queries were not there."""
    for row in rows:
        q_len = int(batch.q_lens[row])
        for first in range(0, q_len, tokens_max):
            yield _Piece(int(row), first, min(tokens_max, q_len - first))


def _groups(pieces: Iterator[_Piece], rows_max: int, tokens_max: int) -> Iterator[list[_Piece]]:
    """Groups pieces, in their order, into launches."""
    group: list[_Piece] = []
    for piece in pieces:
        if len(group) == rows_max or sum(one.count for one in group) + piece.count > tokens_max:
            yield group
            group = []
        group.append(piece)
    yield group


def _launch(batch: RaggedBatch, shape: LaunchShape, pieces: Sequence[_Piece]) -> Launch:
    rows = np.array([piece.row for piece in pieces])
    firsts = np.array([piece.first for piece in pieces])
    counts = np.array([piece.count for piece in pieces])
    n = len(pieces)
    cu_q_lens = np.zeros(shape.num_rows + 1, np.int32)
    cu_q_lens[1 : n + 1] = np.cumsum(counts)
    cu_q_lens[n + 1 :] = cu_q_lens[n]
    kv_lens = np.zeros(shape.num_rows, np.int32)
    kv_lens[:n] = batch.kv_lens[rows] - batch.q_lens[rows] + firsts + counts
    page_indices = np.zeros((shape.num_rows, shape.pages_per_seq), np.int32)
    width = min(shape.pages_per_seq, batch.page_indices.shape[1])
    page_indices[:n, :width] = batch.page_indices[rows, :width]
    starts = batch.cu_q_lens[rows] + firsts
    tokens = np.repeat(starts - cu_q_lens[:n], counts) + np.arange(int(counts.sum()))
    return Launch(
        shape=shape,
        tokens=tokens.astype(np.int64),
        kv_lens=kv_lens,
        page_indices=page_indices,
        cu_q_lens=cu_q_lens,
        num_seqs=np.array([n], np.int32),
    )


def _parts(rows: np.ndarray, size: int) -> Iterator[np.ndarray]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def _row_buckets(buckets: Sequence[int], slots: int, slots_max: int) -> list[int]:
    """Returns the numbers of rows for which tables with so many slots a row fit; at least one."""
    fitting = [rows for rows in buckets if rows * slots <= slots_max]
    return fitting or [1 << (slots_max // slots).bit_length() - 1]


def _decode_shape(rows: int, slots: int) -> LaunchShape:
    return LaunchShape(query_block=1, num_tokens=rows, num_rows=rows, pages_per_seq=slots)


def _chunk_shape(query_block: int, tokens: int, rows: int, slots: int) -> LaunchShape:
    return LaunchShape(query_block=query_block, num_tokens=tokens, num_rows=rows, pages_per_seq=slots)
