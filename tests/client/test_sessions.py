"""Steps over sessions: what travels, what is judged, and what happens when a session does not work."""

import asyncio
import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import numpy as np
import pytest

from attnd import client as sdk
from attnd.client import _pipe, _session
from attnd.kernels import validation
from attnd.service import server as service
from attnd.service.attention_service import AttentionHandlers
from attnd.service.config import ServerConfig
from attnd.service.errors import UnimplementedError
from tests.client.batches import CU_Q_LENS, KV_LENS, PAGE_INDICES, ragged
from tests.client.conftest import KINDS, Driver, driving
from tests.service.test_tls import self_signed
from tests.support.server import attnd_server

LAYERS = 32
SIZES = {"num_pages": 16, "page_size": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def run(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Over gRPC: the local socket has plans, but no sessions."""
    with driving(*request.param) as driver:
        yield driver


@contextmanager
def server_here():
    """A server in a thread of this process, so that a test can look at what it does."""
    started: list[str] = []
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with service.running(ServerConfig(port=0, warm_up=False, grace_s=2)) as running:
            started.append(f"127.0.0.1:{running.port}")
            ready.set()
            await asyncio.to_thread(stop.wait)

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(asyncio.run, serve())
        serving.add_done_callback(lambda _: ready.set())
        try:
            ready.wait()
            if started:
                yield started[0]
        finally:
            stop.set()
            serving.result()


@contextmanager
def breaking_proxy(address: str):
    """Forwards connections; `cut()` breaks those that are open."""
    host, port = address.rsplit(":", 1)
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        cut([source, sink])

    def cut(which: list[socket.socket] = ends) -> None:
        for end in list(which):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listening.accept()
                server = socket.create_connection((host, int(port)))
                ends.extend((client, server))
                for pair in ((client, server), (server, client)):
                    threads.append(threading.Thread(target=pump, args=pair))
                    threads[-1].start()

    listening = socket.create_server(("127.0.0.1", 0))
    accepting = threading.Thread(target=serve)
    accepting.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}", cut
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        cut()
        for thread in (accepting, *threads):
            thread.join(20)
        for end in ends:
            end.close()


def count_calls(monkeypatch, target, name: str, counts: Counter) -> None:
    real = getattr(target, name)

    def counted(*args, **kwargs):
        counts[name] += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(target, name, counted)


@pytest.mark.parametrize("pages_by", ["client", "server"])
def test_the_metadata_of_a_step_travels_and_is_judged_once(run, normal, monkeypatch, pages_by):
    counts, records = Counter(), []
    for name in ("ragged_batch", "ragged_plan", "ragged_layer", "step_lens", "step_plan", "step_layer"):
        count_calls(monkeypatch, validation, name, counts)
    with server_here() as address:
        client = run.client(address, timeout_s=60.0, on_call=records.append)
        sizes = SIZES | {"num_pages": 64 * 128, "num_layers": LAYERS, "page_size": 1}
        cache = run(client.create_cache("a", **sizes, pages_by=pages_by))
        if pages_by == "client":
            tables = np.random.default_rng(0).permutation(64 * 128).reshape(64, 128)
            step = run(cache.plan(np.full(64, 128), tables, np.arange(65), 64))
            metadata_bytes = (tables.size + 64 + 65 + 1) * 4
        else:
            sequences = run(cache.create_sequences(64))
            step = run(cache.step(sequences, q_lens=np.ones(64, int), kv_lens=np.ones(64, int)))
            metadata_bytes = 64 * (18 + 4 + 4)
        q, k, v = normal(64, 4, 16), normal(64, 2, 16), normal(64, 2, 16)
        records.clear()
        for layer in range(LAYERS):
            run(step.attend(layer, q, k, v))
        run(client.close())
    plan = "ragged" if pages_by == "client" else "step"
    assert counts == {f"{plan}_plan": 1, f"{plan}_layer": LAYERS}
    first, *rest = [record.request_bytes for record in records]
    assert max(rest) - min(rest) <= 4
    assert max(rest) < q.nbytes + k.nbytes + v.nbytes + 200
    assert metadata_bytes < first - max(rest) < metadata_bytes + 300
    assert {record.method for record in records} == {"RaggedPagedAttention" if plan == "ragged" else "Attend"}


def test_a_step_keeps_what_it_was_made_of(run, new_cache, normal):
    cache = new_cache()
    q, k, v = normal(8, 4, 16), normal(8, 2, 16), normal(8, 2, 16)
    kv_lens, page_indices = np.array(KV_LENS, np.int32), np.array(PAGE_INDICES, np.int32)
    wanted = ragged(run, cache, q, k=k, v=v)
    step = run(cache.plan(kv_lens, page_indices, CU_Q_LENS, 2))
    kv_lens[:], page_indices[:] = 0, 1000
    np.testing.assert_array_equal(run(step.attend(0, q, k, v)), wanted)


def test_many_steps_are_used_in_turn(run, new_cache, normal):
    cache = new_cache()
    steps = [run(cache.plan([1], [[page]], [0, 1], 1)) for page in range(16)] * 2
    steps += [run(cache.plan([1], [[page]], [0, 1], 1)) for page in range(16)]
    q = normal(1, 4, 16)
    for value, step in enumerate(steps * 2):
        kv = np.full((1, 2, 16), value, np.float32)
        np.testing.assert_allclose(run(step.attend(0, q, kv, kv)), value)


def test_a_refused_layer_raises_what_a_whole_call_does(run, new_cache, normal):
    cache = new_cache()
    q = normal(8, 4, 16)
    good = run(cache.plan(KV_LENS, PAGE_INDICES, CU_Q_LENS, 2))
    bad = run(cache.plan([9, 1000], [[3, 99], [5, 2]], CU_Q_LENS, 2))
    for step, changes in ((good, {"soft_cap": 0.0, "sliding_window": -3}), (bad, {"soft_cap": 0.0}), (bad, {})):
        metadata = step.metadata.arrays
        with pytest.raises(sdk.InvalidArgumentError) as whole:
            ragged(run, cache, q, **{name: np.asarray(array) for name, array in metadata.items()}, **changes)
        with pytest.raises(sdk.InvalidArgumentError) as layer:
            run(step.attend(0, q, **changes))
        assert layer.value.violations == whole.value.violations
        assert (str(layer.value), layer.value.reason) == (str(whole.value), whole.value.reason)
    assert run(good.attend(0, q)).shape == q.shape


def test_a_server_without_sessions_serves_steps(run, normal, monkeypatch):
    asked = Counter()

    async def session(*_):
        asked["session"] += 1
        raise UnimplementedError("UNIMPLEMENTED", "This server has no sessions.")

    monkeypatch.setattr(AttentionHandlers, "session", session)
    with server_here() as address:
        client = run.client(address, timeout_s=60.0)
        cache = run(client.create_cache("a", **SIZES, num_layers=LAYERS, pages_by="client"))
        step = run(cache.plan([1], [[3]], [0, 1], 1))
        q, kv = normal(1, 4, 16), np.full((1, 2, 16), 3, np.float32)
        for layer in range(LAYERS):
            np.testing.assert_allclose(run(step.attend(layer, q, kv, kv)), 3)
        run(client.close())
    # gRPC's awaiting streams lose the server's status when it meets a message on its way.
    assert 1 <= asked["session"] <= (1 if run.kind is sdk.Client else 3)


def test_a_broken_session_is_replaced_and_its_calls_are_repeated(run, server, normal):
    with breaking_proxy(server.address) as (address, cut):
        client = run.client(address, timeout_s=60.0)
        cache = run(client.create_cache(f"broken-{run.kind.__name__}", **SIZES, num_layers=2, pages_by="server"))
        (sequence,) = run(cache.create_sequences(1))
        q = normal(1, 4, 16)
        for length in range(1, 7):
            step = run(cache.step([sequence], q_lens=[1], kv_lens=[length]))
            for layer in range(2):
                kv = np.full((1, 2, 16), 3, np.float32)
                for _ in range(100):  # until gRPC has tried the address again
                    with suppress(sdk.UnavailableError):
                        np.testing.assert_allclose(run(step.attend(layer, q, kv, kv)), 3)
                        break
                if layer == 0 and length % 2 == 0:
                    cut()
        run(cache.delete())
        run(client.close())


def test_deadlines_of_layers_hold_when_the_server_hangs(run, normal):
    with attnd_server() as server:
        client = run.client(server.address, timeout_s=60.0)
        cache = run(client.create_cache("a", **SIZES, num_layers=1, pages_by="server"))
        (sequence,) = run(cache.create_sequences(1))
        step = run(cache.step([sequence], q_lens=[1], kv_lens=[1]))
        q, kv = normal(1, 4, 16), np.full((1, 2, 16), 3, np.float32)
        run(step.attend(0, q, kv, kv))
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(sdk.DeadlineExceededError, match="did not answer Attend within 0.3 s"):
                run(step.attend(0, q, timeout_s=0.3))
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        np.testing.assert_allclose(run(step.attend(0, q)), 3)
        run(client.close())


def test_a_late_layer_fails_alone(run, server, new_cache, normal):
    cache = new_cache()
    step = run(cache.plan([1], [[3]], [0, 1], 1))
    q, kv = normal(1, 4, 16), np.full((1, 2, 16), 3, np.float32)
    run(step.attend(0, q, kv, kv))
    with pytest.raises(sdk.DeadlineExceededError):
        run(step.attend(0, q, timeout_s=1e-6))
    np.testing.assert_allclose(run(step.attend(0, q)), 3)


def test_threads_share_a_session(server):
    with sdk.Client(server.address, local=False, timeout_s=60.0) as client:
        cache = client.create_cache("session-threads", **SIZES, num_layers=2, pages_by="server")
        q = np.ones((1, 4, 16), np.float32)

        def decode(value: int) -> None:
            (sequence,) = cache.create_sequences(1)
            kv = np.full((1, 2, 16), value, np.float32)
            for length in range(1, 9):
                step = cache.step([sequence], q_lens=[1], kv_lens=[length])
                for layer in range(2):
                    np.testing.assert_allclose(step.attend(layer, q, kv, kv), value)
                    with pytest.raises(sdk.InvalidArgumentError):
                        step.attend(2, q, kv, kv)
                    with suppress(sdk.DeadlineExceededError):
                        step.attend(layer, q, kv, kv, timeout_s=0.002)
            sequence.release()

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(decode, range(24)))
        cache.delete()
    assert not [thread for thread in threading.enumerate() if thread.name == "attnd-watchdog" and not thread.daemon]


def test_closing_a_client_ends_the_layers_that_wait(server):
    with sdk.Client(server.address, local=False) as other:
        cache = other.create_cache("closing", **SIZES, num_layers=1, pages_by="client")
        client = sdk.Client(server.address, local=False)
        step = client.get_cache("closing").plan([1], [[3]], [0, 1], 1)
        q = np.ones((1, 4, 16), np.float32)
        step.attend(0, q)
        failed: list[Exception] = []

        def attend() -> None:
            try:
                while True:
                    step.attend(0, q)
            except sdk.AttndError as error:
                failed.append(error)

        threads = [threading.Thread(target=attend) for _ in range(4)]
        for thread in threads:
            thread.start()
        client.close()
        for thread in threads:
            thread.join(20)
        cache.delete()
    assert len(failed) == 4
    assert all(isinstance(error, sdk.CallCancelledError | sdk.FailedPreconditionError) for error in failed)


def test_a_cancelled_task_gives_its_layer_up_and_no_other(server, normal):
    async def main() -> None:
        async with sdk.AsyncClient(server.address, local=False, timeout_s=60.0) as client:
            cache = await client.create_cache("cancelled", **SIZES, num_layers=1, pages_by="client")
            step = await cache.plan([1], [[3]], [0, 1], 1)
            kv = np.full((1, 2, 16), 3, np.float32)
            await step.attend(0, normal(1, 4, 16), kv, kv)
            for delay_s in (0, 0, 0.0005, 0.001, 0.002):
                layers = [asyncio.create_task(step.attend(0, normal(1, 4, 16))) for _ in range(9)]
                await asyncio.sleep(delay_s)
                for layer in layers[::2]:
                    layer.cancel()
                answers = await asyncio.gather(*layers, return_exceptions=True)
                for answer in answers[1::2]:
                    np.testing.assert_allclose(answer, 3)
                assert all(isinstance(each, asyncio.CancelledError | np.ndarray) for each in answers[::2])
            await cache.delete()

    asyncio.run(main())


def test_the_public_stream_serves_where_grpc_has_no_other(server, normal, monkeypatch):
    opened = []

    def refused(*_):
        raise AttributeError("another gRPC")

    class Queued(_pipe.QueuedPipe):
        def __init__(self, *args) -> None:
            opened.append(self)
            super().__init__(*args)

    monkeypatch.setattr(_pipe, "PolledPipe", refused)
    monkeypatch.setattr(_pipe, "QueuedPipe", Queued)
    with breaking_proxy(server.address) as (address, cut), sdk.Client(address, local=False, timeout_s=60.0) as client:
        cache = client.create_cache("queued", **SIZES, num_layers=1, pages_by="client")
        step = cache.plan([1], [[3]], [0, 1], 1)
        q, kv = normal(1, 4, 16), np.full((1, 2, 16), 3, np.float32)
        for _ in range(3):
            np.testing.assert_allclose(step.attend(0, q, kv, kv), 3)
        cut()
        for _ in range(100):
            with suppress(sdk.UnavailableError):
                np.testing.assert_allclose(step.attend(0, q), 3)
                break
        step.attend(0, q)
        cache.delete()
    assert len(opened) >= 2


def test_sessions_run_over_tls_and_belong_to_the_callers_tenant(run, normal, tmp_path):
    cert, key = self_signed(tmp_path, "server")
    with attnd_server("--tls-cert", str(cert), "--tls-key", str(key)) as server:
        address = server.address.replace("127.0.0.1", "localhost")
        credentials = grpc.ssl_channel_credentials(cert.read_bytes())
        records: list[sdk.CallRecord] = []
        ours, theirs = (
            run.client(address, credentials=credentials, tenant=name, timeout_s=60.0, on_call=records.append)
            for name in ("ours", "theirs")
        )
        cache = run(ours.create_cache("a", **SIZES, num_layers=2, pages_by="client"))
        step = run(cache.plan([1], [[3]], [0, 1], 1))
        q, kv = normal(1, 4, 16), np.full((1, 2, 16), 3, np.float32)
        for layer in range(2):
            np.testing.assert_allclose(run(step.attend(layer, q, kv, kv)), 3)
        assert records[-1].request_bytes < records[-2].request_bytes  # the plan went before
        stolen = run(theirs.create_cache("a", **SIZES, num_layers=2, pages_by="client"))
        stolen.info = cache.info
        step = run(stolen.plan([1], [[3]], [0, 1], 1))
        with pytest.raises(sdk.NotFoundError):
            run(step.attend(0, q))
        run(ours.close())
        run(theirs.close())


def test_sessions_are_given_up_when_streams_do_not_get_through():
    health = _session.Health()
    lost = _session.BrokenError(grpc.StatusCode.UNAVAILABLE, "", answered=False)
    health.broke(lost)
    health.broke(lost)
    health.broke(_session.BrokenError(grpc.StatusCode.UNAVAILABLE, "", answered=True))
    for served in (True, True, False):
        health.broke(lost)
        assert health.served is served
