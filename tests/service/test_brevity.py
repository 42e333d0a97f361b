"""Which calls run where they came, and that the engine runs them there."""

import asyncio
import threading
import time

import pytest

from attnd.service.batching import Joinable
from attnd.service.brevity import BRIEF_NS, COMPANY_NS, Brevity
from attnd.service.engine import Engine
from attnd.service.errors import DeadlineExceededError, UnavailableError
from attnd.service.metrics import Metrics

A, B = "a", "b"


class Work(Joinable):
    """Says on which thread it ran."""

    def __init__(self, kind="kind", error=None):
        self._kind, self._error = kind, error

    kind = property(lambda self: self._kind)
    place = property(lambda _: "place")

    def joins(self, _others):
        return False

    def run(self):
        if self._error is not None:
            raise self._error
        return threading.get_ident()

    @classmethod
    def run_all(cls, calls):
        return [call.run() for call in calls]


def run(scenario):
    metrics = Metrics()

    async def with_engine():
        engine = Engine(queue_depth_max=100, batch_calls_max=64, metrics=metrics)
        await scenario(engine)
        if not engine._stopping:
            await engine.stop()

    asyncio.run(asyncio.wait_for(with_engine(), 30))
    return metrics


def test_a_kind_is_brief_once_a_call_of_it_has_been():
    brevity = Brevity()
    assert not brevity.is_brief("kind", A, 0)
    brevity.note("kind", BRIEF_NS // 2)
    assert brevity.is_brief("kind", A, 1)
    assert not brevity.is_brief("another", A, 2)


def test_a_call_that_was_held_up_counts_for_little_and_a_slow_kind_is_noticed():
    brevity = Brevity()
    brevity.note("kind", BRIEF_NS // 4)
    brevity.note("kind", 1000 * BRIEF_NS)
    assert brevity.is_brief("kind", A, 0)
    for _ in range(5):
        brevity.note("kind", 2 * BRIEF_NS)
    assert not brevity.is_brief("kind", A, 1)
    for _ in range(10):
        brevity.note("kind", BRIEF_NS // 4)
    assert brevity.is_brief("kind", A, 2)


def test_nothing_is_brief_while_others_call():
    brevity, now = Brevity(), COMPANY_NS
    brevity.note("kind", 1)
    assert brevity.is_brief("kind", A, now)
    assert not brevity.is_brief("kind", B, now + 1)
    assert not brevity.is_brief("kind", B, now + COMPANY_NS)
    assert brevity.is_brief("kind", B, now + COMPANY_NS + 1)
    assert brevity.is_brief("kind", A, now + 3 * COMPANY_NS)


def test_only_so_many_kinds_are_remembered():
    brevity = Brevity()
    for kind in range(5000):
        brevity.note(kind, 1)
    assert brevity.is_brief(4999, A, 0)
    assert not brevity.is_brief(0, A, 1)


def test_the_second_call_of_a_lone_caller_runs_where_it_came():
    async def scenario(engine):
        here, settled = threading.get_ident(), []
        first = await engine.run(Work(), connection=A, settle=settled.append)
        second = await engine.run(Work(), connection=A, settle=settled.append)
        assert (first.value != here, second.value == here, settled) == (True, True, [True, True])
        assert (await engine.run(Work())).value != here  # nobody says that it comes alone
        assert (await engine.run(Work("other"), connection=A)).value != here

    assert run(scenario).num_calls == 4


def test_nothing_runs_beside_the_engine():
    async def scenario(engine):
        here, gate = threading.get_ident(), threading.Event()
        for _ in range(2):
            await engine.run(Work(), connection=A)
        held = asyncio.create_task(engine.run(gate.wait))
        await asyncio.sleep(0)
        behind = asyncio.create_task(engine.run(Work(), connection=A))
        await asyncio.sleep(0)
        assert not behind.done()
        gate.set()
        await held
        assert (await behind).value != here

    run(scenario)


def test_a_call_that_fails_where_it_came_is_settled_and_one_too_late_is_not_begun():
    async def scenario(engine):
        settled = []
        for _ in range(2):
            await engine.run(Work(), connection=A)
        with pytest.raises(ZeroDivisionError):
            await engine.run(Work(error=ZeroDivisionError()), connection=A, settle=settled.append)
        with pytest.raises(DeadlineExceededError):
            await engine.run(Work(), connection=A, expires_at=time.monotonic() - 1, settle=settled.append)
        assert settled == [False, False]
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await engine.run(Work(), connection=A, settle=settled.append)
        await stopping
        assert settled == [False, False, False]

    run(scenario)
