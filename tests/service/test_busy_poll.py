"""The event loop does not sleep for a while after a brief call, and sleeps at once when others need the cores."""

import asyncio
import time

import pytest

from attnd.service.busy_poll import BusyPoll
from attnd.service.config import ConfigError, ServerConfig
from attnd.service.engine import Engine
from attnd.service.metrics import Metrics
from tests.service.test_brevity import A, Work

PERIOD_NS = 20_000_000


def sleeps_of(scenario):
    """Runs a scenario; returns what it returns, and when the loop was told to sleep, with the seconds."""
    sleeps = []

    async def spied():
        selector = asyncio.get_running_loop()._selector
        select = selector.select

        def look(timeout=None):
            if timeout is None or timeout > 0:
                sleeps.append((time.monotonic_ns(), timeout))
            return select(timeout)

        selector.select = look
        return await scenario()

    return asyncio.run(spied()), sleeps


def test_the_loop_stays_awake_for_the_period_and_sleeps_after_it():
    async def scenario():
        poll = BusyPoll(asyncio.get_running_loop(), PERIOD_NS)
        began_ns = time.monotonic_ns()
        poll.extend()
        poll.extend()
        await asyncio.sleep(3 * PERIOD_NS / 1e9)
        return began_ns

    began_ns, sleeps = sleeps_of(scenario)
    assert sleeps
    assert all(at_ns >= began_ns + PERIOD_NS for at_ns, _ in sleeps)


def test_it_can_be_ended_and_begun_again():
    async def scenario():
        poll = BusyPoll(asyncio.get_running_loop(), 10**12)
        for _ in range(3):
            poll.extend()
            await asyncio.sleep(0)
            poll.end()
            await asyncio.sleep(0.001)

    _, sleeps = sleeps_of(scenario)
    assert len(sleeps) >= 3


def test_without_a_period_the_loop_sleeps_as_ever():
    async def scenario():
        BusyPoll(asyncio.get_running_loop(), 0).extend()
        await asyncio.sleep(0.001)

    assert sleeps_of(scenario)[1]


def test_a_brief_call_keeps_the_loop_awake_until_the_engine_gets_work():
    async def scenario():
        engine = Engine(queue_depth_max=10, batch_calls_max=1, metrics=Metrics(), busy_poll_ns=10**12)
        for _ in range(2):
            await engine.run(Work(), connection=A)
        awake_from_ns = time.monotonic_ns()
        await asyncio.sleep(0.01)
        awake_until_ns = time.monotonic_ns()
        await engine.run(lambda: time.sleep(0.01))
        await engine.stop()
        return awake_from_ns, awake_until_ns

    (awake_from_ns, awake_until_ns), sleeps = sleeps_of(scenario)
    assert not [at_ns for at_ns, _ in sleeps if awake_from_ns <= at_ns <= awake_until_ns]
    assert [at_ns for at_ns, _ in sleeps if at_ns > awake_until_ns]


@pytest.mark.parametrize("period_ms", [-1.0, float("nan"), 1001.0])
def test_a_period_out_of_range_is_refused(period_ms):
    with pytest.raises(ConfigError, match="busy_poll_ms"):
        ServerConfig(busy_poll_ms=period_ms)


def test_a_lone_core_is_left_to_the_callers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5})
    assert ServerConfig(busy_poll_ms=3.0).busy_poll_ns == 3_000_000
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5})
    assert ServerConfig(busy_poll_ms=3.0).busy_poll_ns == 0
    monkeypatch.delattr("os.sched_getaffinity")  # as on systems other than Linux
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert ServerConfig(busy_poll_ms=3.0).busy_poll_ns == 3_000_000
