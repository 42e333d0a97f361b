"""Messages that end like one that was read before."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from attnd.v1 import attention_pb2 as pb
from attnd.v1 import envelope, tensors

RNG = np.random.default_rng(0)
KIND = pb.PlannedAttendRequest
FIELDS = ("q", "k", "v")


@pytest.fixture(autouse=True)
def nothing_is_known():
    envelope._tails.cache_clear()


def known(message, fetch=None):
    return envelope._tails(KIND.DESCRIPTOR).read(message, fetch)


def layer(index, shape=(2, 3, 8), dtype=np.float32, fields=FIELDS, plan_id=9):
    arrays = {field: RNG.standard_normal(shape).astype(dtype) for field in fields}
    header = KIND(plan_id=plan_id, layer=index, options=pb.AttentionOptions(sm_scale=0.125))
    return envelope.pack(header, arrays), header, arrays


def check(message, header, arrays):
    got_header, got = envelope.unpack(message, KIND)
    assert got_header == header
    assert list(got) == sorted(arrays, key=list(KIND.DESCRIPTOR.fields_by_name).index)
    for field, array in arrays.items():
        assert got[field].dtype == array.dtype
        np.testing.assert_array_equal(got[field], array)


def test_layers_of_a_step_are_read_by_what_they_have_in_common():
    check(*layer(0))
    for index in (1, 2, 200):  # a longer header, too
        message, header, arrays = layer(index)
        for form in (message, bytearray(message), memoryview(message)):
            assert known(form) is not None
            check(form, header, arrays)


def test_callers_that_take_turns_are_all_known():
    kinds = [{"shape": (1, 3, 8)}, {"shape": (7, 3, 8)}, {"fields": ("q",)}, {"dtype": np.float16}]
    for index in range(3):
        for kind in kinds:
            message, header, arrays = layer(index, **kind)
            assert (known(message) is not None) == (index > 0)
            check(message, header, arrays)


def test_only_so_many_tails_are_kept():
    for size in range(1, 20):
        check(*layer(0, shape=(size, 3, 8)))
    tails = envelope._tails(KIND.DESCRIPTOR)._tails
    assert len(tails) == 4
    assert known(layer(5, shape=(19, 3, 8))[0]) is not None
    assert known(layer(5, shape=(1, 3, 8))[0]) is None


@pytest.mark.parametrize("arrays", [{"q": np.zeros((0, 3, 8), np.float32)}, {}], ids=["no elements", "no arrays"])
def test_messages_without_elements_teach_nothing(arrays):
    message = envelope.pack(KIND(layer=3), arrays)
    check(message, KIND(layer=3), arrays)
    assert envelope._tails(KIND.DESCRIPTOR)._tails == ()


def test_an_array_that_stands_before_the_others_is_not_overlooked():
    message, header, arrays = layer(1)
    check(message, header, arrays)
    first = envelope.pack(KIND(), {"q": np.ones((2, 3, 8), np.float32)})
    assert known(first + message) is None
    with pytest.raises(tensors.TensorError, match=r"q\.shape"):
        envelope.unpack(first + message, KIND)


def test_damaged_messages_are_read_as_protobuf_reads_them_or_refused():
    whole = layer(1)[0]
    envelope.unpack(whole, KIND)
    num_known = 0
    for _ in range(5000):
        damaged = bytearray(whole)
        for place in RNG.integers(len(whole), size=RNG.integers(1, 4)):
            damaged[min(place, RNG.integers(1, 80))] = RNG.integers(256)
        message = bytes(damaged)
        num_known += known(message) is not None
        try:
            got_header, got = envelope.unpack(message, KIND)
        except (DecodeError, tensors.TensorError):
            continue
        wanted = KIND.FromString(message)
        for field, array in got.items():
            wanted_array = tensors.from_tensor(getattr(wanted, field), field)
            assert (array.dtype, array.tobytes()) == (wanted_array.dtype, wanted_array.tobytes())
            wanted.ClearField(field)
        assert got_header == wanted
    assert num_known > 100  # or nothing but the long way was tried


def test_elements_in_shared_memory_are_fetched_each_time():
    memory = np.arange(96, dtype=np.float32)
    header, arrays = KIND(layer=1), {"q": memory[:48].reshape(2, 3, 8), "k": np.ones((2, 3, 8), np.float32)}
    message = envelope.pack(header, arrays, lambda array: 64 if array[0, 0, 0] == 0 else None)
    asked = []

    def fetch(field, offset, size_bytes):
        asked.append((field, offset, size_bytes))
        return memoryview(memory).cast("B")[:size_bytes]

    for _ in range(2):
        _, got = envelope.unpack(message, KIND, fetch)
        np.testing.assert_array_equal(got["q"], arrays["q"])
        np.testing.assert_array_equal(got["k"], arrays["k"])
    assert asked == [("q", 64, 192)] * 2
    assert known(message, fetch) is not None
    with pytest.raises(tensors.TensorError, match="does not share"):
        envelope.unpack(message, KIND)

    def elsewhere(field, offset, size_bytes):
        raise tensors.TensorError(field, "not here")

    with pytest.raises(tensors.TensorError, match="not here"):
        envelope.unpack(message, KIND, elsewhere)


SESSION = {
    "planned": lambda: envelope.pack_within(
        [(pb.SessionRequest(id=300, timeout_s=1.5, others_wait=True), "planned")], KIND(layer=2), {}
    ),
    "cancel": lambda: pb.SessionRequest(cancel=pb.CancelRequest(id=7)).SerializeToString(),
    "nothing inside": lambda: b"",
}


@pytest.mark.parametrize("name", SESSION)
def test_damaged_outer_messages_are_read_as_protobuf_reads_them_or_refused(name):
    whole = SESSION[name]() + pb.SessionRequest(id=1).SerializeToString() * (name == "nothing inside")
    for _ in range(5000):
        damaged = bytearray(whole[: RNG.integers(len(whole) + 1)])
        for place in RNG.integers(len(damaged), size=RNG.integers(3)) if damaged else ():
            damaged[place] = RNG.integers(256)
        message = bytes(damaged)
        try:
            header, field, value = envelope.unpack_outer(message, pb.SessionRequest)
            kind = type(getattr(header, field)) if field else None
            inner = None if kind is None else envelope.unpack(value, kind)[0]
        except (DecodeError, tensors.TensorError):
            continue
        wanted = pb.SessionRequest.FromString(message)
        assert (wanted.WhichOneof("call") or "") == field
        if field:
            assert inner == getattr(wanted, field)
            wanted.ClearField(field)
            header.ClearField(field)
        assert header == wanted
