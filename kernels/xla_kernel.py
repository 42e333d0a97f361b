"""The XLA program of plain JAX attention: a list of blocks of queries, each looping over the tiles of its keys."""

from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Shaped

from attnd.kernels.contract import CACHE_DTYPES, INT8_SCALE, Layout
from attnd.kernels.host_pages import bits_dtype

LOWEST: Final = float(np.finfo(np.float32).min)


class Item(NamedTuple):
    """One block of queries of one sequence, and a range of its keys: the columns of the array of items."""

    q_row: int
    """Row of the first query in q."""
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
        queries: Queries of a block.
        items: Most items of a call.
        slots: Entries of the table of pages.
        tile: Keys of a step; a multiple of page_size.
    """

    layout: Layout
    dtype: str
    scaled: bool
    num_pages: int
    page_size: int
    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    queries: int
    items: int
    slots: int
    tile: int


T = TypeVar("T")


class Pool(NamedTuple, Generic[T]):
    """One layer's pages.

    Attributes:
        kv: Bits of the pages, in the layout's shape.
        scales: float32 [2, num_kv_heads, num_pages, page_size, 1]; empty unless the pages carry scales.
    """

    kv: T
    scales: T


class Inputs(NamedTuple, Generic[T]):
    """The other arguments of a program.

    Attributes:
        q: float32 [items * queries, num_q_heads, head_dim], scaled. Rows that no item names may hold anything.
        table: int32 [slots + tile / page_size], page ids, item after item. Entries that no key needs may hold anything.
        items: int32 [items, 5], rows of `Item`.
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
    interleaved = (*page, 2 * shape.num_kv_heads, shape.head_dim)
    kv = interleaved if shape.layout is Layout.INTERLEAVED else (*split, shape.head_dim)
    return Pool(
        kv=ArgumentShape(kv, bits_dtype(CACHE_DTYPES[shape.dtype])),
        scales=ArgumentShape((*split, 1) if shape.scaled else (0,), np.dtype(np.float32)),
    )


def input_shapes(shape: ProgramShape) -> Inputs[ArgumentShape]:
    """Returns what a program takes for its other arguments."""
    float32, int32 = np.dtype(np.float32), np.dtype(np.int32)
    return Inputs(
        q=ArgumentShape((shape.items * shape.queries, shape.num_q_heads, shape.head_dim), float32),
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
        out: float32 [items, queries, num_q_heads, head_dim], normalised over each item's keys. Rows past an item's
            queries, and items past the count, hold anything.
        lse: float32 [items, queries, num_q_heads], the natural log-sum-exp.
    """
    out = jnp.zeros((shape.items, shape.queries, shape.num_q_heads, shape.head_dim), jnp.float32)
    lse = jnp.zeros((shape.items, shape.queries, shape.num_q_heads), jnp.float32)

    def one_item(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        out, lse = results
        item_out, item_lse = _attend_item(shape, pool, inputs, Item(*inputs.items[i]))
        return lax.dynamic_update_index_in_dim(out, item_out, i, 0), lax.dynamic_update_index_in_dim(
            lse, item_lse, i, 0
        )

    results: tuple[Array, Array] = lax.fori_loop(0, inputs.counts[0], one_item, (out, lse))
    return results


def _attend_item(shape: ProgramShape, pool: Pool[Array], inputs: Inputs[Array], item: Item) -> tuple[Array, Array]:
    """Runs the flash loop over the keys of one block of queries."""
    heads, group = shape.num_kv_heads, shape.num_q_heads // shape.num_kv_heads
    columns = shape.queries * group
    q = lax.dynamic_slice_in_dim(inputs.q, item.q_row, shape.queries, 0)
    q = q.reshape(shape.queries, heads, group, shape.head_dim).transpose(1, 0, 2, 3)
    q = q.reshape(heads, columns, shape.head_dim)
    positions = item.position + jnp.arange(columns, dtype=jnp.int32) // group
    window, soft_cap = inputs.counts[1], inputs.soft_cap[0]

    def one_tile(step: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = state
        start = item.start + step * shape.tile
        keys = start + jnp.arange(shape.tile, dtype=jnp.int32)
        # A masked score does not clean a NaN out of the product with v: v itself must be masked.
        readable = (keys < item.end) & (keys > item.position - window)
        k, v, k_scales, v_scales = _load_tile(
            shape, pool, inputs.table, item.slot + step * (shape.tile // shape.page_size)
        )
        v = jnp.where(readable[None, :, None], v, 0.0)
        scores = lax.dot_general(k, q, (((2,), (2,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        if k_scales is not None:
            scores = scores * k_scales
        scores = lax.cond(soft_cap > 0, lambda x: soft_cap * jnp.tanh(x / soft_cap), lambda x: x, scores)
        seen = (keys[:, None] <= positions) & (keys[:, None] > positions - window) & readable[:, None]
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, scores.max(1))
        weights = jnp.exp(scores - new_top[:, None])
        decay = jnp.exp(top - new_top)
        total = total * decay + weights.sum(1)
        if v_scales is not None:
            weights = weights * jnp.where(readable[None, :, None], v_scales, 0.0)
        product = lax.dot_general(weights, v, (((1,), (1,)), ((0,), (0,))), preferred_element_type=jnp.float32)
        return new_top, total, acc * decay[:, :, None] + product

    state = (
        jnp.full((heads, columns), LOWEST, jnp.float32),
        jnp.zeros((heads, columns), jnp.float32),
        jnp.zeros((heads, columns, shape.head_dim), jnp.float32),
    )
    steps = (item.end - item.start + shape.tile - 1) // shape.tile
    top, total, acc = lax.fori_loop(0, steps, one_tile, state)
    # A block may hold queries that see none of the keys of this item: their weight in the merge is exp(-inf).
    out = acc / jnp.where(total > 0, total, 1.0)[:, :, None]
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    out = out.reshape(heads, shape.queries, group, shape.head_dim).transpose(1, 0, 2, 3)
    lse = lse.reshape(heads, shape.queries, group).transpose(1, 0, 2)
    return (
        out.reshape(shape.queries, shape.num_q_heads, shape.head_dim),
        lse.reshape(shape.queries, shape.num_q_heads),
    )


def _load_tile(
    shape: ProgramShape, pool: Pool[Array], table: Array, slot: Array
) -> tuple[Array, Array, Array | None, Array | None]:
    """Gathers the bits of one tile's pages, then widens them to [num_kv_heads, tile, head_dim]."""
    pages = lax.dynamic_slice_in_dim(table, slot, shape.tile // shape.page_size, 0)
    heads = (shape.num_kv_heads, shape.tile)
    if shape.layout is Layout.INTERLEAVED:
        kv = jnp.take(pool.kv, pages, axis=0, mode="clip")
        kv = kv.reshape(shape.tile, shape.num_kv_heads, 2, shape.head_dim).transpose(2, 1, 0, 3)
        kv = widen(kv, shape.dtype)
        return kv[0], kv[1], None, None
    kv = widen(jnp.take(pool.kv, pages, axis=2, mode="clip"), shape.dtype)
    kv = kv.reshape(2, *heads, shape.head_dim)
    if not shape.scaled:
        return kv[0], kv[1], None, None
    scales = jnp.take(pool.scales, pages, axis=2, mode="clip").reshape(2, *heads, 1) / INT8_SCALE
    return kv[0], kv[1], scales[0], scales[1]
