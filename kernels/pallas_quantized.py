"""int8 caches of layout SPLIT, with a scale for each token and head, for our split decode kernel.

A query token is a row of its own, which sees the tokens up to its position: right for prompts, too, if not fast.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped

from attnd.kernels.contract import CacheSpec, RaggedBatch
from attnd.kernels.pallas_pool import PAGE_BUCKETS, TOKEN_BUCKETS, in_buckets, set_pages, set_tokens
from attnd.kernels.quantization import quantize_int8
from attnd.kernels.tpu_chips import LANES


@dataclass(slots=True, kw_only=True)
class QuantizedPages:
    """The pages of one cache. Each array is donated to what changes it, and replaced by the result.

    Attributes:
        spec: Shape of the cache.
        weights: For each layer, K and V: int8 [num_kv_heads, num_pages, page_size, lanes], zero past head_dim.
        scales: For each layer, those of K and V: float32 [num_pages, num_kv_heads * page_size].
    """

    spec: CacheSpec
    weights: list[list[jax.Array]] = field(repr=False)
    scales: list[list[jax.Array]] = field(repr=False)

    def layer(self, layer: int) -> tuple[jax.Array, ...]:
        """Returns keys, values, and their scales."""
        return (*self.weights[layer], *self.scales[layer])


def array_shapes(spec: CacheSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shapes of a layer's K or V, and of their scales."""
    weights = (spec.num_kv_heads, spec.num_pages, spec.page_size, -(-spec.head_dim // LANES) * LANES)
    return weights, (spec.num_pages, spec.num_kv_heads * spec.page_size)


class QuantizedMover:
    """Writes, reads and clears pages on a device, by programs of a few sizes."""

    def __init__(self, device: jax.Device) -> None:
        self._device = device
        self._set_pages = jax.jit(set_quantized_pages, donate_argnums=(0, 1))
        self._set_tokens = jax.jit(set_quantized_tokens, donate_argnums=(0, 1))

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled so far."""
        programs: tuple[Any, ...] = (self._set_pages, self._set_tokens)
        return sum(program._cache_size() for program in programs)  # noqa: SLF001 - JAX has no other count

    def allocate(self, spec: CacheSpec) -> QuantizedPages:
        """Returns zeroed pages."""
        weights, scales = array_shapes(spec)
        with jax.default_device(self._device):
            return QuantizedPages(
                spec=spec,
                weights=[[jnp.zeros(weights, jnp.int8) for _ in "kv"] for _ in range(spec.num_layers)],
                scales=[[jnp.zeros(scales, jnp.float32) for _ in "kv"] for _ in range(spec.num_layers)],
            )

    def write(
        self,
        pages: QuantizedPages,
        layer: int,
        page_indices: Int32[np.ndarray, " n"],
        kv_pages: Shaped[np.ndarray, "2 num_kv_heads n page_size head_dim"],
        scales: Float32[np.ndarray, "2 num_kv_heads n page_size 1"],
    ) -> None:
        """Overwrites whole pages of a layer."""

        def write(indices: np.ndarray, part: slice) -> None:
            for which in (0, 1):
                new, new_scales = (_filled(each[which][:, part], len(indices), 1) for each in (kv_pages, scales))
                self._set(self._set_pages, pages, layer, which, (indices,), new, new_scales)

        in_buckets(page_indices, pages.spec.num_pages, PAGE_BUCKETS, write)

    def read(
        self, pages: QuantizedPages, layer: int, page_indices: Int32[np.ndarray, " n"]
    ) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."]]:
        """Returns copies of whole pages of a layer, and their scales."""
        spec, n = pages.spec, len(page_indices)
        weights = [np.asarray(jnp.take(array, page_indices, 1)) for array in pages.weights[layer]]
        rows = [np.asarray(jnp.take(array, page_indices, 0)) for array in pages.scales[layer]]
        scales = [row.reshape(n, spec.num_kv_heads, spec.page_size, 1).swapaxes(0, 1) for row in rows]
        return np.stack(weights)[..., : spec.head_dim].copy(), np.stack(scales)

    def clear(self, pages: QuantizedPages, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Zeroes pages in every layer."""
        spec = pages.spec
        zeros = np.zeros(spec.pages_shape(len(page_indices)), np.int8)
        for layer in range(spec.num_layers):
            self.write(pages, layer, page_indices, zeros, np.zeros(spec.scales_shape(len(page_indices)), np.float32))

    def copy(self, pages: QuantizedPages, sources: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, " n"]) -> None:
        """Copies pages over others in every layer."""
        for layer in range(pages.spec.num_layers):
            self.write(pages, layer, targets, *self.read(pages, layer, sources))

    def append(
        self,
        pages: QuantizedPages,
        layer: int,
        batch: RaggedBatch,
        k: Float[np.ndarray, "tokens num_kv_heads head_dim"],
        v: Float[np.ndarray, "tokens num_kv_heads head_dim"],
    ) -> None:
        """Quantizes the new tokens of a batch and writes them to their slots."""
        page, offset = batch.token_slots(pages.spec.page_size)
        for which, new in enumerate((k, v)):
            weights, scales = quantize_int8(new[: batch.num_tokens])

            def append(
                indices: np.ndarray, part: slice, which: int = which, weights: Any = weights, scales: Any = scales
            ) -> None:
                places = (indices, _filled(offset[part], len(indices), 0))
                self._set(
                    self._set_tokens, pages, layer, which, places,
                    _filled(weights[part], len(indices), 0), _filled(scales[part], len(indices), 0),
                )  # fmt: skip

            in_buckets(page, pages.spec.num_pages, TOKEN_BUCKETS, append)

    @staticmethod
    def _set(
        program: Callable[..., Any],
        pages: QuantizedPages,
        layer: int,
        which: int,
        places: Any,
        new: Any,
        new_scales: Any,
    ) -> None:
        """Runs a program that changes one of K and V, and its scales."""
        weights, scales = pages.weights[layer], pages.scales[layer]
        weights[which], scales[which] = program(weights[which], scales[which], places, new, new_scales)


def rows_of_tokens(batch: RaggedBatch) -> RaggedBatch:
    """Makes a row of each query token."""
    return RaggedBatch(
        kv_lens=batch.token_positions + np.int32(1),
        page_indices=batch.page_indices[batch.token_seqs],
        cu_q_lens=np.arange(batch.num_tokens + 1, dtype=np.int32),
    )


def _filled(values: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Pads an axis with zeros."""
    return np.pad(values, [(0, size - values.shape[axis] if i == axis else 0) for i in range(values.ndim)])


def set_quantized_pages(
    weights: Any, scales: Any, places: Any, new: Any, new_scales: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the arrays with other pages; page ids past the end write nothing."""
    (page,) = places
    rows = new_scales[..., 0].swapaxes(0, 1).reshape(len(page), -1)
    pool = weights.reshape(-1, *weights.shape[2:])
    pool = set_pages(pool, _pages_of_heads(weights, page), _lanes(new, weights).reshape(-1, *pool.shape[1:]))
    return pool.reshape(weights.shape), scales.at[page].set(rows, mode="drop")


def set_quantized_tokens(
    weights: Any, scales: Any, places: Any, new: Any, new_scales: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the arrays with new tokens; page ids past the end write nothing."""
    page, offset = places
    column = jnp.arange(weights.shape[0]) * weights.shape[2] + offset[:, None]
    scales = scales.at[page[:, None], column].set(new_scales[..., 0], mode="drop")
    pool = weights.reshape(-1, *weights.shape[2:])

    def lay_out(new: jax.Array) -> jax.Array:
        return _lanes(new, weights).swapaxes(0, 1).reshape(-1, 1, weights.shape[-1])

    pool = set_tokens(pool, _pages_of_heads(weights, page), jnp.tile(offset, weights.shape[0]), new, lay_out)
    return pool.reshape(weights.shape), scales


def _pages_of_heads(weights: Any, page: Any) -> jax.Array:
    """Returns the pages of each head among those of all heads, one after another; a page past the end is past all."""
    heads, num_pages = weights.shape[:2]
    pages = jnp.arange(heads, dtype=jnp.int32)[:, None] * num_pages + page
    return jnp.where(page < num_pages, pages, heads * num_pages).reshape(-1)


def _lanes(new: Any, weights: Any) -> jax.Array:
    return jnp.pad(new, [*[(0, 0)] * (new.ndim - 1), (0, weights.shape[-1] - new.shape[-1])])
