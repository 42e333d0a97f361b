"""The local socket against clients that keep to no rule, and who is let in."""

import os
import random
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import grpc
import psutil
import pytest

from attnd.client import Client
from attnd.service import local_socket
from attnd.service.config import ServerConfig
from attnd.v1 import cache_pb2, local
from attnd.v1.local import Kind
from tests.support.local import INFO_PATH, RawLine, fresh_cache, offer_of, raw_line, refusal
from tests.support.server import attnd_server

RAGGED_PATH = "/attnd.v1.AttentionService/RaggedPagedAttention"
HOLDER = """
import sys, time
from tests.support.local import SIZES, fresh_cache, raw_line
with raw_line(sys.argv[1]) as line:
    line.share()
    line.segment.view("q", 0, 1 << 26)[:] = bytes(1 << 26)
    print("holds", flush=True)
    time.sleep(600)
"""
FOREIGN = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
with socket.socket(socket.AF_UNIX) as line:
    line.connect(sys.argv[1])
    try:
        line.sendall(bytes.fromhex(sys.argv[2]))
        print("answer", line.recv(100))
    except OSError:
        print("answer", b"")
"""


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


def answers(line: RawLine) -> bool:
    return line.call(INFO_PATH, b"")[0] == Kind.MESSAGE


# Who is let in.


def test_the_socket_is_its_owners_alone_and_gone_with_the_server():
    with attnd_server() as process:
        path = Path(offer_of(process.address).path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(offer_of(process.address).token) == local.TOKEN_BYTES
    assert not path.exists()


def test_no_socket_is_offered_where_none_is_wanted():
    with attnd_server("--no-local-socket") as process:
        assert not offer_of(process.address).path
        with Client(process.address, timeout_s=60) as client:
            assert client.server_info().platform == "cpu"
            assert client.list_caches() == []


def test_a_socket_left_behind_is_replaced_and_nothing_else_is(tmp_path):
    path = tmp_path / "attnd.sock"
    with attnd_server("--local-socket", str(path)) as process:
        process.process.send_signal(signal.SIGKILL)
        process.process.wait()
    assert path.is_socket()
    with attnd_server("--local-socket", str(path)) as process:
        assert offer_of(process.address).path == str(path)
        with (
            pytest.raises(RuntimeError, match="another server listens there"),
            attnd_server("--local-socket", str(path)),
        ):
            pass
        with raw_line(process.address) as line:
            assert answers(line)
    path.write_text("precious")
    with pytest.raises(RuntimeError, match="no socket"), attnd_server("--local-socket", str(path)):
        pass
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == [path.name]


def test_a_socket_that_does_not_listen_yet_is_not_taken_for_one_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    real, servers = socket.socket.listen, []

    def listen(self, backlog):
        monkeypatch.setattr(socket.socket, "listen", real)
        servers.append(local_socket.listen(ServerConfig()))
        real(self, backlog)

    monkeypatch.setattr(socket.socket, "listen", listen)
    servers.append(local_socket.listen(ServerConfig()))
    for server in servers:
        with server.listening, socket.socket(socket.AF_UNIX) as connected:
            connected.connect(str(server.path))
            assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


def test_what_a_server_killed_before_it_listened_left_behind_is_removed_once_it_is_old(tmp_path):
    names = [f".attnd-{name}" for name in ("old", "new", "listening")]
    sockets = [socket.socket(socket.AF_UNIX) for _ in names]
    for name, left in zip(names, sockets, strict=True):
        left.bind(str(tmp_path / name))
        if name != ".attnd-new":
            os.utime(tmp_path / name, (0, 0))
    sockets[2].listen()
    server = local_socket.listen(ServerConfig(local_socket_path=tmp_path / "attnd.sock"))
    for opened in (*sockets, server.listening):
        opened.close()
    assert set(os.listdir(tmp_path)) == {*names[1:], "attnd.sock"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_let_in_even_with_the_token(tmp_path):
    path = tmp_path / "attnd.sock"
    with attnd_server("--local-socket", str(path)) as process:
        for opened in (path, *path.parents):
            if not stat.S_IMODE(opened.stat().st_mode) & 0o001:
                opened.chmod(0o777 if opened == path else 0o755)
        path.chmod(0o777)
        hello = local.request(Kind.HELLO, offer_of(process.address).token, b"")
        done = subprocess.run(
            [sys.executable, "-c", FOREIGN, str(path), hello.hex()],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert done.stdout.strip() == "answer b''"


def test_who_does_not_know_the_token_is_not_let_in(server):
    offer = offer_of(server.address)
    for frames in (
        [(Kind.HELLO, bytes(local.TOKEN_BYTES))],
        [(Kind.HELLO, offer.token[:-1])],
        [(Kind.UNARY, INFO_PATH.encode())],
        [(Kind.SEGMENT, b"")],
    ):
        line = RawLine(offer.path)
        with line.socket:
            for kind, body in frames:
                line.send(kind, body)
            assert line.receive()[0] == 0


def test_tenants_do_not_see_each_other(server, cache):
    path = "/attnd.v1.CacheService/ListCaches"
    with raw_line(server.address) as own, raw_line(server.address, tenant="other") as other:
        mine = cache_pb2.ListCachesResponse.FromString(own.call(path, b"")[1])
        theirs = cache_pb2.ListCachesResponse.FromString(other.call(path, b"")[1])
    assert cache.name in [each.name for each in mine.caches]
    assert not theirs.caches
    offer = offer_of(server.address)
    line = RawLine(offer.path)
    with line.socket:
        line.send(Kind.HELLO, offer.token, b"no such tenant!")
        code, _, message = refusal(*line.receive())
    assert (code, "attnd-tenant" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)


# Forged frames.


def head(body: int = 0, kind: int = Kind.UNARY, path: int = 0, timeout_s: float = 1.0, room=(0, 0)) -> bytes:
    return struct.pack("<IBxHdQQ", body, kind, path, timeout_s, *room)


@pytest.mark.parametrize(
    "data",
    [
        head(local.REQUEST_BYTES_MAX + 1),
        head(2**32 - 1),
        head(10, path=11) + bytes(10),
        head(kind=0),
        head(kind=Kind.MESSAGE),
        head(kind=200),
        head(timeout_s=0.0),
        head(timeout_s=float("nan")),
        head(timeout_s=-1.0),
        head(room=(0, local.SEGMENT_BYTES + 1)),
        head(room=(2**64 - 64, 64)),
        head(room=(32, 64)),
        head(local.TOKEN_BYTES, Kind.HELLO) + bytes(local.TOKEN_BYTES),
        b"GET / HTTP/1.1\r\nHost: attnd\r\n\r\n",
        random.Random(0).randbytes(100),
    ],
    ids=str,
)
def test_a_forged_frame_ends_the_connection_and_nothing_else(server, line, data):
    line.socket.sendall(data + bytes(local.REQUEST_HEAD_BYTES))
    assert line.receive()[0] == 0
    with raw_line(server.address) as other:
        assert answers(other)


def test_a_second_call_before_the_answer_to_the_first_ends_the_connection(server, line):
    flood = local.request(Kind.UNARY, INFO_PATH.encode(), b"") * 10_000
    with pytest.raises(OSError, match=r"pipe|reset"):
        line.socket.sendall(flood * 100)
    with raw_line(server.address) as other:
        assert answers(other)


def test_memory_is_shared_once_and_its_size_is_fixed(line):
    fd = line.share()
    for size in (0, 4096, 2 * local.SEGMENT_BYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)
    assert answers(line)
    line.send(Kind.SEGMENT)
    assert line.receive()[0] == 0


def test_descriptors_that_a_client_sends_are_not_taken(server, line):
    process = psutil.Process(server.process.pid)
    before = process.num_fds()
    with open(os.devnull) as file:
        for _ in range(20):
            frame = local.request(Kind.UNARY, INFO_PATH.encode(), b"")
            socket.send_fds(line.socket, [frame], [file.fileno()] * 8)
            assert line.receive()[0] == Kind.MESSAGE
    assert process.num_fds() <= before


def test_clients_that_die_in_the_middle_of_a_message_leave_nothing(server):
    process = psutil.Process(server.process.pid)
    with raw_line(server.address) as line:
        assert answers(line)
        before = process.num_fds()
        frame = local.request(Kind.UNARY, INFO_PATH.encode(), bytes(1_000_000))
        for cut in (1, local.REQUEST_HEAD_BYTES - 1, local.REQUEST_HEAD_BYTES, 500_000, len(frame)):
            with raw_line(server.address) as dying:
                dying.share()
                dying.socket.sendall(frame[:cut])
        wait_until(lambda: process.num_fds() <= before)
        assert answers(line)
    assert not mappings(process)


# What ends, and when.


def test_the_memory_of_a_killed_client_is_gone_within_a_second(server):
    process = psutil.Process(server.process.pid)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, server.address], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "holds\n"
        assert mappings(process)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    wait_until(lambda: not mappings(process))


def test_what_the_socket_does_not_serve_is_unimplemented(line):
    for path in ("/attnd.v1.AttentionService/Session", "/grpc.health.v1.Health/Check", "", "\xff"):
        code, _, _ = refusal(*line.call(path, b""))
        assert code is grpc.StatusCode.UNIMPLEMENTED


def test_open_connections_do_not_keep_a_server_from_stopping():
    with attnd_server() as process:
        with raw_line(process.address) as line:
            line.share()
            process.process.terminate()
            assert line.receive()[0] == 0
        assert process.process.wait(20) == 0
        assert "Traceback" not in process.log()


def mappings(process: psutil.Process) -> list[str]:
    return [line for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines() if "memfd:attnd" in line]


def wait_until(condition, timeout_s: float = 30) -> None:
    # A second is what is promised; a machine under load gets longer.
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
