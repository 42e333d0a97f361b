"""Arrays and scalars on their way out and back: what is converted, what is refused."""

import ml_dtypes
import numpy as np
import pytest

from attnd.client import InternalError, InvalidArgumentError, ResourceExhaustedError, _messages
from attnd.v1 import attention_pb2, envelope

BIG = 2**32 + 1


def over_the_wire(array: np.ndarray) -> np.ndarray:
    message = envelope.pack(attention_pb2.AttendResponse(), {"out": array})
    return _messages.owned(envelope.unpack(message, attention_pb2.AttendResponse)[1], "out")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_bit_of_the_values_survives(dtype):
    size = np.dtype(dtype).itemsize
    values = np.random.default_rng(0).integers(0, 256, 96 * size, dtype=np.uint8).view(dtype).reshape(2, 6, 8)
    got = over_the_wire(_messages.values_array(values, "q"))
    assert got.dtype == values.dtype
    assert got.tobytes() == values.tobytes()


def test_signed_zero_nan_and_subnormals_survive_in_bfloat16():
    values = np.array([-0.0, np.nan, -np.inf, 1e-40], np.float32).astype(ml_dtypes.bfloat16)
    assert over_the_wire(_messages.values_array(values, "q")).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    "change",
    [lambda x: x.astype(">f4"), np.asfortranarray, lambda x: np.repeat(x, 2, axis=1)[:, ::2], lambda x: x[::-1][::-1]],
    ids=["big-endian", "fortran", "strided", "negative-strides"],
)
def test_memory_order_does_not_matter(change):
    values = np.random.default_rng(0).standard_normal((3, 4, 5), np.float32)
    np.testing.assert_array_equal(over_the_wire(_messages.values_array(change(values), "q")), values)


def test_answers_are_writable_and_own_their_memory():
    got = over_the_wire(np.ones((2, 3), np.float32))
    got += 1
    assert got.flags.owndata
    assert got.flags.writeable


def test_an_answer_without_its_array_is_the_servers_fault():
    with pytest.raises(InternalError, match="lacks out"):
        _messages.owned({}, "out")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (np.ones(3), "float64"),
        (np.ones(3, ">f8"), "float64"),
        ([1.0, 2.0], "float64"),
        (np.ones(3, bool), "bool"),
        (np.ones(3, np.complex64), "complex64"),
        (np.array(["a"]), "must be one of"),
        (None, "object"),
        ([[1], [2, 3]], "cannot be read as an array"),
        (np.ma.masked_array(np.ones(3, np.float32), [0, 1, 0]), "masked"),
    ],
    ids=["float64", "big-endian-float64", "python-floats", "bool", "complex", "strings", "none", "ragged", "masked"],
)
def test_refuses_values_that_would_be_changed(values, text):
    with pytest.raises(InvalidArgumentError, match=text) as caught:
        _messages.values_array(values, "q")
    assert caught.value.violations[0].field.startswith("q")
    assert isinstance(caught.value, ValueError)


def test_says_how_to_mend_float64():
    with pytest.raises(InvalidArgumentError, match=r"k has dtype float64, .*k\.astype\(numpy\.float32\)"):
        _messages.values_array(np.ones(3), "k")


@pytest.mark.parametrize(
    "values",
    [
        [[0, 1], [2, 3]],
        ((0, 1), (2, 3)),
        np.array([[0, 1], [2, 3]]),
        np.array([[0, 1], [2, 3]], np.uint64),
        np.array([[0, 1], [2, 3]], ">i8"),
        np.array([[0, 1], [2, 3]], ">i4"),
        [np.array([0, 1], np.int32), np.array([2, 3], np.int32)],
        [[np.int64(0), 1], [np.uint8(2), 3]],
    ],
    ids=["lists", "tuples", "int64", "uint64", "big-endian-64", "big-endian-32", "list-of-arrays", "numpy-scalars"],
)
def test_integers_that_fit_are_narrowed_to_int32(values):
    got = over_the_wire(_messages.integers_array(values, "page_indices"))
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("values", "place", "value"),
    [
        (np.array([[0, BIG]]), "page_indices[0,1]", BIG),
        ([0, 1, BIG], "page_indices[2]", BIG),
        ([2**31], "page_indices[0]", 2**31),
        (np.array([2**63], np.uint64), "page_indices[0]", 2**63),
        ([1, 2**64], "page_indices[1]", 2**64),
        ([2**63, 1], "page_indices[0]", 2**63),
        (np.array([[0, BIG]], ">i8"), "page_indices[0,1]", BIG),
        (np.array([-(2**31) - 1]), "page_indices[0]", -(2**31) - 1),
        (BIG, "page_indices", BIG),
    ],
)
def test_integers_beyond_int32_are_refused_not_wrapped(values, place, value):
    with pytest.raises(InvalidArgumentError) as caught:
        _messages.integers_array(values, "page_indices")
    assert str(caught.value) == f"{place}={value} must be in [-2**31, 2**31)."
    assert caught.value.violations[0].field == place


def test_the_ends_of_int32_fit():
    ends = [-(2**31), 2**31 - 1]
    np.testing.assert_array_equal(_messages.integers_array(ends, "x"), ends)
    np.testing.assert_array_equal(_messages.integers_array(np.array(ends), "x"), ends)


@pytest.mark.parametrize("values", [[0.0, 1.0], [1, 2.5], [True], ["1"], [None], [[1], [2, 3]]])
def test_refuses_lists_of_anything_but_integers(values):
    with pytest.raises(InvalidArgumentError, match="kv_lens"):
        _messages.integers_array(values, "kv_lens")


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "uint32", "float32", "float64", "bool"])
def test_arrays_of_other_dtypes_are_left_to_the_server(dtype):
    got = _messages.integers_array(np.array([0, 1], dtype), "kv_lens")
    assert got.dtype == dtype


def test_empty_lists_are_int32():
    assert _messages.integers_array([], "kv_lens").dtype == np.int32
    assert _messages.integers_array([[], []], "page_indices").shape == (2, 0)


def test_num_seqs_may_be_an_integer():
    for given in (2, np.int64(2), np.int32(2), [2], np.array([2])):
        np.testing.assert_array_equal(_messages.counts_array(given, "num_seqs"), np.array([2], np.int32))
    assert _messages.counts_array(np.array(2, np.int32), "num_seqs").shape == ()


@pytest.mark.parametrize("given", [1, 1.0, np.float32(1), np.int8(1), np.array(1), ml_dtypes.bfloat16(1)])
def test_real_scalars_of_every_kind_are_floats(given):
    got = _messages.real(given, "sm_scale")
    assert type(got) is float
    assert got == 1.0


@pytest.mark.parametrize("given", [True, np.bool_(False), "1.0", 1j, [1.0], np.ones(1), 10**400, object()])
def test_refuses_scalars_that_are_not_real(given):
    with pytest.raises(InvalidArgumentError, match="sm_scale="):
        _messages.real(given, "sm_scale")


@pytest.mark.parametrize("given", [4.0, True, "4", None, np.array([4, 5]), 2**31, -(2**31) - 1])
def test_refuses_scalars_that_are_not_int32(given):
    with pytest.raises(InvalidArgumentError, match="layer="):
        _messages.integer(given, "layer")


def test_integers_of_numpy_are_integers():
    assert _messages.integer(np.int64(3), "layer") == 3
    assert _messages.optional_integer(2**40, "vmem_limit_bytes") == 2**40
    assert _messages.optional_integer(None, "sliding_window") is None


@pytest.mark.parametrize("given", [1, 0, None, "yes", np.ones(2, bool)])
def test_refuses_flags_that_are_not_booleans(given):
    with pytest.raises(InvalidArgumentError, match="return_lse="):
        _messages.flag(given, "return_lse")


@pytest.mark.parametrize(
    "given", ["bfloat16", np.dtype("bfloat16"), ml_dtypes.bfloat16, np.zeros(1, ml_dtypes.bfloat16).dtype]
)
def test_dtypes_may_be_names_or_types(given):
    assert _messages.dtype_name(given) == "bfloat16"


@pytest.mark.parametrize("given", [None, 3, object()])
def test_refuses_what_is_no_dtype(given):
    with pytest.raises(InvalidArgumentError, match="dtype="):
        _messages.dtype_name(given)


def test_takes_jax_arrays_and_dtypes():
    jnp = pytest.importorskip("jax.numpy")
    assert _messages.dtype_name(jnp.bfloat16) == "bfloat16"
    assert _messages.values_array(jnp.ones((2, 3), jnp.bfloat16), "q").dtype == ml_dtypes.bfloat16
    assert _messages.integers_array(jnp.arange(3), "kv_lens").dtype == np.int32
    assert _messages.real(jnp.float32(0.5), "sm_scale") == 0.5
    assert _messages.integer(jnp.int32(3), "layer") == 3


def test_refuses_an_array_beyond_the_limit_before_copying_it(monkeypatch):
    monkeypatch.setattr(_messages, "MESSAGE_BYTES_MAX", 15)
    with pytest.raises(ResourceExhaustedError, match="q has 16 bytes, a message holds at most 15") as caught:
        _messages.values_array(np.ones(4, np.float32), "q")
    assert caught.value.reason == "MESSAGE_TOO_LARGE"
