"""A real server under bad input, busy times and signals."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from attnd.v1 import attention_pb2, cache_pb2, server_pb2, tensor_pb2, tensors
from tests.support.rpc import (
    RawClient,
    Refused,
    attend_request,
    create_cache,
    create_sequences,
    ints,
    normal,
    refusal,
)
from tests.support.server import attnd_server


@pytest.fixture(scope="module")
def server():
    with attnd_server() as process:
        yield process


@pytest.fixture
def client(server):
    with RawClient(server.address) as raw:
        yield raw


@pytest.fixture
def cache_id(client, request):
    name = f"c{abs(hash(request.node.name))}"
    cache_id = create_cache(client, name)
    yield cache_id
    client("CacheService/DeleteCache", cache_pb2.DeleteCacheRequest(cache_id=cache_id))


def still_serves(client, cache_id):
    (handle,) = create_sequences(client, cache_id, 1)
    response = client("AttentionService/Attend", attend_request(cache_id, [handle], [3], [3]))
    assert np.isfinite(tensors.from_tensor(response.out, "out")).all()
    client("CacheService/ReleaseSequences", cache_pb2.ReleaseSequencesRequest(cache_id=cache_id, sequences=[handle]))


@pytest.mark.parametrize(
    "path", ["AttentionService/Attend", "CacheService/CreateCache", "AttentionService/ValidateBatch"]
)
@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x0a\x7f", b"\x12\x04\xc3\x28\xa0\xa1", os.urandom(1000)])
def test_malformed_protobuf_is_invalid_argument(client, cache_id, path, data):
    with pytest.raises(Refused) as caught:
        client(path, data)
    assert caught.value.code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert caught.value.message
    still_serves(client, cache_id)


@pytest.mark.parametrize(
    "path",
    [
        f"{service}/{method}"
        for service, methods in {
            "AttentionService": ["RaggedPagedAttention", "PagedAttention", "Attend", "ValidateBatch"],
            "CacheService": [
                "CreateCache", "GetCache", "DeleteCache", "WritePages", "ReadPages", "CreateSequences",
                "ReleaseSequences", "ListSequences", "ForkSequence", "TruncateSequence", "KeepAlive",
            ],
        }.items()
        for method in methods
    ],
)  # fmt: skip
def test_an_empty_message_gets_a_clear_status(client, path):
    with pytest.raises(Refused) as caught:
        client(path, b"")
    assert caught.value.code in {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    assert caught.value.reason
    assert caught.value.message


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("CacheService/SaveCache", grpc.StatusCode.NOT_FOUND),
        ("CacheService/RestoreCache", grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_stream_that_is_refused_has_a_clear_status(client, path, code):
    for data, expected in ((b"", code), (b"\xff\xff", grpc.StatusCode.INVALID_ARGUMENT)):
        with pytest.raises(grpc.RpcError) as caught:
            list(client.channel.unary_stream(f"/attnd.v1.{path}")(data, timeout=10))
        assert refusal(caught.value).code is expected
        assert refusal(caught.value).reason


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        (tensor_pb2.Tensor(dtype="float32", shape=[3, 4, 16], data=b"1234567"), "q.data"),
        (tensor_pb2.Tensor(dtype="float32", shape=[2**31 - 1] * 3), "q.data"),
        (tensor_pb2.Tensor(dtype="float32", shape=[2**32, 2**32]), "q.shape[0]"),
        (tensor_pb2.Tensor(dtype="float32", shape=[-1, 4, 16]), "q.shape[0]"),
        (tensor_pb2.Tensor(dtype="V2", shape=[1], data=b"12"), "q.dtype"),
        (None, "q"),
    ],
)
def test_a_message_that_is_no_array_is_named_before_anything_is_allocated(client, cache_id, tensor, field):
    (handle,) = create_sequences(client, cache_id, 1)
    request = attend_request(cache_id, [handle], [3], [3])
    request.ClearField("q")
    if tensor is not None:
        request.q.CopyFrom(tensor)
    with pytest.raises(Refused) as caught:
        client("AttentionService/Attend", request)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.fields == [field]
    still_serves(client, cache_id)


def test_wrong_kinds_of_cache_are_failed_preconditions(client, cache_id):
    by_client = create_cache(client, "by-client", pages_by="CLIENT")
    split = create_cache(client, "split", pages_by="CLIENT", layout="SPLIT")
    ragged = attention_pb2.RaggedPagedAttentionRequest
    for path, request, reason in [
        ("AttentionService/RaggedPagedAttention", ragged(cache_id=cache_id), "PAGES_BY_SERVER"),
        ("CacheService/ReadPages", cache_pb2.ReadPagesRequest(cache_id=cache_id), "PAGES_BY_SERVER"),
        ("AttentionService/Attend", attention_pb2.AttendRequest(cache_id=by_client), "PAGES_BY_CLIENT"),
        ("CacheService/ListSequences", cache_pb2.ListSequencesRequest(cache_id=split), "PAGES_BY_CLIENT"),
        ("AttentionService/RaggedPagedAttention", ragged(cache_id=split), "WRONG_LAYOUT"),
        ("AttentionService/PagedAttention", attention_pb2.PagedAttentionRequest(cache_id=by_client), "WRONG_LAYOUT"),
    ]:
        with pytest.raises(Refused) as caught:
            client(path, request)
        assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, reason)
    for made in (by_client, split):
        client("CacheService/DeleteCache", cache_pb2.DeleteCacheRequest(cache_id=made))


def test_the_id_of_a_deleted_cache_never_names_a_later_one(client):
    first = create_cache(client, "again")
    with pytest.raises(Refused) as caught:
        create_cache(client, "again")
    assert caught.value.code is grpc.StatusCode.ALREADY_EXISTS
    client("CacheService/DeleteCache", cache_pb2.DeleteCacheRequest(cache_id=first))
    second = create_cache(client, "again")
    assert second != first
    with pytest.raises(Refused) as caught:
        create_sequences(client, first, 1)
    assert caught.value.code is grpc.StatusCode.NOT_FOUND
    client("CacheService/DeleteCache", cache_pb2.DeleteCacheRequest(cache_id=second))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"num_layers": 0}, "spec.num_layers"),
        ({"num_pages": -1}, "spec.num_pages"),
        ({"page_size": 0}, "spec.page_size"),
        ({"num_kv_heads": 0}, "spec.num_kv_heads"),
        ({"head_dim": 0}, "spec.head_dim"),
        ({"dtype": "int32"}, "spec.dtype"),
        ({"dtype": ""}, "spec.dtype"),
    ],
)
def test_a_cache_of_an_impossible_shape_is_refused_by_field(client, spec, field):
    with pytest.raises(Refused) as caught:
        create_cache(client, "impossible", **spec)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.fields == [field]


def test_a_cache_beyond_the_memory_is_refused_with_both_sizes(client):
    with pytest.raises(Refused, match="bytes") as caught:
        create_cache(client, "huge", num_pages=2**31 - 1, page_size=65536, num_layers=1024)
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert caught.value.reason == "CACHE_MEMORY_EXHAUSTED"


def test_thousands_of_violations_keep_the_code_and_stay_small(client):
    cache_id = create_cache(client, "bad-pages", pages_by="CLIENT")
    num_seqs = 5000
    request = attention_pb2.RaggedPagedAttentionRequest(
        cache_id=cache_id,
        kv_lens=tensors.to_tensor(np.ones(num_seqs, np.int32)),
        page_indices=tensors.to_tensor(np.full((num_seqs, 1), 99, np.int32)),
        cu_q_lens=tensors.to_tensor(np.arange(num_seqs + 1, dtype=np.int32)),
        num_seqs=ints(num_seqs),
        q=tensors.to_tensor(normal(num_seqs, 4, 16)),
    )
    with pytest.raises(Refused) as caught:
        client("AttentionService/RaggedPagedAttention", request)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(caught.value.fields) == 16
    assert caught.value.fields[0] == "page_indices[0,0]"
    assert len(caught.value.message) + sum(map(len, caught.value.descriptions)) < 4096
    client("CacheService/DeleteCache", cache_pb2.DeleteCacheRequest(cache_id=cache_id))


def test_a_repeated_call_is_harmless_and_a_differing_one_is_detected(client, cache_id):
    a, b = create_sequences(client, cache_id, 2)
    request = attend_request(cache_id, [a, b], [5, 9], [5, 9])
    first = client("AttentionService/Attend", request)
    again = client("AttentionService/Attend", request)
    assert first.out == again.out
    with pytest.raises(Refused) as caught:
        client("AttentionService/Attend", attend_request(cache_id, [a, b], [5, 9], [5, 9], seed=7))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "CONFLICTING_WRITE")
    assert client("AttentionService/Attend", request).out == first.out


def test_of_two_writers_at_one_position_the_second_is_told(server, client, cache_id):
    (handle,) = create_sequences(client, cache_id, 1)
    outcomes = []

    def writer(seed):
        with RawClient(server.address) as own:
            for position in range(1, 51):
                try:
                    own("AttentionService/Attend", attend_request(cache_id, [handle], [1], [position], seed=seed))
                    outcomes.append((position, seed))
                except Refused as refused:
                    assert refused.reason == "CONFLICTING_WRITE"

    threads = [threading.Thread(target=writer, args=(seed,)) for seed in (10, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(position for position, _ in outcomes) == list(range(1, 51))
    winners = dict(outcomes)
    keys = np.concatenate([normal(1, 2, 16, seed=winners[position] + 1) for position in range(1, 51)])
    values = np.concatenate([normal(1, 2, 16, seed=winners[position] + 2) for position in range(1, 51)])
    rewrite = attend_request(cache_id, [handle], [50], [50], k=keys, v=values)
    client("AttentionService/Attend", rewrite)


def test_cancelled_calls_leave_no_page_behind(client, cache_id):
    for i in range(100):
        (handle,) = create_sequences(client, cache_id, 1)
        data = attend_request(cache_id, [handle], [20], [20]).SerializeToString()
        call = client.channel.unary_unary("/attnd.v1.AttentionService/Attend").future(data, timeout=30)
        time.sleep(i % 5 * 1e-3)
        call.cancel()
        release = cache_pb2.ReleaseSequencesRequest(cache_id=cache_id, sequences=[handle])
        client("CacheService/ReleaseSequences", release)
    deadline = time.monotonic() + 10
    while free_pages(client, cache_id) < 16 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert free_pages(client, cache_id) == 16


def free_pages(client, cache_id):
    caches = client("CacheService/ListCaches", cache_pb2.ListCachesRequest()).caches
    return next(cache.num_free_pages for cache in caches if cache.cache_id == cache_id)


def test_pages_that_ran_out_leave_the_sequence_as_it_was(client, cache_id):
    (handle,) = create_sequences(client, cache_id, 1)
    start = attend_request(cache_id, [handle], [120], [120])
    first = client("AttentionService/Attend", start)
    with pytest.raises(Refused) as caught:
        client("AttentionService/Attend", attend_request(cache_id, [handle], [20], [140]))
    assert (caught.value.code, caught.value.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "PAGES_EXHAUSTED")
    assert client("AttentionService/Attend", start).out == first.out
    (sequence,) = client("CacheService/ListSequences", cache_pb2.ListSequencesRequest(cache_id=cache_id)).sequences
    assert (sequence.length, sequence.num_pages) == (120, 15)
    client("AttentionService/Attend", attend_request(cache_id, [handle], [4], [124]))


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(4096), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"]
)
def test_garbage_on_the_port_is_closed_and_the_server_goes_on(server, client, cache_id, garbage):
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(garbage)
        connection.settimeout(10)
        try:
            while connection.recv(4096):
                pass
        except ConnectionResetError:
            pass
    still_serves(client, cache_id)


def test_a_second_server_on_the_port_fails_loudly(server):
    port = server.address.split(":")[1]
    with pytest.raises(RuntimeError, match="Cannot listen on 127.0.0.1"), attnd_server("--port", port):
        pass


def test_health_answers_while_the_engine_is_busy(server, client, cache_id):
    big = create_cache(client, "busy", num_pages=2048, num_kv_heads=8, head_dim=128, num_layers=1)
    (handle,) = create_sequences(client, big, 1)
    q = normal(2048, 32, 128)
    kv = normal(2048, 8, 128)
    request = attend_request(big, [handle], [2048], [2048], q=q, k=kv, v=kv).SerializeToString()
    call = client.channel.unary_unary("/attnd.v1.AttentionService/Attend").future(request, timeout=120)
    stub = health_pb2_grpc.HealthStub(client.channel)
    answers = 0
    while not call.done():
        answer = stub.Check(health_pb2.HealthCheckRequest(service="attnd.v1.AttentionService"), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        answers += 1
    assert answers > 1
    call.result()
    client("CacheService/DeleteCache", cache_pb2.DeleteCacheRequest(cache_id=big))


def test_reflection_lists_the_services(client):
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=10)
    names = {service.name for service in answer.list_services_response.service}
    assert {"attnd.v1.AttentionService", "attnd.v1.CacheService", "attnd.v1.ServerService"} <= names
    assert "grpc.health.v1.Health" in names


def test_server_info_tells_limits_and_a_new_incarnation_for_each_run(client):
    info = client("ServerService/GetServerInfo", server_pb2.GetServerInfoRequest())
    assert info.platform == "cpu"
    assert info.limits.message_bytes_max > 1 << 22
    assert info.resident_bytes > 0
    with attnd_server() as other, RawClient(other.address) as second:
        assert (
            second("ServerService/GetServerInfo", server_pb2.GetServerInfoRequest()).incarnation_id
            != info.incarnation_id
        )


def test_sigterm_lets_calls_in_flight_end(server):
    with attnd_server("--grace-s", "60") as own, RawClient(own.address) as client:
        cache_id = create_cache(client, "stopping")
        (handle,) = create_sequences(client, cache_id, 1)
        data = attend_request(cache_id, [handle], [100], [100]).SerializeToString()
        call = client.channel.unary_unary("/attnd.v1.AttentionService/Attend").future(data, timeout=60)
        time.sleep(0.2)
        own.process.send_signal(signal.SIGTERM)
        assert attention_pb2.AttendResponse.FromString(call.result()).implementation
        assert own.process.wait(60) == 0


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["info", "--help"]])
def test_help_needs_no_server(arguments):
    ran = subprocess.run(
        [sys.executable, "-m", "attnd.service", *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert "attnd" in ran.stdout


def test_info_prints_a_table_of_server_and_caches(server, client, cache_id):
    command = [sys.executable, "-m", "attnd.service", "info", server.address]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"attnd at {server.address}" in ran.stdout
    assert "incarnation" in ran.stdout


def test_info_says_where_no_server_answers():
    command = [sys.executable, "-m", "attnd.service", "info", "127.0.0.1:1"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 1
    assert "No attnd server answers at 127.0.0.1:1" in ran.stderr
