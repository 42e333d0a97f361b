"""What freed memory becomes: by default the C library gives large buffers back to the system, message by message.

The next message then has its pages mapped, zeroed and faulted in anew, which costs more than gRPC does with it.
"""

import ctypes
import os
from typing import Final

# Numbers of <malloc.h>.
_TRIM_THRESHOLD: Final = -1
_TOP_PAD: Final = -2
_MMAP_THRESHOLD: Final = -3
_ARENA_MAX: Final = -8

_INT_MAX: Final = 2**31 - 1
# Some releases refuse a threshold beyond half of a thread's heap.
_MMAP_THRESHOLDS: Final = (1 << 30, 32 << 20)


def keep_freed_memory() -> bool:
    """Lets this process keep the memory of a message for the next ones instead of giving it back to the system.

    The process then stays as large as the messages that it had in hand at one time. To be called by whoever owns the
    process, before it starts threads; a library should not.

    Returns:
        Whether the C library was told; only glibc can be.
    """
    if not _is_glibc():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    told = any(mallopt(_MMAP_THRESHOLD, threshold) for threshold in _MMAP_THRESHOLDS)
    for option, value in ((_TRIM_THRESHOLD, _INT_MAX), (_TOP_PAD, 64 << 20), (_ARENA_MAX, 1)):
        # One heap for all threads: a buffer that one of gRPC's frees is the next one that another takes.
        told = bool(mallopt(option, value)) and told
    return told


def _is_glibc() -> bool:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (AttributeError, OSError, ValueError):  # no such system, or no such question
        return False
