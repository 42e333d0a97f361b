"""Requests to bytes and bytes to answers, for transports whose messages hold everything."""

import operator
from collections.abc import Mapping
from typing import Final

import numpy as np
from google.protobuf.message import DecodeError

from attnd.client._errors import InternalError, ResourceExhaustedError
from attnd.client._transport import Answer, Sending
from attnd.v1 import envelope, tensors

# Quicker than a generator, which costs a small call more than the sum.
NBYTES: Final = operator.attrgetter("nbytes")


def pack(sending: Sending, message_bytes_max: int) -> bytes:
    """Returns the bytes of a request.

    Raises:
        ResourceExhaustedError: They are more than a message may have.
    """
    # Known before anything is copied, but for the header, which is small.
    size = arrays_bytes(sending.arrays)
    message = envelope.pack(sending.request, sending.arrays) if size <= message_bytes_max else b""
    check_size(sending, max(size, len(message)), message_bytes_max)
    return message


def arrays_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """Returns the bytes of all elements of arrays."""
    return sum(map(NBYTES, arrays.values()))


def check_size(sending: Sending, size_bytes: int, message_bytes_max: int) -> None:
    """Refuses a request that is too large.

    Raises:
        ResourceExhaustedError: It has more bytes than a message may have.
    """
    if size_bytes > message_bytes_max:
        raise ResourceExhaustedError(
            f"The message of {sending.method.name} has {size_bytes} bytes, at most {message_bytes_max} are taken: "
            "send fewer rows.",
            reason="MESSAGE_TOO_LARGE",
        )


def unpack(sending: Sending, answer: bytes, request_bytes: int) -> Answer:
    """Returns the answer of a unary call.

    Raises:
        InternalError: The bytes are no answer to the call.
    """
    try:
        response, arrays = envelope.unpack(answer, sending.method.response_type)
    except (DecodeError, tensors.TensorError) as error:
        message = f"The answer to {sending.method.name} cannot be read: {error}"
        raise InternalError(message, reason="ANSWER_MALFORMED") from error
    return Answer(response, arrays, request_bytes, len(answer))
