"""What processes hold, to be compared between several moments."""

from collections.abc import Sequence
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


def growth(looks: Sequence[Usage], *, resident_bytes_max: int) -> list[str]:
    """Returns what a process holds more and more of, as it was seen at several times.

    Memory rises and falls with the messages in hand: it grows if the least of the later half is more than the most of
    the first half, by more than so many bytes.
    """
    first, last = looks[0], looks[-1]
    grown = [
        f"{name}: {getattr(first, name)}, then {getattr(last, name)}"
        for name, more in (("threads", _OF_GRPC), ("descriptors", _OF_GRPC), ("segments", 0))
        if getattr(last, name) - getattr(first, name) > more
    ]
    half = len(looks) // 2
    before = max(look.resident_bytes for look in looks[:half])
    after = min(look.resident_bytes for look in looks[half:])
    if after - before > resident_bytes_max:
        grown.append(f"resident: up to {before / MIB:.1f} MiB, then from {after / MIB:.1f} MiB")
    return grown
