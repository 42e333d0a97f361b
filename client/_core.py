"""The course of a call, without the waiting: both clients run this, one blocking and one awaiting.

A conversation is a generator. It yields what is to be sent and is given the answer, or thrown the transport's error;
what it returns is the caller's result. How a request travels is the transport's affair (`_transport.py`).
"""

import os
import time
from collections.abc import Generator
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from attnd.client import _caches, _info
from attnd.client._calls import METHODS, Call
from attnd.client._channel import Settings, check_timeout
from attnd.client._errors import (
    AttndError,
    FailedPreconditionError,
    NotFoundError,
    SessionLostError,
    class_of,
)
from attnd.client._info import CallRecord, ServerInfo
from attnd.client._transport import Answer, RefusalError, Sending
from attnd.v1.limits import MESSAGE_BYTES_MAX

ResultT = TypeVar("ResultT")

_DOMAIN: Final = "attnd"
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class Core:
    """What a client knows, whichever way it waits.

    Attributes:
        settings: What it was given.
        server: The server as it was when last asked; None before.
        closed: Whether `close` was called.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.server: ServerInfo | None = None
        self.closed = False
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process inherited the client rather than made it."""
        return os.getpid() != self._pid

    @property
    def message_bytes_max(self) -> int:
        """Bytes that a message may have."""
        if self.server is not None and self.server.limits.message_bytes_max > 0:
            return min(MESSAGE_BYTES_MAX, self.server.limits.message_bytes_max)
        return MESSAGE_BYTES_MAX

    def check_usable(self) -> None:
        """Refuses calls that would hang or fail in gRPC's depths.

        Raises:
            FailedPreconditionError: The client is closed, or was made before a fork.
        """
        if self.forked:
            raise FailedPreconditionError(
                f"This client was made in process {self._pid} and gRPC does not survive a fork: start process "
                f"{os.getpid()} with the multiprocessing method 'spawn', and make a client there.",
                reason="CLIENT_FORKED",
            )
        if self.closed:
            raise FailedPreconditionError("This client is closed.", reason="CLIENT_CLOSED")

    def converse(self, call: Call[ResultT], started_ns: int) -> Generator[Sending, Answer, ResultT]:
        """Carries out a call.

        Args:
            call: The call.
            started_ns: `time.perf_counter_ns` when the caller made it.

        Yields:
            What to send; expects the answer, or the transport's error thrown.

        Raises:
            AttndError: The call failed.
        """
        try:
            return (yield from self._ask(call, started_ns))
        except NotFoundError as error:
            if call.incarnation_id and (yield from self._restarted_since(call.incarnation_id)):
                raise SessionLostError(
                    f"{error.message} The server at {self.settings.address} has restarted since: "
                    "look for what it restored (`restored_from`), or create it anew.",
                    reason="SERVER_RESTARTED",
                ) from error.__cause__
            raise

    def _ask(self, call: Call[ResultT], started_ns: int) -> Generator[Sending, Answer, ResultT]:
        self.check_usable()
        check_timeout(call.timeout_s)
        method = METHODS[call.method]
        timeout_s = self.settings.timeout_s if call.timeout_s is None else call.timeout_s
        sending = Sending(
            method=method,
            request=call.request,
            arrays=call.arrays,
            timeout_s=timeout_s,
            step=call.step,
            on_answer=call.on_answer,
        )
        try:
            answer = yield sending
        except grpc.RpcError as error:
            raise self._error_of(error, sending) from error
        except RefusalError as error:
            raise self._refusal(error.status) from error
        result = call.read(answer.response, answer.arrays)
        self._record(sending, answer, started_ns)
        return result

    def _restarted_since(self, incarnation_id: str) -> Generator[Sending, Answer, bool]:
        try:
            self.server = yield from self._ask(_caches.server_info(None), time.perf_counter_ns())
        except AttndError:
            return False  # Unknown: the error at hand stands as it is.
        return self.server.incarnation_id != incarnation_id

    def _record(self, sending: Sending, answer: Answer, started_ns: int) -> None:
        if self.settings.on_call is None:
            return
        timings: Any = getattr(answer.response, "timings", None)
        self.settings.on_call(
            CallRecord(
                method=sending.method.name,
                total_ns=time.perf_counter_ns() - started_ns,
                request_bytes=answer.request_bytes,
                response_bytes=answer.response_bytes,
                timings=None if timings is None else _info.timings(timings),
                implementation=getattr(answer.response, "implementation", ""),
            )
        )

    def _error_of(self, error: Any, sending: Sending) -> AttndError:
        code: grpc.StatusCode = error.code()
        details: dict[str, Any] = _details_of(error)
        message = error.details() or _silent(code)
        if not details:
            message = self._explained(code, message, sending)
        return class_of(code)(message, **details)

    def _refusal(self, status: status_pb2.Status) -> AttndError:
        code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
        return class_of(code)(status.message or _silent(code), **_details_in(status))

    def _explained(self, code: grpc.StatusCode, message: str, sending: Sending) -> str:
        # The text is gRPC's own, or another program's: say what it means for whoever called attnd.
        address = self.settings.address
        match code:
            case grpc.StatusCode.UNAVAILABLE:
                return f"no attnd server answers at {address}: {message}"
            case grpc.StatusCode.DEADLINE_EXCEEDED:
                return f"the server at {address} did not answer {sending.method.name} within {sending.timeout_s} s"
            case grpc.StatusCode.UNIMPLEMENTED:
                return f"the server at {address} does not serve {sending.method.path}: {message}"
            case _:
                return message


def _details_of(error: Any) -> dict[str, Any]:
    """Returns reason, violations and retry delay of an error that an attnd server sent; nothing for any other."""
    try:
        status = rpc_status.from_call(error)
    except (ValueError, DecodeError):  # Trailers that contradict the status or are not attnd's: it stands alone.
        return {}
    return {} if status is None else _details_in(status)


def _silent(code: grpc.StatusCode) -> str:
    return f"The server answered {code.name} without a reason."


def _details_in(status: status_pb2.Status) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for detail in status.details:
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == _DOMAIN:
            found["reason"] = info.reason
        elif detail.Unpack(bad):
            found["violations"] = [(each.field, each.description) for each in bad.field_violations]
        elif detail.Unpack(retry):
            found["retry_delay_s"] = retry.retry_delay.ToNanoseconds() / 1e9
    return found
