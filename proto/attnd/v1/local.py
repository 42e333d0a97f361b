"""What travels over the local socket: frames around the messages of gRPC, and memory that both ends share.

A connection carries one call at a time: the client sends a request, the server answers it. Who gives a call up, or
breaks the rules, loses the connection; whoever wants several calls at a time opens several connections.

A frame is its head and a body, all numbers little-endian. Requests:

    HELLO    body: the token of `LocalSocket`, then the name of the tenant in UTF-8; the first frame, and only that
    SEGMENT  body: empty; asks for memory to share, once in a connection
    UNARY    body: the path of an rpc in UTF-8, `path_size` bytes; its message
    PLANNED  body: a `PlanRequest`, `path_size` bytes, or none; a `PlannedAttendRequest` of a plan of this connection

Answers:

    WELCOME  body: empty
    SEGMENT  body: empty; beside it a file descriptor of `SEGMENT_BYTES` that nobody can resize
    MESSAGE  body: the response; that of the planned call for PLANNED
    STATUS   body: a `google.rpc.Status`: the call, or its plan, was refused

The elements of a `Tensor` may lie in the shared memory (`Tensor.shared_offset`), in requests wherever the client put
them and in answers within the room that the request's head gave. The server reads the elements of q, k and v where
they lie, and copies all others before it looks at them.
"""

import math
import mmap
import os
import struct
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from attnd.v1.tensors import TensorError

SEGMENT_BYTES: Final = 256 * 1024**2
"""Bytes of address space that a connection shares. Only what is written to takes memory."""

ALIGNMENT: Final = 64
"""Elements in shared memory begin at multiples of it: JAX copies what lies otherwise."""

SHARED_BYTES_MIN: Final = 16 * 1024
"""Bytes from which elements are worth to be put into shared memory."""

REQUEST_BYTES_MAX: Final = 16 * 1024**2
"""Bytes of the body of a request. Larger ones go over gRPC."""

TOKEN_BYTES: Final = 16

_REQUEST: Final = struct.Struct("<IBxHdQQ")
_ANSWER: Final = struct.Struct("<IB")

REQUEST_HEAD_BYTES: Final = _REQUEST.size
ANSWER_HEAD_BYTES: Final = _ANSWER.size


# Linux's fcntl.h; Python names them on Linux only, and this module is read elsewhere, too.
_F_ADD_SEALS: Final = 1033
_F_GET_SEALS: Final = 1034
_SEALS: Final = 0x0001 | 0x0002 | 0x0004  # no more seals, no shrinking, no growing


class Kind(IntEnum):
    """Kinds of frames."""

    HELLO = 1
    SEGMENT = 2
    UNARY = 3
    PLANNED = 4
    WELCOME = 5
    MESSAGE = 6
    STATUS = 7


_REQUESTS: Final = frozenset((Kind.HELLO, Kind.SEGMENT, Kind.UNARY, Kind.PLANNED))


class FrameError(Exception):
    """Bytes that are no frame, or a frame out of place: nothing that follows can be trusted."""


class Room(NamedTuple):
    """Where in shared memory an answer may put elements.

    Attributes:
        offset: Where it begins; a multiple of `ALIGNMENT`.
        size_bytes: Its bytes; 0 for none.
    """

    offset: int = 0
    size_bytes: int = 0


NO_ROOM: Final = Room()


class RequestHead(NamedTuple):
    """Head of a request.

    Attributes:
        body_bytes: Bytes of the body.
        kind: Its kind.
        path_size: Bytes of the first of two parts of the body.
        timeout_s: Seconds that the client waits for the answer, > 0; infinite if as long as it takes.
        room: Where the answer may put elements.
    """

    body_bytes: int
    kind: int
    path_size: int
    timeout_s: float
    room: Room


def request(kind: Kind, first: bytes, second: bytes, *, timeout_s: float | None = None, room: Room = NO_ROOM) -> bytes:
    """Returns the frame of a request whose body has two parts."""
    head = _REQUEST.pack(
        len(first) + len(second),
        kind,
        len(first),
        math.inf if timeout_s is None else timeout_s,
        room.offset,
        room.size_bytes,
    )
    return b"".join((head, first, second))


def request_head(head: bytes | bytearray | memoryview) -> RequestHead:
    """Reads the head of a request.

    Raises:
        FrameError: No client that keeps to the protocol would send it.
    """
    body_bytes, kind, path_size, timeout_s, offset, room_bytes = _REQUEST.unpack_from(head)
    if not (kind in _REQUESTS and path_size <= body_bytes <= REQUEST_BYTES_MAX and timeout_s > 0):
        raise FrameError("The head of a request is wrong.")
    if room_bytes and not (offset % ALIGNMENT == 0 and offset + room_bytes <= SEGMENT_BYTES):
        raise FrameError("The room for an answer does not lie in the shared memory.")
    return RequestHead(body_bytes, kind, path_size, timeout_s, Room(offset, room_bytes))


def answer_head(kind: Kind, body_bytes: int) -> bytes:
    """Returns the head of an answer; its body follows."""
    return _ANSWER.pack(body_bytes, kind)


def read_answer_head(head: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Returns the bytes of an answer's body, and its kind."""
    body_bytes, kind = _ANSWER.unpack_from(head)
    return body_bytes, kind


class Segment:
    """Memory that two processes share. Wherever an offset comes from the other one, it is checked.

    The mapping ends with the last array that lies in it.

    Args:
        fd: Descriptor of the memory; it may be closed afterwards.

    Raises:
        FrameError: The memory has another size, or can be resized: touching what was cut off would kill the process.
    """

    def __init__(self, fd: int) -> None:
        import fcntl  # noqa: PLC0415 - as above

        seals = fcntl.fcntl(fd, _F_GET_SEALS)
        if seals & _SEALS != _SEALS or os.fstat(fd).st_size != SEGMENT_BYTES:
            raise FrameError("The shared memory has another size, or none that is fixed.")
        self._view = memoryview(mmap.mmap(fd, SEGMENT_BYTES))

    def view(self, field: str, offset: int, size_bytes: int) -> memoryview:
        """Returns bytes of the memory, which both ends can change at any time.

        Raises:
            TensorError: They do not lie in it, or not at a multiple of `ALIGNMENT`.
        """
        if offset % ALIGNMENT or offset + size_bytes > SEGMENT_BYTES:
            text = f"{field}.shared_offset={offset} must be a multiple of {ALIGNMENT}, and {size_bytes} bytes behind it"
            raise TensorError(f"{field}.shared_offset", f"{text} must lie within {SEGMENT_BYTES}.")
        return self._view[offset : offset + size_bytes]

    def write(self, offset: int, array: np.ndarray) -> None:
        """Copies the elements of an array, in C order, to where they are known to fit."""
        target = np.frombuffer(self._view[offset : offset + array.nbytes], array.dtype).reshape(array.shape)
        np.copyto(target, array)


def new_segment() -> int:
    """Returns the descriptor of new memory to share, whose size nobody can change.

    Raises:
        OSError: The system has none to give.
    """
    import fcntl  # noqa: PLC0415 - as above

    fd = os.memfd_create("attnd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SEGMENT_BYTES)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def aligned(offset: int) -> int:
    """Returns the next multiple of `ALIGNMENT`."""
    return -(-offset // ALIGNMENT) * ALIGNMENT
