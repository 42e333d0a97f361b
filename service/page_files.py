"""Pages to files and back: which pages lie in which file, and what of a file can be believed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import safetensors.numpy
from jaxtyping import Bool, Float32, Int32, Shaped
from safetensors import SafetensorError

from attnd.kernels.contract import CacheSpec, Layout
from attnd.service.manifest import PageFile, SaveId, header_checksum, page_checksums

FILE_BYTES: Final = 16 << 20
"""About how large a file of pages is: what a save or restore holds in memory at a time, two or three times over."""

_LENGTH_BYTES: Final = 8  # of a safetensors container: the length of its header, which follows
_PAGES: Final = "kv_pages"
_SCALES: Final = "scales"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """Pages that one file holds.

    Attributes:
        layers: The layers.
        pages: int32. The pages' ids.
    """

    layers: range
    pages: Int32[np.ndarray, " n"]


@dataclass(frozen=True, slots=True, eq=False)
class LayerPages:
    """Pages of one layer, as an implementation's `read` gives and its `write` takes them.

    Attributes:
        kv_pages: `spec.pages_shape(n)`, in the cache's dtype.
        scales: `spec.scales_shape(n)` if `spec.quantized_per_token`.
    """

    kv_pages: Shaped[np.ndarray, "..."]
    scales: Float32[np.ndarray, "..."] | None

    @property
    def size_bytes(self) -> int:
        """Bytes of pages and scales."""
        return self.kv_pages.nbytes + (0 if self.scales is None else self.scales.nbytes)


def page_bytes(spec: CacheSpec) -> int:
    """Returns the bytes of a page of one layer, its scales included."""
    scales_bytes = math.prod(spec.scales_shape(1)) * 4 if spec.quantized_per_token else 0
    return math.prod(spec.pages_shape(1)) * spec.dtype.itemsize + scales_bytes


def parts(spec: CacheSpec, pages: Int32[np.ndarray, " n"], file_bytes: int) -> Iterator[Part]:
    """Cuts the pages of a cache into what goes into one file: as many layers of a page together as fit."""
    num_layers = min(max(file_bytes // page_bytes(spec), 1), spec.num_layers)
    num_pages = max(file_bytes // (page_bytes(spec) * num_layers), 1)
    for start in range(0, len(pages), num_pages):
        for layer in range(0, spec.num_layers, num_layers):
            layers = range(layer, min(layer + num_layers, spec.num_layers))
            yield Part(layers=layers, pages=pages[start : start + num_pages])


def encode(save: SaveId, spec: CacheSpec, name: str, part: Part, layers: list[LayerPages]) -> tuple[bytes, PageFile]:
    """Returns what a file holds, and what the manifest says of it.

    Args:
        save: The save.
        spec: Shape of the cache.
        name: Name of the file.
        part: Which pages it holds.
        layers: What they hold, for each layer of the part.
    """
    axis = _pages_axis(spec)
    bits = _bits_dtype(spec)
    # A page after the other, each over all layers, so that a checksum covers bytes that lie together.
    arrays = {_PAGES: np.stack([np.moveaxis(each.kv_pages, axis, 0) for each in layers], 1).view(bits)}
    if spec.quantized_per_token:
        scales = [each.scales for each in layers if each.scales is not None]
        arrays[_SCALES] = np.stack([np.moveaxis(each, axis, 0) for each in scales], 1)
    arrays = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
    data = safetensors.numpy.save(arrays)
    pages = tuple(part.pages.tolist())
    return data, PageFile(
        name=name,
        size_bytes=len(data),
        header_checksum=header_checksum(_header(data)),
        first_layer=part.layers.start,
        end_layer=part.layers.stop,
        pages=pages,
        checksums=page_checksums(save, part.layers, pages, list(arrays.values())),
    )


def decode(
    save: SaveId, spec: CacheSpec, file: PageFile, data: bytes | None
) -> tuple[list[LayerPages], Bool[np.ndarray, " n"]]:
    """Returns the pages of a file, a `LayerPages` for each of its layers, and which of them are what was written.

    Args:
        save: The save.
        spec: Shape of the cache.
        file: What the manifest says of the file.
        data: What the file holds; None if it cannot be read.
    """
    layers = range(file.first_layer, file.end_layer)
    arrays = None if data is None else _arrays(spec, file, data)
    if arrays is None:
        return [], np.zeros(len(file.pages), bool)
    found = page_checksums(save, layers, file.pages, arrays)
    whole = np.array([one == other for one, other in zip(found, file.checksums, strict=True)], bool)
    kv_pages = arrays[0].view(spec.dtype)
    scales = arrays[1] if spec.quantized_per_token else None
    axis = _pages_axis(spec)
    return [
        LayerPages(
            kv_pages=np.moveaxis(kv_pages[:, i], 0, axis),
            scales=None if scales is None else np.moveaxis(scales[:, i], 0, axis),
        )
        for i in range(len(layers))
    ], whole


def select(spec: CacheSpec, layer: LayerPages, which: Shaped[np.ndarray, " n"]) -> LayerPages:
    """Returns some of the pages of a layer, contiguous, as `write` takes them."""
    axis = _pages_axis(spec)

    def some(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.compress(which, array, axis))

    return LayerPages(kv_pages=some(layer.kv_pages), scales=None if layer.scales is None else some(layer.scales))


def put(spec: CacheSpec, layer: LayerPages, place: int, page: LayerPages) -> None:
    """Overwrites one of the pages of a layer, in place."""
    index = (slice(None),) * _pages_axis(spec) + (slice(place, place + 1),)
    layer.kv_pages[index] = page.kv_pages
    if layer.scales is not None:
        layer.scales[index] = page.scales


def _arrays(spec: CacheSpec, file: PageFile, data: bytes) -> list[np.ndarray] | None:
    """Returns the arrays of a container, page by page; None if it is not the one that was written."""
    if len(data) != file.size_bytes or header_checksum(_header(data)) != file.header_checksum:
        return None
    try:
        arrays = safetensors.numpy.load(data)
    except SafetensorError:
        return None
    return [arrays[_PAGES], arrays[_SCALES]] if spec.quantized_per_token else [arrays[_PAGES]]


def _header(data: bytes) -> bytes:
    return data[: _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")]


def _pages_axis(spec: CacheSpec) -> int:
    return 0 if spec.layout is Layout.INTERLEAVED else 2


def _bits_dtype(spec: CacheSpec) -> np.dtype:
    # A container knows no float8, and NumPy no bfloat16: the bits say it all.
    return np.dtype(f"uint{8 * spec.dtype.itemsize}")
