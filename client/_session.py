"""What is said in a session, without the saying: requests to bytes, bytes to answers, and which plans are known.

Both clients keep one `Dialogue` for each stream. It is not locked: the blocking client locks around it.
"""

import itertools
import math
import time
from typing import Any, Final, NamedTuple

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from attnd.client._calls import StepMetadata
from attnd.client._errors import DeadlineExceededError, InternalError
from attnd.client._transport import Answer, RefusalError, Sending
from attnd.client._wire import arrays_bytes, check_size
from attnd.v1 import attention_pb2, envelope, tensors

PATH: Final = "/attnd.v1.AttentionService/Session"

# The server keeps as many at least, unless they are huge; one more here would be sent in vain.
_PLANS_MAX: Final = 16
_NOT_ANSWERED_MAX: Final = 3


class BrokenError(Exception):
    """The stream has ended, and with it the hope for the answers that have not come.

    Attributes:
        code: How gRPC says that it ended.
        answered: Whether it ever gave an answer.
    """

    def __init__(self, code: grpc.StatusCode, details: str, *, answered: bool) -> None:
        super().__init__(details)
        self.code = code
        self.answered = answered


class Heard(NamedTuple):
    """An answer that is not read yet.

    Attributes:
        header: The message without what was answered.
        field: The field of the answer; empty if the call was refused.
        value: What was answered.
        size_bytes: Bytes of the message.
    """

    header: attention_pb2.SessionResponse
    field: str
    value: envelope.Inner
    size_bytes: int


class Planned(NamedTuple):
    """The plan that a request names.

    Attributes:
        plan_id: Its id in the stream.
        message: What makes the plan, to be sent before; empty if it was sent before.
    """

    plan_id: int
    message: bytes


class Dialogue:
    """Ids and plans of one stream."""

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._plans: dict[StepMetadata, int] = {}

    def next_id(self) -> int:
        """Returns an id for a request."""
        return next(self._ids)

    def plan(self, step: StepMetadata, sending: Sending, message_bytes_max: int) -> Planned:
        """Returns the plan of a step, which is taken for known from then on.

        Raises:
            ResourceExhaustedError: Its message has more bytes than a message may have.
        """
        if (known := self._plans.get(step)) is not None:
            return Planned(known, b"")
        check_size(sending, arrays_bytes(step.arrays), message_bytes_max)
        plan_id = self.next_id()
        outers: list[tuple[Message, str]] = [
            (attention_pb2.SessionRequest(id=plan_id), "plan"),
            (attention_pb2.PlanRequest(plan_id=plan_id), step.field),
        ]
        message = envelope.pack_within(outers, step.request, step.arrays)
        check_size(sending, len(message), message_bytes_max)
        if len(self._plans) >= _PLANS_MAX:
            del self._plans[next(iter(self._plans))]
        self._plans[step] = plan_id
        return Planned(plan_id, message)

    def forget(self, step: StepMetadata) -> None:
        """Takes a plan for unknown: the server has said so."""
        self._plans.pop(step, None)


def pack(sending: Sending, request_id: int, plan_id: int, message_bytes_max: int, *, others_wait: bool) -> bytes:
    """Returns the bytes of a request.

    Raises:
        ResourceExhaustedError: They are more than a message may have.
    """
    check_size(sending, arrays_bytes(sending.arrays), message_bytes_max)
    request: Any = sending.request
    request.plan_id = plan_id
    outer = attention_pb2.SessionRequest(id=request_id, timeout_s=sending.timeout_s, others_wait=others_wait)
    message = envelope.pack_within([(outer, "planned")], request, sending.arrays)
    check_size(sending, len(message), message_bytes_max)
    return message


def cancel(request_id: int) -> bytes:
    """Returns the bytes of a request that gives another one up."""
    return attention_pb2.SessionRequest(cancel=attention_pb2.CancelRequest(id=request_id)).SerializeToString()


def hear(message: bytes) -> Heard:
    """Returns an answer, read only as far as to know whose it is.

    Raises:
        BrokenError: It is none: nothing that follows can be trusted.
    """
    try:
        header, field, value = envelope.unpack_outer(message, attention_pb2.SessionResponse)
    except DecodeError as error:
        raise BrokenError(grpc.StatusCode.INTERNAL, f"An answer cannot be read: {error}", answered=False) from error
    return Heard(header, field, value, len(message))


def read(sending: Sending, heard: Heard, request_bytes: int) -> Answer:
    """Returns what a request was answered.

    Raises:
        RefusalError: The call was refused.
        InternalError: The bytes are no answer to the call.
    """
    if heard.header.HasField("status"):
        raise RefusalError(status_pb2.Status.FromString(heard.header.status))
    if sending.step is None or heard.field != sending.step.field:
        message = f"{sending.method.name} was answered with {heard.field or 'nothing'}."
        raise InternalError(message, reason="ANSWER_MALFORMED")
    try:
        response, arrays = envelope.unpack(heard.value, sending.method.response_type)
    except (DecodeError, tensors.TensorError) as error:
        message = f"The answer to {sending.method.name} cannot be read: {error}"
        raise InternalError(message, reason="ANSWER_MALFORMED") from error
    return Answer(response, arrays, request_bytes, heard.size_bytes)


def names_no_plan(error: RefusalError) -> bool:
    """Whether the server does not know the plan that a request named. Then nothing has happened."""
    info = error_details_pb2.ErrorInfo()
    return any(detail.Unpack(info) and info.reason == "PLAN_NOT_FOUND" for detail in error.status.details)


def deadline_of(sending: Sending) -> float:
    """Returns the `time.monotonic()` at which a request's time is up."""
    return math.inf if sending.timeout_s is None else time.monotonic() + sending.timeout_s


def repeated(sending: Sending, deadline: float) -> Sending:
    """Returns a request to be sent again by other means, in the time that is left.

    A call that attends writes the same to the same place, however often it is repeated.

    Raises:
        DeadlineExceededError: None is left.
    """
    if sending.timeout_s is None:
        return sending
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise expired(sending)
    return sending._replace(timeout_s=left_s)


def expired(sending: Sending) -> DeadlineExceededError:
    """Returns the error of a call whose time is up."""
    return DeadlineExceededError(f"the server did not answer {sending.method.name} within {sending.timeout_s} s")


class Health:
    """Whether sessions are worth trying with a server.

    Attributes:
        served: False once the server has shown that it has no sessions, or that they do not get through to it.
    """

    def __init__(self) -> None:
        self.served = True
        self._in_vain = 0

    def broke(self, error: BrokenError) -> None:
        """Takes note that a stream broke and the same call then succeeded without one."""
        self._in_vain = 0 if error.answered else self._in_vain + 1
        if error.code is grpc.StatusCode.UNIMPLEMENTED or self._in_vain >= _NOT_ANSWERED_MAX:
            self.served = False
