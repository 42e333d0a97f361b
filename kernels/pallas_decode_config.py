"""What selects a decode program: shapes, dtypes, block size, features; and what follows from them."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import jax.numpy as jnp

LANES: Final = 128
SUBLANES: Final = 8
NUM_BUFFERS: Final = 4
Q_DTYPES: Final = ("float32", "bfloat16")
KV_DTYPES: Final = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
# Least room for what the compiler itself keeps in VMEM: spilled registers and operands of matrix products.
VMEM_RESERVE_BYTES: Final = 4 << 20


class Chunk(NamedTuple):
    """The columns of one matrix product.

    Attributes:
        number: Number of the chunk in its block.
        head: KV head of the columns; 0 if they are of all heads.
        token: First token.
        tile: Number of its first tile of scores.
        state: Number of the first state that its scores belong to.
    """

    number: int
    head: int
    token: int
    tile: int
    state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """The static part of a decode call over the interleaved layout. Equal configs share a program.

    Only whether there is a window, a cap, new tokens or an lse is static; their values are run-time scalars, and so are
    the scales. The program walks *items*: up to `block_tokens` neighbouring tokens of one row, all kv heads together.

    Attributes:
        num_rows: Rows of q, in use or not.
        num_q_heads: Query heads, a multiple of `num_kv_heads`.
        num_kv_heads: KV heads, up to 128.
        head_dim: Head dimension.
        page_size: Tokens of a page; it divides `block_tokens` or is a multiple of it.
        num_pages: Pages of the pool.
        pages_per_seq: Slots of a row of the page table.
        q_dtype: Name of q's dtype, one of `Q_DTYPES`.
        kv_dtype: Name of the pool's dtype, one of `KV_DTYPES`.
        block_tokens: Most tokens of an item, a multiple of `chunk_tokens`.
        windowed: Whether there is a sliding window.
        capped: Whether there is a soft cap.
        append: Whether new k and v are written before attending.
        return_lse: Whether the log-sum-exp is wanted.

    Raises:
        ValueError: The shapes contradict each other.
    """

    num_rows: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    pages_per_seq: int
    q_dtype: str
    kv_dtype: str
    block_tokens: int = field(default=0)
    windowed: bool = False
    capped: bool = False
    append: bool = False
    return_lse: bool = False

    def __post_init__(self) -> None:
        if self.block_tokens == 0:
            object.__setattr__(
                self, "block_tokens", default_block_tokens(self.chunk_tokens, self.heads, self.page_size)
            )
        for broken, text in (
            (self.num_q_heads % self.num_kv_heads != 0, "num_q_heads must be a multiple of num_kv_heads."),
            (self.num_kv_heads > LANES, f"num_kv_heads must be at most {LANES}."),
            (self.q_dtype not in Q_DTYPES, f"q_dtype must be one of {', '.join(Q_DTYPES)}."),
            (self.kv_dtype not in KV_DTYPES, f"kv_dtype must be one of {', '.join(KV_DTYPES)}."),
            (self.block_tokens % self.strip_tokens != 0, "page_size must divide block_tokens or be a multiple of it."),
            (self.page_size % self.strip_tokens != 0, "page_size must divide block_tokens or be a multiple of it."),
            (self.block_tokens % self.chunk_tokens != 0, f"block_tokens must be a multiple of {self.chunk_tokens}."),
        ):
            if broken:
                raise ValueError(f"{text} ({self})")

    # What is stored.  Memory is laid out in tiles of 8 rows and 128 lanes, so that padding costs little or nothing.

    @property
    def heads(self) -> int:
        """KV heads that a token of the pool has: a power of two, so that tokens and tiles of scores coincide."""
        return 1 << (self.num_kv_heads - 1).bit_length()

    @property
    def lanes(self) -> int:
        """Values that a row of the pool has: `head_dim`, padded to whole tiles. XLA would transpose a narrower pool."""
        return -(-self.head_dim // LANES) * LANES

    @property
    def pool_shape(self) -> tuple[int, int, int, int]:
        """Shape of the pool; what pads it is zero. A pool of another shape is padded at each call, which copies it.

        Where `lanes` is more than 128 and a token less than a tile, XLA tiles this shape in another order than the
        program: keep the pool as [num_pages, page_size * rows_per_token, lanes] and reshape it for the call, for free.
        """
        return (self.num_pages, self.page_size, self.rows_per_token, self.lanes)

    # Heads and rows.  The rows of q are padded so that a kv head has a power of two or whole tiles of them.

    @property
    def rows_per_token(self) -> int:
        """Rows of one token in the pool: k and v of each kv head."""
        return 2 * self.heads

    @property
    def group_size(self) -> int:
        """Query heads of one kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def group_rows(self) -> int:
        """`group_size`, padded to a power of two or whole tiles, so that all heads together fill packed tiles."""
        sizes = itertools.chain((1, 2, 4), itertools.count(SUBLANES, SUBLANES))
        return next(n for n in sizes if n >= self.group_size and self.heads * n % (2 * SUBLANES) == 0)

    @property
    def q_rows(self) -> int:
        """Rows of q of one token, padding included; a multiple of 16."""
        return self.heads * self.group_rows

    @property
    def fold(self) -> int:
        """Tiles of 8 rows that hold the scores of one column: those of the query heads of the column's kv head."""
        return max(1, self.group_rows // SUBLANES)

    @property
    def states(self) -> int:
        """Tiles of softmax state."""
        return self.fold

    # Tokens.

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile of scores: a lane is a (token, kv head)."""
        return LANES // self.heads

    @property
    def chunk_tokens(self) -> int:
        """Tokens of one matrix product."""
        return max(self.tile_tokens, min(LANES, 8 * LANES // self.heads))

    @property
    def pass_tokens(self) -> tuple[int, ...]:
        """Sizes for which a pass is compiled; an item runs in the smallest that holds it.

        Beside powers of two, three quarters of a block: the last two blocks of a row have at least half of it each.
        """
        doubled = (self.chunk_tokens << i for i in range(self.block_tokens.bit_length()))
        sizes = {self.block_tokens, *(size for size in doubled if size < self.block_tokens)}
        three_quarters = self.block_tokens * 3 // 4
        if three_quarters % self.chunk_tokens == 0:
            sizes.add(three_quarters)
        return tuple(sorted(sizes))

    @property
    def strip_tokens(self) -> int:
        """Tokens of one copy: a page, or the part of it that fits a block."""
        return min(self.page_size, self.block_tokens)

    @property
    def strips_per_block(self) -> int:
        """Copies of a full block."""
        return self.block_tokens // self.strip_tokens

    @property
    def strips_per_page(self) -> int:
        """Copies of a page."""
        return self.page_size // self.strip_tokens

    @property
    def split_tokens(self) -> int:
        """The last two blocks of a row are made equal, up to a multiple of this many tokens."""
        unit = max(self.strip_tokens, LANES)
        return unit if unit % self.strip_tokens == 0 and self.block_tokens % unit == 0 else self.block_tokens

    @property
    def tile_rows(self) -> int:
        """Rows of a tile in memory."""
        return SUBLANES * 4 // self.kv_itemsize

    @property
    def aligned_tokens(self) -> int:
        """Tokens whose rows fill whole tiles: where a vector store may start."""
        return math.lcm(self.tile_rows, self.rows_per_token) // self.rows_per_token

    @property
    def copied_tokens(self) -> int:
        """Tokens to a multiple of which a partial copy is rounded up, so that it moves whole tiles."""
        return self.aligned_tokens if self.strip_tokens % self.aligned_tokens == 0 else self.strip_tokens

    @property
    def cleared_tokens(self) -> int:
        """Tokens that one step of clearing stale rows takes."""
        return self.aligned_tokens * max(1, LANES // (self.aligned_tokens * self.rows_per_token))

    # Dtypes and bytes.

    @property
    def kv_itemsize(self) -> int:
        """Bytes of a value of the pool."""
        return int(jnp.dtype(self.kv_dtype).itemsize)

    @property
    def compute_dtype(self) -> str:
        """Dtype of the operands of the matrix products: float32 pools are attended over in float32."""
        return "float32" if self.kv_dtype == "float32" else "bfloat16"

    @property
    def splits_q(self) -> bool:
        """Whether q goes in as two bfloat16 parts, because one would lose bits that float32 q has."""
        return self.q_dtype == "float32" and self.compute_dtype == "bfloat16"

    @property
    def chunk_tiles(self) -> int:
        """Tiles of scores of a chunk."""
        return self.chunk_tokens // self.tile_tokens * self.fold

    @property
    def score_tiles(self) -> int:
        """Tiles of scores of a block."""
        return len(self.chunks(self.block_tokens)) * self.chunk_tiles

    def chunks(self, tokens: int) -> list[Chunk]:
        """Returns the chunks of a block of `tokens` tokens, a multiple of `chunk_tokens`."""
        return [
            Chunk(number=i, head=0, token=i * self.chunk_tokens, tile=i * self.chunk_tiles, state=0)
            for i in range(tokens // self.chunk_tokens)
        ]

    @property
    def vmem_bytes(self) -> int:
        """Bytes of VMEM that the program needs."""
        lanes = self.lanes
        tile = SUBLANES * LANES * 4
        row = 2 * self.q_rows * lanes * int(jnp.dtype(self.q_dtype).itemsize)  # q and out
        row += self.return_lse * self.states * tile
        aligned = self.aligned_tokens * self.rows_per_token * lanes * self.kv_itemsize
        row += self.append * aligned
        buffers = self.buffer_bytes + NUM_BUFFERS * self.append * aligned
        state = (2 * self.score_tiles + 3 * self.states) * tile + self.q_rows * lanes * 4
        # The more operands a block has, the more of them are spilled: half of them at most, as far as was seen.
        operands = self.block_tokens * self.rows_per_token * lanes * int(jnp.dtype(self.compute_dtype).itemsize)
        return self.num_rows * row + buffers + state + operands // 2 + VMEM_RESERVE_BYTES

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of pages."""
        return NUM_BUFFERS * self.block_tokens * self.rows_per_token * self.lanes * self.kv_itemsize

    @property
    def smem_bytes(self) -> int:
        """Bytes of SMEM that the program needs: the page table, the lengths and the scalars."""
        return 4 * (self.num_rows * self.pages_per_seq + self.num_rows) + 1024


def default_block_tokens(chunk_tokens: int, heads: int, page_size: int) -> int:
    """Returns a block size that is safe for a shape: 512 tokens of 8 kv heads, adapted to chunk and page."""
    unit = math.lcm(chunk_tokens, page_size)
    wanted = max(chunk_tokens, min(4096, 512 * 8 // heads) // chunk_tokens * chunk_tokens)
    if page_size % wanted == 0:
        return wanted
    return max(unit, wanted // unit * unit)
