"""Ragged and paged attention in process: the kernels' contract, validation and implementations."""

from attnd.kernels.api import QuantizedPages, paged_attention, ragged_paged_attention
from attnd.kernels.errors import InvalidArgumentError, UnsupportedError, Violation

__all__ = [
    "InvalidArgumentError",
    "QuantizedPages",
    "UnsupportedError",
    "Violation",
    "paged_attention",
    "ragged_paged_attention",
]
