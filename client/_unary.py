"""The plainest transport: one gRPC call for each request, whose message holds everything.

An rpc that streams has many answers: each is told of, and the last one is the answer.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from attnd.client import _wire
from attnd.client._calls import METHODS
from attnd.client._channel import CHANNEL_OPTIONS
from attnd.client._core import Core
from attnd.client._errors import FailedPreconditionError
from attnd.client._transport import Answer, Sending


class UnaryTransport:
    """Carries calls over a gRPC channel and waits for each. Threads may share it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        settings = core.settings
        if settings.credentials is None:
            self.channel = grpc.insecure_channel(settings.address, CHANNEL_OPTIONS)
        else:
            self.channel = grpc.secure_channel(settings.address, settings.credentials, CHANNEL_OPTIONS)
        # Without serializers gRPC takes and gives bytes.
        self._stubs: dict[str, Callable[..., Any]] = {
            name: (self.channel.unary_stream if method.streams else self.channel.unary_unary)(method.path)
            for name, method in METHODS.items()
        }

    def send(self, sending: Sending) -> Answer:
        """Returns the answer to a request."""
        sending = sending.whole()
        message = _wire.pack(sending, self._core.message_bytes_max)
        try:
            answer = self._stubs[sending.method.name](
                message, timeout=sending.timeout_s, metadata=self._core.settings.metadata
            )
            if sending.method.streams:
                answer = _last(sending, answer)
        except ValueError:  # gRPC's answer to a channel that another thread closes at this moment
            self._core.check_usable()
            raise
        return _wire.unpack(sending, answer, len(message))

    def close(self) -> None:
        """Closes the channel; calls that still run are cancelled."""
        # A channel inherited through a fork is the parent's to close, and closing it here would hang.
        if not self._core.forked:
            self.channel.close()


class AsyncUnaryTransport:
    """Carries calls over a gRPC channel of one event loop and awaits each. Tasks may share it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._loop: asyncio.AbstractEventLoop | None = None
        self.channel: grpc.aio.Channel
        self._stubs: dict[str, Callable[..., Any]]

    def connect(self) -> None:
        """Makes the channel, if this is the first call.

        gRPC ties a channel to the loop in which it is made, and the client itself may be made where no loop runs.

        Raises:
            FailedPreconditionError: It was made in another loop.
        """
        loop = asyncio.get_running_loop()
        if self._loop is None:
            settings = self._core.settings
            if settings.credentials is None:
                self.channel = grpc.aio.insecure_channel(settings.address, CHANNEL_OPTIONS)
            else:
                self.channel = grpc.aio.secure_channel(settings.address, settings.credentials, CHANNEL_OPTIONS)
            self._stubs = {
                name: (self.channel.unary_stream if method.streams else self.channel.unary_unary)(method.path)
                for name, method in METHODS.items()
            }
            self._loop = loop
        elif self._loop is not loop:
            raise FailedPreconditionError(
                "This client belongs to another event loop: make one client for each loop.", reason="CLIENT_OTHER_LOOP"
            )

    async def send(self, sending: Sending) -> Answer:
        """Returns the answer to a request."""
        self.connect()
        sending = sending.whole()
        message = _wire.pack(sending, self._core.message_bytes_max)
        try:
            call = self._stubs[sending.method.name](
                message, timeout=sending.timeout_s, metadata=self._core.settings.metadata
            )
            answer = await (_async_last(sending, call) if sending.method.streams else call)
        except grpc.aio.UsageError:  # gRPC's answer to a channel that another task closes at this moment
            self._core.check_usable()
            raise
        return _wire.unpack(sending, answer, len(message))

    async def close(self) -> None:
        """Closes the channel; calls that still run are cancelled."""
        # A channel inherited through a fork is the parent's to close, one of another loop nobody's: either would hang.
        if self.usable_here:
            await self.channel.close()

    @property
    def usable_here(self) -> bool:
        """Whether the channel was made in this process and event loop."""
        return not self._core.forked and self._loop is asyncio.get_running_loop()


def _last(sending: Sending, answers: Any) -> bytes:
    answer = b""
    try:
        for answer in answers:
            _tell(sending, answer)
    finally:
        answers.cancel()  # of no effect at the end; else the listener raised, and wants no more
    return answer


async def _async_last(sending: Sending, answers: Any) -> bytes:
    answer = b""
    try:
        async for answer in answers:
            _tell(sending, answer)
    finally:
        answers.cancel()
    return answer


def _tell(sending: Sending, answer: bytes) -> None:
    if sending.on_answer is not None:
        sending.on_answer(_wire.unpack(sending, answer, 0).response)
