"""Tokens that can be told apart: each has a number, and its key and value in each layer are numbers made of it."""

import numpy as np

from attnd.kernels.contract import CacheSpec, Layout
from attnd.kernels.host_pages import HostPages

NUMBERS_MAX = 2**24


class Codec:
    """Writes tokens as keys and values of a cache that are exact in its dtype, and reads pages as numbers.

    The number of token `id` in a layer is `2 * (id * num_layers + layer)` for its key and one more for its value: no
    two tokens, layers or halves have the same. Ids begin at 1, so that a zero is no token.
    """

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._dtype = np.dtype(np.float32) if spec.quantized_per_token else spec.dtype
        base = round(NUMBERS_MAX ** (1 / spec.head_dim))
        self._weights = base ** np.arange(spec.head_dim, dtype=np.int64)
        self._base = base

    @property
    def id_max(self) -> int:
        """The last token that has a number."""
        return NUMBERS_MAX // (2 * self._spec.num_layers) - 1

    def numbers(self, ids: list[int], layer: int) -> np.ndarray:
        """Returns int64 [n, 2]: the numbers of keys and values."""
        keys = (np.array(ids, np.int64) * self._spec.num_layers + layer) * 2
        return np.stack([keys, keys + 1], axis=1)

    def values(self, ids: list[int], layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns k and v, each [n, 1, head_dim]."""
        digits = self.numbers(ids, layer)[:, :, np.newaxis] // self._weights % self._base
        k_and_v = digits.astype(self._dtype)
        return k_and_v[:, np.newaxis, 0], k_and_v[:, np.newaxis, 1]

    def held(self, pages: HostPages, layer: int, table: np.ndarray | None = None) -> np.ndarray:
        """Returns float64 [n, page_size, 2]: the numbers that pages hold; all pages unless `table` names some."""
        bits, scales = pages.bits[layer], pages.scales[layer] if pages.scales else None
        if self._spec.layout is Layout.INTERLEAVED:
            kept = bits if table is None else bits[table]
            return self._read(kept.view(self._spec.dtype))
        bits = bits[:, 0] if table is None else bits[:, 0, table]
        if scales is None:
            return np.moveaxis(self._read(bits.view(self._spec.dtype)), 0, -1)
        scales = scales[:, 0] if table is None else scales[:, 0, table]
        return np.moveaxis((scales * (bits.view(np.int8) == np.iinfo(np.int8).max))[..., 0], 0, -1)

    def _read(self, digits: np.ndarray) -> np.ndarray:
        return digits.astype(np.float64) @ self._weights
