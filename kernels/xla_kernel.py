"""The XLA program of plain JAX attention: a list of blocks of queries, each looping over the tiles of its keys."""

from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Shaped

from attnd.kernels.contract import CACHE_DTYPES, INT8_SCALE, Layout
from attnd.kernels.host_pages import bits_dtype

LOWEST: Final = float(np.finfo(np.float32).min)
# Up to so many pages of a tile are sliced, each with a piece of program; more are gathered, at about twice the cost of
# reading them. That shows in decodes alone: in a block of many queries, reading is a small part.
SLICES_MAX: Final = 16
# The left operand of a product is read as it lies, the right one packed. With few columns, packing the keys would cost
# more than their products; with many, the left operand's rows pay for it.
FEW_COLUMNS: Final = 16


class Item(NamedTuple):
    """One block of queries of one sequence, and a range of its keys: the columns of the array of items."""

    position: int
    """Position of the first query in its sequence."""
    slot: int
    """Index in the table of the page of the first key."""
    start: int
    """Position of the first key, the first of its page."""
    end: int
    """One past the last key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramShape:
    """What selects a program.

    Attributes:
        layout: Layout of the pages.
        dtype: Name of the cache's dtype; the pages come as its bits.
        scaled: Whether the pages carry scales.
        num_pages: Pages of the pool. A page is at most a tile.
        page_size: Tokens of a page.
        num_kv_heads: KV heads.
        num_q_heads: Query heads.
        head_dim: Head dimension.
        heads: KV heads that a step takes together; a divisor of num_kv_heads.
        queries: Queries of a block.
        items: Most items of a call.
        slots: Entries of the table of pages.
        tile: Keys of a step; a multiple of page_size, which divides a page of the cache.
    """

    layout: Layout
    dtype: str
    scaled: bool
    num_pages: int
    page_size: int
    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    heads: int
    queries: int
    items: int
    slots: int
    tile: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_q_heads // self.num_kv_heads


T = TypeVar("T")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Pool(Generic[T]):
    """One layer's pages.

    Attributes:
        kv: Bits of the pages, in the layout's shape; an interleaved page is [page_size, num_kv_heads, 2, head_dim].
        scales: float32 [2, num_kv_heads, num_pages, page_size, 1]; empty unless the pages carry scales.
    """

    kv: T
    scales: T


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Inputs(Generic[T]):
    """The other arguments of a program.

    Attributes:
        q: float32 [items, num_kv_heads, queries, group, head_dim], scaled. What no item names may hold anything.
        table: int32 [slots + tile / page_size], page ids, item after item. Entries that no key needs may hold anything.
        items: int32 [items, 4], rows of `Item`.
        counts: int32 [2], the number of items and the sliding window.
        soft_cap: float32 [1]; 0 if there is none.
    """

    q: T
    table: T
    items: T
    counts: T
    soft_cap: T


class ArgumentShape(NamedTuple):
    """Shape and dtype of an argument."""

    shape: tuple[int, ...]
    dtype: np.dtype


def pool_shapes(shape: ProgramShape) -> Pool[ArgumentShape]:
    """Returns what a program takes for its pages."""
    page = (shape.num_pages, shape.page_size)
    split = (2, shape.num_kv_heads, *page)
    interleaved = (*page, shape.num_kv_heads, 2, shape.head_dim)
    kv = interleaved if shape.layout is Layout.INTERLEAVED else (*split, shape.head_dim)
    return Pool(
        kv=ArgumentShape(kv, bits_dtype(CACHE_DTYPES[shape.dtype])),
        scales=ArgumentShape((*split, 1) if shape.scaled else (0,), np.dtype(np.float32)),
    )


def input_shapes(shape: ProgramShape) -> Inputs[ArgumentShape]:
    """Returns what a program takes for its other arguments."""
    float32, int32 = np.dtype(np.float32), np.dtype(np.int32)
    return Inputs(
        q=ArgumentShape((shape.items, shape.num_kv_heads, shape.queries, shape.group, shape.head_dim), float32),
        table=ArgumentShape((shape.slots + shape.tile // shape.page_size,), int32),
        items=ArgumentShape((shape.items, len(Item._fields)), int32),
        counts=ArgumentShape((2,), int32),
        soft_cap=ArgumentShape((1,), float32),
    )


def widen(bits: Shaped[Array, "*shape"], dtype: str) -> Float32[Array, "*shape"]:
    """Returns the float32 values of bits, by integer arithmetic where XLA:CPU has no fast conversion."""
    if dtype == "float32":
        return bits
    if dtype == "bfloat16":
        return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)
    if dtype == "float16":
        return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    if dtype == "int8":
        return lax.bitcast_convert_type(bits, jnp.int8).astype(jnp.float32)
    if dtype == "float8_e5m2":  # the upper byte of a float16
        return widen(bits.astype(jnp.uint16) << 8, "float16")
    if dtype == "float8_e4m3fn":  # one exponent bit less than float16, and a bias of 7 for 15
        wide = bits.astype(jnp.uint16)
        magnitude = wide & 0x7F
        values = widen((wide & 0x80) << 8 | magnitude << 7, "float16") * 256.0
        return jnp.where(magnitude == 0x7F, jnp.nan, values)
    raise AssertionError(dtype)


def attend(shape: ProgramShape, pool: Pool[Array], inputs: Inputs[Array]) -> tuple[Array, Array]:
    """Attends over the items of a call.

    Returns:
        out: float32 [items, num_kv_heads, queries * group, head_dim], normalised over each item's keys. Queries past
            an item's, and items past the count, hold anything.
        lse: float32 [items, num_kv_heads, queries * group], the natural log-sum-exp.
    """
    columns = shape.queries * shape.group
    q = inputs.q.reshape(shape.items, shape.num_kv_heads, columns, shape.head_dim)
    steps = shape.num_kv_heads // shape.heads

    def one_step(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        index, head = i // steps, i % steps * shape.heads
        block = lax.dynamic_slice(q, (index, head, 0, 0), (1, shape.heads, columns, shape.head_dim))[0]
        out, lse = _attend_item(shape, pool, inputs, Item(*inputs.items[index]), head, block)
        return (
            lax.dynamic_update_slice(results[0], out[None], (index, head, 0, 0)),
            lax.dynamic_update_slice(results[1], lse[None], (index, head, 0)),
        )

    empty = jnp.zeros(q.shape, jnp.float32), jnp.zeros(q.shape[:3], jnp.float32)
    results: tuple[Array, Array] = lax.fori_loop(0, inputs.counts[0] * steps, one_step, empty)
    return results


def _attend_item(
    shape: ProgramShape,
    pool: Pool[Array],
    inputs: Inputs[Array],
    item: Item,
    head: Array,
    q: Float32[Array, "heads columns head_dim"],
) -> tuple[Float32[Array, "heads columns head_dim"], Float32[Array, "heads columns"]]:
    """Runs the flash loop over the keys of one block of queries, for some of the heads."""
    positions = item.position + jnp.arange(q.shape[1], dtype=jnp.int32) // shape.group
    window, soft_cap = inputs.counts[1], inputs.soft_cap[0]

    def one_tile(step: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = state
        keys = item.start + step * shape.tile + jnp.arange(shape.tile, dtype=jnp.int32)
        # A masked score does not clean a NaN out of the product with v: v itself must be masked.
        readable = (keys < item.end) & (keys > item.position - window)
        slot = item.slot + step * (shape.tile // shape.page_size)
        tile = _Tile(shape, lax.dynamic_slice_in_dim(inputs.table, slot, shape.tile // shape.page_size, 0), head)
        k, v = (widen(tile.load(pool.kv, side), shape.dtype) for side in range(2))
        v = jnp.where(readable[None, :, None], v, 0.0)
        scores = _scores(q, k)
        if shape.scaled:
            scores = scores * tile.load(pool.scales, 0)[:, None, :, 0] / INT8_SCALE
        scores = lax.cond(soft_cap > 0, lambda x: soft_cap * jnp.tanh(x / soft_cap), lambda x: x, scores)
        seen = (keys <= positions[:, None]) & (keys > positions[:, None] - window) & readable
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(2))
        weights = jnp.exp(scores - new_top[:, :, None])
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(2)
        if shape.scaled:
            v_scales = tile.load(pool.scales, 1)[:, None, :, 0] / INT8_SCALE
            weights = weights * jnp.where(readable, v_scales, 0.0)
        product = lax.dot_general(weights, v, (((2,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        return new_top, total, acc * decay[:, :, None] + product

    state = (jnp.full(q.shape[:2], LOWEST, jnp.float32), jnp.zeros(q.shape[:2], jnp.float32), jnp.zeros_like(q))
    num_tiles = (item.end - item.start + shape.tile - 1) // shape.tile
    top, total, acc = lax.fori_loop(0, num_tiles, one_tile, state)
    # A block may hold queries that see none of the keys of this item: their weight in the merge is exp(-inf).
    out = acc / jnp.where(total > 0, total, 1.0)[:, :, None]
    return out, jnp.where(total > 0, top + jnp.log(total), -jnp.inf)


def _scores(
    q: Float32[Array, "heads columns head_dim"], k: Float32[Array, "heads tile head_dim"]
) -> Float32[Array, "heads columns tile"]:
    """Returns the products of queries and keys, with the operand at the left that makes them cheap."""
    if q.shape[1] > FEW_COLUMNS:
        return lax.dot_general(q, k, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    scores = lax.dot_general(k, q, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
    # Without the barrier XLA turns the product around again.
    kept: Array = lax.optimization_barrier(scores)  # type: ignore[no-untyped-call]
    return kept.swapaxes(1, 2)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Where one step finds its keys and values.

    Attributes:
        shape: The program.
        pages: int32 [tile / page_size], page ids. Junk is clipped to the pool: what is read there is masked.
        head: The first of `shape.heads` heads.
    """

    shape: ProgramShape
    pages: Array
    head: Array

    def load(self, array: Shaped[Array, "..."], side: int) -> Shaped[Array, "heads tile last"]:
        """Returns a tile of keys, side 0, or of values, side 1, from an array of the pool.

        Each side is read by itself, so that XLA fuses reading, widening and masking into one pass over the pages.
        """
        load = self._interleaved if self.shape.layout is Layout.INTERLEAVED else self._split
        if len(self.pages) > SLICES_MAX or self.shape.queries > 1:
            return load(array, side, self.pages)
        return jnp.concatenate([load(array, side, page) for page in jnp.split(self.pages, len(self.pages))], axis=1)

    def _interleaved(self, array: Array, side: int, pages: Array) -> Array:
        head, sizes = self.head, (1, self.shape.page_size, self.shape.heads, 1, array.shape[-1])
        if len(pages) == 1:
            tokens = lax.dynamic_slice(array, (pages[0], 0, head, side, 0), sizes)
        else:
            starts = jnp.stack([pages, jnp.full_like(pages, head), jnp.full_like(pages, side)], axis=1)
            numbers = lax.GatherDimensionNumbers((1, 2, 3), (0, 3), (0, 2, 3))
            tokens = lax.gather(array, starts, numbers, sizes, mode="clip")
        return tokens.reshape(-1, self.shape.heads, array.shape[-1]).swapaxes(0, 1)

    def _split(self, array: Array, side: int, pages: Array) -> Array:
        head, sizes = self.head, (1, self.shape.heads, 1, self.shape.page_size, array.shape[-1])
        if len(pages) == 1:
            tokens = lax.dynamic_slice(array, (side, head, pages[0], 0, 0), sizes)
        else:
            starts = jnp.stack([jnp.full_like(pages, side), jnp.full_like(pages, head), pages], axis=1)
            numbers = lax.GatherDimensionNumbers((0, 2, 3), (0, 2), (0, 1, 2))
            tokens = lax.gather(array, starts, numbers, sizes, mode="clip")
        return tokens.reshape(self.shape.heads, -1, array.shape[-1])
