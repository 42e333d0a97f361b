"""What carries calls to the server: one seam, behind which a transport may be anything."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import grpc
import numpy as np
from google.protobuf.message import Message
from google.rpc import status_pb2

from attnd.client._calls import Method, StepMetadata


class Sending(NamedTuple):
    """One request on its way.

    Attributes:
        method: The rpc.
        request: The message without its arrays; a `PlannedAttendRequest` without its plan if `step` is set.
        arrays: Its arrays, by field.
        timeout_s: Seconds to wait for the answer; None: as long as it takes.
        step: What the request shares with the other layers of its step. A transport that has sessions sends it once;
            for any other, `whole` has it all.
        on_answer: Told of each answer of an rpc that streams.
    """

    method: Method
    request: Message
    arrays: Mapping[str, np.ndarray]
    timeout_s: float | None
    step: StepMetadata | None = None
    on_answer: Callable[[Any], object] | None = None

    def whole(self) -> "Sending":
        """Returns the request of the rpc itself."""
        if self.step is None:
            return self
        request, arrays = self.step.whole(self.request, self.arrays)
        return self._replace(request=request, arrays=arrays, step=None)


class Answer(NamedTuple):
    """What the server answered.

    Attributes:
        response: The message without its arrays.
        arrays: Its arrays, by field.
        request_bytes: Bytes of the messages sent.
        response_bytes: Bytes of the message received.
    """

    response: Message
    arrays: Mapping[str, np.ndarray]
    request_bytes: int
    response_bytes: int


class RefusalError(Exception):
    """An answer that is an error, from a transport other than gRPC's own calls.

    Attributes:
        status: Code, message and details.
    """

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


def client_closed() -> RefusalError:
    """Returns the error of a call whose client was closed meanwhile."""
    return RefusalError(status_pb2.Status(code=grpc.StatusCode.CANCELLED.value[0], message="Client closed."))


class Transport(Protocol):
    """Carries calls and waits for each. Threads may share it."""

    def send(self, sending: Sending) -> Answer:
        """Returns the answer to a request.

        Raises:
            grpc.RpcError: gRPC's own error.
            RefusalError: The server's, by another way.
            AttndError: What the transport finds out itself.
        """

    def close(self) -> None:
        """Ends what it holds; calls that still run are cancelled."""


class AsyncTransport(Protocol):
    """Carries calls and awaits each. Tasks of one event loop may share it."""

    async def send(self, sending: Sending) -> Answer:
        """Returns the answer to a request, as `Transport.send` does."""

    async def close(self) -> None:
        """Ends what it holds; calls that still run are cancelled."""
