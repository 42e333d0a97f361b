"""The gRPC front of the dispatcher: bytes in, bytes or a status out."""

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any, Final, NoReturn

import grpc
import grpc.aio
from google.rpc import status_pb2
from grpc_status import rpc_status

from attnd.kernels.errors import InvalidArgumentError
from attnd.service.dispatch import Caller, DisconnectedError, Dispatcher, Reply, Send, named_tenant
from attnd.service.status import status_of
from attnd.v1.limits import TENANT_KEY

Context = grpc.aio.ServicerContext[bytes, bytes]

# grpcio reports "no deadline" as a time of centuries.
_NO_DEADLINE_S: Final = 1e9


def generic_handlers(dispatcher: Dispatcher) -> Iterable[grpc.GenericRpcHandler]:
    """Returns the gRPC handlers of the dispatcher's services."""
    services: defaultdict[str, dict[str, grpc.RpcMethodHandler[bytes, bytes]]] = defaultdict(dict)
    unary_calls = _UnaryCalls()
    for path, method in dispatcher.methods.items():
        services[method.containing_service.full_name][method.name] = _method(dispatcher, path, unary_calls)
    return [grpc.method_handlers_generic_handler(name, methods) for name, methods in services.items()]


class _UnaryCalls:
    """The unary calls of all clients. gRPC does not say which connection brought which."""

    def __init__(self) -> None:
        self._num_open = 0

    def __enter__(self) -> Hashable:
        """Counts a call; returns what calls that come alone have in common, or what is this one's only."""
        self._num_open += 1
        return self if self._num_open == 1 else object()

    def __exit__(self, *_: object) -> None:
        self._num_open -= 1


def _method(dispatcher: Dispatcher, path: str, unary_calls: _UnaryCalls) -> "grpc.RpcMethodHandler[bytes, bytes]":
    # Bytes in and out: gRPC would answer a malformed message with INTERNAL before any handler saw it.
    method = dispatcher.methods[path]

    async def unary(message: bytes, context: Context) -> bytes:
        with unary_calls as connection:
            answer = await dispatcher.answer(path, message, await _caller(context, connection))
        if not isinstance(answer, Reply):
            await _abort(context, answer)
        return answer.pack()

    async def server_stream(message: bytes, context: Context) -> None:
        failed = await dispatcher.answer_many(path, message, _sender(context), await _caller(context))
        if failed is not None:
            await _abort(context, failed)

    async def stream(_requests: object, context: Context) -> None:
        async def receive() -> bytes | None:
            message = await context.read()
            return message if isinstance(message, bytes) else None

        failed = await dispatcher.converse(path, receive, _sender(context), await _caller(context))
        if failed is not None:
            await _abort(context, failed)

    # The stubs know no streams that are written to rather than yielded.
    streaming: Any = stream if method.client_streaming else server_stream
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(streaming)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(streaming)
    return grpc.unary_unary_rpc_method_handler(unary)


def _sender(context: Context) -> Send:
    async def send(reply: Reply) -> None:
        try:
            await context.write(reply.pack())
        except grpc.aio.InternalError as error:  # what writing to a stream that has ended gives
            raise DisconnectedError from error

    return send


async def _caller(context: Context, connection: Hashable = None) -> Caller:
    received_at_ns = time.monotonic_ns()
    remaining_s = context.time_remaining()
    limited = remaining_s is not None and remaining_s < _NO_DEADLINE_S
    try:
        tenant = _tenant(context)
    except InvalidArgumentError as error:
        await _abort(context, status_of(error))
    return Caller(
        expires_at=time.monotonic() + remaining_s if limited else math.inf,
        received_at_ns=received_at_ns,
        tenant=tenant,
        connection=connection,
    )


def _tenant(context: Context) -> str:
    certified: bytes | None = next(iter(context.auth_context().get("x509_common_name", ())), None)
    if certified is not None:
        return certified.decode("utf-8", "replace")
    return named_tenant(next((value for key, value in context.invocation_metadata() or () if key == TENANT_KEY), ""))


async def _abort(context: Context, status: status_pb2.Status) -> NoReturn:
    await context.abort_with_status(rpc_status.to_status(status))
    raise asyncio.CancelledError  # abort_with_status never returns; its stubs do not say so
