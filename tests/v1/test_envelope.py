"""Messages with arrays, written and read beside the protobuf library."""

import ml_dtypes
import numpy as np
import pytest
from google.protobuf.message import DecodeError

from attnd.v1 import attention_pb2, cache_pb2, envelope, tensor_pb2, tensors

RNG = np.random.default_rng(0)
Q = RNG.standard_normal((3, 4, 16)).astype(np.float32)
HEADER = {"cache_id": "x" * 200, "layer": 7, "options": attention_pb2.AttentionOptions(soft_cap=0.0, sm_scale=0.125)}
IDS = np.arange(300, dtype=np.int32).reshape(2, 150)
MESSAGES = {
    "attend": (
        attention_pb2.AttendRequest(sequences=[b"0" * 16, b"1" * 16], **HEADER),
        {"q": Q, "k": Q, "kv_lens": IDS[0]},
    ),
    "ragged": (attention_pb2.RaggedPagedAttentionRequest(**HEADER), {"v": Q, "page_indices": IDS}),
    "answer": (attention_pb2.AttendResponse(implementation="xla"), {"lse_natural": Q[..., 0], "out": Q}),
    "pages": (
        cache_pb2.WritePagesRequest(cache_id="x"),
        {"kv_pages": Q.astype(ml_dtypes.bfloat16), "page_indices": IDS[0]},
    ),
    "header-only": (attention_pb2.AttendRequest(**HEADER), {}),
    "empty": (attention_pb2.AttendResponse(), {"out": np.zeros((0, 4, 16), np.float32)}),
    "scalar": (attention_pb2.AttendResponse(), {"out": np.float32(1.5).reshape(())}),
    "strided": (attention_pb2.AttendResponse(), {"out": np.asfortranarray(Q)[::2, :, ::-1]}),
    "big-endian": (attention_pb2.AttendResponse(), {"out": Q.astype(">f4")}),
    "fp8": (attention_pb2.AttendResponse(), {"out": Q.astype(ml_dtypes.float8_e4m3fn)}),
    "large": (attention_pb2.AttendResponse(), {"out": np.zeros(1 << 15, np.float64)}),
}


def by_protobuf(header, arrays):
    message = type(header)()
    message.CopyFrom(header)
    for name, array in arrays.items():
        getattr(message, name).CopyFrom(tensors.to_tensor(array))
    return message


@pytest.mark.parametrize("name", MESSAGES)
def test_writes_the_bytes_that_protobuf_writes(name):
    header, arrays = MESSAGES[name]
    assert envelope.pack(header, arrays) == by_protobuf(header, arrays).SerializeToString()


@pytest.mark.parametrize("name", MESSAGES)
def test_reads_what_protobuf_writes(name):
    header, arrays = MESSAGES[name]
    got_header, got = envelope.unpack(by_protobuf(header, arrays).SerializeToString(), type(header))
    assert got_header == header
    assert got.keys() == arrays.keys()
    for field, array in arrays.items():
        assert got[field].dtype == array.dtype.newbyteorder("<")
        assert got[field].shape == array.shape
        np.testing.assert_array_equal(got[field].astype(np.float64), array.astype(np.float64))


def test_arrays_read_are_views_of_the_message():
    message = envelope.pack(*MESSAGES["large"])
    _, arrays = envelope.unpack(message, attention_pb2.AttendResponse)
    assert np.shares_memory(arrays["out"], np.frombuffer(message, np.uint8))
    assert not arrays["out"].flags.writeable


@pytest.mark.parametrize("name", ["attend", "answer", "pages", "header-only"])
def test_damaged_messages_are_read_as_protobuf_reads_them_or_refused(name):
    header, arrays = MESSAGES[name]
    whole = envelope.pack(header, arrays)
    for _ in range(3000):
        damaged = bytearray(whole[: RNG.integers(len(whole) + 1)])
        for place in RNG.integers(len(damaged), size=RNG.integers(3)) if damaged else ():
            damaged[min(place, RNG.integers(1, 500)) % len(damaged)] = RNG.integers(256)
        try:
            got_header, got = envelope.unpack(bytes(damaged), type(header))
        except (DecodeError, tensors.TensorError):
            continue
        wanted = type(header).FromString(bytes(damaged))
        for field, array in got.items():
            np.testing.assert_array_equal(
                array.view(np.uint8), tensors.from_tensor(getattr(wanted, field), field).view(np.uint8)
            )
            wanted.ClearField(field)
        assert got_header == wanted


def test_refuses_an_array_given_twice():
    twice = envelope.pack(*MESSAGES["answer"]) + envelope.pack(attention_pb2.AttendResponse(), {"out": Q})
    with pytest.raises(DecodeError, match="out is given twice"):
        envelope.unpack(twice, attention_pb2.AttendResponse)


def test_refuses_shapes_that_the_bytes_do_not_fill():
    tensor = tensor_pb2.Tensor(dtype="float32", shape=[2**20, 2**20], data=b"1234")
    message = attention_pb2.AttendResponse(out=tensor).SerializeToString()
    with pytest.raises(tensors.TensorError, match="must be"):
        envelope.unpack(message, attention_pb2.AttendResponse)


def test_refuses_more_fields_than_any_call_has():
    with pytest.raises(DecodeError, match="more than 131072 fields"):
        envelope.unpack(b"\x10\x01" * (1 << 18), attention_pb2.AttendRequest)
    header = attention_pb2.AttendRequest(sequences=[b"0" * 16] * 65536)
    assert envelope.unpack(header.SerializeToString(), attention_pb2.AttendRequest)[0] == header
