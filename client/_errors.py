"""The errors of the SDK.

    AttndError                          code                  also a
    ├── InvalidArgumentError            INVALID_ARGUMENT      ValueError
    ├── NotFoundError                   NOT_FOUND             LookupError
    │   └── SessionLostError            NOT_FOUND
    ├── AlreadyExistsError              ALREADY_EXISTS
    ├── FailedPreconditionError         FAILED_PRECONDITION
    ├── ResourceExhaustedError          RESOURCE_EXHAUSTED
    ├── DeadlineExceededError           DEADLINE_EXCEEDED     TimeoutError
    ├── UnavailableError                UNAVAILABLE           ConnectionError
    ├── UnimplementedError              UNIMPLEMENTED         NotImplementedError
    ├── AbortedError                    ABORTED
    ├── CallCancelledError              CANCELLED
    ├── DataLossError                   DATA_LOSS
    ├── PermissionDeniedError           PERMISSION_DENIED
    ├── UnauthenticatedError            UNAUTHENTICATED
    ├── InternalError                   INTERNAL
    └── UnknownError                    UNKNOWN and the rest

Every error carries `code`, `reason`, `message`, `violations` and `retry_delay_s`, survives pickling, and keeps gRPC's
own error, where there was one, as `__cause__`. `str(error)` is the server's message and nothing else. What the client
finds out before it sends anything raises the same classes.
"""

from collections.abc import Iterable
from typing import ClassVar, Final, NamedTuple

import grpc


class Violation(NamedTuple):
    """One reason why an input is refused.

    Attributes:
        field: The offending argument, with indices: `cu_q_lens[3]`, `page_indices[2,7]`, `q.shape[2]`.
        description: What must hold, with the values that break it.
    """

    field: str
    description: str


class AttndError(Exception):
    """Anything that keeps attnd from answering a call.

    Attributes:
        code: The status code that the server answered with or would have.
        reason: The cause in UPPER_SNAKE, which tells causes of one code apart; empty when gRPC itself refused.
        message: What a person needs to know to mend it; also `str(error)`.
        violations: The arguments at fault, in the order of the server's checks; at most 16.
        retry_delay_s: After how many seconds a retry may succeed; None when the server did not say.
    """

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        violations: Iterable[tuple[str, str]] = (),
        retry_delay_s: float | None = None,
    ) -> None:
        # The message alone goes into `args`: pickle and copy call the class with them and restore the rest.
        super().__init__(message)
        self.message = message
        self.reason = reason
        self.violations = tuple(Violation(*violation) for violation in violations)
        self.retry_delay_s = retry_delay_s

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.message!r}, reason={self.reason!r})"


class InvalidArgumentError(AttndError, ValueError):
    """An argument that no server accepts. The text is JAX's own where JAX's kernels document one."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    @classmethod
    def of(cls, field: str, description: str) -> "InvalidArgumentError":
        """Returns the error of a single violation that the client itself found."""
        return cls(description, reason="INVALID_ARGUMENT", violations=[(field, description)])


class NotFoundError(AttndError, LookupError):
    """No such cache or sequence."""

    code = grpc.StatusCode.NOT_FOUND


class SessionLostError(NotFoundError):
    """The server has restarted since: the handle is gone, and what it named is too, unless it was restored."""


class AlreadyExistsError(AttndError):
    """The name of the cache is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(AttndError):
    """Right for another cache, device or moment. Closed and forked clients raise it too."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhaustedError(AttndError):
    """Pages, memory, queue or message size: `reason` says which."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class DeadlineExceededError(AttndError, TimeoutError):
    """No answer within `timeout_s`."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class UnavailableError(AttndError, ConnectionError):
    """No server answers at the address, or it is stopping."""

    code = grpc.StatusCode.UNAVAILABLE


class UnimplementedError(AttndError, NotImplementedError):
    """A valid call that this server, device or version does not serve."""

    code = grpc.StatusCode.UNIMPLEMENTED


class AbortedError(AttndError):
    """Another call got in the way; the same call may succeed now."""

    code = grpc.StatusCode.ABORTED


class CallCancelledError(AttndError):
    """The call was cancelled, for instance because the client was closed while it ran."""

    code = grpc.StatusCode.CANCELLED


class DataLossError(AttndError):
    """Saved data cannot be read back."""

    code = grpc.StatusCode.DATA_LOSS


class PermissionDeniedError(AttndError):
    """The server knows the caller and refuses the call."""

    code = grpc.StatusCode.PERMISSION_DENIED


class UnauthenticatedError(AttndError):
    """The server does not know the caller."""

    code = grpc.StatusCode.UNAUTHENTICATED


class InternalError(AttndError):
    """A fault of the server; its log has the correlation id of the message."""

    code = grpc.StatusCode.INTERNAL


class UnknownError(AttndError):
    """A status that attnd does not send."""


_CLASSES: Final[dict[grpc.StatusCode, type[AttndError]]] = {
    error.code: error
    for error in (
        InvalidArgumentError, NotFoundError, AlreadyExistsError, FailedPreconditionError, ResourceExhaustedError,
        DeadlineExceededError, UnavailableError, UnimplementedError, AbortedError, CallCancelledError, DataLossError,
        PermissionDeniedError, UnauthenticatedError, InternalError, UnknownError,
    )
}  # fmt: skip


def class_of(code: grpc.StatusCode) -> type[AttndError]:
    """Returns the class of errors with a status code."""
    return _CLASSES.get(code, UnknownError)
