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


def test_large_arrays_read_are_views_of_the_message():
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


@pytest.mark.parametrize("name", ["answer", "large"])
def test_refuses_an_array_given_twice(name):
    header, arrays = MESSAGES[name]
    twice = envelope.pack(header, arrays) + envelope.pack(attention_pb2.AttendResponse(), {"out": arrays["out"]})
    with pytest.raises((DecodeError, tensors.TensorError), match=r"out is given twice|out.shape"):
        envelope.unpack(twice, attention_pb2.AttendResponse)


NESTED = {
    "layer": [(attention_pb2.SessionRequest(id=300, timeout_s=1.5), "planned")],
    "plan": [
        (attention_pb2.SessionRequest(id=300), "plan"),
        (attention_pb2.PlanRequest(plan_id=7), "ragged_paged_attention"),
    ],
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("num_tokens", [0, 3, 300])  # beside protobuf or through it, by size
def test_messages_in_messages_are_those_of_protobuf(name, num_tokens):
    outers, array = NESTED[name], RNG.standard_normal((num_tokens, 4, 16)).astype(np.float32)
    inner = (
        attention_pb2.PlannedAttendRequest(plan_id=9, layer=2)
        if name == "layer"
        else attention_pb2.RaggedPagedAttentionRequest(cache_id="x" * 200)
    )
    written = envelope.pack_within(outers, inner, {"q": array, "k": array})
    wanted = by_protobuf(inner, {"q": array, "k": array})
    for outer, field in reversed(outers):
        whole = type(outer)()
        whole.CopyFrom(outer)
        getattr(whole, field).CopyFrom(wanted)
        wanted = whole
    assert written == wanted.SerializeToString()
    value = written
    for outer, field in outers:
        header, found, value = envelope.unpack_outer(value, type(outer))
        assert found == field
        header.ClearField(found)
        assert header == outer
    header, arrays = envelope.unpack(value, type(inner))
    assert header == inner
    for name in ("q", "k"):
        np.testing.assert_array_equal(arrays[name], array)


def test_a_message_with_nothing_inside_has_no_field():
    message = attention_pb2.SessionRequest(id=3).SerializeToString()
    header, field, _ = envelope.unpack_outer(message, attention_pb2.SessionRequest)
    assert (header.id, field) == (3, "")


def test_a_message_with_damage_inside_is_still_found_in_the_outer_one():
    outer = attention_pb2.SessionRequest(id=3).SerializeToString() + bytes([8 << 3 | 2, 2, 0xFF, 0xFF])
    header, field, value = envelope.unpack_outer(outer, attention_pb2.SessionRequest)
    assert (header.id, field) == (3, "attend")
    with pytest.raises(DecodeError):
        envelope.unpack(value, attention_pb2.AttendRequest)


def test_refuses_two_messages_inside_a_large_one():
    calls = [envelope.pack_within(NESTED["layer"], attention_pb2.PlannedAttendRequest(), {"q": np.zeros(1 << 14)})]
    calls.append(attention_pb2.SessionRequest(cancel=attention_pb2.CancelRequest(id=1)).SerializeToString())
    with pytest.raises(DecodeError, match="planned and cancel are given at once"):
        envelope.unpack_outer(b"".join(calls), attention_pb2.SessionRequest)


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
