"""What the engine does next: tenants take turns, and calls that can run as one leave the queue together."""

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Hashable
from collections.abc import Sequence as Many
from typing import Any, Final, Generic, Protocol, Self, TypeVar

T = TypeVar("T")

# How far a lane is searched for calls to join the first: what lies beyond joins the next batch.
_SEARCH_MAX: Final = 256


class Joinable(ABC, Generic[T]):
    """Work that can run as one with others of its kind."""

    @property
    @abstractmethod
    def place(self) -> Hashable:
        """What it works on: work of one place is done in the order in which it came."""

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """What its work depends on in kind and size: work of one kind takes about as long."""

    @abstractmethod
    def joins(self, others: Many[Self]) -> bool:
        """Returns whether it can run as one with others of its place, which can run as one."""

    @abstractmethod
    def run(self) -> T:
        """Does the work alone."""

    @classmethod
    @abstractmethod
    def run_all(cls, calls: Many[Self]) -> list[T | Exception]:
        """Does the work of all; returns the result of each, or what it failed with."""


class Job(Protocol):
    """What stands in a lane."""

    @property
    def lane(self) -> str:
        """Whose it is."""
        ...

    @property
    def work(self) -> Any:
        """A `Joinable`, or a function without arguments."""
        ...


JobT = TypeVar("JobT", bound=Job)


class Lanes(Generic[JobT]):
    """Jobs that wait, a lane for each tenant. Used by one thread.

    Lanes are served in turn. Within one, jobs leave in order, except that a call may leave with an earlier one of its
    place if only calls of other places stand between them.

    Args:
        batch_calls_max: Calls that leave together.
    """

    def __init__(self, batch_calls_max: int) -> None:
        self._batch_calls_max = batch_calls_max
        self._lanes: OrderedDict[str, deque[JobT]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def put(self, job: JobT) -> None:
        """Adds a job at the end of its lane."""
        self._lanes.setdefault(job.lane, deque()).append(job)

    def take(self) -> list[JobT]:
        """Removes and returns what is to be done next: one job, or calls to run as one. There must be jobs."""
        name, lane = self._lanes.popitem(last=False)
        first = lane.popleft()
        jobs = [first]
        if lane and isinstance(first.work, Joinable) and self._batch_calls_max > 1:
            jobs += self._joining(lane, first.work)
        if lane:
            self._lanes[name] = lane  # at the end: it is the others' turn
        return jobs

    def _joining(self, lane: deque[JobT], first: Joinable[Any]) -> list[JobT]:
        batch, jobs = [first], []
        passed: list[JobT] = []
        while lane and len(batch) < self._batch_calls_max and len(passed) < _SEARCH_MAX:
            work = lane[0].work
            if not isinstance(work, Joinable) or (work.place == first.place and not work.joins(batch)):
                break
            job = lane.popleft()
            if work.place == first.place:
                batch.append(work)
                jobs.append(job)
            else:
                passed.append(job)
        lane.extendleft(reversed(passed))
        return jobs
