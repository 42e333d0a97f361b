"""What each TPU generation has: the sizes and speeds that decide whether a kernel fits and how fast it can be."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LANES: Final = 128
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One TensorCore of a generation; sizes and bandwidths are those of `jax/_src/tpu_info.py`.

    Attributes:
        generation: Name by which it is chosen: "v6e".
        device_kinds: JAX's `Device.device_kind`s.
        vmem_bytes: Vector memory.
        smem_bytes: Scalar memory, which page tables share with what the compiler spills.
        hbm_bytes_per_s: Share of the chip's memory bandwidth.
        clock_hz: Peak bfloat16 FLOP/s over FLOPs of a cycle in the compiler's schedules.
        cores: TensorCores that JAX shows as one device (megacore).
        mxu_depth: Longest contraction that a matrix unit does at once.
        large_tiles: Whether arrays of 16-bit values lie in tiles of 16 rows; else of 8.
    """

    generation: str
    device_kinds: tuple[str, ...]
    vmem_bytes: int
    smem_bytes: int
    hbm_bytes_per_s: float
    clock_hz: float
    cores: int = 1
    mxu_depth: int = 128
    large_tiles: bool = False

    @property
    def hbm_bytes_per_cycle(self) -> float:
        """Bytes that the memory delivers in a cycle."""
        return self.hbm_bytes_per_s / self.clock_hz


CHIPS: Final[Mapping[str, Chip]] = {
    chip.generation: chip
    for chip in (
        Chip(
            generation="v4", device_kinds=("TPU v4",), vmem_bytes=16 * _MIB, smem_bytes=_MIB,
            hbm_bytes_per_s=1.23e12 / 2, clock_hz=1.05e9, cores=2,
        ),
        Chip(
            generation="v5e", device_kinds=("TPU v5 lite", "TPU v5e"), vmem_bytes=128 * _MIB, smem_bytes=_MIB,
            hbm_bytes_per_s=8.2e11, clock_hz=1.5e9,
        ),
        Chip(
            generation="v5p", device_kinds=("TPU v5", "TPU v5p"), vmem_bytes=64 * _MIB, smem_bytes=_MIB,
            hbm_bytes_per_s=2.46e12 / 2, clock_hz=1.75e9, cores=2,
        ),
        Chip(
            generation="v6e", device_kinds=("TPU v6 lite", "TPU v6e"), vmem_bytes=128 * _MIB, smem_bytes=_MIB,
            hbm_bytes_per_s=1.64e12, clock_hz=1.75e9, mxu_depth=256,
        ),
        Chip(
            generation="tpu7x", device_kinds=("TPU7x", "TPU7"), vmem_bytes=64 * _MIB, smem_bytes=_MIB,
            hbm_bytes_per_s=7.4e12 / 2, clock_hz=2.2e9, mxu_depth=256, large_tiles=True,
        ),
    )
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """Returns the chip of a JAX device kind; None if it is no TPU that the kernels know."""
    for chip in CHIPS.values():
        if device_kind in chip.device_kinds:
            return chip
    return None
