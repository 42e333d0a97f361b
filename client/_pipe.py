"""A gRPC stream of bytes for the blocking client, whose user waits for answers in gRPC itself.

gRPC's public blocking streams hand each message over between three threads: the caller's, one that takes requests
from an iterator, one that waits for events. Each hand-over costs as much as a small call's work. gRPC has calls whose
events the caller's own thread waits for, and uses them for its unary calls; the stream here is one of those. It is
not public: where a version of gRPC lacks it, the public stream serves.
"""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from attnd.client._session import BrokenError

Metadata = Sequence[tuple[str, str | bytes]]

_NO_FLAGS: Final = 0
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class Pipe(Protocol):
    """A stream of messages. Any thread may send; one at a time receives."""

    def send(self, message: bytes) -> None:
        """Queues a message."""

    def receive(self) -> bytes:
        """Returns the next message.

        Raises:
            BrokenError: The stream has ended.
        """

    def cancel(self) -> None:
        """Ends the stream; whoever receives learns of it."""


def open_pipe(channel: grpc.Channel, path: str, metadata: Metadata) -> Pipe:
    """Opens a stream.

    Raises:
        ValueError: The channel is closed.
    """
    try:
        return PolledPipe(channel, path, metadata)
    except (AttributeError, TypeError):  # not the gRPC that this was written for
        return QueuedPipe(channel, path, metadata)


class PolledPipe:
    """A stream whose events the receiving thread itself waits for."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        inner: Any = channel._channel  # type: ignore[attr-defined]  # noqa: SLF001 - see above
        begin = (
            (cygrpc.SendInitialMetadataOperation(tuple(metadata), _NO_FLAGS),),
            (cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),),
            (cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),),
        )
        self._call: Any = inner.segregated_call(
            _NO_FLAGS, path.encode(), None, None, tuple(metadata), None, [(each, None) for each in begin], None
        )
        self._lock = threading.Lock()
        self._outbox: deque[bytes] = deque()
        self._sending = False
        self._receiving = False
        self._answered = False
        self._broken: BrokenError | None = None

    def send(self, message: bytes) -> None:
        """Queues a message."""
        with self._lock:
            self._outbox.append(message)
            self._send_next()

    def receive(self) -> bytes:
        """Returns the next message."""
        with self._lock:
            if not self._receiving and self._broken is None:
                self._receiving = self._call.operate((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), None)
        while self._broken is None:
            message = self._handle(self._call.next_event())
            if message is not None:
                self._answered = True
                return message
        raise self._broken

    def cancel(self) -> None:
        """Ends the stream."""
        self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "ended by the client")

    def _send_next(self) -> None:
        # gRPC takes one message at a time, and says when it takes the next.
        if self._outbox and not self._sending and self._broken is None:
            self._sending = self._call.operate((cygrpc.SendMessageOperation(self._outbox.popleft(), _NO_FLAGS),), None)

    def _handle(self, event: Any) -> bytes | None:
        message: bytes | None = None
        for operation in event.batch_operations:
            kind = operation.type()
            if kind == cygrpc.OperationType.receive_message:
                self._receiving = False
                message = operation.message()
            elif kind == cygrpc.OperationType.send_message:
                with self._lock:
                    self._sending = False
                    self._send_next()
            elif kind == cygrpc.OperationType.receive_status_on_client:
                code = _CODES.get(operation.code(), grpc.StatusCode.UNKNOWN)
                details = str(operation.details() or "")
                with self._lock:
                    self._broken = BrokenError(code, details, answered=self._answered)
                    self._outbox.clear()
        return message


class QueuedPipe:
    """gRPC's public stream."""

    def __init__(self, channel: grpc.Channel, path: str, metadata: Metadata) -> None:
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answered = False
        stub: Any = channel.stream_stream(path)
        self._call: Any = stub(iter(self._outbox.get, None), metadata=metadata)

    def send(self, message: bytes) -> None:
        """Queues a message."""
        self._outbox.put(message)

    def receive(self) -> bytes:
        """Returns the next message."""
        try:
            message: bytes = next(self._call)
        except StopIteration:
            raise BrokenError(grpc.StatusCode.OK, "the server ended the stream", answered=self._answered) from None
        except grpc.RpcError as error:
            call: Any = error
            raise BrokenError(call.code(), call.details() or "", answered=self._answered) from error
        self._answered = True
        return message

    def cancel(self) -> None:
        """Ends the stream."""
        self._call.cancel()
        self._outbox.put(None)
