"""int8 with one float32 scale for each token and head, as JAX's decode kernel stores it."""

from typing import Final

import numpy as np
from jaxtyping import Float, Float32, Int8

from attnd.kernels.contract import INT8_SCALE

INT8_MIN: Final = -128.0
INT8_MAX: Final = 127.0


def quantize_int8(
    values: Float[np.ndarray, "*tokens head_dim"],
) -> tuple[Int8[np.ndarray, "*tokens head_dim"], Float32[np.ndarray, "*tokens 1"]]:
    """Quantizes finite values: `scale = max|x|`, `weight = rint(x * 127.5 / scale)`, saturated to [-128, 127].

    A token of zeros keeps weights and scale of zero. Agrees bit for bit with `quantize_to_int8` of JAX's
    `paged_attention/quantization_utils.py`, except below 4e-37, where the factor overflows float32 there.
    """
    values = np.asarray(values, np.float32)
    scales = np.max(np.abs(values), axis=-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        factors = np.float32(INT8_SCALE) / scales
        weights = np.where(np.isfinite(factors), values * factors, values / scales * np.float32(INT8_SCALE))
    weights = np.where(scales > 0, np.clip(np.rint(weights), INT8_MIN, INT8_MAX), 0)
    return weights.astype(np.int8), scales


def dequantize_int8(
    weights: Int8[np.ndarray, "*tokens head_dim"], scales: Float32[np.ndarray, "*tokens 1"]
) -> Float[np.ndarray, "*tokens head_dim"]:
    """Returns `weight * scale / 127.5`, in float64."""
    values: np.ndarray = weights.astype(np.float64) * scales / INT8_SCALE
    return values
