"""The one table from exceptions to `google.rpc.Status`."""

import logging
import uuid
from collections.abc import Iterable
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from attnd.kernels.errors import VIOLATIONS_MAX, InvalidArgumentError, UnsupportedError, Violation
from attnd.service.errors import RefusedError
from attnd.v1.tensors import TensorError

DOMAIN: Final = "attnd"
# Status and details travel in trailers, which peers cut at 8 KiB: an overflow turns the code into RESOURCE_EXHAUSTED.
MESSAGE_CHARS_MAX: Final = 1000
DESCRIPTION_CHARS_MAX: Final = 180

_log = logging.getLogger(__name__)


def status_of(error: Exception) -> status_pb2.Status:
    """Returns the status that answers an exception.

    Unexpected exceptions become INTERNAL with a correlation id and nothing else; the log has the traceback.
    """
    match error:
        case InvalidArgumentError():
            violations = error.violations
            return _status(
                grpc.StatusCode.INVALID_ARGUMENT,
                "INVALID_ARGUMENT",
                str(error),
                [_bad_request(violations)],
                num_violations=str(error.num_violations),
            )
        case TensorError():
            violations = (Violation(error.field, error.message),)
            return _status(
                grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TENSOR", error.message, [_bad_request(violations)]
            )
        case DecodeError():
            message = "The request is not a valid protobuf message of its type."
            return _status(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_MESSAGE", message)
        case UnsupportedError():
            return _status(grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED", str(error))
        case RefusedError():
            retry = [] if error.retry_delay_s is None else [_retry_info(error.retry_delay_s)]
            return _status(error.code, error.reason, error.message, retry)
        case MemoryError():
            return _status(grpc.StatusCode.RESOURCE_EXHAUSTED, "MEMORY_EXHAUSTED", "The server is out of memory.")
        case _:
            correlation_id = uuid.uuid4().hex
            _log.error("internal error %s", correlation_id, exc_info=error)
            message = f"Internal error {correlation_id}: the server's log has the cause."
            return _status(grpc.StatusCode.INTERNAL, "INTERNAL", message)


def _status(
    code: grpc.StatusCode, reason: str, message: str, details: Iterable[Message] = (), **metadata: str
) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=_cut(message, MESSAGE_CHARS_MAX))
    for detail in (error_details_pb2.ErrorInfo(reason=reason, domain=DOMAIN, metadata=metadata), *details):
        status.details.add().Pack(detail)
    return status


def _bad_request(violations: Iterable[Violation]) -> error_details_pb2.BadRequest:
    return error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(
                field=_cut(violation.field, DESCRIPTION_CHARS_MAX),
                description=_cut(violation.description, DESCRIPTION_CHARS_MAX),
            )
            for violation in list(violations)[:VIOLATIONS_MAX]
        ]
    )


def _retry_info(delay_s: float) -> error_details_pb2.RetryInfo:
    delay = Duration()
    delay.FromNanoseconds(round(delay_s * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def _cut(text: str, chars_max: int) -> str:
    # ASCII only: other characters grow threefold in the trailer.
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= chars_max else text[: chars_max - 3] + "..."
