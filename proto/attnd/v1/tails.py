"""How messages end that were read before: the layers of a model differ in elements and in a number or two.

Fields are written in the order of their numbers, arrays last. If a message ends in the same tags, lengths, dtypes and
shapes as one before, in the same places, then it has the same arrays, and only what stands before them needs to be
read. Anything else is no such message, and is read as if none had been before.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

MessageT = TypeVar("MessageT", bound=Message)

Fetch = Callable[[str, int, int], memoryview]
"""Returns the elements of an array in shared memory, by its field, where they begin and how many bytes they have."""

# Several callers may take turns, each with shapes of its own.
_KEPT_MAX: Final = 4
_BEGINS_BYTES_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One array of a message, but for its elements.

    Attributes:
        field: Its field.
        begin: The field's bytes up to its elements, or all of them if those lie in shared memory.
        dtype: Little-endian dtype.
        shape: Shape.
        shared_offset: Where in shared memory the elements lie; None if they are in the message.
    """

    field: str
    begin: bytes
    dtype: np.dtype
    shape: tuple[int, ...]
    shared_offset: int | None


class _Part(NamedTuple):
    field: str
    begin: bytes
    begin_at: int  # places count from the start of the tail
    data_at: int
    dtype: np.dtype
    shape: tuple[int, ...]
    num_elements: int
    shared_offset: int | None


class _Tail:
    def __init__(self, arrays: Iterable[Described]) -> None:
        self.parts: list[_Part] = []
        self.size_bytes = 0
        for each in arrays:
            begin_at = self.size_bytes
            data_at = begin_at + len(each.begin)
            count = math.prod(each.shape)
            self.size_bytes = data_at + (count * each.dtype.itemsize if each.shared_offset is None else 0)
            self.parts.append(
                _Part(each.field, each.begin, begin_at, data_at, each.dtype, each.shape, count, each.shared_offset)
            )

    def begins_at(self, message: bytes | bytearray | memoryview) -> int:
        """Returns where in a message it begins; -1 if the message does not end like this."""
        start = len(message) - self.size_bytes
        if start < 0:
            return -1
        for part in self.parts:
            if message[start + part.begin_at : start + part.data_at] != part.begin:
                return -1
        return start


class Tails(Generic[MessageT]):
    """The latest tails of messages of one type.

    Args:
        kind: The type.
        fields: Its fields that hold arrays.
    """

    def __init__(self, kind: type[MessageT], fields: Iterable[str]) -> None:
        self._kind = kind
        self._fields = tuple(fields)
        # Replaced as a whole: threads read it while another one learns.
        self._tails: tuple[_Tail, ...] = ()

    def read(
        self, message: bytes | bytearray | memoryview, fetch: Fetch | None
    ) -> tuple[MessageT, dict[str, np.ndarray]] | None:
        """Returns a message without its arrays, and those, as views of its bytes; None if it ends like none before.

        Raises:
            TensorError: As `fetch`.
        """
        for tail in self._tails:
            start = tail.begins_at(message)
            if start >= 0:
                break
        else:
            return None
        try:
            header = self._kind.FromString(bytes(message[:start]))
        except DecodeError:
            return None
        arrays: dict[str, np.ndarray] = {}
        for field, _, _, data_at, dtype, shape, count, shared_offset in tail.parts:
            if shared_offset is None:
                arrays[field] = np.frombuffer(message, dtype, count, start + data_at).reshape(shape)
            elif fetch is None:
                return None
            else:
                elements = fetch(field, shared_offset, count * dtype.itemsize)
                arrays[field] = np.frombuffer(elements, dtype).reshape(shape)
        for field in self._fields:
            if header.HasField(field):
                return None  # an array stands before the others, or twice
        return header, arrays

    def learn(self, message: bytes | bytearray | memoryview, arrays: Iterable[Described]) -> None:
        """Takes note of how a message ends, if that is in these arrays, in this order."""
        tail = _Tail(arrays)
        size_bytes = sum(len(part.begin) for part in tail.parts)
        if not 0 < size_bytes <= _BEGINS_BYTES_MAX or not all(part.num_elements for part in tail.parts):
            return
        if tail.begins_at(message) >= 0:
            self._tails = (tail, *self._tails[: _KEPT_MAX - 1])


def inner_of(message: Any, tags: Iterable[int]) -> tuple[int, int]:
    """Returns where in a message the tag of the last field begins and where its value does, if it is one of these.

    Only what attnd's own clients and servers write is found: fields before it that are numbers. The two are -1 for
    everything else, whatever it is.

    Args:
        message: Bytes.
        tags: Tags of fields that hold messages, each of one byte.
    """
    i, size = 0, len(message)
    try:
        while (tag := message[i]) not in tags:
            kind = tag & 7
            if kind == 1:
                i += 9
            elif kind == 0 and tag < 0x80:
                i += 1
                while message[i] >= 0x80:
                    i += 1
                i += 1
            else:
                return -1, -1
        begin, i, length, shift = i, i + 1, 0, 0
        while (byte := message[i]) >= 0x80 and shift < 32:
            length |= (byte & 0x7F) << shift
            shift += 7
            i += 1
        i += 1
        return (begin, i) if i + (length | byte << shift) == size else (-1, -1)
    except IndexError:
        return -1, -1
