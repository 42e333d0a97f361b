"""A session: many calls over one stream, side by side, answered in order, each with a status of its own."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import DecodeError, Message

from attnd.kernels.errors import InvalidArgumentError
from attnd.service.dispatch import Caller, Receive, Reply, Send, read
from attnd.service.errors import (
    CallCancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    UnavailableError,
)
from attnd.service.plans import Step
from attnd.service.status import status_of
from attnd.v1 import attention_pb2 as pb
from attnd.v1 import envelope

CALLS_MAX: Final = 32
"""Calls of a session that have been read and whose answers have not been taken."""

CALLS_BYTES_MAX: Final = 64 * 1024**2
"""Bytes of those calls and their answers. One call is taken whatever its size."""

PLANS_MAX: Final = 16
PLANS_BYTES_MAX: Final = 64 * 1024**2
"""Plans that a session keeps, and their bytes. The newest is kept whatever its size."""

_CALLS: Final[Mapping[str, type[Message]]] = {
    "ragged_paged_attention": pb.RaggedPagedAttentionRequest,
    "paged_attention": pb.PagedAttentionRequest,
    "attend": pb.AttendRequest,
}

Handler = Callable[[Any, Caller], Awaitable[Reply]]
PlanHandler = Callable[[Any, Caller], Step]
PlannedHandler = Callable[[Step, pb.PlannedAttendRequest, Caller], Awaitable[tuple[str, Reply]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """What a session can be asked.

    Attributes:
        whole: Answers whole calls, by field of `SessionRequest`.
        plan: Makes plans, by field of `PlanRequest`.
        planned: Answers one layer of a plan, and says in which field of `SessionResponse`.
    """

    whole: Mapping[str, Handler]
    plan: Mapping[str, PlanHandler]
    planned: PlannedHandler


@dataclass(slots=True, eq=False, kw_only=True)
class _Call:
    """One call that has been read and whose answer has not been taken.

    Attributes:
        header: The request without what is asked.
        name: What is asked: the field that is set.
        value: The message there.
        caller: Who asks, and until when.
        size_bytes: What it may hold of memory.
        before: The call before it, as long as that has not been answered.
        task: What works on it and answers it.
        working: Whether its answer is being worked on.
        given_up: Whether nobody waits for its answer: its caller said so, or its time is up.
        sent: Whether it has been answered.
        after: Done when it has been answered; None if nobody waits for that.
    """

    header: pb.SessionRequest
    name: str
    value: envelope.Inner
    caller: Caller
    size_bytes: int
    before: "_Call | None"
    task: "asyncio.Task[None] | None" = None
    working: bool = False
    given_up: bool = False
    sent: bool = False
    after: "asyncio.Future[None] | None" = None

    def give_up(self) -> None:
        """Ends the work on it, if its answer is not known yet."""
        # Once only: a task cancelled twice is one whose stream has ended.
        if not self.given_up and self.task is not None and self.working:
            self.task.cancel()
        self.given_up = True

    def only_given_up(self) -> bool:
        """Returns whether its task was cancelled for that alone, and not with the whole stream."""
        return self.given_up and self.task is not None and not self.task.uncancel()


class Plans:
    """Plans that a caller has made, and the calls that name them.

    Args:
        handlers: What makes plans, and answers calls.
    """

    def __init__(self, handlers: Handlers) -> None:
        self._handlers = handlers
        self._plans: dict[int, Step] = {}

    def keep(self, message: envelope.Inner, caller: Caller) -> pb.PlanResponse:
        """Makes a plan of a `PlanRequest`. It may push out older ones.

        Raises:
            InvalidArgumentError: The metadata is wrong.
            DecodeError: The message cannot be read.
        """
        request, name, value = envelope.unpack_outer(message, pb.PlanRequest)
        self._plans.pop(request.plan_id, None)
        if not name:
            raise InvalidArgumentError.of("plan.metadata", "metadata must be set.")
        step = self._handlers.plan[name](*read(value, _CALLS[name], caller))
        while self._plans and (
            len(self._plans) >= PLANS_MAX
            or sum(each.size_bytes for each in self._plans.values()) + step.size_bytes > PLANS_BYTES_MAX
        ):
            del self._plans[next(iter(self._plans))]  # the oldest
        self._plans[request.plan_id] = step
        return pb.PlanResponse(plan_id=request.plan_id)

    async def answer(self, message: envelope.Inner, caller: Caller) -> tuple[str, Reply]:
        """Answers a `PlannedAttendRequest`, and says in which field of `SessionResponse`.

        Raises:
            FailedPreconditionError: There is no such plan.
            DecodeError: The message cannot be read.
        """
        request, caller = read(message, pb.PlannedAttendRequest, caller)
        try:
            step = self._plans[request.plan_id]
        except KeyError:
            text = f"There is no plan {request.plan_id}: it was refused, or newer ones have taken its place."
            raise FailedPreconditionError("PLAN_NOT_FOUND", text) from None
        return await self._handlers.planned(step, request, caller)


class Session:
    """One session, whatever carries it.

    Args:
        handlers: What it can be asked.
        send: Takes its answers.
        caller: Who opened it.
    """

    def __init__(self, handlers: Handlers, send: Send, caller: Caller) -> None:
        self._handlers = handlers
        self._send = send
        self._caller = caller
        self._plans = Plans(handlers)
        self._open: dict[int, _Call] = {}
        self._num_calls = 0
        self._size_bytes = 0
        self._last: _Call | None = None
        self._room = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._reading = asyncio.timeout(None)
        self._ending = False

    async def run(self, receive: Receive) -> None:
        """Serves until the caller ends the stream, or `end` does; answers what has been read.

        Raises:
            DecodeError: A message cannot be read.
            UnavailableError: The server ended it.
        """
        malformed: DecodeError | None = None
        try:
            async with asyncio.TaskGroup() as calls:
                try:
                    async with self._reading:
                        while (received := await receive()) is not None:
                            await self._admit(received, calls)
                except TimeoutError:
                    assert self._ending
                except DecodeError as error:
                    malformed = error
        except BaseExceptionGroup as group:  # the connection is gone: whichever call met it first tells
            raise group.exceptions[0] from None
        finally:
            if self._alarm is not None:
                self._alarm.cancel()
        if malformed is not None:
            raise malformed
        if self._ending:
            raise UnavailableError("SERVER_STOPPING", "The server is stopping.")

    def end(self) -> None:
        """Reads no further; what has been read is answered."""
        with suppress(RuntimeError):  # it reads no more already, and ends by itself
            self._reading.reschedule(asyncio.get_running_loop().time())
            self._ending = True

    async def _admit(self, message: bytes, calls: asyncio.TaskGroup) -> None:
        received_at_ns = time.monotonic_ns()
        header, name, value = envelope.unpack_outer(message, pb.SessionRequest)
        if name == "cancel":
            self._cancel(envelope.unpack(value, pb.CancelRequest)[0].id)
            return
        # The answer to an attention call is no larger than its question.
        size_bytes = 2 * len(message)
        while self._num_calls and (self._num_calls >= CALLS_MAX or self._size_bytes + size_bytes > CALLS_BYTES_MAX):
            self._room.clear()
            await self._room.wait()
        # Unset is 0, and what is not a time is refused when the call is looked at.
        expires_at = time.monotonic() + header.timeout_s if 0 < header.timeout_s < math.inf else math.inf
        call = _Call(
            header=header,
            name=name,
            value=value,
            caller=Caller(
                expires_at=expires_at,
                received_at_ns=received_at_ns,
                tenant=self._caller.tenant,
                # A call that waits for no other, and keeps none waiting, gains nothing from the engine's thread.
                connection=None if header.others_wait or self._num_calls else self,
            ),
            size_bytes=size_bytes,
            before=self._last,
        )
        self._open[header.id] = self._last = call
        self._num_calls += 1
        self._size_bytes += size_bytes
        call.task = calls.create_task(self._serve(call))
        if expires_at < math.inf and (self._alarm is None or expires_at < self._alarm.when()):
            self._wake_at(expires_at)
        await asyncio.sleep(0)  # begins with it before the next message is asked for, which takes a while

    def _cancel(self, request_id: int) -> None:
        call = self._open.get(request_id)
        if call is not None:
            call.give_up()

    def _wake_at(self, when: float) -> None:
        # One timer for all: most calls are answered long before their time is up.
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(when, self._give_late_ones_up)

    def _give_late_ones_up(self) -> None:
        self._alarm = None
        now = time.monotonic()
        for call in self._open.values():
            if call.caller.expires_at <= now:
                call.give_up()
        left = [call.caller.expires_at for call in self._open.values() if now < call.caller.expires_at < math.inf]
        if left:
            self._wake_at(min(left))

    async def _serve(self, call: _Call) -> None:
        reply = await self._reply(call)
        before, call.before = call.before, None  # or each call would keep all before it
        if before is not None and not before.sent:
            before.after = asyncio.get_running_loop().create_future()
            await before.after
        await self._send(reply)
        del reply
        call.sent = True
        if call.after is not None and not call.after.done():
            call.after.set_result(None)
        if self._open.get(call.header.id) is call:
            del self._open[call.header.id]
        if self._last is call:
            self._last = None
        self._num_calls -= 1
        self._size_bytes -= call.size_bytes
        self._room.set()

    async def _reply(self, call: _Call) -> Reply:
        outer = pb.SessionResponse(id=call.header.id)
        try:
            name, answer = await self._answer_if_wanted(call)
        except Exception as error:  # the table has a status for each
            outer.status = status_of(error).SerializeToString()
            return Reply(outer)
        return Reply(answer.message, answer.arrays, ((outer, name),))

    async def _answer_if_wanted(self, call: _Call) -> tuple[str, Reply]:
        if not call.given_up:
            call.working = True
            try:
                return await self._answer(call)
            except asyncio.CancelledError:
                if not call.only_given_up():
                    raise
            finally:
                call.working = False
        if time.monotonic() >= call.caller.expires_at:
            message = f"The call was not answered within {call.header.timeout_s} s."
            raise DeadlineExceededError("DEADLINE_PASSED", message)
        raise CallCancelledError("CALLER_CANCELLED", "The caller gave the call up.")

    async def _answer(self, call: _Call) -> tuple[str, Reply]:
        if call.header.HasField("timeout_s") and not 0 < call.header.timeout_s < math.inf:
            message = f"timeout_s={call.header.timeout_s} must be finite and greater than 0."
            raise InvalidArgumentError.of("timeout_s", message)
        match call.name:
            case "planned":
                return await self._plans.answer(call.value, call.caller)
            case "plan":
                return call.name, Reply(self._plans.keep(call.value, call.caller))
            case "":
                raise InvalidArgumentError.of("call", "call must be set.")
            case name:
                return name, await self._handlers.whole[name](*read(call.value, _CALLS[name], call.caller))
