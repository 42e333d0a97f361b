"""The local transport of the awaiting client: each call has a connection that the event loop watches."""

import asyncio
import math
import os
import socket
import time
from typing import Any, Final

import grpc

from attnd.client import _local, _session
from attnd.client._core import Core
from attnd.client._errors import AttndError
from attnd.client._local import LostError, Talk, TooLargeError
from attnd.client._transport import Answer, AsyncTransport, RefusalError, Sending, client_closed
from attnd.client._unary import AsyncUnaryTransport
from attnd.v1 import local, server_pb2
from attnd.v1.local import Kind

_RECEIVE_BYTES: Final = 64 * 1024
_RECEIVE_MORE_BYTES: Final = 1024**2


class AsyncLocalTransport:
    """Carries calls over unix sockets where the server has one on this host, and all others over another transport.

    Args:
        core: What the client knows.
        remote: The other transport.
        unary: What knows the event loop that the client belongs to.
    """

    def __init__(self, core: Core, remote: AsyncTransport, unary: AsyncUnaryTransport) -> None:
        self._core = core
        self._remote = remote
        self._unary = unary
        self._offer: server_pb2.LocalSocket | None = None
        self._asked = False
        self._not_before = -math.inf
        self._idle: list[AsyncLine] = []
        self._lines: set[AsyncLine] = set()
        self._num_opening = 0

    async def send(self, sending: Sending) -> Answer:
        """Returns the answer to a request."""
        self._unary.connect()
        if sending.method.streams:
            return await self._remote.send(sending)
        if sending.method.name == "GetServerInfo":
            answer = await self._remote.send(sending)
            self._take_offer(answer)
            return answer
        deadline = _session.deadline_of(sending)
        try:
            line = await self._line(sending, deadline)
        except LostError:
            self._not_before = time.monotonic() + _local.RETRY_S
            line = None
        if line is None:
            return await self._remote.send(_session.repeated(sending, deadline))
        try:
            answer = await line.ask(sending, deadline, self._core.message_bytes_max)
        except LostError as error:
            self._lose(line)
            if self._core.closed:
                raise client_closed() from error
            _local.check_repeatable(sending, error)
            return await self._remote.send(_session.repeated(sending, deadline))
        except TooLargeError:
            self._put_back(line)
            return await self._remote.send(_session.repeated(sending, deadline))
        except (RefusalError, AttndError):
            self._put_back(line)
            raise
        except BaseException:  # above all a task that was cancelled: with the connection its call ends
            self._drop(line)
            raise
        self._put_back(line)
        return answer

    async def close(self) -> None:
        """Ends the connections and closes the other transport; calls that still run are cancelled."""
        if self._lines and self._unary.usable_here:
            for line in list(self._lines):
                line.close()
            self._lines.clear()
            self._idle.clear()
        await self._remote.close()

    def _take_offer(self, answer: Answer) -> None:
        offer = _local.offer_in(answer)
        if offer != self._offer:
            for line in self._idle:
                self._drop(line)
            self._idle.clear()
        self._offer, self._asked = offer, True

    async def _line(self, sending: Sending, deadline: float) -> "AsyncLine | None":
        """Returns a connection for one call, or None if there is none to have."""
        if self._idle:
            return self._idle.pop()
        if len(self._lines) + self._num_opening >= _local.CONNECTIONS_MAX or time.monotonic() < self._not_before:
            return None
        self._num_opening += 1
        try:
            return await self._open(sending, deadline)
        finally:
            self._num_opening -= 1

    async def _open(self, sending: Sending, deadline: float) -> "AsyncLine | None":
        if not self._asked:
            try:
                timeout_s = _session.repeated(sending, deadline).timeout_s
                self._take_offer(await self._remote.send(_local.discovery(timeout_s)))
            except (grpc.RpcError, RefusalError, AttndError):
                return None  # the call itself will tell
        if self._offer is None:
            return None
        line = AsyncLine(self._offer)
        self._lines.add(line)
        try:
            await line.greet(self._offer, self._core.settings.metadata)
        except BaseException:
            self._drop(line)
            raise
        return line

    def _put_back(self, line: "AsyncLine") -> None:
        if line.closed or self._core.closed:
            self._drop(line)
        else:
            self._idle.append(line)

    def _drop(self, line: "AsyncLine") -> None:
        line.close()
        self._lines.discard(line)

    def _lose(self, line: "AsyncLine") -> None:
        """Drops a connection that broke, and all that are idle: it may be another server by now."""
        self._drop(line)
        idle, self._idle = self._idle, []
        for other in idle:
            self._drop(other)
        self._offer, self._asked = None, False


class AsyncLine:
    """One connection, used by one task at a time.

    Args:
        offer: The socket, as the server told of it.

    Raises:
        LostError: Nobody lets us in there.
    """

    def __init__(self, offer: server_pb2.LocalSocket) -> None:
        self._talk = Talk()
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket(socket.AF_UNIX)
        self._inbox = bytearray()
        self._fds: list[int] = []
        self._heard: asyncio.Future[tuple[int, bytes | bytearray]] | None = None
        try:
            self._socket.setblocking(False)
            self._socket.connect(offer.path)  # a unix socket connects at once or not at all
            _local.check_peer(self._socket)
        except (OSError, LostError) as error:
            self._socket.close()
            raise LostError(str(error), sent=False) from error
        self._loop.add_reader(self._socket.fileno(), self._read)

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._socket.fileno() < 0

    async def greet(self, offer: server_pb2.LocalSocket, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        """Says who we are.

        Raises:
            LostError: Nobody lets us in there.
            RefusalError: The server refuses the client.
        """
        try:
            async with asyncio.timeout(_local.DISCOVERY_TIMEOUT_S):
                _local.check_welcome(*await self._exchange(_local.greeting(offer, metadata)))
        except TimeoutError as error:
            raise LostError("nobody answers there", sent=False) from error

    async def ask(self, sending: Sending, deadline: float, message_bytes_max: int) -> Answer:
        """Returns the answer to a call. A connection whose call was not answered must be closed.

        Raises:
            RefusalError: The call was refused.
            LostError: The connection is gone.
            TooLargeError: The call does not fit, and was not sent.
            DeadlineExceededError: No answer came in time; the connection is closed.
            AttndError: The call cannot be sent, or its answer not be read.
        """
        try:
            async with asyncio.timeout(None if deadline == math.inf else _local.time_left(deadline)):
                if self._talk.wants_memory(sending):
                    await self._share()
                asked = self._talk.ask(sending, message_bytes_max)
                kind, body = await self._exchange(asked.frame)
                try:
                    return self._talk.read(sending, asked, kind, body)
                except RefusalError as error:
                    if not _session.names_no_plan(error):
                        raise
                asked = self._talk.ask(sending, message_bytes_max)
                kind, body = await self._exchange(asked.frame)
        except TimeoutError:
            self.close()
            raise _session.expired(sending) from None
        return self._talk.read(sending, asked, kind, body)

    def close(self) -> None:
        """Ends the connection; a task that waits for it learns of it."""
        if self.closed:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        self._fail(LostError("the connection was closed", sent=True))

    async def _share(self) -> None:
        kind, _ = await self._exchange(local.request(Kind.SEGMENT, b"", b""))
        if kind != Kind.SEGMENT or len(self._fds) != 1:
            raise LostError("it shares no memory", sent=False)
        self._talk.share(self._fds.pop())

    async def _exchange(self, frame: bytes) -> tuple[int, bytes | bytearray]:
        if self.closed:
            raise LostError("the connection was closed", sent=False)
        self._heard = self._loop.create_future()
        try:
            sent = 0
            try:
                sent = self._socket.send(frame)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                raise LostError(str(error), sent=False) from error
            if sent < len(frame):
                await self._send_rest(memoryview(frame)[sent:])
            return await self._heard
        finally:
            self._heard = None

    async def _send_rest(self, rest: memoryview) -> None:
        try:
            await self._loop.sock_sendall(self._socket, rest)
        except (OSError, ValueError) as error:
            raise LostError(str(error), sent=False) from error

    def _read(self) -> None:
        try:
            size_bytes = _RECEIVE_MORE_BYTES if self._inbox else _RECEIVE_BYTES
            data, fds, _, _ = socket.recv_fds(self._socket, size_bytes, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            data, fds = b"", []
            self._fail(LostError(str(error), sent=True))
        self._fds += fds
        if not data:
            self._fail(LostError("the server ended the connection", sent=True))
            self.close()
            return
        whole: bytes | bytearray = data
        if self._inbox:
            self._inbox += data
            whole = self._inbox
        missing = local.ANSWER_HEAD_BYTES - len(whole)
        kind = 0
        if missing <= 0:
            body_bytes, kind = local.read_answer_head(whole)
            missing += body_bytes
        if missing > 0:
            if not self._inbox:
                self._inbox += data
            return
        self._inbox = bytearray()
        if missing < 0 or self._heard is None:
            self._fail(LostError("the server said more than it was asked", sent=True))
            self.close()
        elif not self._heard.done():
            self._heard.set_result((kind, whole[local.ANSWER_HEAD_BYTES :]))

    def _fail(self, error: Any) -> None:
        if self._heard is not None and not self._heard.done():
            self._heard.set_exception(error)
