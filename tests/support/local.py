"""The local socket by hand: what a client that keeps to no rule can say."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from attnd.client import Cache, Client
from attnd.v1 import local, server_pb2
from attnd.v1.local import NO_ROOM, Kind, Room, Segment

INFO_PATH = "/attnd.v1.ServerService/GetServerInfo"


SIZES = {"num_layers": 1, "num_pages": 64, "page_size": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


@contextmanager
def fresh_cache(address: str, pages_by: str = "client") -> Iterator[Cache]:
    """Gives a cache of `SIZES`, made over gRPC, and deletes it."""
    with Client(address, local=False, timeout_s=60) as client:
        made = client.create_cache(f"local-{time.monotonic_ns()}", **SIZES, pages_by=pages_by)
        yield made
        made.delete()


def offer_of(address: str) -> server_pb2.LocalSocket:
    """Returns the socket that a server tells of."""
    with grpc.insecure_channel(address) as channel:
        info = channel.unary_unary(INFO_PATH)(b"", timeout=30)
    return server_pb2.GetServerInfoResponse.FromString(info).local_socket


class RawLine:
    """A connection."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.segment: Segment | None = None

    def send(self, kind: Kind, first: bytes = b"", second: bytes = b"", **head: object) -> None:
        self.socket.sendall(local.request(kind, first, second, **head))

    def receive(self) -> tuple[int, bytes]:
        """Returns kind and body of an answer; the kind is 0 if the server has ended the connection."""
        head = self._receive(local.ANSWER_HEAD_BYTES)
        if not head:
            return 0, b""
        size, kind = local.read_answer_head(head)
        return kind, self._receive(size)

    def greet(self, token: bytes, tenant: str = "") -> int:
        """Says the first frame; returns the kind of the answer."""
        self.send(Kind.HELLO, token, tenant.encode())
        return self.receive()[0]

    def share(self) -> int:
        """Asks for memory, and returns its descriptor."""
        self.send(Kind.SEGMENT)
        _, (fd,), _, _ = socket.recv_fds(self.socket, local.ANSWER_HEAD_BYTES, 1)
        self.segment = Segment(fd)
        return fd

    def call(self, path: str, message: Message | bytes, room: Room = NO_ROOM) -> tuple[int, bytes]:
        """Returns the answer to a call."""
        data = message if isinstance(message, bytes) else message.SerializeToString()
        self.send(Kind.UNARY, path.encode(), data, room=room)
        return self.receive()

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = self.socket.recv(size - len(data))
            except ConnectionError:
                more = b""
            if not more:
                return b""
            data += more
        return data


@contextmanager
def raw_line(address: str, *, tenant: str = "") -> Iterator[RawLine]:
    """Connects and says hello."""
    offer = offer_of(address)
    line = RawLine(offer.path)
    with line.socket:
        assert line.greet(offer.token, tenant) == Kind.WELCOME
        yield line


def refusal(kind: int, body: bytes) -> tuple[grpc.StatusCode, str, str]:
    """Returns code, reason and message of a refused call."""
    assert kind == Kind.STATUS
    status = status_pb2.Status.FromString(body)
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    return code, info.reason, status.message
