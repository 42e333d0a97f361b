"""The clients where no attnd server is, or is no longer."""

import asyncio
import inspect
import math
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import grpc
import pytest

from attnd import client as sdk
from attnd.client import AsyncClient, Client
from tests.client.conftest import Driver
from tests.service.test_tls import self_signed
from tests.support.server import attnd_server

PAIRS = [
    (sdk.Client, sdk.AsyncClient),
    (sdk.Cache, sdk.AsyncCache),
    (sdk.Sequence, sdk.AsyncSequence),
    (sdk.Step, sdk.AsyncStep),
]
FORKING = """
import asyncio, multiprocessing, sys
from attnd.client import AsyncClient, Client, FailedPreconditionError

def child(client):
    try:
        answer = client.server_info()
        if not isinstance(client, Client):
            asyncio.run(answer)
    except FailedPreconditionError as error:
        print(error.reason, flush=True)
    if isinstance(client, Client):
        client.close()
    else:
        asyncio.run(client.close())

def fork(client):
    process = multiprocessing.get_context("fork").Process(target=child, args=(client,))
    process.start()
    process.join(20)
    print(process.exitcode, flush=True)

with Client(sys.argv[1]) as client:
    client.server_info()
    fork(client)
    print(client.server_info().platform, flush=True)
with asyncio.Runner() as runner:
    client = AsyncClient(sys.argv[1])
    runner.run(client.server_info())
    fork(client)
    print(runner.run(client.server_info()).platform, flush=True)
    runner.run(client.close())
"""


@contextmanager
def listener(answer: bytes | None):
    """Accepts connections and gives each one answer; None leaves them waiting."""
    stop = threading.Event()
    opened = []

    def serve() -> None:
        while not stop.is_set():
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            opened.append(connection)
            if answer is not None:
                connection.sendall(answer)
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            stop.set()
            thread.join()
            for connection in opened:
                connection.close()


@contextmanager
def serving(*handlers: grpc.GenericRpcHandler):
    """A gRPC server that is not attnd's."""
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers(handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def cutting_proxy(address: str):
    """Forwards one connection until told to cut it when the server next speaks, and gives its answer time to exist."""
    cut = threading.Event()

    def pump(source: socket.socket, sink: socket.socket, *, cuts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if cuts and cut.is_set():
                    time.sleep(0.5)
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        host, port = address.rsplit(":", 1)
        with suppress(OSError), listening.accept()[0] as client, socket.create_connection((host, int(port))) as server:
            back = threading.Thread(target=pump, args=(server, client), kwargs={"cuts": True})
            back.start()
            pump(client, server, cuts=False)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}", cut
        finally:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            thread.join(20)


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.parametrize(("blocking", "awaiting"), PAIRS, ids=lambda kind: kind.__name__)
def test_both_clients_have_the_same_methods_in_the_same_order(blocking, awaiting):
    public = [
        [name for name, value in vars(kind).items() if inspect.isfunction(value) and not name.startswith("_")]
        for kind in (blocking, awaiting)
    ]
    assert public[0] == public[1]
    for name in public[0]:
        assert getattr(blocking, name).__doc__
        parameters = [
            [
                (each.name, each.kind, each.default)
                for each in inspect.signature(getattr(kind, name)).parameters.values()
            ]
            for kind in (blocking, awaiting)
        ]
        assert parameters[0] == parameters[1]


def test_methods_show_what_they_return():
    assert inspect.signature(Client.create_cache).return_annotation is sdk.Cache
    assert inspect.signature(AsyncClient.create_cache).return_annotation is sdk.AsyncCache
    assert inspect.signature(sdk.Cache.list_sequences).return_annotation == "list[SequenceInfo]"
    assert "num_kv_heads" in inspect.signature(Client.create_cache).parameters


@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:50051", "", ":50051", "host:", None, 50051])
def test_refuses_addresses_without_host_or_port(run: Driver, address):
    with pytest.raises(sdk.InvalidArgumentError, match="must be HOST:PORT"):
        run.client(address)


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.nan, math.inf, True, "30"])
def test_refuses_timeouts_that_are_no_time(run: Driver, timeout_s):
    with pytest.raises(sdk.InvalidArgumentError, match="timeout_s="):
        run.client("127.0.0.1:50051", timeout_s=timeout_s)


def test_says_where_no_server_answers(run: Driver):
    address = free_address()
    with pytest.raises(sdk.UnavailableError, match=f"^no attnd server answers at {address}: ") as caught:
        run(run.client(address).server_info())
    assert isinstance(caught.value, ConnectionError)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"\x00" * 512, b""],
    ids=["http", "zeros", "eof"],
)
def test_says_so_when_another_program_has_the_port(run: Driver, answer):
    with listener(answer) as address, pytest.raises(sdk.UnavailableError, match="^no attnd server answers") as caught:
        run(run.client(address, timeout_s=10.0).get_cache("x"))
    assert address in str(caught.value)


def test_a_silent_server_meets_the_deadline(run: Driver):
    with listener(None) as address:
        started = time.monotonic()
        with pytest.raises(sdk.DeadlineExceededError, match=f"{address} did not answer GetServerInfo within 0.3 s"):
            run(run.client(address, timeout_s=0.3).server_info())
        assert time.monotonic() - started < 10


def test_a_closed_client_says_that_it_is_closed(run: Driver):
    client = run.client(free_address())
    run(client.close())
    run(client.close())
    with pytest.raises(sdk.FailedPreconditionError, match="closed") as caught:
        run(client.server_info())
    assert caught.value.reason == "CLIENT_CLOSED"


def test_leaving_the_context_closes_the_client(server):
    with Client(server.address) as client:
        client.server_info()
    with pytest.raises(sdk.FailedPreconditionError, match="closed"):
        client.server_info()

    async def main() -> None:
        async with AsyncClient(server.address) as client:
            await client.server_info()
        with pytest.raises(sdk.FailedPreconditionError, match="closed"):
            await client.server_info()

    asyncio.run(main())


def test_an_awaiting_client_belongs_to_one_event_loop(server):
    client = AsyncClient(server.address)  # made where no loop runs

    async def first() -> None:
        await client.server_info()

    async def second() -> None:
        with pytest.raises(sdk.FailedPreconditionError, match="another event loop") as caught:
            await client.server_info()
        assert caught.value.reason == "CLIENT_OTHER_LOOP"

    with asyncio.Runner() as runner:
        runner.run(first())
        asyncio.run(second())
        runner.run(client.close())


def test_an_awaiting_client_may_be_closed_after_its_loop(server):
    client = AsyncClient(server.address)

    async def ask() -> None:
        await client.server_info()

    asyncio.run(ask())
    asyncio.run(client.close())
    with pytest.raises(sdk.FailedPreconditionError, match="closed"):
        asyncio.run(ask())


def test_tls_is_spoken_with_credentials_and_refusals_are_clear(run: Driver, tmp_path):
    cert, key = self_signed(tmp_path, "server")
    other, _ = self_signed(tmp_path, "other")
    with attnd_server("--tls-cert", str(cert), "--tls-key", str(key)) as server:
        address = f"localhost:{server.address.rpartition(':')[2]}"
        trusting = run.client(address, credentials=grpc.ssl_channel_credentials(cert.read_bytes()))
        assert run(trusting.server_info()).platform == "cpu"
        for credentials in (None, grpc.ssl_channel_credentials(other.read_bytes())):
            with pytest.raises(sdk.UnavailableError, match=f"no attnd server answers at {address}: "):
                run(run.client(address, credentials=credentials, timeout_s=10.0).server_info())


def test_metadata_travels_with_every_call(run: Driver):
    seen = []

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(dict(context.invocation_metadata()).get("authorization"))
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")

    handler = grpc.method_handlers_generic_handler(
        "attnd.v1.ServerService", {"GetServerInfo": grpc.unary_unary_rpc_method_handler(answer)}
    )
    with serving(handler) as address, pytest.raises(sdk.UnauthenticatedError, match="who are you") as caught:
        run(run.client(address, metadata=[("authorization", "me")]).server_info())
    assert (seen, caught.value.reason) == (["me"], "")


@pytest.mark.parametrize("data", [b"\xff\xff", b"\x0a\x7fx"])
def test_an_answer_that_is_no_message_is_the_servers_fault(run: Driver, data):
    handler = grpc.method_handlers_generic_handler(
        "attnd.v1.ServerService",
        {"GetServerInfo": grpc.unary_unary_rpc_method_handler(lambda request, context: data)},
    )
    with serving(handler) as address, pytest.raises(sdk.InternalError, match="GetServerInfo cannot be read"):
        run(run.client(address).server_info())


def test_another_grpc_service_does_not_serve_attnd(run: Driver):
    with serving() as address, pytest.raises(sdk.UnimplementedError, match="does not serve /attnd.v1.ServerService"):
        run(run.client(address).server_info())


def test_a_call_whose_answer_is_lost_is_not_repeated(run: Driver, server):
    sizes = {"num_layers": 1, "num_pages": 4, "page_size": 8, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32"}
    with Client(server.address) as direct, cutting_proxy(server.address) as (address, cut):
        cache = direct.create_cache("lost-answer", **sizes, pages_by="server")
        indirect = run(run.client(address, local=False).get_cache("lost-answer"))
        cut.set()
        with pytest.raises(sdk.UnavailableError):
            run(indirect.create_sequences(1))
        assert len(cache.list_sequences()) == 1
        cache.delete()


def test_a_forked_process_is_told_at_once_and_the_parent_goes_on(server):
    command = [sys.executable, "-c", FORKING, server.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["CLIENT_FORKED", "0", "cpu"] * 2


def test_clients_are_readable():
    with Client("127.0.0.1:50051") as client:
        assert repr(client) == "Client('127.0.0.1:50051')"
        assert client.address == "127.0.0.1:50051"
