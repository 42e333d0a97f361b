"""Bytes to bytes: how an RPC reaches its handler, and how every error becomes a status."""

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
import numpy as np
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_status import rpc_status

from attnd.kernels.errors import InvalidArgumentError
from attnd.service.errors import UnimplementedError
from attnd.service.status import status_of
from attnd.v1 import envelope
from attnd.v1.limits import TENANT_KEY

_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{0,128}")
# grpcio reports "no deadline" as a time of centuries.
_NO_DEADLINE_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class Caller:
    """What comes with a request.

    Attributes:
        arrays: The arrays of the request, by field, read-only; its message does not have them.
        expires_at: `time.monotonic()` at which its deadline passes; infinite if it has none.
        received_at_ns: `time.monotonic_ns()` at which its message had been received.
        tenant: Who calls: the common name of the client's certificate, or what the call says where there is none.
    """

    arrays: Mapping[str, np.ndarray]
    expires_at: float
    received_at_ns: int
    tenant: str


Handler = Callable[[Any, Caller], Awaitable[Message | bytes]]


def generic_handler(service: ServiceDescriptor, handlers: object) -> grpc.GenericRpcHandler:
    """Returns the gRPC handler of a service.

    Args:
        service: Its descriptor.
        handlers: An object with a coroutine method for each RPC, named in snake_case, that takes the request and a
            `Caller` and returns the response; or `unimplemented`.

    Raises:
        AttributeError: An RPC of the descriptor has no handler.
    """
    methods = {method.name: _method(method, getattr(handlers, _snake_case(method.name))) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, methods)


async def unimplemented(_request: Message, _caller: Caller) -> Message:
    """Answers an RPC that this version does not serve."""
    raise UnimplementedError("UNIMPLEMENTED", "This version of attnd does not serve this RPC.")


def _method(method: MethodDescriptor, handler: Handler) -> "grpc.RpcMethodHandler[bytes, bytes]":
    # Bytes in and out: gRPC would answer a malformed message with INTERNAL before any handler saw it.
    request_class: type[Message] = GetMessageClass(method.input_type)

    async def unary(data: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        received_at_ns = time.monotonic_ns()
        try:
            request, arrays = envelope.unpack(data, request_class)
            response = await handler(request, Caller(arrays, _expires_at(context), received_at_ns, _tenant(context)))
            return response if isinstance(response, bytes) else response.SerializeToString()
        except Exception as error:  # the table has a status for each
            await _abort(context, error)

    async def stream(
        _requests: "bytes | AsyncIterator[bytes]", context: "grpc.aio.ServicerContext[bytes, bytes]"
    ) -> bytes:
        try:
            await handler(request_class(), Caller({}, _expires_at(context), time.monotonic_ns(), _tenant(context)))
        except Exception as error:
            await _abort(context, error)
        raise AssertionError("no stream is served yet")

    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(stream)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(stream)
    return grpc.unary_unary_rpc_method_handler(unary)


def _expires_at(context: "grpc.aio.ServicerContext[bytes, bytes]") -> float:
    remaining_s = context.time_remaining()
    limited = remaining_s is not None and remaining_s < _NO_DEADLINE_S
    return time.monotonic() + remaining_s if limited else math.inf


def _tenant(context: "grpc.aio.ServicerContext[bytes, bytes]") -> str:
    certified: bytes | None = next(iter(context.auth_context().get("x509_common_name", ())), None)
    if certified is not None:
        return certified.decode("utf-8", "replace")
    tenant = next((value for key, value in context.invocation_metadata() or () if key == TENANT_KEY), "")
    if not (isinstance(tenant, str) and _TENANT.fullmatch(tenant)):
        raise InvalidArgumentError.of(
            TENANT_KEY, f"{TENANT_KEY}={tenant[:140]!r} must be 0 to 128 of A-Z a-z 0-9 . _ -."
        )
    return tenant


async def _abort(context: "grpc.aio.ServicerContext[bytes, bytes]", error: Exception) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise asyncio.CancelledError  # abort_with_status never returns; its stubs do not say so


def _snake_case(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
