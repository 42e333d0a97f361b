"""Both clients over the local socket: when it is used, what lies where, and what happens when it breaks."""

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from attnd import client as sdk
from attnd.client import _local
from attnd.client._caches import get_cache
from attnd.client._calls import METHODS
from attnd.client._transport import RefusalError, Sending
from attnd.v1 import cache_pb2, local
from tests.client.conftest import LOCAL_KINDS, Driver, driving
from tests.support.server import attnd_server

SIZES = {"num_layers": 2, "num_pages": 64, "page_size": 8, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}


@pytest.fixture(params=LOCAL_KINDS.values(), ids=LOCAL_KINDS)
def run(request: pytest.FixtureRequest) -> Iterator[Driver]:
    with driving(*request.param) as driver:
        yield driver


def lines(client) -> set:
    """The connections of a client."""
    return client._executor._transport._lines


def step_of(run, cache, rows: int):
    """A step of rows of one token each, which attends over that token alone: the answer is its value."""
    return run(cache.plan(np.ones(rows, int), np.arange(rows)[:, np.newaxis], np.arange(rows + 1), rows))


def values(rows: int, number: float) -> tuple[np.ndarray, np.ndarray]:
    """q, and k or v."""
    return np.ones((rows, 16, 64), np.float32), np.full((rows, 2, 64), number, np.float32)


def test_calls_go_over_the_socket_by_themselves_and_over_grpc_if_told_so(run, server, new_cache, client):
    new_cache()
    assert len(lines(client)) == 1
    remote = run.client(server.address, local=False)
    run(remote.list_caches())
    assert not hasattr(remote._executor._transport, "_lines")


def test_no_other_host_is_asked_for_a_socket():
    for address in ("127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/run/attnd.sock"):
        assert sdk.Client(address)._executor.core.settings.looks_for_local_socket
    for address in ("10.0.0.1:1", "localhost.example:1", "attnd.example:1", "[fe80::1]:1", "dns:///localhost:1"):
        assert not sdk.Client(address)._executor.core.settings.looks_for_local_socket


def test_a_server_without_a_socket_is_served_over_grpc(run):
    with attnd_server("--no-local-socket") as process:
        client = run.client(process.address, timeout_s=60)
        assert run(client.list_caches()) == []
        assert run(client.list_caches()) == []
        assert not lines(client)
        run(client.close())


def test_large_arrays_lie_in_shared_memory_and_small_ones_in_the_message(run, client, new_cache):
    cache = new_cache(**SIZES)
    for rows in (1, 64):
        q, kv = values(rows, 3)
        step = step_of(run, cache, rows)
        out, lse = run(step.attend(0, q, kv, kv, return_lse=True))
        np.testing.assert_allclose(out, np.full_like(q, 3))
        assert lse.shape == (rows, 16)
        (line,) = lines(client)
        assert (line._talk._memory is not None) == (q.nbytes >= local.SHARED_BYTES_MIN)
    pages = run(cache.read_pages(0, np.arange(64)))
    assert (pages[:, 0] == 3).all()
    run(cache.write_pages(1, np.arange(64), pages))
    np.testing.assert_array_equal(run(cache.read_pages(1, np.arange(64))), pages)


def test_results_stay_what_they_are_for_as_long_as_they_are_held(run, server):
    client = run.client(server.address, timeout_s=60)
    cache = run(client.create_cache(f"held-{run.kind.__name__}", **SIZES))
    step, held = step_of(run, cache, 64), []
    for number in range(40):
        q, kv = values(64, number)
        out = run(step.attend(0, q, kv, kv))
        assert out.flags.writeable
        held.append(out[:, 3:5].reshape(-1) if number % 2 else out)  # a view keeps it, too
        del out
        if number % 7 == 6:
            del held[::3]
            gc.collect()
    run(cache.delete())
    run(client.close())
    for result in held:
        assert len(np.unique(result)) == 1
    assert len({float(result.flat[0]) for result in held}) == len(held)


def test_results_beyond_what_the_memory_keeps_are_copied():
    memory = _local.Memory(local.Segment(local_fd()))
    arrays = []
    for i in range(6):
        array = np.frombuffer(memory.segment.view("out", i << 25, 1 << 25), np.uint8).reshape(2, -1)
        arrays.append((memory.lease(i << 25, 1 << 25, array), array))
    assert [leased for leased, _ in arrays] == [True, True, True, False, False, False]
    assert memory._gap(1 << 20)[0] == 3 << 25
    del arrays, array
    memory.prepare(sending(), 0)
    assert memory._gap(1 << 20)[0] == 0


def test_a_call_that_does_not_fit_goes_over_grpc(run, client, new_cache, monkeypatch):
    cache = new_cache(**SIZES)
    monkeypatch.setattr(local, "REQUEST_BYTES_MAX", 1000)
    monkeypatch.setattr(local, "SHARED_BYTES_MIN", 1 << 40)
    q, kv = values(64, 5)
    np.testing.assert_allclose(run(step_of(run, cache, 64).attend(0, q, kv, kv)), np.full_like(q, 5))
    assert len(lines(client)) == 1


def test_errors_are_those_of_grpc(run, server, client, new_cache):
    cache = new_cache(**SIZES)
    q, kv = values(2, 1)
    found = []
    for each in (client, run.client(server.address, local=False, timeout_s=60)):
        same = run(each.get_cache(cache.name))
        for call in (
            lambda same=same: same.ragged_paged_attention(0, q, [1, 1], [[0], [99]], [0, 1, 2], 2),
            lambda same=same: step_of(run, same, 2).attend(7, q, kv, kv),
            lambda same=same: same.create_sequences(1),
            lambda each=each: each.get_cache("no-such-cache"),
            lambda each=each, same=same: each.create_cache(same.name, **SIZES),
        ):
            with pytest.raises(sdk.AttndError) as caught:
                run(call())
            found.append((type(caught.value), caught.value.reason, str(caught.value), caught.value.violations))
    assert found[:5] == found[5:]
    assert len({kind for kind, *_ in found}) == 4


def test_a_refused_plan_is_sent_again_and_a_forgotten_one_too(run, client, new_cache):
    cache = new_cache(**SIZES)
    q, kv = values(1, 2)
    wrong = run(cache.plan([1], [[64]], [0, 1], 1))
    for _ in range(2):
        with pytest.raises(sdk.InvalidArgumentError, match="page_idx=64"):
            run(wrong.attend(0, q, kv, kv))
    steps = [step_of(run, cache, 1) for _ in range(40)]
    (line,) = lines(client)
    for step in [*steps, *steps]:
        line._talk._plans |= {other.metadata: 10**6 for other in (step,) if other is steps[3]}  # one the server lacks
        np.testing.assert_allclose(run(step.attend(0, q, kv, kv)), np.full_like(q, 2))
    assert len(line._talk._plans) <= 17


def test_a_broken_connection_is_replaced_and_its_call_answered(run, client, new_cache):
    cache = new_cache(**SIZES)
    step = step_of(run, cache, 64)
    q, kv = values(64, 4)
    for _ in range(4):
        np.testing.assert_allclose(run(step.attend(0, q, kv, kv)), np.full_like(q, 4))
        for line in lines(client):
            line._socket.shutdown(2)  # as a server does that ends the connection
    np.testing.assert_allclose(run(step.attend(0, q)), np.full_like(q, 4))


def test_a_socket_that_lets_nobody_in_leaves_calls_to_grpc(run, tmp_path):
    path = tmp_path / "attnd.sock"
    with attnd_server("--local-socket", str(path)) as process:
        client = run.client(process.address, timeout_s=60)
        run(client.server_info())
        path.unlink()
        assert run(client.list_caches()) == []
        assert not lines(client)
        run(client.close())


def test_calls_that_may_have_been_carried_out_are_not_repeated():
    lost = _local.LostError("gone", sent=True)
    with pytest.raises(RefusalError, match="the connection broke while the server was at work on CreateSequences"):
        _local.check_repeatable(sending("CreateSequences"), lost)
    _local.check_repeatable(sending("CreateSequences"), _local.LostError("gone", sent=False))
    for method in ("Attend", "RaggedPagedAttention", "PagedAttention", "WritePages", "ReadPages", "ListCaches"):
        _local.check_repeatable(sending(method), lost)


def test_a_server_that_is_killed_is_unavailable_and_a_new_one_is_found(run, server):
    with attnd_server() as process:
        port = int(process.address.rpartition(":")[2])
        client = run.client(process.address, timeout_s=60)
        cache = run(client.create_cache("lost", **SIZES))
        step = step_of(run, cache, 1)
        q, kv = values(1, 1)
        run(step.attend(0, q, kv, kv))
        process.process.send_signal(signal.SIGKILL)
        process.process.wait()
        with pytest.raises(sdk.UnavailableError):
            run(step.attend(0, q, kv, kv))
    with attnd_server(port=port):
        for _ in range(100):  # until gRPC has tried the address again
            try:
                run(step.attend(0, q, kv, kv))
            except sdk.UnavailableError:
                time.sleep(0.1)
            except sdk.SessionLostError:
                break
        again = run(client.create_cache("lost", **SIZES))
        np.testing.assert_allclose(run(step_of(run, again, 1).attend(0, q, kv, kv)), np.full_like(q, 1))
        assert len(lines(client)) == 1
        run(client.close())


def test_a_server_that_hangs_is_given_up_when_time_is_up(run):
    with attnd_server() as process:
        client = run.client(process.address, timeout_s=60)
        run(client.list_caches())
        process.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(sdk.DeadlineExceededError, match="did not answer GetCache"):
                run(client._executor.run(short_call(), 0))
            assert not lines(client)
        finally:
            process.process.send_signal(signal.SIGCONT)
        assert run(client.list_caches()) == []
        run(client.close())


def test_callers_side_by_side_have_connections_of_their_own_up_to_a_limit(server):
    numbers = range(3 * _local.CONNECTIONS_MAX)
    with sdk.Client(server.address, timeout_s=120) as client:
        cache = client.create_cache("side-by-side", **SIZES | {"num_layers": len(numbers)})

        def one(layer: int) -> bool:
            q, kv = values(8, layer)
            step = cache.plan(np.ones(8, int), np.arange(8)[:, np.newaxis], np.arange(9), 8)
            return all((step.attend(layer, q, kv, kv) == layer).all() for _ in range(5))

        with ThreadPoolExecutor(48) as threads:
            assert all(threads.map(one, numbers))
        assert 1 < len(lines(client)) <= _local.CONNECTIONS_MAX
        cache.delete()

    async def many() -> None:
        async with sdk.AsyncClient(server.address, timeout_s=120) as client:
            cache = await client.create_cache("side-by-side", **SIZES | {"num_layers": len(numbers)})

            async def one(layer: int) -> bool:
                q, kv = values(8, layer)
                step = await cache.plan(np.ones(8, int), np.arange(8)[:, np.newaxis], np.arange(9), 8)
                return all([(await step.attend(layer, q, kv, kv) == layer).all() for _ in range(5)])

            assert all(await asyncio.gather(*map(one, numbers)))
            assert 1 < len(lines(client)) <= _local.CONNECTIONS_MAX
            task = asyncio.create_task(one(0))
            await asyncio.sleep(0)
            task.cancel()
            assert await one(1)
            await cache.delete()

    asyncio.run(many())


def test_closing_the_client_cancels_the_calls_of_other_threads(server):
    with attnd_server() as process:
        client = sdk.Client(process.address, timeout_s=60)
        client.list_caches()
        process.process.send_signal(signal.SIGSTOP)
        failed = []

        def call() -> None:
            try:
                client.list_caches()
            except sdk.AttndError as error:
                failed.append(type(error))

        thread = threading.Thread(target=call)
        thread.start()
        while not client._executor._transport._lines or client._executor._transport._idle:
            time.sleep(0.01)
        client.close()
        thread.join(30)
        process.process.send_signal(signal.SIGCONT)
        assert failed == [sdk.CallCancelledError]


def local_fd() -> int:
    return local.new_segment()


def sending(method: str = "ListCaches") -> Sending:
    return Sending(method=METHODS[method], request=cache_pb2.ListCachesRequest(), arrays={}, timeout_s=None)


def short_call():
    return get_cache(None, "none")._replace(timeout_s=0.5)
