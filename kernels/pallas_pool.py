"""The pages of a cache in a TPU's memory, a donated array for each layer, as our kernels take them.

Both kernels see a page as rows (token, kv head, k or v) of whole vectors of 128 lanes. So the pool keeps the heads of
the cache padded to a power of two and head_dim padded to a multiple of 128 (memory of a TPU is tiled so anyway); what
pads is zero and stays so. A cache of layout SPLIT is kept in the same form.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int32, Shaped

from attnd.kernels.contract import CacheSpec, Layout, RaggedBatch
from attnd.kernels.pallas_put import put_pieces, put_tokens, scatters_in_place
from attnd.kernels.tpu_chips import LANES

# Programs that write, read and clear pages exist for these many at a time.
PAGE_BUCKETS: Final = (1, 8, 64)
TOKEN_BUCKETS: Final = (8, 64, 512)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolShape:
    """How a cache's pages lie in a pool."""

    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype

    @classmethod
    def of(cls, spec: CacheSpec) -> "PoolShape":
        """Returns the shape of a layer's pool."""
        return cls(
            num_pages=spec.num_pages,
            page_size=spec.page_size,
            num_kv_heads=1 << (spec.num_kv_heads - 1).bit_length(),
            head_dim=-(-spec.head_dim // LANES) * LANES,
            dtype=spec.dtype,
        )

    @property
    def array_shape(self) -> tuple[int, int, int]:
        """Shape of the array."""
        return (self.num_pages, self.page_size * 2 * self.num_kv_heads, self.head_dim)

    @property
    def size_bytes(self) -> int:
        """Bytes of a layer."""
        return math.prod(self.array_shape) * self.dtype.itemsize


@dataclass(slots=True, kw_only=True)
class PallasPages:
    """The pages of one cache. Each layer's array is donated to what changes it, and replaced by the result.

    Attributes:
        spec: Shape of the cache.
        pools: For each layer, an array of `PoolShape.array_shape`.
    """

    spec: CacheSpec
    pools: list[jax.Array] = field(repr=False)


class PageMover:
    """Writes, reads and clears pages on a device, by programs of a few sizes."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._write = jax.jit(write_pages, static_argnums=0, donate_argnums=1)
        self._read = jax.jit(read_pages, static_argnums=0)
        self._clear = jax.jit(clear_pages, donate_argnums=0)
        self._copy = jax.jit(copy_pages, donate_argnums=0)
        self._append = jax.jit(append_tokens, static_argnums=0, donate_argnums=1)

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled so far."""
        programs: tuple[Any, ...] = (self._write, self._read, self._clear, self._copy, self._append)
        return sum(program._cache_size() for program in programs)  # noqa: SLF001 - JAX has no other count

    def allocate(self, spec: CacheSpec) -> PallasPages:
        """Returns zeroed pages."""
        shape = PoolShape.of(spec)
        with jax.default_device(self._device):
            pools = [jnp.zeros(shape.array_shape, shape.dtype) for _ in range(spec.num_layers)]
        for pool in pools:
            pool.block_until_ready()
        return PallasPages(spec=spec, pools=pools)

    def write(
        self, pages: PallasPages, layer: int, page_indices: Int32[np.ndarray, " n"], kv_pages: Shaped[np.ndarray, "..."]
    ) -> None:
        """Overwrites whole pages of a layer."""
        axis = _pages_axis(pages.spec)

        def write(indices: np.ndarray, part: slice) -> None:
            values = kv_pages[(slice(None),) * axis + (part,)]
            padding = [(0, len(indices) - values.shape[axis] if i == axis else 0) for i in range(values.ndim)]
            pages.pools[layer] = self._write(pages.spec, pages.pools[layer], indices, np.pad(values, padding))

        in_buckets(page_indices, pages.spec.num_pages, PAGE_BUCKETS, write)

    def read(self, pages: PallasPages, layer: int, page_indices: Int32[np.ndarray, " n"]) -> Shaped[np.ndarray, "..."]:
        """Returns copies of whole pages of a layer, as `spec.pages_shape` has them."""
        axis = _pages_axis(pages.spec)
        values = np.empty(pages.spec.pages_shape(len(page_indices)), pages.spec.dtype)

        def read(indices: np.ndarray, part: slice) -> None:
            read = np.asarray(self._read(pages.spec, pages.pools[layer], indices))
            target = values[(slice(None),) * axis + (part,)]
            target[...] = np.take(read, np.arange(target.shape[axis]), axis)

        in_buckets(page_indices, 0, PAGE_BUCKETS, read)
        return values

    def clear(self, pages: PallasPages, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Zeroes pages in every layer."""
        for layer in range(len(pages.pools)):

            def clear(indices: np.ndarray, _: slice, layer: int = layer) -> None:
                pages.pools[layer] = self._clear(pages.pools[layer], indices)

            in_buckets(page_indices, pages.spec.num_pages, PAGE_BUCKETS, clear)

    def copy(self, pages: PallasPages, sources: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, " n"]) -> None:
        """Copies pages over others in every layer."""
        for layer in range(len(pages.pools)):

            def copy(indices: np.ndarray, part: slice, layer: int = layer) -> None:
                originals = np.zeros(len(indices), np.int32)
                originals[: part.stop - part.start] = sources[part]
                pages.pools[layer] = self._copy(pages.pools[layer], originals, indices)

            in_buckets(targets, pages.spec.num_pages, PAGE_BUCKETS, copy)

    def append(
        self,
        pages: PallasPages,
        layer: int,
        batch: RaggedBatch,
        k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"],
        v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"],
    ) -> None:
        """Writes the new tokens of a batch to their slots."""
        page, offset = batch.token_slots(pages.spec.page_size)
        kv = np.stack([k[: batch.num_tokens], v[: batch.num_tokens]], 2)

        def append(indices: np.ndarray, part: slice) -> None:
            offsets = np.zeros(len(indices), np.int32)
            offsets[: part.stop - part.start] = offset[part]
            padding = [(0, len(offsets) - (part.stop - part.start)), (0, 0), (0, 0), (0, 0)]
            values = np.pad(kv[part], padding)
            pages.pools[layer] = self._append(pages.spec, pages.pools[layer], indices, offsets, values)

        in_buckets(page, pages.spec.num_pages, TOKEN_BUCKETS, append)


def padded_heads(spec: CacheSpec, values: jax.Array, axis: int) -> jax.Array:
    """Pads the kv heads on an axis, and head_dim on the last one, with zeros, to those of the pool."""
    shape = PoolShape.of(spec)
    padding = [(0, 0)] * values.ndim
    padding[axis] = (0, shape.num_kv_heads - spec.num_kv_heads)
    padding[-1] = (0, shape.head_dim - spec.head_dim)
    return jnp.pad(values, padding)


def in_buckets(
    page_indices: np.ndarray, filler: int, buckets: tuple[int, ...], act: Callable[[np.ndarray, slice], None]
) -> None:
    """Acts on pages by groups whose sizes are buckets; a filler makes the last group whole.

    `act` takes the page ids of a group, filled up, and which of `page_indices` they are.
    """
    start = 0
    while start < len(page_indices):
        left = len(page_indices) - start
        size = next((bucket for bucket in buckets if bucket >= left), buckets[-1])
        part = slice(start, min(start + size, len(page_indices)))
        indices = np.full(size, filler, np.int32)
        indices[: part.stop - start] = page_indices[part]
        act(indices, part)
        start += size


def _pages_axis(spec: CacheSpec) -> int:
    return 0 if spec.layout is Layout.INTERLEAVED else 2


def moved(
    move: Callable[..., jax.Array], *arrays: jax.Array, on_tpu: Callable[..., jax.Array] | None = None
) -> jax.Array:
    """Returns `move` of arrays of one dtype, of which it moves values only: no bit changes, and a donated pool stays.

    A CPU has no float8: it would widen the whole pool and give NaNs back as others, so there it is bits that move. A
    TPU could not do that in place.

    Args:
        move: What to do.
        arrays: Its arguments.
        on_tpu: Does the same, where a TPU would copy the pool for `move`.
    """

    def as_bits(*arrays: jax.Array) -> jax.Array:
        dtype = arrays[0].dtype
        bits = [lax.bitcast_convert_type(array, f"uint{8 * dtype.itemsize}") for array in arrays]
        return lax.bitcast_convert_type(move(*bits), dtype)

    result: jax.Array = lax.platform_dependent(*arrays, cpu=as_bits, default=on_tpu or move)
    return result


def set_pages(
    pool: Shaped[jax.Array, "pages page_rows lanes"],
    page_indices: Int32[jax.Array, " n"],
    values: Shaped[jax.Array, "..."],
    lay_out: Callable[[jax.Array], jax.Array] = lambda values: values,
) -> Shaped[jax.Array, "pages page_rows lanes"]:
    """Returns the pool with other pages; indices past its end write nothing.

    Args:
        pool: The pool.
        page_indices: Which pages.
        values: The pages, one for all or one for each index.
        lay_out: Makes [n, page_rows, lanes] of them. It moves values, too: see `moved`.
    """

    def scatter(pool: jax.Array, values: jax.Array) -> jax.Array:
        return pool.at[page_indices].set(lay_out(values), mode="drop")

    def put(pool: jax.Array, values: jax.Array) -> jax.Array:
        return put_pieces(pool, page_indices, jnp.zeros_like(page_indices), lay_out(values))

    return moved(scatter, pool, values, on_tpu=None if scatters_in_place(pool.dtype, pool.shape[-1]) else put)


def set_tokens(
    pool: Shaped[jax.Array, "pages page_rows lanes"],
    page: Int32[jax.Array, " tokens"],
    offset: Int32[jax.Array, " tokens"],
    values: Shaped[jax.Array, "..."],
    lay_out: Callable[[jax.Array], jax.Array],
) -> Shaped[jax.Array, "pages page_rows lanes"]:
    """Returns the pool with new tokens, of which `lay_out` makes [tokens, rows, lanes]; pages past its end get none."""

    def scatter(pool: jax.Array, values: jax.Array) -> jax.Array:
        tokens = lay_out(values)
        places = pool.reshape(pool.shape[0], -1, *tokens.shape[1:])
        return places.at[page, offset].set(tokens, mode="drop").reshape(pool.shape)

    def put(pool: jax.Array, values: jax.Array) -> jax.Array:
        return put_tokens(pool, page, offset, lay_out(values))

    return moved(scatter, pool, values, on_tpu=None if scatters_in_place(pool.dtype, pool.shape[-1]) else put)


def write_pages(spec: CacheSpec, pool: jax.Array, page_indices: jax.Array, kv_pages: jax.Array) -> jax.Array:
    """Returns the pool with other pages; indices past its end write nothing."""

    def lay_out(kv: jax.Array) -> jax.Array:
        if spec.layout is Layout.INTERLEAVED:
            kv = kv.reshape(*kv.shape[:2], spec.num_kv_heads, 2, spec.head_dim)
        else:
            kv = kv.transpose(2, 3, 1, 0, 4)
        return padded_heads(spec, kv, 2).reshape(len(page_indices), *pool.shape[1:])

    return set_pages(pool, page_indices, kv_pages, lay_out)


def read_pages(spec: CacheSpec, pool: jax.Array, page_indices: jax.Array) -> jax.Array:
    """Returns pages, shaped as callers know them."""
    shape = PoolShape.of(spec)

    def read(pool: jax.Array) -> jax.Array:
        kv = pool[page_indices].reshape(-1, spec.page_size, shape.num_kv_heads, 2, shape.head_dim)
        kv = kv[:, :, : spec.num_kv_heads, :, : spec.head_dim]
        if spec.layout is Layout.INTERLEAVED:
            return kv.reshape(spec.pages_shape(len(page_indices)))
        return kv.transpose(3, 2, 0, 1, 4)

    return moved(read, pool)


def clear_pages(pool: jax.Array, page_indices: jax.Array) -> jax.Array:
    """Returns the pool with zeroed pages; indices past its end write nothing."""
    return set_pages(pool, page_indices, jnp.zeros((1, *pool.shape[1:]), pool.dtype))


def copy_pages(pool: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the pool with pages copied over others; targets past its end get none."""
    return set_pages(pool, targets, moved(lambda pool: pool[sources], pool))


def append_tokens(spec: CacheSpec, pool: jax.Array, page: jax.Array, offset: jax.Array, kv: jax.Array) -> jax.Array:
    """Returns the pool with new tokens; pages past its end get none."""

    def lay_out(kv: jax.Array) -> jax.Array:
        return padded_heads(spec, kv, 1).reshape(len(page), -1, pool.shape[-1])

    return set_tokens(pool, page, offset, kv, lay_out)
