"""Arrays and scalars to messages and back: what is converted, what is refused, in one place.

What the kernels would refuse is the server's to judge. Here only that is refused which cannot travel as it is: values
that would have to be rounded, cut or guessed.
"""

import operator
from collections.abc import Mapping
from typing import Final, SupportsFloat, SupportsIndex

import ml_dtypes
import numpy as np
import numpy.typing as npt

from attnd.client._errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from attnd.v1 import envelope, tensors
from attnd.v1.limits import MESSAGE_BYTES_MAX

_INT32: Final = np.iinfo(np.int32)
_BITS_MAX: Final = {32: 2**31, 64: 2**63}
# Dtypes of queries, keys and values that travel as they are.
_READY: Final = frozenset(
    np.dtype(each) for each in (np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8)
)


def values_array(values: npt.ArrayLike, field: str) -> np.ndarray:
    """Returns an array of numbers that can travel: queries, keys, values, pages or scales.

    Args:
        values: Anything that NumPy reads, JAX arrays included, in any memory and byte order.
        field: Its argument's name, for error messages.

    Raises:
        InvalidArgumentError: float64, which the server would have to round, or a dtype that is not a number's.
        ResourceExhaustedError: The array alone exceeds the limit of a message.
    """
    if type(values) is np.ndarray and values.dtype in _READY and values.nbytes <= MESSAGE_BYTES_MAX:
        return values  # as most are
    array = _array(values, field)
    if array.dtype.kind == "f" and array.dtype.itemsize == 8:  # float64 of either byte order
        raise InvalidArgumentError.of(
            field,
            f"{field} has dtype float64, which would lose precision: cast it first, for instance to float32 with "
            f"{field}.astype(numpy.float32).",
        )
    if array.dtype == np.bool_:
        raise InvalidArgumentError.of(field, f"{field} has dtype bool, must hold numbers.")
    return _sendable(array, field)


def integers_array(values: npt.ArrayLike, field: str) -> np.ndarray:
    """Returns an array of lengths, page ids or running sums that can travel.

    Python integers, int64 and uint64 are narrowed to int32 once every value is known to fit. Arrays of other dtypes
    are sent as they are: the server refuses them with the text that JAX documents.

    Raises:
        InvalidArgumentError: A value does not fit int32, or Python values are not integers.
    """
    if hasattr(values, "__array__"):
        array = _array(values, field)
        if array.dtype.kind in "iu" and array.dtype.itemsize == 8:  # of either byte order
            array = _narrowed(array, field)
        return _sendable(array, field)
    # Object dtype keeps Python's integers whole: NumPy turns [2**63, 1] into floats.
    array = _array(values, field, dtype=object)
    for index, value in np.ndenumerate(array):
        if isinstance(value, list | tuple):
            raise InvalidArgumentError.of(field, f"{field} must be a rectangular array: pad its rows to one length.")
        if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
            place = _place(field, index)
            raise InvalidArgumentError.of(place, f"{place}={value!r} must be an integer.")
    return _sendable(_narrowed(array, field), field)


def counts_array(value: npt.ArrayLike, field: str) -> np.ndarray:
    """Returns `num_seqs` as it can travel: an array as it is, an integer as an array of shape (1,)."""
    if not isinstance(value, int | np.integer):
        return integers_array(value, field)
    count = int(value)
    return np.array([count], np.int32) if 0 <= count <= _INT32.max else integers_array([count], field)


def owned(arrays: Mapping[str, np.ndarray], field: str) -> np.ndarray:
    """Returns an array of an answer, writable and nobody else's.

    Raises:
        InternalError: The answer lacks it.
    """
    if field not in arrays:
        raise InternalError(f"The answer lacks {field}.", reason="ANSWER_MALFORMED")
    array = arrays[field]
    return array if array.flags.writeable else array.copy()


def dtype_name(dtype: npt.DTypeLike) -> str:
    """Returns the wire name of a dtype: a name itself, or a dtype or scalar type of NumPy, ml_dtypes or JAX.

    Raises:
        InvalidArgumentError: It is none of these. Whether a cache can hold the dtype is the server's to say.
    """
    if isinstance(dtype, str):
        return dtype
    try:
        if dtype is not None:  # NumPy reads None as float64.
            return np.dtype(dtype).name
    except TypeError:
        pass
    raise InvalidArgumentError.of("dtype", f"{dtype=} must be a dtype or its name, such as 'bfloat16'.")


def real(value: SupportsFloat | None, field: str) -> float | None:
    """Returns a scalar argument as a float; None, which means unset, as None.

    Raises:
        InvalidArgumentError: It is not a real number, such as a bool, a string or an array with axes.
    """
    if value is None or type(value) is float:
        return value
    array = np.asarray(value)
    if array.ndim == 0 and array.dtype != np.bool_ and _is_real(array.dtype):
        return float(array.astype(np.float64))
    raise InvalidArgumentError.of(field, f"{field}={value!r} must be a real number.")


def integer(value: SupportsIndex, field: str, *, bits: int = 32) -> int:
    """Returns a scalar argument as an int that a signed field of `bits` bits can hold.

    Raises:
        InvalidArgumentError: It is not an integer, such as 4.0 or True, or out of the field's range.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool | np.bool_):
        raise InvalidArgumentError.of(field, f"{field}={value!r} must be an integer.")
    if not -_BITS_MAX[bits] <= number < _BITS_MAX[bits]:
        raise InvalidArgumentError.of(field, f"{field}={number} must be in [-2**{bits - 1}, 2**{bits - 1}).")
    return number


def optional_integer(value: SupportsIndex | None, field: str, *, bits: int = 64) -> int | None:
    """Returns a scalar argument as `integer` does; None, which means unset, as None."""
    return None if value is None else integer(value, field, bits=bits)


def flag(value: object, field: str) -> bool:
    """Returns a boolean argument.

    Raises:
        InvalidArgumentError: It is neither True nor False: an array or a number would be a guess.
    """
    if not isinstance(value, bool | np.bool_):
        raise InvalidArgumentError.of(field, f"{field}={value!r} must be True or False.")
    return bool(value)


def text(value: object, field: str) -> str:
    """Returns a textual argument.

    Raises:
        InvalidArgumentError: It is not a string.
    """
    if not isinstance(value, str):
        raise InvalidArgumentError.of(field, f"{field}={value!r} must be a string.")
    return value


def _array(values: npt.ArrayLike, field: str, dtype: type[object] | None = None) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        raise InvalidArgumentError.of(field, f"{field} is a masked array, whose mask would be lost: fill it first.")
    try:
        return np.asarray(values, dtype)
    except (TypeError, ValueError) as error:  # rows of different lengths, or another library's memory
        raise InvalidArgumentError.of(field, f"{field} cannot be read as an array: {error}") from error


def _narrowed(array: np.ndarray, field: str) -> np.ndarray:
    if array.dtype != object:
        narrow: np.ndarray = array.astype(np.int32)
        if (narrow == array).all():
            return narrow
    outside = (array < _INT32.min) | (array > _INT32.max)
    if np.any(outside):
        index = tuple(int(i) for i in np.argwhere(outside)[0])
        place = _place(field, index)
        raise InvalidArgumentError.of(place, f"{place}={int(array[index])} must be in [-2**31, 2**31).")
    return array.astype(np.int32)


def _place(field: str, index: tuple[int, ...]) -> str:
    return f"{field}[{','.join(map(str, index))}]" if index else field


def _sendable(array: np.ndarray, field: str) -> np.ndarray:
    try:
        envelope.describe(array.dtype, field)
    except tensors.TensorError as error:
        raise InvalidArgumentError.of(error.field, error.message) from error
    # Before the bytes are copied: protobuf would fail on 2 GiB, with less to say.
    if array.nbytes > MESSAGE_BYTES_MAX:
        raise ResourceExhaustedError(
            f"{field} has {array.nbytes} bytes, a message holds at most {MESSAGE_BYTES_MAX}.",
            reason="MESSAGE_TOO_LARGE",
        )
    return array


def _is_real(dtype: np.dtype) -> bool:
    # ml_dtypes are no subtypes of np.floating, but their names have a wire form.
    return bool(np.issubdtype(dtype, np.integer) or np.issubdtype(dtype, np.floating)) or "float" in dtype.name
