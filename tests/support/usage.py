"""What processes hold, to be compared between two moments."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

MIB = 2**20
_OF_GRPC = 2
"""Threads and descriptors that come and go with gRPC's mood."""


@dataclass(frozen=True)
class Usage:
    """What a process holds.

    Attributes:
        threads: Its threads.
        descriptors: Its open files and sockets.
        segments: Mappings of memory that it shares with a client or server.
        resident_bytes: Its resident memory.
    """

    threads: int
    descriptors: int
    segments: int
    resident_bytes: int

    @classmethod
    def of(cls, pid: int) -> Self:
        """Looks at a process."""
        process = psutil.Process(pid)
        return cls(
            threads=process.num_threads(),
            descriptors=process.num_fds(),
            segments=Path(f"/proc/{pid}/maps").read_text().count("memfd:attnd"),
            resident_bytes=process.memory_info().rss,
        )

    def growth_since(self, before: Self, *, resident_bytes_max: int) -> list[str]:
        """Returns what there is more of than before; of memory, more than so many bytes."""
        grown = [
            f"{name}: {getattr(before, name)}, then {getattr(self, name)}"
            for name, more in (("threads", _OF_GRPC), ("descriptors", _OF_GRPC), ("segments", 0))
            if getattr(self, name) - getattr(before, name) > more
        ]
        if self.resident_bytes - before.resident_bytes > resident_bytes_max:
            grown.append(f"resident: {before.resident_bytes / MIB:.1f} MiB, then {self.resident_bytes / MIB:.1f} MiB")
        return grown
