"""The engine: the only thread that touches device arrays, fed through a bounded queue."""

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from attnd.service.batching import Joinable, Lanes
from attnd.service.brevity import Brevity
from attnd.service.busy_poll import BusyPoll
from attnd.service.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from attnd.service.metrics import Metrics

T = TypeVar("T")

QUEUE_FULL_RETRY_S: Final = 0.1

_log = logging.getLogger(__name__)


def _ignore(_done: bool) -> None:
    pass


class Ran(NamedTuple, Generic[T]):
    """What a job gave.

    Attributes:
        value: What its work returned.
        queue_ns: Nanoseconds that it waited for its turn.
        ended_at_ns: `time.monotonic_ns()` when its work had ended.
    """

    value: T
    queue_ns: int
    ended_at_ns: int


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any] | Joinable[Any]
    settle: Callable[[bool], None]
    expires_at: float
    lane: str
    future: "asyncio.Future[Ran[Any]]"
    queued_at_ns: int = field(default_factory=time.monotonic_ns)
    took_ns: int | None = None  # of its work alone


class Engine:
    """Runs jobs one after another on a thread of its own; calls that wait and can run as one, together.

    What that thread works on is the event loop's thread's while it has nothing to do. A brief call that comes then
    runs where it came: two hand-overs between threads would cost it more than its work.

    All methods are called from the event loop's thread. A job is settled exactly once, on that thread, after its work
    has ended or was dropped, whatever became of the call that asked for it: so pages stay pinned while a kernel uses
    them, and only work whose caller still waits is committed.

    Args:
        queue_depth_max: Jobs that may wait or run.
        batch_calls_max: Calls that may run as one. A call never waits for others to join it.
        metrics: Told of every batch.
        busy_poll_ns: Nanoseconds after a brief call in which the event loop does not sleep.
    """

    def __init__(self, *, queue_depth_max: int, batch_calls_max: int, metrics: Metrics, busy_poll_ns: int = 0) -> None:
        self._queue_depth_max = queue_depth_max
        self._lanes: Lanes[_Job] = Lanes(batch_calls_max)
        self._metrics = metrics
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._depth = 0
        self._brevity = Brevity()
        self._stopping = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._busy_poll = BusyPoll(self._loop, busy_poll_ns)
        self._thread = threading.Thread(target=self._serve, name="attnd-engine", daemon=True)
        self._start()

    @property
    def depth(self) -> int:
        """Jobs that wait or run."""
        return self._depth

    async def run(
        self,
        work: Callable[[], T] | Joinable[T],
        *,
        lane: str = "",
        expires_at: float = math.inf,
        settle: Callable[[bool], None] = _ignore,
        connection: Hashable = None,
    ) -> Ran[T]:
        """Runs `work` on the engine's thread, or at once if it is brief and none waits, and returns what it gives.

        Args:
            work: The job. It is dropped if its caller is gone, or its time is up, before its turn.
            lane: Whose it is: jobs of one lane keep their order, and lanes take turns.
            expires_at: `time.monotonic()` after which the work must not begin.
            settle: Called on the event loop's thread when the work has ended or was dropped, before this returns;
                with True if the work succeeded and its caller still waits. Called, too, when the queue is full.
            connection: What calls have in common that come one after the other; None if none waits for the other.

        Raises:
            ResourceExhaustedError: The queue is full.
            UnavailableError: The engine is stopping.
            DeadlineExceededError: The time was up before the job's turn.
            Exception: Whatever `work` raises.
        """
        if self._depth >= self._queue_depth_max:
            settle(False)
            message = f"The queue is full: queue_depth_max={self._queue_depth_max} calls wait for the engine."
            raise ResourceExhaustedError("QUEUE_FULL", message, retry_delay_s=QUEUE_FULL_RETRY_S)
        if connection is not None and isinstance(work, Joinable):
            kind, now_ns = work.kind, time.monotonic_ns()
            is_brief = self._brevity.is_brief(kind, connection, now_ns) and now_ns < expires_at * 1e9
            if is_brief and not self._depth and not self._stopping:
                return self._run_here(work, kind, settle)
        return await self._put(work, settle, expires_at, lane)

    def post(self, work: Callable[[], None], settle: Callable[[bool], None], *, lane: str = "") -> None:
        """Queues work of the server's own, which no call waits for and no bound refuses."""
        self._put(work, settle, math.inf, lane).add_done_callback(_report)

    async def run_own(self, work: Callable[[], T], *, lane: str = "") -> T:
        """Runs work of the server's own, which no bound refuses, and returns what it gives.

        Raises:
            UnavailableError: The engine is stopping.
            Exception: Whatever `work` raises.
        """
        value: T = (await self._put(work, _ignore, math.inf, lane)).value
        return value

    async def flush(self, lane: str = "") -> None:
        """Returns when the jobs queued before in a lane have been settled."""
        await self._put(lambda: None, _ignore, math.inf, lane)

    async def stop(self) -> None:
        """Waits for the queue to drain and ends the thread. Later jobs are refused."""
        self._stopping = True
        self._busy_poll.end()
        await self._idle.wait()
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    def _start(self) -> None:
        self._thread.start()

    def _put(
        self, work: Callable[[], Any] | Joinable[Any], settle: Callable[[bool], None], expires_at: float, lane: str
    ) -> "asyncio.Future[Ran[Any]]":
        future: asyncio.Future[Ran[Any]] = self._loop.create_future()
        if self._stopping:
            settle(False)
            future.set_exception(UnavailableError("SERVER_STOPPING", "The server is stopping."))
            return future
        self._depth += 1
        self._idle.clear()
        self._busy_poll.end()
        self._queue.put(_Job(work, settle, expires_at, lane, future))
        return future

    def _run_here(self, work: Joinable[T], kind: Hashable, settle: Callable[[bool], None]) -> Ran[T]:
        started_ns = time.monotonic_ns()
        try:
            value = work.run()
        except BaseException:
            self._metrics.ran([0], time.monotonic_ns() - started_ns)
            settle(False)
            raise
        ended_ns = time.monotonic_ns()
        self._brevity.note(kind, ended_ns - started_ns)
        self._metrics.ran([0], ended_ns - started_ns)
        settle(True)
        self._busy_poll.extend()
        return Ran(value, 0, ended_ns)

    def _serve(self) -> None:
        while self._fill():
            for outcome in self._carry_out(self._lanes.take()):
                self._loop.call_soon_threadsafe(self._finish, *outcome)
                # The loop holds the answer now; keeping it here until the next job would keep its arrays alive.
                del outcome

    def _fill(self) -> bool:
        """Moves what was queued to its lane, waiting if nothing was; returns False when the engine is to end."""
        try:
            while True:
                job = self._queue.get(block=not self._lanes)
                if job is None:
                    return False
                self._lanes.put(job)
        except queue.Empty:
            return True

    def _carry_out(self, jobs: list[_Job]) -> list[tuple[_Job, Ran[Any], Exception | None]]:
        started_at_ns, now = time.monotonic_ns(), time.monotonic()
        outcomes: dict[int, Any] = {}
        for i, job in enumerate(jobs):
            if job.future.cancelled():
                outcomes[i] = DeadlineExceededError("CALLER_GONE", "The caller is gone.")
            elif now > job.expires_at:
                message = "The deadline passed before the call's turn came."
                outcomes[i] = DeadlineExceededError("QUEUED_TOO_LONG", message)
        live = [i for i in range(len(jobs)) if i not in outcomes]
        outcomes.update(zip(live, _results([jobs[i].work for i in live]), strict=True))
        ended_at_ns = time.monotonic_ns()
        jobs[0].took_ns = ended_at_ns - started_at_ns if len(live) == len(jobs) == 1 else None
        self._metrics.ran([started_at_ns - jobs[i].queued_at_ns for i in live], ended_at_ns - started_at_ns)
        finished = []
        for i, job in enumerate(jobs):
            failed = isinstance(outcomes[i], Exception)
            ran = Ran(None if failed else outcomes[i], started_at_ns - job.queued_at_ns, ended_at_ns)
            finished.append((job, ran, outcomes[i] if failed else None))
        return finished

    def _finish(self, job: _Job, ran: Ran[Any], error: Exception | None) -> None:
        self._depth -= 1
        if not self._depth:
            self._idle.set()
        if error is None and job.took_ns is not None and isinstance(job.work, Joinable):
            self._brevity.note(job.work.kind, job.took_ns)
        waited_for = not job.future.cancelled()
        job.settle(error is None and waited_for)
        if not waited_for:
            return
        if error is None:
            job.future.set_result(ran)
        else:
            job.future.set_exception(error)


def _results(works: list[Any]) -> list[Any]:
    """Returns what each work gives, or the exception that its caller gets, whatever it is."""
    if len(works) > 1:
        results: list[Any] = type(works[0]).run_all(works)
        return results
    try:
        return [work.run() if isinstance(work, Joinable) else work() for work in works]
    except Exception as error:
        return [error]


def _report(future: "asyncio.Future[Ran[Any]]") -> None:
    if (error := future.exception()) is not None:
        _log.error("work of the server's own failed", exc_info=error)
