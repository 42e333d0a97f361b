"""Messages with large arrays, written and read without taking the arrays through the protobuf library.

Protobuf copies a bytes field several times on its way in and out. Here the library writes and reads everything but
the elements: each array's bytes are copied once into the message, and not at all out of it. The bytes are those that
protobuf itself would write.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar, cast

import numpy as np
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from attnd.v1 import tensor_pb2, tensors

MessageT = TypeVar("MessageT", bound=Message)

_VARINT, _FIXED64, _LENGTH_DELIMITED, _FIXED32 = 0, 1, 2, 5
_FIXED_SIZES: Final = {_FIXED64: 8, _FIXED32: 4}
_VARINT_BYTES_MAX: Final = 10
# A call names at most 65,536 sequences; a message of a billion two-byte fields would keep Python busy for minutes.
_FIELDS_MAX: Final = 1 << 17
_SMALL: Final = [bytes([number]) for number in range(0x80)]
_DTYPE_NUMBER: Final = tensor_pb2.Tensor.DTYPE_FIELD_NUMBER
_SHAPE_NUMBER: Final = tensor_pb2.Tensor.SHAPE_FIELD_NUMBER
_DATA_NUMBER: Final = tensor_pb2.Tensor.DATA_FIELD_NUMBER


def pack(header: Message, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns the bytes of a message.

    Args:
        header: The message without its arrays.
        arrays: The arrays, by field. Their fields' numbers must exceed those of the header's fields, as they do in
            every message of attnd: the header is written first.

    Raises:
        TensorError: An array's dtype has no wire name.
        EncodeError: The header is too large.
    """
    return b"".join(_message(header, arrays))


def pack_within(outers: Sequence[tuple[Message, str]], header: Message, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns the bytes of a message that lies in a field of another, which may lie in a field of yet another.

    Args:
        outers: The messages around it, the outermost first, each without the field that holds the next, and that
            field. Its number exceeds those of the others that are set.
        header: The innermost message, as in `pack`.
        arrays: Its arrays.

    Raises:
        TensorError: An array's dtype has no wire name.
        EncodeError: A header is too large.
    """
    parts = _message(header, arrays)
    for outer, field in reversed(outers):
        tag = _tag(outer.DESCRIPTOR.fields_by_name[field].number)
        parts = [outer.SerializeToString(), tag, _varint(sum(map(len, parts))), *parts]
    return b"".join(parts)


def unpack(message: bytes | memoryview, kind: type[MessageT]) -> tuple[MessageT, dict[str, np.ndarray]]:
    """Returns a message without its arrays, and the arrays by field, read-only views of the message's bytes.

    Raises:
        DecodeError: The bytes are not a message of the type, or have an array twice.
        TensorError: An array's dtype, shape and bytes do not agree.
    """
    header, values = _split(memoryview(message), _array_fields(kind.DESCRIPTOR))
    arrays = {
        name: tensors.from_tensor(cast("tensor_pb2.Tensor", _parts(value)), name) for name, value in values.items()
    }
    return kind.FromString(header), arrays


def unpack_outer(message: bytes | memoryview, kind: type[MessageT]) -> tuple[MessageT, str, memoryview]:
    """Returns a message without the one message inside it, that one's field, and its bytes.

    The field is empty if there is none.

    Raises:
        DecodeError: The bytes are not a message of the type, or it has several inside.
    """
    view = memoryview(message)
    header, values = _split(view, _message_fields(kind.DESCRIPTOR))
    if len(values) > 1:
        raise DecodeError(f"{' and '.join(values)} are given at once.")
    field, value = next(iter(values.items()), ("", view[:0]))
    return kind.FromString(header), field, value


def _split(view: memoryview, names: Mapping[int, str]) -> tuple[bytes, dict[str, memoryview]]:
    """Returns the bytes of a message without the fields of these numbers, and the values of those by name."""
    header: list[memoryview] = []
    values: dict[str, memoryview] = {}
    for field in _fields(view):
        name = names.get(field.number) if field.wire_type == _LENGTH_DELIMITED else None
        if name is None:
            header.append(view[field.start : field.end])
        elif name in values:
            raise DecodeError(f"{name} is given twice.")
        else:
            values[name] = view[field.value : field.end]
    return b"".join(header), values


def _message(header: Message, arrays: Mapping[str, np.ndarray]) -> list[bytes | memoryview]:
    fields = header.DESCRIPTOR.fields_by_name
    parts: list[bytes | memoryview] = [header.SerializeToString()]
    for number, name in sorted([(fields[name].number, name) for name in arrays]):
        begin, elements = _written(arrays[name], name)
        parts += [_tag(number), _varint(len(begin) + len(elements)), begin, elements]
    return parts


@functools.lru_cache(maxsize=256)
def describe(dtype: np.dtype, field: str) -> tuple[bytes, np.dtype]:
    """Returns how a dtype is written in a `Tensor`, and its little-endian form. NumPy makes its name anew each time.

    Raises:
        TensorError: The dtype has no wire name.
    """
    name = dtype.name
    little_endian = tensors.dtype_of_name(name, field).newbyteorder("<")
    return _tag(_DTYPE_NUMBER) + _varint(len(name)) + name.encode(), little_endian


def _written(array: np.ndarray, field: str) -> tuple[bytes, bytes | memoryview]:
    """Returns a `Tensor` in two parts, the second its elements. protobuf leaves empty fields out."""
    begin, dtype = describe(array.dtype, field)
    if array.shape:
        shape = b"".join([_varint(size) for size in array.shape])
        begin += _tag(_SHAPE_NUMBER) + _varint(len(shape)) + shape
    if array.size == 0:
        return begin, b""
    elements = np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data
    return begin + _tag(_DATA_NUMBER) + _varint(len(elements)), elements


@functools.lru_cache(maxsize=64)
def _array_fields(kind: Descriptor) -> dict[int, str]:
    return {each.number: each.name for each in kind.fields if each.message_type is tensor_pb2.Tensor.DESCRIPTOR}


@functools.lru_cache(maxsize=64)
def _message_fields(kind: Descriptor) -> dict[int, str]:
    return {each.number: each.name for each in kind.fields if each.message_type is not None}


class _Field(NamedTuple):
    """Where a field lies in its message.

    Attributes:
        number: Its number.
        wire_type: How its value is written.
        start: Where its tag begins.
        value: Where its value begins, past the length if it has one.
        end: Where its value ends.
    """

    number: int
    wire_type: int
    start: int
    value: int
    end: int


class _Tensor(NamedTuple):
    """What `tensors.from_tensor` reads of a `Tensor`, the elements still in the message."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def _parts(view: memoryview) -> _Tensor:
    rest: list[memoryview] = []
    data = view[:0]
    for field in _fields(view):
        if field.number == _DATA_NUMBER and field.wire_type == _LENGTH_DELIMITED:
            data = view[field.value : field.end]
        else:
            rest.append(view[field.start : field.end])
    described = tensor_pb2.Tensor.FromString(b"".join(rest))
    return _Tensor(described.dtype, tuple(described.shape), data)


def _fields(view: memoryview) -> Iterator[_Field]:
    start = num_fields = 0
    while start < len(view):
        tag, value = _read_varint(view, start)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _VARINT:
            _, end = _read_varint(view, value)
        elif wire_type == _LENGTH_DELIMITED:
            size, value = _read_varint(view, value)
            end = value + size
        elif wire_type in _FIXED_SIZES:
            end = value + _FIXED_SIZES[wire_type]
        else:
            raise DecodeError(f"Wire type {wire_type} is not used by attnd.")
        if end > len(view):
            raise DecodeError("The message is cut off.")
        yield _Field(number, wire_type, start, value, end)
        start = end
        num_fields += 1
        if num_fields > _FIELDS_MAX:
            raise DecodeError(f"The message has more than {_FIELDS_MAX} fields.")


def _read_varint(view: memoryview, start: int) -> tuple[int, int]:
    """Returns a number and the place behind it."""
    if start < len(view) and view[start] < 0x80:
        return view[start], start + 1
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
