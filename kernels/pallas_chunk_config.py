"""Static geometry of the chunk kernel: every shape it uses and the memory they take, known without compiling."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np

from attnd.kernels.errors import UnsupportedError

LANES: Final = 128
SUBLANES: Final = 8
# Columns of a matrix product: the width of the largest matrix unit.
_COLUMNS_MAX: Final = 256
# Least room for what the compiler keeps beside our buffers: spilled registers and values in flight.
_VMEM_HEADROOM_BYTES: Final = 2 << 20
KV_DTYPES: Final[Mapping[str, np.dtype]] = {
    np.dtype(dtype).name: np.dtype(dtype)
    for dtype in (np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8)
}
Q_DTYPES: Final[Mapping[str, np.dtype]] = {
    np.dtype(dtype).name: np.dtype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16)
}


def round_up(value: int, multiple: int) -> int:
    """Returns the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


class Piece(NamedTuple):
    """Consecutive tokens of one query head, side by side in the columns of an item."""

    q_head: int
    first_token: int


class Item(NamedTuple):
    """One matrix product's worth of queries: columns that share a kv head.

    Attributes:
        kv_head: The kv head.
        part: Which of the kv head's items.
        pieces: What the columns are, in order; None is padding.
    """

    kv_head: int
    part: int
    pieces: tuple[Piece | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkConfig:
    """Everything about a call of the chunk kernel that selects a program.

    `sm_scale`, `soft_cap`, `sliding_window`, `k_scale` and `v_scale` are run-time values; only whether there is a
    window or a cap is static. The per-tensor scales cost nothing where they are 1, so they have no flag.

    Attributes:
        num_tokens: Rows of q.
        num_rows: Sequences the metadata has room for.
        num_q_heads: A multiple of `num_kv_heads`.
        num_kv_heads: Any.
        head_dim: Any; lanes up to the next multiple of 128 are padding, also in the pool.
        page_size: Tokens of a page; see `block_tokens`.
        num_pages: Pages of the pool.
        pages_per_seq: Columns of the page table.
        q_dtype: Name of one of `Q_DTYPES`.
        kv_dtype: Name of one of `KV_DTYPES`.
        query_block: Query tokens of a tile: a power of two, 16 at least.
        block_tokens: KV tokens of a block: a multiple of `page_size`, or a divisor of it.
        edge_tokens: KV tokens of the steps by which blocks with a mask are worked through. Where they do not divide
            `block_tokens`, all blocks are.
        lag: Items whose product with V waits for the next block, so that its start has work for the matrix units.
        fold: Whether keys of 128 lanes may be doubled to carry the scale and the anchor (see `folded`): free where
            matrix units are 256 deep (v6e, 7x), half a block's time where they are 128 deep (v4, v5e, v5p). Keys of
            64 lanes fold into their padding anywhere.
        large_tiles: Whether a tile of memory has 16 rows of 16 bits (7x), not 8.
        windowed: There is a sliding window.
        capped: There is a soft cap.
        append: The call brings new k and v.
        return_lse: The call wants the log-sum-exp.
        counted: The call wants `ChunkCounts`.

    Raises:
        UnsupportedError: The kernel cannot serve the shape.
    """

    num_tokens: int
    num_rows: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    pages_per_seq: int
    q_dtype: str
    kv_dtype: str
    query_block: int = 128
    block_tokens: int = 512
    edge_tokens: int = 128
    lag: int = 2
    fold: bool = True
    large_tiles: bool = False
    windowed: bool = False
    capped: bool = False
    append: bool = False
    return_lse: bool = False
    counted: bool = False

    def __post_init__(self) -> None:
        if self.q_dtype not in Q_DTYPES:
            raise UnsupportedError(f"q.dtype={self.q_dtype} must be one of {', '.join(Q_DTYPES)}.")
        if self.kv_dtype not in KV_DTYPES:
            raise UnsupportedError(f"kv_pages.dtype={self.kv_dtype} must be one of {', '.join(KV_DTYPES)}.")
        if self.num_q_heads % self.num_kv_heads:
            raise UnsupportedError(f"num_q_heads={self.num_q_heads} must be a multiple of {self.num_kv_heads}.")
        if self.query_block < 16 or self.query_block & (self.query_block - 1):
            raise UnsupportedError(f"query_block={self.query_block} must be a power of two, 16 at least.")
        if self.block_tokens % self.page_size and self.page_size % self.block_tokens:
            raise UnsupportedError(
                f"block_tokens={self.block_tokens} must be a multiple or a divisor of page_size={self.page_size}."
            )
        rows = self.fetch_tokens * self.rows_per_token
        if rows % self.row_tile:
            raise UnsupportedError(
                f"a fetch of {self.fetch_tokens} tokens has {rows} rows of {self.kv_dtype}, "
                f"not a multiple of {self.row_tile}."
            )
        if self.edge_tokens % 16:
            raise UnsupportedError(f"edge_tokens={self.edge_tokens} must be a multiple of 16.")

    # Heads and lanes.
    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def lanes(self) -> int:
        """head_dim and its padding."""
        return round_up(self.head_dim, LANES)

    @property
    def q_rows_per_token(self) -> int:
        """Rows of q of a token: its heads, padded so that a token is whole tiles of memory."""
        return round_up(self.num_q_heads, SUBLANES)

    @property
    def compute_dtype(self) -> np.dtype:
        """What the matrix units multiply: bfloat16 unless the cache is float32."""
        return KV_DTYPES["float32" if self.kv_dtype == "float32" else "bfloat16"]

    @property
    def exact_products(self) -> bool:
        """Whether products keep float32's accuracy."""
        return self.kv_dtype == "float32"

    @property
    def fold_lane(self) -> int:
        """Where, in the contraction, the second copy of K begins; 0 if there is none."""
        if self.capped or self.exact_products:
            return 0
        return {64: 64, 128: 128 if self.fold else 0}.get(self.head_dim, 0)

    @property
    def folded(self) -> bool:
        """Whether the product of K and Q carries the scale and the anchor.

        K is there twice, and against it stand the high and the low half of q * scale, so scores come scaled at 16
        bits of q; the last lane of the second K is 1 and meets minus the anchor.
        """
        return self.fold_lane > 0

    @property
    def depth(self) -> int:
        """Contraction depth of the product of K and Q."""
        return self.lanes + (LANES if self.fold_lane == LANES else 0)

    # Pages and blocks.
    @property
    def packing(self) -> int:
        """Values of the cache in a 32-bit word."""
        return 4 // KV_DTYPES[self.kv_dtype].itemsize

    @property
    def row_tile(self) -> int:
        """Rows that a copy from the cache must be a whole multiple of."""
        return SUBLANES

    @property
    def append_row_tile(self) -> int:
        """Rows that a copy into the middle of a page must be a whole multiple of: whole tiles of memory.

        Pages of 128 lanes are contiguous, whatever their tiles; in wider ones the tiles of 8 bits are four times as
        tall. Where tiles are large, copies of parts of one compile, but are said to lose what is left over.
        """
        if self.large_tiles or (self.lanes > LANES and self.packing == 4):
            return SUBLANES * self.packing
        return SUBLANES

    @property
    def rows_per_token(self) -> int:
        """Rows of the cache of a token: k and v of each head."""
        return 2 * self.num_kv_heads

    @property
    def append_in_kernel(self) -> bool:
        """Whether the kernel writes the new tokens: only where a token is whole tiles of memory.

        Elsewhere a plain scatter does, ahead of the kernel and in place.
        """
        return self.append and self.rows_per_token % self.append_row_tile == 0

    @property
    def pool_shape(self) -> tuple[int, int, int]:
        """Shape of the pool as the kernel sees it: a page is rows (token, head, k or v)."""
        return (self.num_pages, self.page_size * self.rows_per_token, self.lanes)

    @property
    def fetch_tokens(self) -> int:
        """Tokens of one copy from the pool: a page, or a whole block of a larger page."""
        return min(self.page_size, self.block_tokens)

    @property
    def fetches_per_block(self) -> int:
        """Copies that fill a block."""
        return self.block_tokens // self.fetch_tokens

    @property
    def padded_block_tokens(self) -> int:
        """Block rows with room for a last whole step."""
        return round_up(self.block_tokens, self.edge_tokens)

    @property
    def has_interior(self) -> bool:
        """Whether blocks that no mask touches may take the fast path."""
        return self.block_tokens == self.padded_block_tokens

    # Columns.
    @property
    def columns(self) -> int:
        """Columns of an item."""
        return min(_COLUMNS_MAX, round_up(self.group * self.query_block, LANES))

    @property
    def piece_tokens(self) -> int:
        """Tokens of a piece."""
        return min(self.query_block, self.columns)

    @property
    def items_per_head(self) -> int:
        """Items of a kv head."""
        return -(-self.group * self.query_block // self.columns)

    @property
    def num_items(self) -> int:
        """Items of a tile."""
        return self.num_kv_heads * self.items_per_head

    @property
    def deferred(self) -> int:
        """Items whose product with V waits for the next block."""
        return min(self.lag, self.num_items)

    def items(self) -> Iterator[Item]:
        """Yields the items of a tile, in the order of their kv heads."""
        per_item = self.columns // self.piece_tokens
        for kv_head in range(self.num_kv_heads):
            pieces: list[Piece | None] = [
                Piece(kv_head * self.group + g, t)
                for g in range(self.group)
                for t in range(0, self.query_block, self.piece_tokens)
            ]
            pieces += [None] * (self.items_per_head * per_item - len(pieces))
            for part in range(self.items_per_head):
                yield Item(kv_head, part, tuple(pieces[part * per_item : (part + 1) * per_item]))

    @property
    def tiles_max(self) -> int:
        """Tiles that any batch of this shape may have."""
        return self.num_tokens // self.query_block + self.num_rows

    @property
    def lse_shape(self) -> tuple[int, int]:
        """The log-sum-exp of a tile: a row for each item."""
        return (round_up(self.num_items, SUBLANES), self.columns)

    # Memory.
    def scratch_shapes(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Returns shape and dtype of each VMEM buffer."""
        q_dtype, kv_dtype, f32 = Q_DTYPES[self.q_dtype], KV_DTYPES[self.kv_dtype], KV_DTYPES["float32"]
        halves, tokens, items = self.lanes // LANES, self.padded_block_tokens, self.num_items
        q_rows = self.query_block * self.q_rows_per_token
        kv_rows = tokens * self.rows_per_token
        shapes = {
            "q_buffer": ((halves, q_rows, LANES), q_dtype),
            "out_buffer": ((halves, q_rows, LANES), q_dtype),
            "kv_buffer": ((2, halves, kv_rows, LANES), kv_dtype),
            "keys": ((self.num_kv_heads, tokens, self.depth), self.compute_dtype),
            "values": ((self.num_kv_heads, self.lanes, tokens), self.compute_dtype),
            "queries": ((items, self.depth, self.columns), self.compute_dtype),
            "waiting": ((self.deferred, tokens, self.columns), self.compute_dtype),
            "anchor": ((items, SUBLANES, self.columns), f32),
            "total": ((items, SUBLANES, self.columns), f32),
            "acc": ((items, self.lanes, self.columns), f32),
        }
        if self.return_lse:
            shapes["lse_buffer"] = (self.lse_shape, f32)
        return shapes

    @property
    def vmem_bytes(self) -> int:
        """Bytes of all VMEM buffers."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.scratch_shapes().values())

    @property
    def vmem_limit_bytes(self) -> int:
        """VMEM that the compiler is given: the buffers and room for what it keeps beside them.

        It has been seen to take up to a third of the buffers.
        """
        return self.vmem_bytes + self.vmem_bytes // 2 + _VMEM_HEADROOM_BYTES

    @property
    def smem_bytes(self) -> int:
        """Bytes of the scalars: the flat page table, most of all."""
        return 4 * (self.num_rows * self.pages_per_seq + 2 * self.num_rows + 32)
