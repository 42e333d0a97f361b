"""From a request to its answer, whatever carried it. A transport is a front on this, and nothing else.

A front reads messages from its connections, says who calls and until when, and writes what it is given back. Every
exception has become a `google.rpc.Status` by then.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import status_pb2

from attnd.kernels.errors import InvalidArgumentError
from attnd.service.status import status_of
from attnd.v1 import envelope
from attnd.v1.limits import TENANT_KEY
from attnd.v1.tails import Fetch

_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{0,128}")


_NO_ARRAYS: Final[Mapping[str, np.ndarray]] = MappingProxyType({})


class Caller(NamedTuple):
    """What comes with a request.

    Attributes:
        expires_at: `time.monotonic()` at which its deadline passes; infinite if it has none.
        received_at_ns: `time.monotonic_ns()` at which its message had been received.
        tenant: Who calls: the common name of the client's certificate, or what the call says where there is none.
        fetch: Returns elements that lie in memory which the connection shares; None if it shares none.
        connection: What calls have in common that come one after the other; None if they may come at the same time.
        arrays: The arrays of the request, by field, read-only; its message does not have them.
    """

    expires_at: float
    received_at_ns: int
    tenant: str
    fetch: Fetch | None = None
    connection: Hashable = None
    arrays: Mapping[str, np.ndarray] = _NO_ARRAYS


def named_tenant(name: object) -> str:
    """Returns the tenant that a call says it comes from.

    Raises:
        InvalidArgumentError: No tenant can have this name.
    """
    if not (isinstance(name, str) and _TENANT.fullmatch(name)):
        text = name[:140] if isinstance(name, str | bytes) else name
        raise InvalidArgumentError.of(TENANT_KEY, f"{TENANT_KEY}={text!r} must be 0 to 128 of A-Z a-z 0-9 . _ -.")
    return name


class Reply(NamedTuple):
    """An answer.

    Attributes:
        message: The response without its arrays.
        arrays: Its arrays, by field.
        outers: The messages that it lies in, the outermost first, and their fields: an answer of a session.
    """

    message: Message
    arrays: Mapping[str, np.ndarray] = _NO_ARRAYS
    outers: Sequence[tuple[Message, str]] = ()

    def pack(self) -> bytes:
        """Returns the bytes of the response, its arrays copied into them."""
        return envelope.pack_within(self.outers, self.message, self.arrays)


Receive = Callable[[], Awaitable[bytes | None]]
"""Returns the next message of a stream; None at its end."""

Send = Callable[[Reply], Awaitable[None]]
"""Sends one answer of a stream, and returns when the connection can take the next.

Raises:
    DisconnectedError: The caller is gone.
"""


def read(message: bytes | memoryview | envelope.Inner, kind: type[Message], caller: Caller) -> tuple[Any, Caller]:
    """Returns a request without its arrays, and its caller with them.

    Raises:
        DecodeError: The message cannot be read.
        TensorError: An array is not what it claims to be.
    """
    request, arrays = envelope.unpack(message, kind, caller.fetch)
    return request, Caller(*caller[:-1], arrays)


class DisconnectedError(Exception):
    """Nobody is there to be answered."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    request_class: type[Message]
    handler: Callable[..., Any]


class Dispatcher:
    """Finds the handler of a request by its path, `/attnd.v1.AttentionService/Attend`.

    Handlers are methods of one object for each service, named as its RPCs in snake_case:

    - unary: a coroutine function of (request, caller) that returns a `Message` or a `Reply`;
    - server streaming: an async generator function of (request, caller) that yields them;
    - bidirectional: a coroutine function of (receive, send, caller), which takes and gives messages as bytes.

    Attributes:
        methods: Descriptors of all RPCs, by path.

    Args:
        services: The object with the handlers of each service.

    Raises:
        AttributeError: An RPC of a descriptor has no handler.
    """

    def __init__(self, services: Mapping[ServiceDescriptor, object]) -> None:
        self.methods: Mapping[str, MethodDescriptor] = {
            f"/{service.full_name}/{method.name}": method for service in services for method in service.methods
        }
        self._endpoints = {
            f"/{service.full_name}/{method.name}": _Endpoint(
                GetMessageClass(method.input_type), getattr(handlers, _snake_case(method.name))
            )
            for service, handlers in services.items()
            for method in service.methods
        }

    async def answer(self, path: str, message: bytes | memoryview, caller: Caller) -> Reply | status_pb2.Status:
        """Answers a unary call."""
        endpoint = self._endpoints[path]
        try:
            response = await endpoint.handler(*read(message, endpoint.request_class, caller))
        except Exception as error:  # the table has a status for each
            return status_of(error)
        return response if isinstance(response, Reply) else Reply(response)

    async def answer_many(self, path: str, message: bytes, send: Send, caller: Caller) -> status_pb2.Status | None:
        """Answers a server-streaming call. Returns its status if it failed."""
        endpoint = self._endpoints[path]
        try:
            responses: AsyncIterator[Message | Reply] = endpoint.handler(*read(message, endpoint.request_class, caller))
            async for response in responses:
                await send(response if isinstance(response, Reply) else Reply(response))
        except DisconnectedError:
            return None
        except Exception as error:
            return status_of(error)
        return None

    async def converse(self, path: str, receive: Receive, send: Send, caller: Caller) -> status_pb2.Status | None:
        """Serves a bidirectional stream until its end. Returns its status if it failed."""
        endpoint = self._endpoints[path]
        try:
            await endpoint.handler(receive, send, caller)
        except DisconnectedError:
            return None
        except Exception as error:
            return status_of(error)
        return None


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
