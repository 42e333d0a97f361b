"""Sessions of the awaiting client: tasks of one event loop share a stream."""

import asyncio
from collections import deque
from typing import Any

import grpc
import grpc.aio

from attnd.client import _session
from attnd.client._core import Core
from attnd.client._session import BrokenError, Dialogue, Health, Heard
from attnd.client._transport import Answer, RefusalError, Sending, client_closed
from attnd.client._unary import AsyncUnaryTransport


class AsyncSessionTransport:
    """Carries the layers of steps over a session, and all else, and those when there is none, over another transport.

    Args:
        core: What the client knows.
        unary: The other transport.
    """

    def __init__(self, core: Core, unary: AsyncUnaryTransport) -> None:
        self._core = core
        self._unary = unary
        self._health = Health()
        self._stream: AsyncStream | None = None

    async def send(self, sending: Sending) -> Answer:
        """Returns the answer to a request."""
        if sending.step is None or not self._health.served:
            return await self._unary.send(sending)
        deadline = _session.deadline_of(sending)
        broken: BrokenError | None = None
        try:
            return await self._open().ask(sending, self._core.message_bytes_max)
        except RefusalError as error:
            if not _session.names_no_plan(error):
                raise
        except BrokenError as error:
            broken = error
        if self._core.closed:
            raise client_closed()
        answer = await self._unary.send(_session.repeated(sending, deadline))
        if broken is not None:
            self._health.broke(broken)
        return answer

    async def close(self) -> None:
        """Ends the session and closes the other transport."""
        if self._stream is not None and self._unary.usable_here:
            await self._stream.close()
        await self._unary.close()

    def _open(self) -> "AsyncStream":
        self._unary.connect()
        if self._stream is None or self._stream.broken is not None:
            try:
                call: Any = self._unary.channel.stream_stream(_session.PATH)(metadata=self._core.settings.metadata)
            except grpc.aio.UsageError:  # gRPC's answer to a channel that another task closes at this moment
                self._core.check_usable()
                raise
            self._stream = AsyncStream(call)
        return self._stream


class AsyncStream:
    """One stream.

    Attributes:
        broken: Why it has ended; None as long as it has not.

    Args:
        call: gRPC's stream of bytes.
    """

    def __init__(self, call: Any) -> None:
        self.broken: BrokenError | None = None
        self._call = call
        self._answered = False
        self._dialogue = Dialogue()
        self._waiting: dict[int, asyncio.Future[Heard]] = {}
        self._outbox: deque[bytes] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._reading = asyncio.create_task(self._read())

    async def ask(self, sending: Sending, message_bytes_max: int) -> Answer:
        """Returns the answer to one layer of a step.

        Raises:
            RefusalError: The call was refused.
            BrokenError: The stream has ended.
            DeadlineExceededError: No answer came in time.
            ResourceExhaustedError: The message is too large.
        """
        assert sending.step is not None
        plan = self._dialogue.plan(sending.step, sending, message_bytes_max)
        request_id = self._dialogue.next_id()
        if plan.message:
            self._send(plan.message)
        others_wait = bool(self._waiting)
        message = _session.pack(sending, request_id, plan.plan_id, message_bytes_max, others_wait=others_wait)
        self._send(message)
        answer = self._waiting[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(sending.timeout_s):
                heard = await answer
        except TimeoutError:
            raise _session.expired(sending) from None
        finally:
            del self._waiting[request_id]
            # The task was cancelled or ran out of time: whoever awaits is gone.
            if answer.cancelled() and self.broken is None:
                self._send(_session.cancel(request_id))
        try:
            return _session.read(sending, heard, len(plan.message) + len(message))
        except RefusalError as error:
            if _session.names_no_plan(error):
                self._dialogue.forget(sending.step)
            raise

    async def close(self) -> None:
        """Ends the stream; calls that wait fail."""
        self._call.cancel()
        await asyncio.wait([self._reading])

    def _send(self, message: bytes) -> None:
        # Never awaited by a caller: gRPC ends the stream when a task is cancelled that writes to it.
        self._outbox.append(message)
        if self._writing is None:
            self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            while self._outbox and self.broken is None:
                await self._call.write(self._outbox.popleft())
        except (grpc.RpcError, asyncio.InvalidStateError, asyncio.CancelledError):
            pass  # the stream has ended; the reader says why
        finally:
            self._writing = None

    async def _read(self) -> None:
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                self._hear(message)
        except (grpc.RpcError, asyncio.CancelledError, BrokenError) as error:
            self.broken = error if isinstance(error, BrokenError) else None
        if self.broken is None:
            code, details = await self._call.code(), await self._call.details()
            self.broken = BrokenError(code, details or "", answered=self._answered)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self.broken)

    def _hear(self, message: bytes) -> None:
        heard = _session.hear(message)
        self._answered = True
        answer = self._waiting.get(heard.header.id)
        if answer is not None and not answer.done():
            answer.set_result(heard)
