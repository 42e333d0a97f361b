"""Why the server refuses a call that is well formed: one class for each status code, a reason for each cause."""

from typing import ClassVar

import grpc


class RefusedError(Exception):
    """A call that the server will not carry out.

    Attributes:
        code: The status code.
        reason: The cause, UPPER_SNAKE: what programs tell causes of one code apart by.
        message: What a person needs to know to mend it.
        retry_delay_s: When to try again; None if trying again will not help.
    """

    code: ClassVar[grpc.StatusCode]

    def __init__(self, reason: str, message: str, *, retry_delay_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_delay_s = retry_delay_s


class NotFoundError(RefusedError):
    """No such cache or sequence. Foreign, freed and never-existing ones are answered alike."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExistsError(RefusedError):
    """The name is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPreconditionError(RefusedError):
    """Right for another cache, device or moment."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhaustedError(RefusedError):
    """Pages, memory, queue or message size."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED


class UnimplementedError(RefusedError):
    """Not served by this version."""

    code = grpc.StatusCode.UNIMPLEMENTED


class DataLossError(RefusedError):
    """What was saved is damaged."""

    code = grpc.StatusCode.DATA_LOSS


class DeadlineExceededError(RefusedError):
    """The call's time ran out before its work began."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class CallCancelledError(RefusedError):
    """Its caller gave it up, and waits for nothing but to be told so."""

    code = grpc.StatusCode.CANCELLED


class UnavailableError(RefusedError):
    """The server is stopping."""

    code = grpc.StatusCode.UNAVAILABLE
