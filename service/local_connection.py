"""One connection of the local socket: a call at a time, from its frame to its answer, on the event loop's thread."""

import asyncio
import hmac
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from google.rpc import status_pb2

from attnd.service.dispatch import Caller, Dispatcher, Reply, named_tenant
from attnd.service.errors import DeadlineExceededError, UnimplementedError
from attnd.service.session import Plans
from attnd.service.status import status_of
from attnd.v1 import envelope, local
from attnd.v1.local import Kind, RequestHead, Segment
from attnd.v1.tensors import TensorError

RECEIVE_BYTES: Final = 64 * 1024
HELLO_TIMEOUT_S: Final = 5.0

# What a client changes while a kernel reads it harms nobody else. All else decides where is read and written.
_READ_IN_PLACE: Final = frozenset(("q", "k", "v"))

_log = logging.getLogger(__name__)

Answer: TypeAlias = Reply | status_pb2.Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What a connection gives access to.

    Attributes:
        dispatcher: Answers unary calls.
        new_plans: Makes the plans of a connection, none at first.
        token: What clients must say first.
    """

    dispatcher: Dispatcher
    new_plans: Callable[[], Plans]
    token: bytes


class Connection:
    """A connection.

    Attributes:
        busy: Whether it has read a call that it has not answered.

    Args:
        connected: The socket; it is closed by the connection.
        services: What its calls may ask for.
        on_close: Called when it is closed.
    """

    def __init__(self, connected: socket.socket, services: Services, on_close: Callable[["Connection"], None]) -> None:
        self.busy = False
        self._socket = connected
        self._services = services
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._inbox = bytearray()
        self._outbox: list[memoryview] = []
        self._tenant: str | None = None
        self._plans = services.new_plans()
        self._segment: Segment | None = None
        self._task: asyncio.Task[Answer] | None = None
        self._expired = False
        connected.setblocking(False)
        self._loop.add_reader(connected.fileno(), self._read)
        self._loop.call_later(HELLO_TIMEOUT_S, self._require_hello)

    def close(self) -> None:
        """Ends the connection; a call that still runs is cancelled. What it shares is unmapped with its last array."""
        if self._socket.fileno() < 0:
            return
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        self._segment = None
        self._inbox.clear()
        self._outbox.clear()
        if self._task is not None:
            self._task.cancel()
        self._on_close(self)

    def _require_hello(self) -> None:
        if self._tenant is None:
            self.close()

    # Requests.

    def _read(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        try:
            self._take(data)
        except local.FrameError as error:
            _log.warning("a local connection is closed: %s", error)
            self.close()

    def _take(self, data: bytes) -> None:
        """Carries on with what has been received, when it is a whole frame."""
        if self.busy:
            raise local.FrameError("A call came before the one before it was answered.")
        whole: bytes | bytearray = data
        if self._inbox:
            self._inbox += data
            whole = self._inbox
        missing = local.REQUEST_HEAD_BYTES - len(whole)
        if missing <= 0:
            head = local.request_head(whole)
            missing += head.body_bytes
        if missing > 0:
            if not self._inbox:
                self._inbox += data
            return
        if missing < 0:
            raise local.FrameError("A call came before the one before it was answered.")
        self._inbox = bytearray()
        self._handle(head, memoryview(whole)[local.REQUEST_HEAD_BYTES :])

    def _handle(self, head: RequestHead, body: memoryview) -> None:
        if head.kind == Kind.HELLO:
            self._greet(body)
        elif self._tenant is None:
            raise local.FrameError("The first frame is no HELLO.")
        elif head.kind == Kind.SEGMENT:
            self._share()
        else:
            expires_at = time.monotonic() + head.timeout_s
            caller = Caller(
                expires_at=expires_at,
                received_at_ns=time.monotonic_ns(),
                tenant=self._tenant,
                fetch=self._fetch,
                connection=self,
            )
            self._begin(head, body[: head.path_size], body[head.path_size :], caller)

    def _greet(self, body: memoryview) -> None:
        token, tenant = bytes(body[: local.TOKEN_BYTES]), bytes(body[local.TOKEN_BYTES :])
        if self._tenant is not None or not hmac.compare_digest(token, self._services.token):
            raise local.FrameError("The token is another server's.")
        try:
            self._tenant = named_tenant(tenant.decode("utf-8", "replace"))
        except Exception as error:
            self._send(Kind.STATUS, status_of(error).SerializeToString())
            return
        self._send(Kind.WELCOME)

    def _share(self) -> None:
        if self._segment is not None:
            raise local.FrameError("The connection shares memory already.")
        fd = local.new_segment()
        try:
            self._segment = Segment(fd)
            # A head is so small that the socket takes all of it: nothing else is under way.
            socket.send_fds(self._socket, [local.answer_head(Kind.SEGMENT, 0)], [fd])
        finally:
            os.close(fd)

    def _fetch(self, field: str, offset: int, size_bytes: int) -> memoryview:
        if self._segment is None:
            message = f"{field}.shared_offset is set, but the connection shares no memory."
            raise TensorError(f"{field}.shared_offset", message)
        view = self._segment.view(field, offset, size_bytes)
        return view.toreadonly() if field in _READ_IN_PLACE else memoryview(bytes(view))

    # Calls.

    def _begin(self, head: RequestHead, first: memoryview, second: memoryview, caller: Caller) -> None:
        self.busy = True
        if head.kind == Kind.PLANNED:
            call, is_attention = self._answer_planned(first, second, caller), True
        else:
            path = bytes(first).decode("utf-8", "replace")
            call = self._answer(path, second, caller)
            is_attention = path.startswith("/attnd.v1.AttentionService/")
        if is_attention:
            # Most attention calls never wait: a task for each would cost more than reading its message.
            try:
                waits_for = call.send(None)
            except StopIteration as end:
                self._end(head.room, end.value)
                return
            call = _rest(call, waits_for)
        self._expired = False
        self._task = self._loop.create_task(call)
        timer = None if caller.expires_at == math.inf else self._loop.call_at(caller.expires_at, self._expire)
        self._task.add_done_callback(lambda task: self._done(head.room, task, timer))

    async def _answer(self, path: str, message: memoryview, caller: Caller) -> Answer:
        method = self._services.dispatcher.methods.get(path)
        if method is None or method.client_streaming or method.server_streaming:
            return status_of(UnimplementedError("UNIMPLEMENTED", f"A local socket does not serve {path[:200]}."))
        return await self._services.dispatcher.answer(path, message, caller)

    async def _answer_planned(self, plan: memoryview, message: memoryview, caller: Caller) -> Answer:
        try:
            if len(plan):
                self._plans.keep(plan, caller)
            return (await self._plans.answer(message, caller))[1]
        except Exception as error:  # the table has a status for each
            return status_of(error)

    def _expire(self) -> None:
        if self._task is not None:
            self._expired = True
            self._task.cancel()

    def _done(self, room: local.Room, task: "asyncio.Task[Answer]", timer: asyncio.TimerHandle | None) -> None:
        self._task = None
        if timer is not None:
            timer.cancel()
        if not task.cancelled():
            self._end(room, task.result())
        elif self._expired:
            error = DeadlineExceededError("DEADLINE_PASSED", "The call was not answered in time.")
            self._end(room, status_of(error))
        else:  # the server stops, or the client is gone
            self.close()

    # Answers.

    def _end(self, room: local.Room, answer: Answer) -> None:
        if self._socket.fileno() < 0:
            return
        try:
            if isinstance(answer, Reply):
                kind, body = Kind.MESSAGE, _pack(answer, room, self._segment)
            else:
                kind, body = Kind.STATUS, answer.SerializeToString()
        except Exception as error:  # the table has a status for each
            kind, body = Kind.STATUS, status_of(error).SerializeToString()
        self._send(kind, body)

    def _send(self, kind: Kind, body: bytes = b"") -> None:
        parts = [memoryview(local.answer_head(kind, len(body))), memoryview(body)]
        try:
            sent = self._socket.sendmsg(parts)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self.close()
            return
        if sent == len(parts[0]) + len(body):
            self.busy = False
            return
        self.busy = True
        self._outbox = [memoryview(b"".join(parts))[sent:]]
        self._loop.add_writer(self._socket.fileno(), self._flush)

    def _flush(self) -> None:
        try:
            self._outbox[0] = self._outbox[0][self._socket.send(self._outbox[0]) :]
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.close()
            return
        if not self._outbox[0]:
            self._outbox.clear()
            self._loop.remove_writer(self._socket.fileno())
            self.busy = False


def _pack(reply: Reply, room: local.Room, segment: Segment | None) -> bytes:
    """Returns the bytes of an answer, its large arrays in the room for them as far as it reaches."""
    if segment is None or not room.size_bytes:
        return reply.pack()
    end = room.offset

    def place(array: np.ndarray) -> int | None:
        nonlocal end
        offset = local.aligned(end)
        if array.nbytes < local.SHARED_BYTES_MIN or offset + array.nbytes > room.offset + room.size_bytes:
            return None
        segment.write(offset, array)
        end = offset + array.nbytes
        return offset

    return envelope.pack(reply.message, reply.arrays, place)


async def _rest(call: Coroutine[Any, Any, Answer], waits_for: Any) -> Answer:
    """Goes on with a coroutine that has begun and waits for something."""
    answer: Answer = await _Rest(call, waits_for)
    return answer


class _Rest:
    def __init__(self, call: Coroutine[Any, Any, Answer], waits_for: Any) -> None:
        self._call = call
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Answer]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    got = yield waits_for
                except BaseException as error:
                    waits_for = self._call.throw(error)
                else:
                    waits_for = self._call.send(got)
        except StopIteration as end:
            answer: Answer = end.value
            return answer
