"""Sessions of the blocking client: threads share a stream, and whoever waits for an answer reads for all."""

import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import Final

from attnd.client import _session
from attnd.client._core import Core
from attnd.client._pipe import Pipe, open_pipe
from attnd.client._session import BrokenError, Dialogue, Health, Heard
from attnd.client._transport import Answer, RefusalError, Sending, Transport, client_closed
from attnd.client._unary import UnaryTransport

# The server answers by itself when time is up; only one that is hung or far away is given up from here.
_GRACE_S: Final = 0.1


class SessionTransport:
    """Carries the layers of steps over a session, and all else, and those when there is none, over another transport.

    Args:
        core: What the client knows.
        unary: The other transport.
    """

    def __init__(self, core: Core, unary: UnaryTransport) -> None:
        self._core = core
        self._unary: Transport = unary
        self._channel = unary.channel
        self._health = Health()
        self._lock = threading.Lock()
        self._stream: Stream | None = None

    def send(self, sending: Sending) -> Answer:
        """Returns the answer to a request."""
        if sending.step is None or not self._health.served:
            return self._unary.send(sending)
        deadline = _session.deadline_of(sending)
        broken: BrokenError | None = None
        try:
            return self._open().ask(sending, deadline, self._core.message_bytes_max)
        except RefusalError as error:
            if not _session.names_no_plan(error):
                raise
        except BrokenError as error:
            broken = error
        if self._core.closed:
            raise client_closed()
        answer = self._unary.send(_session.repeated(sending, deadline))
        if broken is not None:
            self._health.broke(broken)
        return answer

    def close(self) -> None:
        """Ends the session and closes the other transport."""
        if not self._core.forked:
            with self._lock:
                if self._stream is not None:
                    self._stream.cancel()
        self._unary.close()

    def _open(self) -> "Stream":
        with self._lock:
            if self._stream is None or self._stream.broken:
                try:
                    self._stream = Stream(open_pipe(self._channel, _session.PATH, self._core.settings.metadata))
                except ValueError:  # gRPC's answer to a channel that another thread closes at this moment
                    self._core.check_usable()
                    raise
            return self._stream


class _Waiting:
    """A thread that waits for its answer.

    Attributes:
        deadline: `time.monotonic()` at which it waits no longer.
        heard: The answer.
        turn: Gets an item when there is an answer, the stream is broken, or nobody reads.
    """

    __slots__ = ("deadline", "heard", "turn")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.heard: Heard | None = None
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()


class Stream:
    """One stream. A thread that waits reads the answers of the others too, so that no thread is there only to read."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._lock = threading.Lock()
        self._dialogue = Dialogue()
        self._waiting: dict[int, _Waiting] = {}
        self._reading = False
        self._broken: BrokenError | None = None
        self._watchdog = Watchdog(self)

    @property
    def broken(self) -> bool:
        """Whether it has ended."""
        return self._broken is not None

    def ask(self, sending: Sending, deadline: float, message_bytes_max: int) -> Answer:
        """Returns the answer to one layer of a step.

        Raises:
            RefusalError: The call was refused.
            BrokenError: The stream has ended.
            DeadlineExceededError: No answer came in time.
            ResourceExhaustedError: The message is too large.
        """
        assert sending.step is not None
        waiting = _Waiting(deadline)
        with self._lock:
            if self._broken is not None:
                raise self._broken
            plan = self._dialogue.plan(sending.step, sending, message_bytes_max)
            if plan.message:
                self._pipe.send(plan.message)
            request_id = self._dialogue.next_id()
            others_wait = bool(self._waiting)
            self._waiting[request_id] = waiting
        sent = False
        try:
            message = _session.pack(sending, request_id, plan.plan_id, message_bytes_max, others_wait=others_wait)
            self._watchdog.watch(deadline)
            self._pipe.send(message)
            sent = True
            heard = self._wait(waiting, sending)
        finally:
            self._leave(request_id)
            if sent and waiting.heard is None and self._broken is None:
                self._pipe.send(_session.cancel(request_id))
        try:
            return _session.read(sending, heard, len(plan.message) + len(message))
        except RefusalError as error:
            if _session.names_no_plan(error):
                with self._lock:
                    self._dialogue.forget(sending.step)
            raise

    def cancel(self) -> None:
        """Ends the stream; calls that wait fail."""
        self._pipe.cancel()

    def deadlines(self) -> Sequence[float]:
        """Returns when the threads that wait will wait no longer."""
        with self._lock:
            return [each.deadline for each in self._waiting.values()]

    def _leave(self, request_id: int) -> None:
        with self._lock:
            del self._waiting[request_id]
            if self._waiting and not self._reading:
                # Another one reads on; all of them learn it if there is nothing to be read any more.
                left = [each for each in self._waiting.values() if each.heard is None]
                for each in left if self._broken is not None else left[:1]:
                    each.turn.put(None)

    def _wait(self, waiting: _Waiting, sending: Sending) -> Heard:
        while True:
            with self._lock:
                if waiting.heard is not None:
                    return waiting.heard
                if self._broken is not None:
                    if time.monotonic() >= waiting.deadline:
                        raise _session.expired(sending)
                    raise self._broken
                reads = not self._reading
                self._reading = True
            if reads:
                heard = self._read_for(waiting)
                if heard is not None:
                    return heard
                continue
            left_s = None if waiting.deadline == math.inf else max(0.0, waiting.deadline - time.monotonic())
            try:
                waiting.turn.get(timeout=left_s)
            except queue.Empty:
                raise _session.expired(sending) from None

    def _read_for(self, waiting: _Waiting) -> Heard | None:
        """Reads until a thread's answer is there; None if the stream breaks before."""
        try:
            while waiting.heard is None:
                heard = _session.hear(self._pipe.receive())
                with self._lock:
                    other = self._waiting.get(heard.header.id)
                    if other is not None:
                        other.heard = heard
                if other is not None and other is not waiting:
                    other.turn.put(None)
        except BrokenError as error:
            with self._lock:
                self._broken = error
        finally:
            with self._lock:
                self._reading = False
        return waiting.heard


class Watchdog:
    """Ends a stream when the thread that reads would wait for a server that has long been late.

    Its thread lives while calls with a deadline are made, and sleeps until the earliest of them: in the common case
    it wakes once in the time that a call may take.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._changed = threading.Condition(threading.Lock())
        self._wakes_at = math.inf
        self._running = False

    def watch(self, deadline: float) -> None:
        """Sees to it that the stream is looked at after the deadline of a call that waits already."""
        with self._changed:
            if deadline + _GRACE_S >= self._wakes_at:
                return
            self._wakes_at = deadline + _GRACE_S
            if self._running:
                self._changed.notify()
                return
            self._running = True
        threading.Thread(target=self._run, name="attnd-watchdog", daemon=True).start()

    def _run(self) -> None:
        with self._changed:
            while not self._stream.broken:
                self._wakes_at = min(self._stream.deadlines(), default=math.inf) + _GRACE_S
                left_s = self._wakes_at - time.monotonic()
                if left_s <= 0:
                    self._stream.cancel()
                    break
                if left_s == math.inf:
                    break
                self._changed.wait(left_s)
            self._running = False
            self._wakes_at = math.inf
