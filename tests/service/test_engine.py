"""The engine: one thread, a bounded queue, and jobs that are settled exactly once."""

import asyncio
import threading
import time

import pytest

from attnd.service.engine import Engine
from attnd.service.errors import DeadlineExceededError, ResourceExhaustedError, UnavailableError
from attnd.service.metrics import Metrics


def engine_of(queue_depth_max, batch_calls_max=64):
    return Engine(queue_depth_max=queue_depth_max, batch_calls_max=batch_calls_max, metrics=Metrics())


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 30))


def test_runs_every_job_on_one_thread_in_order():
    async def scenario():
        engine = engine_of(queue_depth_max=100)
        seen = []
        ran = await asyncio.gather(
            *(engine.run(lambda i=i: seen.append(i) or threading.get_ident()) for i in range(50))
        )
        await engine.stop()
        assert seen == list(range(50))
        assert {job.value for job in ran} != {threading.get_ident()}
        assert len({job.value for job in ran}) == 1

    run(scenario())


def test_refuses_calls_beyond_the_queue_at_once_and_settles_them():
    async def scenario():
        engine = engine_of(queue_depth_max=2)
        gate = threading.Event()
        held = [asyncio.create_task(engine.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        settled = []
        with pytest.raises(ResourceExhaustedError, match="queue_depth_max=2") as caught:
            await engine.run(lambda: None, settle=settled.append)
        assert caught.value.reason == "QUEUE_FULL"
        assert caught.value.retry_delay_s > 0
        assert settled == [False]
        gate.set()
        await asyncio.gather(*held)
        await engine.run(lambda: None)
        await engine.stop()

    run(scenario())


def test_drops_jobs_whose_deadline_passed_in_the_queue():
    async def scenario():
        engine = engine_of(queue_depth_max=10)
        ran, settled = [], []
        slow = asyncio.create_task(engine.run(lambda: time.sleep(0.1)))
        await asyncio.sleep(0)
        with pytest.raises(DeadlineExceededError):
            await engine.run(lambda: ran.append(1), expires_at=time.monotonic() + 0.02, settle=settled.append)
        await slow
        await engine.stop()
        assert not ran
        assert settled == [False]

    run(scenario())


def test_a_cancelled_call_is_settled_uncommitted_and_only_after_its_work_has_ended():
    async def scenario():
        engine = engine_of(queue_depth_max=10)
        started, gate, order = threading.Event(), threading.Event(), []

        def work():
            started.set()
            gate.wait()
            order.append("work ended")

        call = asyncio.create_task(engine.run(work, settle=order.append))
        await asyncio.to_thread(started.wait)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not order
        gate.set()
        await engine.flush()
        await engine.stop()
        assert order == ["work ended", False]

    run(scenario())


def test_a_cancelled_call_that_waits_is_never_run():
    async def scenario():
        engine = engine_of(queue_depth_max=10)
        gate, ran = threading.Event(), []
        first = asyncio.create_task(engine.run(gate.wait))
        second = asyncio.create_task(engine.run(lambda: ran.append(1)))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.sleep(0)
        gate.set()
        await first
        await engine.flush()
        await engine.stop()
        assert not ran

    run(scenario())


def test_an_exception_reaches_the_caller_and_the_engine_goes_on():
    async def scenario():
        engine = engine_of(queue_depth_max=10)
        settled = []
        with pytest.raises(ZeroDivisionError):
            await engine.run(lambda: 1 // 0, settle=settled.append)
        assert settled == [False]
        assert (await engine.run(lambda: 7)).value == 7
        await engine.stop()

    run(scenario())


def test_stop_drains_the_queue_and_refuses_later_calls():
    async def scenario():
        engine = engine_of(queue_depth_max=10)
        calls = [asyncio.create_task(engine.run(lambda i=i: time.sleep(0.01) or i)) for i in range(5)]
        await asyncio.sleep(0)
        await engine.stop()
        assert [(await call).value for call in calls] == list(range(5))
        with pytest.raises(UnavailableError):
            await engine.run(lambda: None)

    run(scenario())
