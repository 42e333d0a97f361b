"""The local transport of the blocking client: each thread that calls waits in the socket itself."""

import contextlib
import math
import os
import socket
import struct
import threading
import time
from typing import Final

import grpc

from attnd.client import _local, _session
from attnd.client._core import Core
from attnd.client._errors import AttndError
from attnd.client._local import LostError, Talk, TooLargeError
from attnd.client._transport import Answer, RefusalError, Sending, Transport, client_closed
from attnd.v1 import local, server_pb2
from attnd.v1.local import Kind

_RECEIVE_BYTES: Final = 64 * 1024
_BRIEF_NS: Final = 500_000
"""Answers that come so soon are looked for without sleeping: waking up takes a tenth of that."""
# By how much of a limit another one may differ that is not worth telling the kernel.
_LIMIT_SHARE: Final = 1e-3
_TIMEVAL: Final = struct.Struct("ll")  # seconds, microseconds; zero: no limit


class LocalTransport:
    """Carries calls over unix sockets where the server has one on this host, and all others over another transport.

    Args:
        core: What the client knows.
        remote: The other transport.
    """

    def __init__(self, core: Core, remote: Transport) -> None:
        self._core = core
        self._remote = remote
        self._lock = threading.Lock()
        self._offer: server_pb2.LocalSocket | None = None
        self._asked = False
        self._not_before = -math.inf
        self._idle: list[Line] = []
        self._lines: set[Line] = set()
        self._num_opening = 0
        self._has_cores = len(os.sched_getaffinity(0)) > 1

    def send(self, sending: Sending) -> Answer:
        """Returns the answer to a request."""
        if sending.method.streams:
            return self._remote.send(sending)
        if sending.method.name == "GetServerInfo":
            answer = self._remote.send(sending)
            self._take_offer(answer)
            return answer
        deadline = _session.deadline_of(sending)
        try:
            line = self._line(sending, deadline)
        except LostError:
            self._not_before = time.monotonic() + _local.RETRY_S
            line = None
        if line is None:
            return self._remote.send(_session.repeated(sending, deadline))
        try:
            answer = line.ask(sending, deadline, self._core.message_bytes_max)
        except LostError as error:
            self._lose(line)
            if self._core.closed:
                raise client_closed() from error
            _local.check_repeatable(sending, error)
            return self._remote.send(_session.repeated(sending, deadline))
        except TooLargeError:
            self._put_back(line)
            return self._remote.send(_session.repeated(sending, deadline))
        except (RefusalError, AttndError):
            self._put_back(line)
            raise
        except BaseException:
            self._drop(line)
            raise
        self._put_back(line)
        return answer

    def close(self) -> None:
        """Ends the connections and closes the other transport; calls that still run are cancelled."""
        if not self._core.forked:
            with self._lock:
                idle, self._idle = self._idle, []
                self._lines.difference_update(idle)
                busy = list(self._lines)
            for line in idle:
                line.close()
            for line in busy:
                line.interrupt()
        self._remote.close()

    def _take_offer(self, answer: Answer) -> None:
        offer = _local.offer_in(answer)
        with self._lock:
            if offer != self._offer:
                for line in self._idle:
                    line.close()
                    self._lines.discard(line)
                self._idle.clear()
            self._offer, self._asked = offer, True

    def _line(self, sending: Sending, deadline: float) -> "Line | None":
        """Returns a connection for one call, or None if there is none to have."""
        with self._lock:
            if self._idle:
                line = self._idle.pop()
                # Threads that all look without sleeping would take the cores from each other, and from the server.
                line.polls = self._has_cores and len(self._lines) == len(self._idle) + 1
                return line
            if len(self._lines) + self._num_opening >= _local.CONNECTIONS_MAX:
                return None
            if time.monotonic() < self._not_before:
                return None
            self._num_opening += 1
        try:
            return self._open(sending, deadline)
        finally:
            with self._lock:
                self._num_opening -= 1

    def _open(self, sending: Sending, deadline: float) -> "Line | None":
        if not self._asked:
            try:
                self._take_offer(self._remote.send(_local.discovery(_session.repeated(sending, deadline).timeout_s)))
            except (grpc.RpcError, RefusalError, AttndError):
                return None  # the call itself will tell
        offer = self._offer
        if offer is None:
            return None
        line = Line(offer, self._core.settings.metadata)
        with self._lock:
            self._lines.add(line)
        if self._core.closed:
            self._drop(line)
            raise client_closed()
        return line

    def _put_back(self, line: "Line") -> None:
        with self._lock:
            if not (line.closed or self._core.closed):
                self._idle.append(line)
                return
        self._drop(line)

    def _drop(self, line: "Line") -> None:
        line.close()
        with self._lock:
            self._lines.discard(line)

    def _lose(self, line: "Line") -> None:
        """Drops a connection that broke, and all that are idle: it may be another server by now."""
        self._drop(line)
        with self._lock:
            idle, self._idle = self._idle, []
            self._lines.difference_update(idle)
            self._offer, self._asked = None, False
        for other in idle:
            other.close()


class Line:
    """One connection, used by one thread at a time.

    Attributes:
        polls: Whether the thread may look for an answer without sleeping, if answers come soon.

    Args:
        offer: The socket, as the server told of it.
        metadata: What the client sends with every call.

    Raises:
        LostError: Nobody lets us in there.
        RefusalError: The server refuses the client.
    """

    def __init__(self, offer: server_pb2.LocalSocket, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        self.polls = False
        self._talk = Talk()
        self._limit_s = -1.0
        self._took_ns = _BRIEF_NS
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(offer.path)
            _local.check_peer(self._socket)
            frame = _local.greeting(offer, metadata)
            _local.check_welcome(*self._exchange(frame, time.monotonic() + _local.DISCOVERY_TIMEOUT_S))
        except OSError as error:
            self._socket.close()
            raise LostError(str(error), sent=False) from error
        except BaseException:
            self._socket.close()
            raise

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._socket.fileno() < 0

    def ask(self, sending: Sending, deadline: float, message_bytes_max: int) -> Answer:
        """Returns the answer to a call. A connection whose call was not answered must be closed.

        Raises:
            RefusalError: The call was refused.
            LostError: The connection is gone.
            TooLargeError: The call does not fit, and was not sent.
            DeadlineExceededError: No answer came in time; the connection is closed.
            AttndError: The call cannot be sent, or its answer not be read.
        """
        if self._talk.wants_memory(sending):
            self._share(deadline)
        for is_last in (False, True):
            asked = self._talk.ask(sending, message_bytes_max)
            try:
                kind, body = self._exchange(asked.frame, deadline)
            except TimeoutError:
                self.close()
                raise _session.expired(sending) from None
            try:
                return self._talk.read(sending, asked, kind, body)
            except RefusalError as error:
                if is_last or not _session.names_no_plan(error):
                    raise
        raise AssertionError

    def interrupt(self) -> None:
        """Ends the connection under the thread that waits for it, if one does."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the connection."""
        self._socket.close()

    def _share(self, deadline: float) -> None:
        self._limit(deadline)
        try:
            self._socket.sendall(local.request(Kind.SEGMENT, b"", b""))
            head, fds, _, _ = socket.recv_fds(self._socket, local.ANSWER_HEAD_BYTES, 1)
        except OSError as error:
            raise LostError(str(error), sent=False) from error
        if len(fds) != 1 or len(head) != local.ANSWER_HEAD_BYTES or local.read_answer_head(head)[1] != Kind.SEGMENT:
            raise LostError("it shares no memory", sent=False)
        self._talk.share(fds[0])

    def _exchange(self, frame: bytes, deadline: float) -> tuple[int, bytes | bytearray]:
        self._limit(deadline)
        sent = False
        try:
            self._socket.sendall(frame)
            sent = True
            return self._receive(time.monotonic_ns())
        except BlockingIOError as error:  # the limit on its time is over
            raise TimeoutError from error
        except OSError as error:
            raise LostError(str(error), sent=sent) from error

    def _receive(self, since_ns: int) -> tuple[int, bytes | bytearray]:
        if self.polls and self._took_ns < _BRIEF_NS:
            self._look(since_ns + _BRIEF_NS)
        data = self._more(_RECEIVE_BYTES)
        self._took_ns = time.monotonic_ns() - since_ns
        while len(data) < local.ANSWER_HEAD_BYTES:
            data += self._more(local.ANSWER_HEAD_BYTES)
        body_bytes, kind = local.read_answer_head(data)
        got = len(data) - local.ANSWER_HEAD_BYTES
        if got == body_bytes:
            return kind, data[local.ANSWER_HEAD_BYTES :]
        if got > body_bytes:
            raise LostError("the server said more than it was asked", sent=True)
        body = bytearray(body_bytes)
        body[:got] = memoryview(data)[local.ANSWER_HEAD_BYTES :]
        self._fill(memoryview(body)[got:])
        return kind, body

    def _look(self, until_ns: int) -> None:
        """Returns when there is something to be received, or time is up, without sleeping."""
        while time.monotonic_ns() < until_ns:
            try:
                self._socket.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK)
            except BlockingIOError:
                os.sched_yield()  # or a kernel that has work for this core, too, would wait for us
            else:
                return

    def _more(self, size_bytes: int) -> bytes:
        data = self._socket.recv(size_bytes)
        if not data:
            raise LostError("the server ended the connection", sent=True)
        return data

    def _fill(self, view: memoryview) -> None:
        while view:
            count = self._socket.recv_into(view)
            if not count:
                raise LostError("the server ended the connection", sent=True)
            view = view[count:]

    def _limit(self, deadline: float) -> None:
        """Lets the kernel end what waits in the socket when time is up: a timeout of Python's costs a call more."""
        left_s = _local.time_left(deadline)
        seconds = 0.0 if left_s == math.inf else max(left_s, 1e-3)
        if abs(seconds - self._limit_s) <= _LIMIT_SHARE * self._limit_s:
            return  # most calls have as long as the one before
        self._limit_s = seconds
        limit = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
