"""How a thread waits in the local socket: without sleeping only where that costs nobody anything."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from attnd.client import Client, _local_sync
from attnd.client._local_sync import Line
from attnd.v1 import local, server_pb2
from attnd.v1.local import Kind
from tests.support.server import attnd_server

BODY = b"an answer"


@pytest.fixture
def looks(monkeypatch):
    """Counts how often a thread has looked in vain."""
    looked = []
    monkeypatch.setattr(_local_sync.os, "sched_yield", lambda: looked.append(threading.get_ident()))
    return looked


@pytest.fixture
def ends(tmp_path):
    """A connection, and the server's end of it."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        welcome = local.answer_head(Kind.WELCOME, 0)
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(lambda: listener.accept()[0])
            opened = pool.submit(lambda: accepted.result().sendall(welcome))
            line = Line(server_pb2.LocalSocket(path=path, token=b"t" * local.TOKEN_BYTES), ())
            opened.result()
        with closing(line), accepted.result() as served:
            served.recv(1000)
            yield line, served


def ask(ends, after_s):
    line, served = ends

    def answer():
        served.recv(100)
        time.sleep(after_s)
        served.sendall(local.answer_head(Kind.MESSAGE, len(BODY)) + BODY)

    thread = threading.Thread(target=answer)
    thread.start()
    assert line._exchange(b"question", time.monotonic() + 30) == (Kind.MESSAGE, BODY)
    thread.join()


def test_after_a_brief_answer_the_next_one_is_looked_for(ends, looks):
    ends[0].polls, ends[0]._took_ns = True, 1000
    ask(ends, 0.02)
    assert looks
    looks.clear()
    ask(ends, 0.0)  # the one before was late
    assert not looks


def test_threads_side_by_side_sleep(ends, looks):
    ends[0].polls, ends[0]._took_ns = False, 1000
    ask(ends, 0.02)
    assert not looks


def test_only_a_lone_call_on_several_cores_looks():
    with attnd_server() as server, Client(server.address) as client:
        client.list_caches()
        transport = client._executor._transport
        transport._has_cores = True
        first = transport._line(None, 0.0)
        assert first.polls
        transport._put_back(first)
        transport._has_cores = False
        second = transport._line(None, 0.0)
        assert not second.polls
        transport._put_back(second)
