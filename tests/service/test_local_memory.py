"""The memory that a local connection shares, against clients that lie about it."""

import array
import os
import threading

import grpc
import numpy as np
import pytest

from attnd.v1 import attention_pb2, local, tensor_pb2
from attnd.v1.local import Kind, Room
from tests.support.local import fresh_cache, raw_line, refusal
from tests.support.server import attnd_server

RAGGED_PATH = "/attnd.v1.AttentionService/RaggedPagedAttention"


@pytest.fixture(scope="module")
def server():
    with attnd_server() as process:
        yield process


@pytest.fixture
def line(server):
    with raw_line(server.address) as connected:
        yield connected


@pytest.fixture
def cache(server):
    with fresh_cache(server.address) as made:
        yield made


def shared_tensor(offset: int, shape: list[int], dtype: str = "float32", **rest) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype=dtype, shape=shape, shared_offset=offset, **rest)


def integers(*values: int) -> tensor_pb2.Tensor:
    return tensor_pb2.Tensor(dtype="int32", shape=[len(values)], data=array.array("i", values).tobytes())


def ragged(cache, **arrays: tensor_pb2.Tensor) -> attention_pb2.RaggedPagedAttentionRequest:
    """A call of one row of one token, whose q lies at the beginning of the memory."""
    given = {
        "q": shared_tensor(0, [1, 4, 16]),
        "kv_lens": integers(1),
        "page_indices": tensor_pb2.Tensor(dtype="int32", shape=[1, 1], data=bytes(4)),
        "cu_q_lens": integers(0, 1),
        "num_seqs": integers(1),
    }
    return attention_pb2.RaggedPagedAttentionRequest(cache_id=cache.info.cache_id, **(given | arrays))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (shared_tensor(local.SEGMENT_BYTES, [1, 4, 16]), "must lie within"),
        (shared_tensor(local.SEGMENT_BYTES - 64, [1, 4, 16]), "must lie within"),
        (shared_tensor(2**64 - 64, [1, 4, 16]), "must lie within"),
        (shared_tensor(8, [1, 4, 16]), "must be a multiple of 64"),
        (shared_tensor(0, [2**31 - 1, 2**31 - 1, 2**31 - 1]), "must lie within"),
        (shared_tensor(0, [-1, 4, 16]), "must be in"),
        (shared_tensor(0, [1, 4, 16], "V2"), "must be one of"),
        (shared_tensor(0, [1, 4, 16], data=bytes(256)), "beside data"),
        (shared_tensor(0, [1, 4, 17]), "head_dim"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_arrays_that_do_not_lie_in_the_memory_are_refused(line, cache, tensor, message):
    os.close(line.share())
    code, _, text = refusal(*line.call(RAGGED_PATH, ragged(cache, q=tensor)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert message in text
    assert line.call(RAGGED_PATH, ragged(cache))[0] == Kind.MESSAGE


def test_shared_arrays_are_refused_where_no_memory_is_shared(server, line, cache):
    request = ragged(cache)
    code, _, text = refusal(*line.call(RAGGED_PATH, request))
    assert (code, "shares no memory" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)
    with (
        grpc.insecure_channel(server.address) as channel,
        pytest.raises(grpc.RpcError, match="does not share") as caught,
    ):
        channel.unary_unary(RAGGED_PATH)(request.SerializeToString(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_answers_lie_in_the_room_for_them_or_in_the_message(line, cache):
    os.close(line.share())
    rows = 512
    q = np.random.default_rng(0).standard_normal((rows, 4, 16), np.float32)
    line.segment.write(0, q)
    request = ragged(
        cache,
        q=shared_tensor(0, list(q.shape)),
        kv_lens=integers(rows),
        page_indices=tensor_pb2.Tensor(dtype="int32", shape=[1, 64], data=np.arange(64, dtype=np.int32).tobytes()),
        cu_q_lens=integers(0, rows),
    )
    places = []
    for room in (Room(local.aligned(q.nbytes), q.nbytes), Room(local.aligned(q.nbytes), q.nbytes - 64), local.NO_ROOM):
        kind, body = line.call(RAGGED_PATH, request, room)
        assert kind == Kind.MESSAGE
        out = attention_pb2.RaggedPagedAttentionResponse.FromString(body).out
        places.append((out.HasField("shared_offset"), out.shared_offset, len(out.data)))
    assert places == [(True, local.aligned(q.nbytes), 0), (False, 0, q.nbytes), (False, 0, q.nbytes)]


def test_memory_that_changes_during_calls_harms_nobody(server, line, cache):
    other = np.full((1, 8, 4, 16), 7, np.float32)
    cache.write_pages(0, [63], other)
    os.close(line.share())
    tables = {name: local.aligned(1 << 16) + i * 64 for i, name in enumerate(("kv_lens", "page_indices", "cu_q_lens"))}
    stop = threading.Event()

    def scribble() -> None:
        views = [np.frombuffer(line.segment.view("x", offset, 64), np.int32) for offset in tables.values()]
        everything = np.frombuffer(line.segment.view("x", 0, 4096), np.uint8)
        rng = np.random.default_rng(0)
        while not stop.is_set():
            everything[:] = rng.integers(0, 256, 4096)
            for view in views:
                view[:] = rng.choice([0, 1, 2, -1, 2**31 - 1, 62])

    scribbling = threading.Thread(target=scribble)
    scribbling.start()
    request = ragged(
        cache,
        q=shared_tensor(0, [1, 4, 16]),
        k=shared_tensor(1024, [1, 2, 16]),
        v=shared_tensor(2048, [1, 2, 16]),
        kv_lens=shared_tensor(tables["kv_lens"], [1], "int32"),
        page_indices=shared_tensor(tables["page_indices"], [1, 1], "int32"),
        cu_q_lens=shared_tensor(tables["cu_q_lens"], [2], "int32"),
    )
    kinds = set()
    try:
        for _ in range(300):
            kind, body = line.call(RAGGED_PATH, request)
            kinds.add(kind)
            if kind == Kind.STATUS:
                assert refusal(kind, body)[0] is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        stop.set()
        scribbling.join()
    assert Kind.STATUS in kinds
    np.testing.assert_array_equal(cache.read_pages(0, [63]), other)
    assert "Traceback" not in server.log()


def test_a_call_whose_time_is_up_is_not_begun(line, cache):
    os.close(line.share())
    request = ragged(cache).SerializeToString()
    for _ in range(3):
        line.send(Kind.UNARY, RAGGED_PATH.encode(), request, timeout_s=1e-9)
        assert refusal(*line.receive())[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert line.call(RAGGED_PATH, request)[0] == Kind.MESSAGE
