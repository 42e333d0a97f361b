"""The local transport, without the waiting: what both clients say over the socket, and where its arrays lie.

A connection carries one call at a time, so a client has as many as it makes calls at a time. The frames are described
in `attnd.v1.local`. A client looks for the socket when its server's address is one of this host; the server's token
proves that whoever listens there is the same server.
"""

import operator
import os
import socket
import struct
import time
import weakref
from typing import Any, Final, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from google.rpc import status_pb2

from attnd.client._calls import METHODS, StepMetadata
from attnd.client._errors import InternalError
from attnd.client._transport import Answer, RefusalError, Sending
from attnd.client._wire import NBYTES, arrays_bytes, check_size
from attnd.v1 import attention_pb2, envelope, local, server_pb2, tensors
from attnd.v1.limits import TENANT_KEY
from attnd.v1.local import Kind, Room

CONNECTIONS_MAX: Final = 32
"""Connections of a client. Calls beyond them go over gRPC."""

GRACE_S: Final = 0.1
"""The server answers by itself when time is up; a client that hears nothing for so much longer gives up."""

RETRY_S: Final = 1.0
"""How long a socket that let nobody in is left alone."""

DISCOVERY_TIMEOUT_S: Final = 5.0

# The server keeps as many at least, unless they are huge.
_PLANS_MAX: Final = 16
# Results from this size on stay in the shared memory for as long as somebody holds them; smaller ones are copied.
_LEASE_BYTES_MIN: Final = 128 * 1024
_LEASES_BYTES_MAX: Final = 96 * 1024**2

# What may have been done already must not be done twice.
_ONCE: Final = frozenset(
    ("CreateCache", "DeleteCache", "CreateSequences", "ForkSequence", "TruncateSequence", "ReleaseSequences")
)


class LostError(Exception):
    """The connection is gone, or was never there.

    Attributes:
        sent: Whether the server may have begun with the call.
    """

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class TooLargeError(Exception):
    """The call does not fit into a local connection."""


def discovery(timeout_s: float | None) -> Sending:
    """Returns the call that asks a server for its socket."""
    timeout_s = DISCOVERY_TIMEOUT_S if timeout_s is None else min(timeout_s, DISCOVERY_TIMEOUT_S)
    request = server_pb2.GetServerInfoRequest()
    return Sending(method=METHODS["GetServerInfo"], request=request, arrays={}, timeout_s=timeout_s)


def offer_in(answer: Answer) -> server_pb2.LocalSocket | None:
    """Returns the socket that a server tells of, if it lies on this host."""
    info: Any = answer.response
    offer: server_pb2.LocalSocket = info.local_socket
    return offer if offer.path and os.path.exists(offer.path) else None


def greeting(offer: server_pb2.LocalSocket, metadata: tuple[tuple[str, str | bytes], ...]) -> bytes:
    """Returns the first frame of a connection."""
    tenant = next((value for key, value in metadata if key == TENANT_KEY), "")
    return local.request(Kind.HELLO, offer.token, tenant.encode() if isinstance(tenant, str) else tenant)


def check_peer(connected: socket.socket) -> None:
    """Refuses a socket that somebody else listens on.

    Raises:
        LostError: It is not this user's.
    """
    layout = struct.Struct("3i")  # pid, uid, gid
    _, uid, _ = layout.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    if uid != os.geteuid():
        raise LostError("another user listens there", sent=False)


def check_welcome(kind: int, body: bytes | bytearray) -> None:
    """Reads the answer to a greeting.

    Raises:
        RefusalError: The server refuses the client.
        LostError: It is no answer to a greeting.
    """
    if kind == Kind.STATUS:
        raise RefusalError(status_pb2.Status.FromString(bytes(body)))
    if kind != Kind.WELCOME:
        raise LostError("another program listens there", sent=False)


def check_repeatable(sending: Sending, error: LostError) -> None:
    """Refuses to send a call again that may have been carried out.

    Raises:
        RefusalError: What gRPC answers when a connection breaks.
    """
    if error.sent and sending.method.name in _ONCE:
        message = f"the connection broke while the server was at work on {sending.method.name}: {error}"
        raise RefusalError(status_pb2.Status(code=grpc.StatusCode.UNAVAILABLE.value[0], message=message)) from error


class Asked(NamedTuple):
    """A call as it goes over a connection.

    Attributes:
        frame: The bytes for the socket.
        room: Where the answer may put its arrays.
        size_bytes: Bytes of the messages and of what lies beside them.
        step: The step whose plan is in the frame.
        plan_id: The plan.
    """

    frame: bytes
    room: Room
    size_bytes: int
    step: StepMetadata | None
    plan_id: int


class Talk:
    """What is said over one connection: its plans, and its memory once there is some."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._plans: dict[StepMetadata, int] = {}
        self._last_plan_id = 0

    def wants_memory(self, sending: Sending) -> bool:
        """Whether the call has arrays that memory must be shared for, and is not yet."""
        if self._memory is not None:
            return False
        largest = max(map(NBYTES, sending.arrays.values()), default=0)
        if sending.step is not None and sending.step not in self._plans:
            largest = max(largest, *map(NBYTES, sending.step.arrays.values()))
        return largest >= local.SHARED_BYTES_MIN or sending.method.name == "ReadPages"

    def share(self, fd: int) -> None:
        """Takes memory, and closes its descriptor.

        Raises:
            LostError: It is not what the protocol says.
        """
        try:
            self._memory = Memory(local.Segment(fd))
        except (local.FrameError, OSError, ValueError) as error:
            raise LostError(f"its memory cannot be used: {error}", sent=False) from error
        finally:
            os.close(fd)

    def ask(self, sending: Sending, message_bytes_max: int) -> Asked:
        """Returns a call, its large arrays copied into the shared memory.

        Raises:
            TooLargeError: It does not fit.
            ResourceExhaustedError: It has more bytes than a message may have.
        """
        size_bytes = arrays_bytes(sending.arrays)
        if sending.step is not None and sending.step not in self._plans:
            size_bytes += arrays_bytes(sending.step.arrays)
        check_size(sending, size_bytes, message_bytes_max)
        place, room = None, local.NO_ROOM
        if self._memory is not None:
            place, room = self._memory.prepare(sending, size_bytes)
        kind, first, second, plan_id = self._parts(sending, place)
        if len(first) + len(second) > local.REQUEST_BYTES_MAX:
            raise TooLargeError
        timeout_s = sending.timeout_s
        return Asked(
            frame=local.request(kind, first, second, timeout_s=timeout_s, room=room),
            room=room,
            size_bytes=size_bytes + len(first) + len(second),
            step=sending.step,
            plan_id=plan_id,
        )

    def read(self, sending: Sending, asked: Asked, kind: int, body: bytes | bytearray) -> Answer:
        """Returns what a call was answered.

        Raises:
            RefusalError: The call was refused.
            InternalError: The bytes are no answer to the call.
        """
        if kind == Kind.STATUS:
            if asked.step is not None:
                self._plans.pop(asked.step, None)  # whether the plan or the call was refused is not said
            raise RefusalError(status_pb2.Status.FromString(bytes(body)))
        if kind != Kind.MESSAGE:
            raise InternalError(f"{sending.method.name} was answered with {kind=}.", reason="ANSWER_MALFORMED")
        if asked.step is not None:
            self._keep(asked.step, asked.plan_id)
        fetched: dict[str, tuple[int, int]] = {}

        def fetch(field: str, offset: int, size_bytes: int) -> memoryview:
            if self._memory is None or offset < asked.room.offset:
                raise tensors.TensorError(field, f"{field} lies where no answer may lie.")
            fetched[field] = (offset, size_bytes)
            return self._memory.segment.view(field, offset, size_bytes)

        try:
            response, arrays = envelope.unpack(body, sending.method.response_type, fetch)
        except (DecodeError, tensors.TensorError) as error:
            message = f"The answer to {sending.method.name} cannot be read: {error}"
            raise InternalError(message, reason="ANSWER_MALFORMED") from error
        response_bytes = len(body)
        for field, (offset, size_bytes) in fetched.items():
            assert self._memory is not None
            response_bytes += size_bytes
            if not self._memory.lease(offset, size_bytes, arrays[field]):
                arrays[field] = arrays[field].copy()
        return Answer(response, arrays, asked.size_bytes, response_bytes)

    def _parts(self, sending: Sending, place: envelope.Place | None) -> tuple[Kind, bytes, bytes, int]:
        if sending.step is None:
            message = envelope.pack(sending.request, sending.arrays, place)
            return Kind.UNARY, sending.method.path.encode(), message, 0
        plan, plan_id = b"", self._plans.get(sending.step, 0)
        if not plan_id:
            self._last_plan_id = plan_id = self._last_plan_id + 1
            outers: list[tuple[Message, str]] = [(attention_pb2.PlanRequest(plan_id=plan_id), sending.step.field)]
            plan = envelope.pack_within(outers, sending.step.request, sending.step.arrays, place)
        request: Any = sending.request
        request.plan_id = plan_id
        return Kind.PLANNED, plan, envelope.pack(request, sending.arrays, place), plan_id

    def _keep(self, step: StepMetadata, plan_id: int) -> None:
        if step not in self._plans:
            if len(self._plans) >= _PLANS_MAX:
                del self._plans[next(iter(self._plans))]
            self._plans[step] = plan_id


class Memory:
    """What lies where in the memory of a connection: the arrays of one call, and results that somebody still holds.

    Args:
        segment: The memory.
    """

    def __init__(self, segment: local.Segment) -> None:
        self.segment = segment
        self._leases: list[tuple[int, int, weakref.ref[np.ndarray]]] = []  # begin, end, whose memory it is

    def prepare(self, sending: Sending, arrays_bytes: int) -> tuple[envelope.Place, Room]:
        """Returns what puts the arrays of a call into the memory, and the room for those of the answer.

        Raises:
            TooLargeError: They do not fit.
        """
        self._leases = [lease for lease in self._leases if lease[2]() is not None]
        num_arrays = len(sending.arrays) + (0 if sending.step is None else len(sending.step.arrays))
        begin, end = self._gap(arrays_bytes + num_arrays * local.ALIGNMENT)
        taken = begin

        def place(array: np.ndarray) -> int | None:
            nonlocal begin
            if array.nbytes < local.SHARED_BYTES_MIN:
                return None
            offset, begin = begin, local.aligned(begin + array.nbytes)
            self.segment.write(offset, array)
            return offset

        # The arrays lie in [taken, answers); the answer comes behind them if it fits there, or else elsewhere.
        answers = local.aligned(taken + arrays_bytes + num_arrays * local.ALIGNMENT)
        answer_bytes = _answer_bytes(sending)
        if end - answers < answer_bytes:
            answers, end = self._gap(answer_bytes, behind=answers)
        return place, Room(answers, end - answers)

    def lease(self, offset: int, size_bytes: int, array: np.ndarray) -> bool:
        """Leaves an answer's array where it lies, until nobody holds it; or says that it has to be copied."""
        held = sum(end - begin for begin, end, _ in self._leases)
        # All views of the array have its base; the memory is free when that is gone.
        owner = array.base
        if size_bytes < _LEASE_BYTES_MIN or held + size_bytes > _LEASES_BYTES_MAX or not isinstance(owner, np.ndarray):
            return False
        self._leases.append((offset, local.aligned(offset + size_bytes), weakref.ref(owner)))
        self._leases.sort(key=operator.itemgetter(0))
        return True

    def _gap(self, size_bytes: int, behind: int = 0) -> tuple[int, int]:
        """Returns the first stretch of so many bytes that nobody holds: low addresses are used again and again."""
        begin = behind
        for lease_begin, lease_end, _ in self._leases:
            if lease_begin - begin >= size_bytes:
                return begin, lease_begin
            begin = max(begin, lease_end)
        if local.SEGMENT_BYTES - begin < size_bytes:
            raise TooLargeError
        return begin, local.SEGMENT_BYTES


def _answer_bytes(sending: Sending) -> int:
    """Returns the bytes for which an answer needs room, as far as the call tells: out is as large as q, and lse."""
    q = sending.arrays.get("q")
    if q is None:
        return local.SEGMENT_BYTES // 4 if sending.method.name == "ReadPages" else 0
    return q.nbytes + q.size // max(1, q.shape[-1] if q.ndim else 1) * 4 + 2 * local.ALIGNMENT


def time_left(deadline: float) -> float:
    """Returns the seconds in which a connection must be heard of; infinite if there is no hurry."""
    return deadline + GRACE_S - time.monotonic()
