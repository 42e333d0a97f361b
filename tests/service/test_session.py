"""Sessions as any gRPC client sees them: many calls over one stream."""

import itertools
import math
import queue
import signal
import threading
import time

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from attnd.v1 import attention_pb2 as pb
from attnd.v1 import cache_pb2, server_pb2, tensors
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

PATH = "/attnd.v1.AttentionService/Session"
NAMES = itertools.count()


@pytest.fixture(scope="module")
def server():
    # The first call of a kind must take its time: xla compiles for it.
    with attnd_server("--implementation", "xla") as process:
        yield process


@pytest.fixture
def client(server):
    with RawClient(server.address) as raw:
        yield raw


@pytest.fixture
def session(client):
    with Session(client) as opened:
        yield opened


class Session:
    """One stream: requests in, answers out."""

    def __init__(self, client: RawClient) -> None:
        self._requests = queue.SimpleQueue()
        self._ids = itertools.count(1)
        self.call = client.channel.stream_stream(PATH)(iter(self._requests.get, None), timeout=120)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.call.cancel()
        self._requests.put(None)

    def send(self, request: bytes | None = None, **call) -> int:
        request_id = next(self._ids)
        message = pb.SessionRequest(id=request_id, **call).SerializeToString() if request is None else request
        self._requests.put(message)
        return request_id

    def receive(self) -> pb.SessionResponse:
        return pb.SessionResponse.FromString(next(self.call))

    def ask(self, **call) -> pb.SessionResponse:
        request_id = self.send(**call)
        response = self.receive()
        assert response.id == request_id
        return response

    def end(self) -> None:
        self._requests.put(None)


def status_in(response: pb.SessionResponse) -> status_pb2.Status:
    assert response.HasField("status")
    assert response.WhichOneof("answer") is None
    return status_pb2.Status.FromString(response.status)


def reason_in(response: pb.SessionResponse) -> tuple[grpc.StatusCode, str]:
    status, info = status_in(response), error_details_pb2.ErrorInfo()
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return code, next(info.reason for detail in status.details if detail.Unpack(info))


def pages_request(cache_id: str, **changes) -> pb.RaggedPagedAttentionRequest:
    """A row of 9 tokens, 3 of them queries, and one of 13, 5 of them queries."""
    metadata = {
        "cache_id": cache_id,
        "kv_lens": ints(9, 13),
        "page_indices": tensors.to_tensor(np.array([[0, 1], [2, 3]], np.int32)),
        "cu_q_lens": ints(0, 3, 8),
        "num_seqs": ints(2),
    }
    return pb.RaggedPagedAttentionRequest(**metadata | changes)


def tokens(num_tokens: int = 8, seed: int = 0, num_q_heads: int = 4) -> dict:
    heads = {"q": num_q_heads, "k": 2, "v": 2}
    return {name: tensors.to_tensor(normal(num_tokens, heads[name], 16, seed=seed + i)) for i, name in enumerate(heads)}


def new_cache(client: RawClient, **options) -> str:
    return create_cache(client, f"session-{next(NAMES)}", **options)


def test_calls_of_every_kind_are_answered_in_order_as_their_own_rpcs_do(client, session):
    interleaved, split = new_cache(client, pages_by="CLIENT"), new_cache(client, pages_by="CLIENT", layout="SPLIT")
    owned = new_cache(client)
    handles = create_sequences(client, owned, 2)
    whole = pages_request(interleaved, **tokens())
    decode = pb.PagedAttentionRequest(
        cache_id=split,
        lengths=ints(1, 1),
        page_indices=tensors.to_tensor(np.array([[0], [1]], np.int32)),
        **tokens(2),
    )
    attend = attend_request(owned, handles, [7, 1], [7, 1])
    sent = [
        session.send(ragged_paged_attention=whole),
        session.send(paged_attention=decode),
        session.send(attend=attend),
        session.send(plan=pb.PlanRequest(plan_id=5, ragged_paged_attention=pages_request(interleaved))),
        session.send(planned=pb.PlannedAttendRequest(plan_id=5, layer=1, **tokens())),
        session.send(plan=pb.PlanRequest(plan_id=6, attend=attend)),
        session.send(planned=pb.PlannedAttendRequest(plan_id=6, layer=1, q=attend.q, k=attend.k, v=attend.v)),
    ]
    got = [session.receive() for _ in sent]
    assert [each.id for each in got] == sent
    assert not any(each.HasField("status") for each in got)
    assert (got[3].plan.plan_id, got[5].plan.plan_id) == (5, 6)
    whole.layer = 1
    assert got[0].ragged_paged_attention.out == client("AttentionService/RaggedPagedAttention", whole).out
    assert got[4].ragged_paged_attention.out == got[0].ragged_paged_attention.out
    assert got[1].paged_attention.out == client("AttentionService/PagedAttention", decode).out
    assert got[6].attend.out == got[2].attend.out == client("AttentionService/Attend", attend).out
    assert got[6].attend.implementation == got[0].ragged_paged_attention.implementation != ""


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": 2},
        {"options": pb.AttentionOptions(soft_cap=0.0, sliding_window=-1, sm_scale=math.inf)},
        {"q": tensors.to_tensor(normal(8, 4, 8))},
        {"q": tensors.to_tensor(normal(7, 4, 16))},
        {"q": tensors.to_tensor(normal(8, 3, 16))},
        {"q": tensors.to_tensor(normal(8, 4, 16).astype(np.float64))},
        {"k": tensors.to_tensor(normal(7, 2, 16))},
        {"v": None},
        {"q": None},
    ],
    ids=str,
)
def test_a_wrong_layer_is_refused_as_the_whole_call_is_and_the_stream_goes_on(client, session, changes):
    cache_id = new_cache(client, pages_by="CLIENT")
    handles = create_sequences(client, owned := new_cache(client), 2)
    lens = {"sequences": handles, "q_lens": ints(3, 5), "kv_lens": ints(3, 5)}
    for path, field, metadata in (
        ("AttentionService/RaggedPagedAttention", "ragged_paged_attention", pages_request(cache_id)),
        ("AttentionService/Attend", "attend", pb.AttendRequest(cache_id=owned, **lens)),
    ):
        assert session.ask(plan=pb.PlanRequest(plan_id=1, **{field: metadata})).plan.plan_id == 1
        layer = {"layer": 0, **tokens(), **changes}
        refused = session.ask(planned=pb.PlannedAttendRequest(plan_id=1, **layer))
        for name, value in layer.items():
            if name in {"layer", "options"}:
                setattr(metadata, name, value) if name == "layer" else metadata.options.CopyFrom(value)
            elif value is not None:
                getattr(metadata, name).CopyFrom(value)
        with pytest.raises(Refused) as caught:
            client(path, metadata)
        status = status_in(refused)
        assert (status.code, status.message) == (caught.value.code.value[0], caught.value.message)
        bad = error_details_pb2.BadRequest()
        found = [each.field for detail in status.details if detail.Unpack(bad) for each in bad.field_violations]
        assert found == caught.value.fields
        assert not session.ask(planned=pb.PlannedAttendRequest(plan_id=1, **tokens())).HasField("status")


def test_two_tokens_for_one_slot_are_refused_only_to_layers_that_write(client, session):
    shared = tensors.to_tensor(np.array([[0, 1], [2, 1]], np.int32))
    request = pages_request(new_cache(client, pages_by="CLIENT"), page_indices=shared, kv_lens=ints(9, 12))
    session.ask(plan=pb.PlanRequest(plan_id=1, ragged_paged_attention=request))
    q, k, v = tokens().values()
    assert not session.ask(planned=pb.PlannedAttendRequest(plan_id=1, q=q)).HasField("status")
    refused = session.ask(planned=pb.PlannedAttendRequest(plan_id=1, q=q, k=k, v=v))
    assert "must take one token in each slot" in status_in(refused).message


@pytest.mark.parametrize(
    "plan",
    [
        {"ragged_paged_attention": pages_request("unknown")},
        {"attend": pb.AttendRequest(cache_id="unknown", q_lens=ints(), kv_lens=ints())},
        {},
    ],
    ids=["pages", "sequences", "nothing"],
)
def test_a_plan_that_is_refused_is_not_there(client, session, plan):
    good = pages_request(new_cache(client, pages_by="CLIENT"))
    session.ask(plan=pb.PlanRequest(plan_id=3, ragged_paged_attention=good))
    status_in(session.ask(plan=pb.PlanRequest(plan_id=3, **plan)))
    refused = session.ask(planned=pb.PlannedAttendRequest(plan_id=3, **tokens()))
    assert reason_in(refused) == (grpc.StatusCode.FAILED_PRECONDITION, "PLAN_NOT_FOUND")


def test_newer_plans_take_the_place_of_older_ones(client, session):
    request = pages_request(new_cache(client, pages_by="CLIENT"))
    for plan_id in range(20):
        assert not session.ask(plan=pb.PlanRequest(plan_id=plan_id, ragged_paged_attention=request)).HasField("status")
    known = [
        plan_id
        for plan_id in range(20)
        if not session.ask(planned=pb.PlannedAttendRequest(plan_id=plan_id, **tokens())).HasField("status")
    ]
    assert known == list(range(4, 20))


def test_a_cache_deleted_between_two_layers_is_not_found(client, session):
    cache_id = new_cache(client, pages_by="CLIENT")
    session.ask(plan=pb.PlanRequest(plan_id=1, ragged_paged_attention=pages_request(cache_id)))
    client("CacheService/DeleteCache", cache_pb2.DeleteCacheRequest(cache_id=cache_id))
    refused = session.ask(planned=pb.PlannedAttendRequest(plan_id=1, **tokens()))
    assert reason_in(refused) == (grpc.StatusCode.NOT_FOUND, "CACHE_NOT_FOUND")


def test_a_call_given_up_or_late_is_told_so_and_has_done_nothing(client, session):
    cache_id = new_cache(client)
    handles = create_sequences(client, cache_id, 3)
    # The first call with so many heads compiles: the others wait for it.
    first = session.send(attend=attend_request(cache_id, handles[:1], [1], [1], num_q_heads=22))
    second = session.send(attend=attend_request(cache_id, handles[1:2], [1], [1]))
    third = session.send(attend=attend_request(cache_id, handles[2:], [1], [1]), timeout_s=1e-4)
    session.send(cancel=pb.CancelRequest(id=second))
    session.send(cancel=pb.CancelRequest(id=10**9))  # no such request
    answers = {answer.id: answer for answer in (session.receive() for _ in range(3))}
    assert list(answers) == [first, second, third]
    assert not answers[first].HasField("status")
    assert reason_in(answers[second]) == (grpc.StatusCode.CANCELLED, "CALLER_CANCELLED")
    assert reason_in(answers[third])[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    listed = client("CacheService/ListSequences", cache_pb2.ListSequencesRequest(cache_id=cache_id))
    assert {each.sequence: each.length for each in listed.sequences} == {handles[0]: 1, handles[1]: 0, handles[2]: 0}


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, math.nan, math.inf])
def test_a_timeout_that_is_no_time_is_refused(session, timeout_s):
    refused = session.ask(attend=pb.AttendRequest(), timeout_s=timeout_s)
    assert status_in(refused).code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_a_call_that_cannot_be_read_is_refused_and_the_stream_goes_on(client, session):
    attend = pb.AttendRequest(cache_id="x").SerializeToString() + b"\xff\xff"
    session.send(b"\x08\x07" + bytes([8 << 3 | 2, len(attend)]) + attend)
    refused = session.receive()
    assert refused.id == 7
    assert reason_in(refused) == (grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE")
    assert reason_in(session.ask())[0] is grpc.StatusCode.INVALID_ARGUMENT  # nothing is asked


def test_a_message_that_cannot_be_read_ends_the_stream_after_what_was_asked_before(client, session):
    first = session.send(attend=pb.AttendRequest(cache_id="unknown"))
    session.send(b"\xff\xff\xff")
    assert session.receive().id == first
    with pytest.raises(grpc.RpcError) as caught:
        session.receive()
    assert refusal(caught.value).code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal(caught.value).reason == "MALFORMED_MESSAGE"


def test_a_stream_ended_by_its_client_ends_after_the_last_answer(client, session):
    sent = [session.send(attend=pb.AttendRequest(cache_id="unknown")) for _ in range(100)]
    session.end()
    assert [pb.SessionResponse.FromString(message).id for message in session.call] == sent
    assert session.call.code() is grpc.StatusCode.OK


def info(client: RawClient) -> server_pb2.GetServerInfoResponse:
    return client("ServerService/GetServerInfo", server_pb2.GetServerInfoRequest())


def large_request(client: RawClient) -> pb.RaggedPagedAttentionRequest:
    """64 KiB of queries that attend over nothing much."""
    cache_id = new_cache(client, pages_by="CLIENT", head_dim=128)
    return pages_request(cache_id, q=tensors.to_tensor(normal(32, 4, 128)), cu_q_lens=ints(0, 3, 8))


def test_a_client_that_does_not_read_is_not_read_from(client):
    request = large_request(client)
    client("AttentionService/RaggedPagedAttention", request)
    before = info(client).resident_bytes
    taken = []

    def requests():
        for request_id in range(4000):
            taken.append(request_id)
            yield pb.SessionRequest(id=request_id, ragged_paged_attention=request).SerializeToString()

    call = client.channel.stream_stream(PATH)(requests(), timeout=120)
    steady = 0
    while steady < 10:  # until no more is taken
        count = len(taken)
        time.sleep(0.1)
        steady = steady + 1 if len(taken) == count else 0
    assert len(taken) < 2000
    assert info(client).resident_bytes - before < 100 * 2**20
    assert [pb.SessionResponse.FromString(message).id for message in call] == list(range(4000))


def test_an_idle_session_is_told_when_the_server_stops():
    with attnd_server() as server, RawClient(server.address) as client, Session(client) as session:
        session.ask(attend=pb.AttendRequest(cache_id="unknown"))
        stopping = threading.Timer(0.1, server.process.send_signal, [signal.SIGTERM])
        stopping.start()
        with pytest.raises(grpc.RpcError) as caught:
            session.receive()
        stopping.join()
        assert refusal(caught.value).code is grpc.StatusCode.UNAVAILABLE
        assert refusal(caught.value).reason == "SERVER_STOPPING"
        assert "Traceback" not in server.log()
