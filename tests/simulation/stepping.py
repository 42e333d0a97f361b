"""Time that stands still: an event loop without sockets and timers, and an engine without a thread."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from attnd.service.attending import AttentionCall
from attnd.service.engine import Engine
from attnd.service.errors import ResourceExhaustedError
from attnd.service.metrics import Metrics
from tests.simulation.model import require


class StepLoop(asyncio.AbstractEventLoop):
    """Runs callbacks in their order, one at a time, when it is told to."""

    def __init__(self):
        self._ready = deque()
        self.problems = []

    def call_soon(self, callback, *args, context=None):
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def create_future(self):
        return asyncio.Future(loop=self)

    def create_task(self, coro, **_):
        return asyncio.Task(coro, loop=self)

    def run_in_executor(self, executor, function, *arguments):
        """Runs what another thread would, at a later step."""
        future = self.create_future()
        self.call_soon(self._do, future, function, arguments)
        return future

    @staticmethod
    def _do(future, function, arguments):
        result = error = None
        try:
            result = function(*arguments)
        except Exception as raised:
            error = raised
        if future.cancelled():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def get_debug(self):
        return False

    def call_exception_handler(self, context):
        self.problems.append(context)

    def step(self, most: int = 2**31) -> None:
        """Runs the callbacks that are ready, and those that become ready, at most so many."""
        while self._ready and most:
            handle = self._ready.popleft()
            if not handle.cancelled():
                handle._run()
            most -= 1

    @contextmanager
    def running(self) -> Iterator["StepLoop"]:
        """Makes it the loop that coroutines find."""
        before = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield self
        finally:
            asyncio._set_running_loop(before)


class SteppedEngine(Engine):
    """The engine, its work begun and ended by the simulation: between the two anything can happen.

    Attributes:
        finishing: What came of the work that is being settled: (its error or None,); None outside of that.

    Args:
        watcher: Told of calls before (`works`) and after (`worked`, with the error or None) their work.
    """

    def __init__(self, config, watcher) -> None:
        super().__init__(
            queue_depth_max=config.queue_depth_max, batch_calls_max=config.batch_calls_max, metrics=Metrics()
        )
        self._watcher = watcher
        self._ended = deque()
        self.finishing = None

    async def run(self, work, **options):
        waiting = self._num_waiting()
        try:
            return await super().run(work, **options)
        except ResourceExhaustedError as error:
            require(error.reason != "QUEUE_FULL" or waiting >= self._queue_depth_max, "a queue of %d is full", waiting)
            raise

    def _start(self) -> None:
        pass

    def _num_waiting(self) -> int:
        return self._queue.qsize() + sum(len(lane) for lane in self._lanes._lanes.values()) + len(self._ended)

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or is at work."""
        return not self._num_waiting()

    def step(self) -> None:
        """Tells the loop of a job whose work has ended, or does the work of the jobs that are next."""
        if self._ended:
            job, ran, error = self._ended.popleft()
            self.finishing = (error,)
            self._finish(job, ran, error)
            self.finishing = None
            return
        while not self._queue.empty():
            self._lanes.put(self._queue.get_nowait())
        if self._lanes:
            jobs = self._lanes.take()
            self._watcher.works([job.work for job in jobs if isinstance(job.work, AttentionCall)])
            self._ended.extend(self._carry_out(jobs))
            for job, _, error in self._ended:
                if isinstance(job.work, AttentionCall):
                    self._watcher.worked(job.work, error)
