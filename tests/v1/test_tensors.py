"""Arrays as messages."""

import ml_dtypes
import numpy as np
import pytest

from attnd.v1 import tensor_pb2, tensors

DTYPES = [np.float32, np.float16, np.int32, np.int8, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_survives_the_round_trip(dtype):
    size = np.dtype(dtype).itemsize
    values = np.random.default_rng(0).integers(0, 256, 64 * size, dtype=np.uint8).view(dtype).reshape(4, 16)
    message = tensor_pb2.Tensor.FromString(tensors.to_tensor(values).SerializeToString())
    got = tensors.from_tensor(message, "q")
    assert got.dtype == values.dtype
    assert got.shape == values.shape
    assert got.tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=">f4"), np.arange(12, dtype=np.float32)[::2], np.asfortranarray(np.eye(3, dtype=np.float32))],
    ids=["big-endian", "strided", "fortran"],
)
def test_converts_arrays_of_another_memory_order(array):
    np.testing.assert_array_equal(tensors.from_tensor(tensors.to_tensor(array), "q"), array)


def test_keeps_the_shape_of_scalars_and_empty_arrays():
    for shape in [(), (0,), (3, 0, 2)]:
        assert tensors.from_tensor(tensors.to_tensor(np.zeros(shape, np.float32)), "q").shape == shape


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (tensor_pb2.Tensor(dtype="float32", shape=[2], data=b"1234567"), "q.data"),
        (tensor_pb2.Tensor(dtype="float32", shape=[2**31 - 1, 2**31 - 1], data=b""), "q.data"),
        (tensor_pb2.Tensor(dtype="float32", shape=[2**32, 2**32], data=b""), "q.shape[0]"),
        (tensor_pb2.Tensor(dtype="float32", shape=[-1, 4], data=b""), "q.shape[0]"),
        (tensor_pb2.Tensor(dtype="float32", shape=[1] * 9, data=b"1234"), "q.shape"),
        (tensor_pb2.Tensor(dtype="V2", shape=[1], data=b"12"), "q.dtype"),
        (tensor_pb2.Tensor(dtype="<f4", shape=[1], data=b"1234"), "q.dtype"),
        (tensor_pb2.Tensor(), "q.dtype"),
    ],
)
def test_refuses_what_is_not_an_array(message, field):
    with pytest.raises(tensors.TensorError) as caught:
        tensors.from_tensor(message, "q")
    assert caught.value.field == field


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.zeros(2, "V2"), np.zeros(2, np.complex64)])
def test_refuses_arrays_without_a_wire_name(array):
    with pytest.raises(tensors.TensorError):
        tensors.to_tensor(array)
