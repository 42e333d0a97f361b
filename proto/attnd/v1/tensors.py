"""Arrays as messages: NumPy arrays to and from `Tensor`."""

import functools
import math
from typing import Final

import ml_dtypes
import numpy as np

from attnd.v1 import tensor_pb2

AXES_MAX: Final = 8
AXIS_SIZE_MAX: Final = 2**31 - 1

_DTYPES: Final[dict[str, np.dtype]] = {
    np.dtype(dtype).name: np.dtype(dtype)
    for dtype in (
        np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
        np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.bool_,
    )
}  # fmt: skip


class TensorError(ValueError):
    """A message that is not an array, or an array that no message can carry.

    Attributes:
        field: Path of the offending part, such as `q.shape[1]`.
        message: What must hold, with the values that break it.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.message = message


def dtype_of_name(name: str, field: str) -> np.dtype:
    """Returns the dtype that has a wire name, such as `bfloat16`.

    Raises:
        TensorError: The name is none of `Tensor.dtype`'s.
    """
    try:
        return _DTYPES[name]
    except KeyError:
        raise TensorError(f"{field}.dtype", f"{field}.dtype={name!r} must be one of {', '.join(_DTYPES)}.") from None


def to_tensor(array: np.ndarray) -> tensor_pb2.Tensor:
    """Returns the message of an array, in little-endian C order whatever the array's own.

    Raises:
        TensorError: The array's dtype has no wire name.
    """
    # ml_dtypes have no byte order to change; their `.str` is a bare "V2", so the name decides.
    if array.dtype.name not in _DTYPES:
        raise TensorError("dtype", f"dtype {array.dtype.name} must be one of {', '.join(_DTYPES)}.")
    native = array.astype(_DTYPES[array.dtype.name].newbyteorder("<"), order="C", copy=False)
    return tensor_pb2.Tensor(dtype=array.dtype.name, shape=array.shape, data=native.tobytes())


def from_tensor(tensor: tensor_pb2.Tensor, field: str) -> np.ndarray:
    """Returns an array over a message's bytes, read-only if they are.

    Args:
        tensor: The message.
        field: Its name in the request, for error messages.

    Raises:
        TensorError: The dtype is unknown, an axis is out of range, or the bytes do not fill the shape.
    """
    shape = tuple(tensor.shape)
    dtype, size_bytes = _layout(tensor.dtype, shape, field)
    data = tensor.data
    if len(data) != size_bytes:
        raise TensorError(
            f"{field}.data",
            f"len({field}.data)={len(data)} must be {size_bytes} for {field}.shape={shape} and dtype {dtype.name}.",
        )
    return np.frombuffer(data, dtype).reshape(shape)


def size_of(dtype_name: str, shape: tuple[int, ...], field: str) -> int:
    """Returns the bytes of the elements of an array that is only described.

    Raises:
        TensorError: The dtype is unknown, or an axis is out of range.
    """
    return _layout(dtype_name, shape, field)[1]


@functools.lru_cache(maxsize=1024)
def _layout(name: str, shape: tuple[int, ...], field: str) -> tuple[np.dtype, int]:
    """Returns little-endian dtype and bytes of an array. Only legal ones are kept: the layers of a step are alike."""
    dtype = dtype_of_name(name, field)
    if len(shape) > AXES_MAX:
        raise TensorError(f"{field}.shape", f"{field}.shape has {len(shape)} axes, must have at most {AXES_MAX}.")
    for axis, size in enumerate(shape):
        if not 0 <= size <= AXIS_SIZE_MAX:
            raise TensorError(f"{field}.shape[{axis}]", f"{field}.shape[{axis}]={size} must be in [0, 2**31).")
    # Python integers do not wrap: NumPy's product of [2**31, 2**31, 4] would be 0.
    return dtype.newbyteorder("<"), math.prod(shape) * dtype.itemsize
