"""What a device could do at most, to compare a measurement with."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np

_CHUNK_BYTES: Final = 64 << 20
_PRODUCT_SIZE: Final = 1024
_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device's limits.

    Attributes:
        bytes_per_s: Bytes that it reads from its memory in a second.
        flops_per_s: Multiplications and additions that it does in a second.
        source: Where the numbers come from.
    """

    bytes_per_s: float
    flops_per_s: float
    source: str

    def least_s(self, num_bytes: float, num_flops: float) -> float:
        """Returns the seconds that reading and computing take at least."""
        return max(num_bytes / self.bytes_per_s, num_flops / self.flops_per_s)


# Of one chip, as its maker publishes them (cloud.google.com/tpu/docs); bfloat16.
_TPUS: Final = {
    "TPU v4": Roofline(1.2e12, 275e12, "published for v4"),
    "TPU v5 lite": Roofline(0.82e12, 197e12, "published for v5e"),
    "TPU v5": Roofline(2.765e12, 459e12, "published for v5p"),
    "TPU v5p": Roofline(2.765e12, 459e12, "published for v5p"),
    "TPU v6 lite": Roofline(1.64e12, 918e12, "published for v6e"),
    "TPU7x": Roofline(7.37e12, 2307e12, "published for 7x"),
}


def of_device(kind: str) -> Roofline:
    """Returns the limits of a device that is not here, by JAX's name, or else those of this machine, measured."""
    return _TPUS.get(kind) or _of_this_machine()


def _of_this_machine() -> Roofline:
    num_threads = os.cpu_count() or 1
    chunks = [np.ones(_CHUNK_BYTES // 4, np.float32) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:
        read_s = _best_s(lambda: list(pool.map(np.max, chunks)))
    a = np.ones((_PRODUCT_SIZE, _PRODUCT_SIZE), np.float32)
    product_s = _best_s(lambda: a @ a)
    return Roofline(
        num_threads * _CHUNK_BYTES / read_s, 2 * _PRODUCT_SIZE**3 / product_s, "NumPy on this machine, float32"
    )


def _best_s(work: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
