"""Pages that NumPy owns: the storage of the implementations that run on the host."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float32, Int32, Shaped

from attnd.kernels.contract import CacheSpec, Layout, RaggedBatch
from attnd.kernels.quantization import quantize_int8

# JAX aliases host memory of this alignment; of any other it makes a copy.
ALIGNMENT_BYTES: Final = 64
# Narrow floats are kept as their bits: copying bits is cheap in NumPy, and XLA:CPU converts a whole array of a narrow
# float type to float32 before it reads one page of it.
_BITS: Final[Mapping[int, np.dtype[Any]]] = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16), 4: np.dtype(np.float32)}


def aligned_zeros(shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
    """Returns zeros at an address that JAX can alias. Every byte is written, so that no call pays for page faults."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    aligned = memory[start : start + size_bytes]
    aligned.fill(0)
    return aligned.view(dtype).reshape(shape)


def bits_of(values: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
    """Returns a view of the values' bits: unsigned integers, or float32 as it is."""
    return values.view(bits_dtype(values.dtype))


def bits_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in which values of `dtype` are stored."""
    return _BITS[dtype.itemsize]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPages:
    """The pages of one cache.

    Attributes:
        spec: Shape of the cache.
        bits: For each layer, the bits of its pages, of shape `spec.layer_shape`.
        scales: For each layer, `spec.scales_shape(num_pages)` float32; empty unless `spec.quantized_per_token`.
    """

    spec: CacheSpec
    bits: tuple[Shaped[np.ndarray, "..."], ...]
    scales: tuple[Float32[np.ndarray, "..."], ...]

    @classmethod
    def zeros(cls, spec: CacheSpec) -> "HostPages":
        """Returns pages of zeros, aligned and touched."""
        layers = range(spec.num_layers)
        scales_shape = spec.scales_shape(spec.num_pages)
        return cls(
            spec=spec,
            bits=tuple(aligned_zeros(spec.layer_shape, bits_dtype(spec.dtype)) for _ in layers),
            scales=tuple(aligned_zeros(scales_shape, np.dtype(np.float32)) for _ in layers)
            if spec.quantized_per_token
            else (),
        )

    def write(
        self,
        layer: int,
        page_indices: Int32[np.ndarray, " n"],
        kv_pages: Shaped[np.ndarray, "..."],
        scales: Float32[np.ndarray, "..."] | None,
    ) -> None:
        """Overwrites whole pages of a layer."""
        if self.spec.layout is Layout.INTERLEAVED:
            self.bits[layer][page_indices] = bits_of(kv_pages)
            return
        self.bits[layer][:, :, page_indices] = bits_of(kv_pages)
        if self.scales:
            self.scales[layer][:, :, page_indices] = scales

    def read(
        self, layer: int, page_indices: Int32[np.ndarray, " n"]
    ) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """Returns copies of whole pages of a layer, and their scales."""
        axis = 0 if self.spec.layout is Layout.INTERLEAVED else 2
        kv_pages = np.take(self.bits[layer], page_indices, axis).view(self.spec.dtype)
        return kv_pages, np.take(self.scales[layer], page_indices, axis) if self.scales else None

    def clear(self, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Zeroes pages in every layer."""
        for bits in self.bits:
            if self.spec.layout is Layout.INTERLEAVED:
                bits[page_indices] = 0
            else:
                bits[:, :, page_indices] = 0
        for scales in self.scales:
            scales[:, :, page_indices] = 0

    def copy(self, sources: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, " n"]) -> None:
        """Copies pages over others in every layer."""
        for bits in (*self.bits, *self.scales):
            if self.spec.layout is Layout.INTERLEAVED:
                bits[targets] = bits[sources]
            else:
                bits[:, :, targets] = bits[:, :, sources]

    def append(
        self,
        layer: int,
        batch: RaggedBatch,
        k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"],
        v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"],
    ) -> None:
        """Writes the new tokens of a batch to their slots; its time does not depend on the number of pages."""
        page, offset = batch.token_slots(self.spec.page_size)
        for which, values in enumerate((k[: batch.num_tokens], v[: batch.num_tokens])):
            if self.spec.layout is Layout.INTERLEAVED:
                self.bits[layer][page, offset, which::2] = bits_of(values)
                continue
            if self.scales:
                values, scales = quantize_int8(values)  # noqa: PLW2901 - the same tokens, narrower
                self.scales[layer][which, :, page, offset] = scales
            self.bits[layer][which, :, page, offset] = bits_of(values)
