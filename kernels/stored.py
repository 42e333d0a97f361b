"""What keys and values become when a cache stores them."""

from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Shaped

from attnd.kernels.contract import CacheSpec, Implementation, Layout, RaggedBatch
from attnd.kernels.quantization import quantize_int8


def stored(
    spec: CacheSpec,
    values: Shaped[np.ndarray, "*tokens head_dim"],
    scales: Float32[np.ndarray, "*tokens 1"] | None = None,
) -> tuple[Shaped[np.ndarray, "*tokens head_dim"], Float32[np.ndarray, "*tokens 1"] | None]:
    """Returns values as a cache keeps them, and their scales if it is quantized per token.

    Args:
        spec: Shape of the cache.
        values: Pages or tokens, of any dtype that may be cast to the cache's.
        scales: Scales of values that are quantized already.
    """
    if spec.quantized_per_token and values.dtype != spec.dtype:
        return quantize_int8(values)
    cast: np.ndarray = values.astype(spec.dtype, copy=False)
    return cast, scales


def poison(implementation: Implementation[Any], pages: Any, page: int) -> None:
    """Fills a page, in every layer, with NaN; with its scales NaN, or the lowest integer, where there is none."""
    spec: CacheSpec = pages.spec
    integers = spec.dtype == np.int8
    kv_pages = np.full(spec.pages_shape(1), np.iinfo(np.int8).min if integers else np.nan, np.float32)
    scales = np.full(spec.scales_shape(1), np.nan, np.float32) if spec.quantized_per_token else None
    for layer in range(spec.num_layers):
        implementation.write(pages, layer, np.array([page], np.int32), kv_pages.astype(spec.dtype), scales)


def first_difference(
    implementation: Implementation[Any],
    pages: Any,
    layer: int,
    batch: RaggedBatch,
    which: Int[np.ndarray, " n"],
    k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"],
    v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"],
) -> int | None:
    """Returns the first of the tokens `which` whose stored bits are not those that writing k, v would give."""
    spec: CacheSpec = pages.spec
    page, offset = batch.token_slots(spec.page_size)
    distinct, index = np.unique(page[which], return_inverse=True)
    kv_pages, scales = implementation.read(pages, layer, distinct)
    for held, brought in ((0, k), (1, v)):
        tokens, token_scales = stored(spec, brought[which])
        same = _equal_bits(_slots(spec, kv_pages, held, index, offset[which]), tokens)
        if scales is not None and token_scales is not None:
            same &= _equal_bits(_slots(spec, scales, held, index, offset[which]), token_scales)
        if not same.all():
            return int(which[np.argmin(same)])
    return None


def _slots(
    spec: CacheSpec,
    pages: Shaped[np.ndarray, "..."],
    held: int,
    page: Int[np.ndarray, " n"],
    offset: Int[np.ndarray, " n"],
) -> Shaped[np.ndarray, "n num_kv_heads _"]:
    if spec.layout is Layout.INTERLEAVED:
        interleaved: np.ndarray = pages[page, offset, held::2]
        return interleaved
    split: np.ndarray = pages[held][:, page, offset]
    return split.swapaxes(0, 1)


def _equal_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    bits_a, bits_b = (np.ascontiguousarray(x).view(np.uint8).reshape(len(x), -1) for x in (a, b))
    equal: np.ndarray = (bits_a == bits_b).all(axis=1)
    return equal
