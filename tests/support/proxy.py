"""A TCP proxy that loses replies and cuts connections, knowing just enough of HTTP/2 to tell requests from replies."""

import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

PREFACE_BYTES = 24
FRAME_HEADER_BYTES = 9
DATA_FRAME = 0


@dataclass
class Losses:
    """What a proxy does to the requests that pass, by chance, and what it has done.

    Attributes:
        rng: Chance.
        lost: Share of requests whose reply is lost: the server has answered, and the connection ends before it passes.
        cut: Share of requests in whose middle the connection ends.
        num_requests: Requests seen.
        num_lost: Replies lost.
        num_cut: Requests cut.
    """

    rng: random.Random
    lost: float
    cut: float
    num_requests: int = 0
    num_lost: int = 0
    num_cut: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def decide(self) -> str:
        """Returns the fate of the next request: "lose", "cut" or "pass"."""
        with self._lock:
            self.num_requests += 1
            chance = self.rng.random()
            if chance < self.lost:
                self.num_lost += 1
                return "lose"
            if chance < self.lost + self.cut:
                self.num_cut += 1
                return "cut"
            return "pass"

    def part(self, length: int) -> int:
        """Returns how many bytes of a request pass before the cut."""
        with self._lock:
            return self.rng.randint(0, length)


class _Connection:
    """One connection: a request is the data that a client sends after it has been answered."""

    def __init__(self, client: socket.socket, server: socket.socket, losses: Losses) -> None:
        self._client = client
        self._server = server
        self._losses = losses
        self._fate = ""

    def serve(self) -> None:
        """Passes frames both ways until either end, or a loss, ends it."""
        replies = threading.Thread(target=self._until_end, args=(self._pass_replies,), daemon=True)
        replies.start()
        self._until_end(self._pass_requests)
        replies.join()

    def _until_end(self, passing) -> None:
        with suppress(OSError, EOFError):
            passing()
        for end in (self._client, self._server):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass_requests(self) -> None:
        self._server.sendall(_read(self._client, PREFACE_BYTES))
        for kind, frame in _frames(self._client):
            if kind == DATA_FRAME and len(frame) > FRAME_HEADER_BYTES and not self._fate:
                self._fate = self._losses.decide()
                if self._fate == "cut":
                    self._server.sendall(frame[: self._losses.part(len(frame))])
                    return
            self._server.sendall(frame)

    def _pass_replies(self) -> None:
        for kind, frame in _frames(self._server):
            if kind == DATA_FRAME and len(frame) > FRAME_HEADER_BYTES:
                if self._fate == "lose":
                    return
                self._fate = ""
            self._client.sendall(frame)


def _frames(end: socket.socket) -> Iterator[tuple[int, bytes]]:
    while True:
        header = _read(end, FRAME_HEADER_BYTES)
        (length,) = struct.unpack(">I", b"\0" + header[:3])
        yield header[3], header + _read(end, length)


def _read(end: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        more = end.recv(length - len(data))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


@contextmanager
def lossy_proxy(address: str, losses: Losses) -> Iterator[str]:
    """Starts a proxy before a server on loopback; gives its address."""
    host, _, port = address.rpartition(":")
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=connect, args=(client,), daemon=True).start()

    def connect(client: socket.socket) -> None:
        with client, socket.create_connection((host, int(port))) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _Connection(client, server, losses).serve()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        accepting.join()
