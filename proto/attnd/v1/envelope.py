"""Messages with large arrays, written and read without taking the arrays through the protobuf library.

Protobuf copies a bytes field several times on its way in and out. Here the library writes and reads everything but
the elements: each array's bytes are copied once into the message, and not at all out of it. The bytes are those that
protobuf itself would write.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from attnd.v1 import tensor_pb2, tensors
from attnd.v1.tails import Described, Fetch, Tails, inner_of

MessageT = TypeVar("MessageT", bound=Message)
Place = Callable[[np.ndarray], int | None]
"""Puts the elements of an array, little-endian, into shared memory, and returns where; None leaves them to the
message."""

Inner = memoryview | Message
"""A message inside another: its bytes, or itself if the outer one was small enough to be read at once."""

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BYTES_MAX: Final = 10
# A call names at most 65,536 sequences; a message of a billion two-byte fields would keep Python busy for minutes.
_FIELDS_MAX: Final = 1 << 17
SMALL_BYTES_MAX: Final = 1 << 15
"""Messages up to this size are read by protobuf: it copies them sooner than Python looks at their fields."""

_SMALL: Final = [bytes([number]) for number in range(0x80)]
_DTYPE_NUMBER: Final = tensor_pb2.Tensor.DTYPE_FIELD_NUMBER
_SHAPE_NUMBER: Final = tensor_pb2.Tensor.SHAPE_FIELD_NUMBER
_DATA_NUMBER: Final = tensor_pb2.Tensor.DATA_FIELD_NUMBER
_OFFSET_NUMBER: Final = tensor_pb2.Tensor.SHARED_OFFSET_FIELD_NUMBER


def pack(header: Message, arrays: Mapping[str, np.ndarray], place: Place | None = None) -> bytes:
    """Returns the bytes of a message.

    Args:
        header: The message without its arrays.
        arrays: The arrays, by field. Their fields' numbers must exceed those of the header's fields, as they do in
            every message of attnd: the header is written first.
        place: Takes elements that are not to lie in the message.

    Raises:
        TensorError: An array's dtype has no wire name.
        EncodeError: The header is too large.
    """
    return b"".join(_message(header, arrays, place))


def pack_within(
    outers: Sequence[tuple[Message, str]],
    header: Message,
    arrays: Mapping[str, np.ndarray],
    place: Place | None = None,
) -> bytes:
    """Returns the bytes of a message that lies in a field of another, which may lie in a field of yet another.

    Args:
        outers: The messages around it, the outermost first, each without the field that holds the next, and that
            field. Its number exceeds those of the others that are set.
        header: The innermost message, as in `pack`.
        arrays: Its arrays.
        place: As in `pack`.

    Raises:
        TensorError: An array's dtype has no wire name.
        EncodeError: A header is too large.
    """
    parts = _message(header, arrays, place)
    for outer, field in reversed(outers):
        size = _varint(sum(map(len, parts)))
        parts = [outer.SerializeToString(), _inner_tag(outer.DESCRIPTOR, field), size, *parts]
    return b"".join(parts)


def unpack(
    message: bytes | bytearray | Inner, kind: type[MessageT], fetch: Fetch | None = None
) -> tuple[MessageT, dict[str, np.ndarray]]:
    """Returns a message without its arrays, and the arrays by field, read-only views of the message's bytes.

    Args:
        message: Its bytes, or what `unpack_outer` gave for a message inside another.
        kind: Its type.
        fetch: Returns elements that lie in shared memory; None if there is no such memory.

    Raises:
        DecodeError: The bytes are not a message of the type.
        TensorError: An array's dtype, shape and bytes do not agree, it is given twice, or it lies in memory that is
            not shared.
    """
    tails = _tails(kind.DESCRIPTOR)
    if not isinstance(message, Message) and (alike := tails.read(message, fetch)) is not None:
        return alike
    names = _array_fields(kind.DESCRIPTOR)
    given: dict[str, tensor_pb2.Tensor]
    if isinstance(message, Message) or len(message) <= SMALL_BYTES_MAX:
        header = _small(message, kind)
        given = {name: getattr(header, name) for name in names.values() if header.HasField(name)}
    else:
        rest, values = _split(memoryview(message), names)
        header = kind.FromString(rest)
        given = {name: cast("tensor_pb2.Tensor", _parts(value)) for name, value in values.items()}
    arrays = {name: _array(tensor, name, fetch) for name, tensor in given.items()}
    if not isinstance(message, Message):
        tails.learn(
            message,
            [
                _as_written(number, name, given[name], arrays[name])
                for number, name in sorted(names.items())
                if name in given
            ],
        )
    for name in given:
        header.ClearField(name)
    return header, arrays


def unpack_outer(message: bytes | Inner, kind: type[MessageT]) -> tuple[MessageT, str, Inner]:
    """Returns a message, the field that holds another one, and that one, to be given to `unpack`.

    The field is empty if there is none. The message itself may still have the one inside: it is for its other fields.

    Args:
        message: Its bytes, or what an earlier call gave for a message inside another.
        kind: Its type, all of whose fields that hold messages are in one `oneof`.

    Raises:
        DecodeError: The bytes are not a message of the type, or it has several inside.
    """
    oneof, names, tags = _message_fields(kind.DESCRIPTOR)
    if not isinstance(message, Message):
        begin, value_at = inner_of(message, tags)
        if begin >= 0:
            inner = memoryview(message)[value_at:]
            return kind.FromString(bytes(message[:begin])), tags[message[begin]], inner
    if isinstance(message, Message) or len(message) <= SMALL_BYTES_MAX:
        try:
            small = _small(message, kind)
        except DecodeError:
            pass  # perhaps only the one inside is at fault, which is for `unpack` to say
        else:
            field = small.WhichOneof(oneof)
            return small, field or "", small if field is None else getattr(small, field)
    assert not isinstance(message, Message)
    view = memoryview(message)
    header, values = _split(view, names)
    if len(values) > 1:
        raise DecodeError(f"{' and '.join(values)} are given at once.")
    name, value = next(iter(values.items()), ("", view[:0]))
    return kind.FromString(header), name, value


def _small(message: bytes | bytearray | Inner, kind: type[MessageT]) -> MessageT:
    if isinstance(message, Message):
        assert isinstance(message, kind)
        return message
    return kind.FromString(bytes(message))


def _split(view: memoryview, names: Mapping[int, str]) -> tuple[bytes, dict[str, memoryview]]:
    """Returns the bytes of a message without the fields of these numbers, and the values of those by name."""
    header: list[memoryview] = []
    values: dict[str, memoryview] = {}
    for number, wire_type, start, value, end in _fields(view):
        name = names.get(number) if wire_type == _LENGTH_DELIMITED else None
        if name is None:
            header.append(view[start:end])
        elif name in values:
            raise DecodeError(f"{name} is given twice.")
        else:
            values[name] = view[value:end]
    return b"".join(header), values


def _message(header: Message, arrays: Mapping[str, np.ndarray], place: Place | None) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = [header.SerializeToString()]
    for number, name in _in_order(header.DESCRIPTOR, tuple(arrays)):
        array = arrays[name]
        begin, dtype = _begin(number, array.dtype, array.shape, name)
        if place is not None and array.size:
            offset = place(array if array.dtype == dtype else array.astype(dtype))
            if offset is not None:
                parts.append(_placed(number, array.dtype, array.shape, name, offset))
                continue
        parts.append(begin)
        if 0 < array.nbytes <= SMALL_BYTES_MAX and array.dtype == dtype:
            parts.append(array.tobytes())  # sooner than a view of it
        elif array.size:
            parts.append(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data)
    return parts


@functools.lru_cache(maxsize=256)
def _in_order(kind: Descriptor, names: tuple[str, ...]) -> list[tuple[int, str]]:
    return sorted((kind.fields_by_name[name].number, name) for name in names)


@functools.lru_cache(maxsize=256)
def _inner_tag(kind: Descriptor, field: str) -> bytes:
    return _tag(kind.fields_by_name[field].number)


@functools.lru_cache(maxsize=256)
def describe(dtype: np.dtype, field: str) -> tuple[bytes, np.dtype]:
    """Returns how a dtype is written in a `Tensor`, and its little-endian form. NumPy makes its name anew each time.

    Raises:
        TensorError: The dtype has no wire name.
    """
    name = dtype.name
    little_endian = tensors.dtype_of_name(name, field).newbyteorder("<")
    return _tag(_DTYPE_NUMBER) + _varint(len(name)) + name.encode(), little_endian


@functools.lru_cache(maxsize=1024)
def _begin(number: int, dtype: np.dtype, shape: tuple[int, ...], field: str) -> tuple[bytes, np.dtype]:
    """Returns all of a field that holds a `Tensor` but its elements, and their dtype. Layers differ in elements only.

    protobuf leaves empty fields out.
    """
    begin, little_endian = _without_elements(dtype, shape, field)
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes:
        begin += _tag(_DATA_NUMBER) + _varint(size_bytes)
    return _tag(number) + _varint(len(begin) + size_bytes) + begin, little_endian


@functools.lru_cache(maxsize=1024)
def _placed(number: int, dtype: np.dtype, shape: tuple[int, ...], field: str, offset: int) -> bytes:
    """Returns a field that holds a `Tensor` whose elements lie in shared memory."""
    tensor = _without_elements(dtype, shape, field)[0] + _varint(_OFFSET_NUMBER << 3 | _VARINT) + _varint(offset)
    return _tag(number) + _varint(len(tensor)) + tensor


def _without_elements(dtype: np.dtype, shape: tuple[int, ...], field: str) -> tuple[bytes, np.dtype]:
    begin, little_endian = describe(dtype, field)
    if shape:
        packed = b"".join([_varint(size) for size in shape])
        begin += _tag(_SHAPE_NUMBER) + _varint(len(packed)) + packed
    return begin, little_endian


@functools.lru_cache(maxsize=64)
def _array_fields(kind: Descriptor) -> dict[int, str]:
    return {each.number: each.name for each in kind.fields if each.message_type is tensor_pb2.Tensor.DESCRIPTOR}


@functools.lru_cache(maxsize=64)
def _tails(kind: Descriptor) -> Tails[Any]:
    return Tails(GetMessageClass(kind), _array_fields(kind).values())


def _as_written(number: int, field: str, tensor: tensor_pb2.Tensor, array: np.ndarray) -> Described:
    """Returns an array as `_message` would write it."""
    offset = tensor.shared_offset if tensor.HasField("shared_offset") else None
    begin, dtype = _begin(number, array.dtype, array.shape, field)
    if offset is not None:
        begin = _placed(number, array.dtype, array.shape, field, offset)
    return Described(field=field, begin=begin, dtype=dtype, shape=array.shape, shared_offset=offset)


@functools.lru_cache(maxsize=64)
def _message_fields(kind: Descriptor) -> tuple[str, dict[int, str], dict[int, str]]:
    """Returns the oneof of a message's inner ones, their fields by number, and by tag where that is one byte."""
    (oneof,) = (each for each in kind.oneofs if each.fields[0].message_type is not None)
    names = {each.number: each.name for each in oneof.fields}
    tags = {number << 3 | _LENGTH_DELIMITED: name for number, name in names.items() if number < 16}
    return oneof.name, names, tags


class _Tensor(NamedTuple):
    """What `tensors.from_tensor` reads of a `Tensor`, the elements still in the message."""

    dtype: str
    shape: tuple[int, ...]
    shared_offset: int | None
    data: memoryview

    def HasField(self, _: str) -> bool:  # noqa: N802 - as protobuf has it
        """Whether the elements lie in shared memory."""
        return self.shared_offset is not None


def _array(tensor: tensor_pb2.Tensor, name: str, fetch: Fetch | None) -> np.ndarray:
    if not tensor.HasField("shared_offset"):
        return tensors.from_tensor(tensor, name)
    if fetch is None or tensor.data:
        why = "must not be set beside data" if tensor.data else "names memory that this connection does not share"
        raise tensors.TensorError(f"{name}.shared_offset", f"{name}.shared_offset {why}.")
    shape = tuple(tensor.shape)
    elements = fetch(name, tensor.shared_offset, tensors.size_of(tensor.dtype, shape, name))
    return tensors.from_tensor(cast("tensor_pb2.Tensor", _Tensor(tensor.dtype, shape, None, elements)), name)


def _parts(view: memoryview) -> _Tensor:
    rest: list[memoryview] = []
    data = view[:0]
    for number, wire_type, start, value, end in _fields(view):
        if number == _DATA_NUMBER and wire_type == _LENGTH_DELIMITED:
            data = view[value:end]
        else:
            rest.append(view[start:end])
    tensor = tensor_pb2.Tensor.FromString(b"".join(rest))
    offset = tensor.shared_offset if tensor.HasField("shared_offset") else None
    return _Tensor(tensor.dtype, tuple(tensor.shape), offset, data)


def _fields(view: memoryview) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields the fields of a message: number, wire type, and where tag and value begin and the value ends."""
    start = num_fields = 0
    size = len(view)
    while start < size:
        tag, value = _read_varint(view, start)
        wire_type = tag & 7
        if wire_type == _LENGTH_DELIMITED:
            length, value = _read_varint(view, value)
            end = value + length
        elif wire_type == _VARINT:
            _, end = _read_varint(view, value)
        elif wire_type in _FIXED_SIZES:
            end = value + _FIXED_SIZES[wire_type]
        else:
            raise DecodeError(f"Wire type {wire_type} is not used by attnd.")
        if end > size:
            raise DecodeError("The message is cut off.")
        yield tag >> 3, wire_type, start, value, end
        start = end
        num_fields += 1
        if num_fields > _FIELDS_MAX:
            raise DecodeError(f"The message has more than {_FIELDS_MAX} fields.")


def _read_varint(view: memoryview, start: int) -> tuple[int, int]:
    """Returns a number and the place behind it."""
    try:
        byte = view[start]
        if byte < 0x80:
            return byte, start + 1
    except IndexError:
        raise DecodeError("The message is cut off.") from None
    number = 0
    for i, byte in enumerate(view[start : start + _VARINT_BYTES_MAX]):
        number |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return number, start + i + 1
    raise DecodeError("A number of the message has no end.")


def _tag(number: int) -> bytes:
    return _varint(number << 3 | _LENGTH_DELIMITED)


def _varint(number: int) -> bytes:
    if number <= 0x7F:
        return _SMALL[number]
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
