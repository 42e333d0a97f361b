"""Calls that run as one: who may join whom, whose turn it is, and that nobody is touched by another's fault."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest

from attnd.client import Client
from attnd.kernels import registry
from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, Layout, RaggedBatch
from attnd.service.attending import BATCH_TOKENS_MAX, AttentionCall
from attnd.service.batching import Joinable, Lanes
from attnd.service.caches import Cache, PagesBy
from attnd.service.quotas import Quota
from tests.support.server import attnd_server


class Call(Joinable):
    kind = 0

    def __init__(self, place, kind=0):
        self._place, self.kind = place, kind

    @property
    def place(self):
        return self._place

    def joins(self, others):
        return self.kind == others[0].kind

    def run(self):
        return self.kind

    @classmethod
    def run_all(cls, calls):
        return [call.run() for call in calls]


@dataclass
class Job:
    name: str
    lane: str
    work: object


def drain(jobs, batch_calls_max=64):
    lanes = Lanes(batch_calls_max)
    for job in jobs:
        lanes.put(job)
    taken = []
    while lanes:
        taken.append("".join(job.name for job in lanes.take()))
    return taken


def test_calls_of_one_place_leave_together_past_those_of_others():
    jobs = [Job(name, "", Call(place)) for name, place in zip("abcde", [1, 2, 1, 3, 2], strict=True)]
    assert drain(jobs) == ["ac", "be", "d"]


def test_no_call_passes_work_that_is_not_a_call_nor_one_of_its_place_that_cannot_join():
    jobs = [Job("a", "", Call(1)), Job("b", "", Call(1, kind=1)), Job("c", "", Call(1))]
    assert drain(jobs) == ["a", "b", "c"]
    jobs = [Job("a", "", Call(1)), Job("b", "", len), Job("c", "", Call(1))]
    assert drain(jobs) == ["a", "b", "c"]


def test_tenants_take_turns_whoever_has_more_to_do():
    jobs = [Job(str(i), "busy", Call(i)) for i in range(5)] + [Job("x", "idle", len), Job("y", "idle", len)]
    assert drain(jobs) == ["0", "x", "1", "y", "2", "3", "4"]


def test_no_more_calls_leave_together_than_allowed():
    jobs = [Job(name, "", Call(1)) for name in "abcde"]
    assert drain(jobs, batch_calls_max=2) == ["ab", "cd", "e"]
    assert drain(jobs, batch_calls_max=1) == list("abcde")


PAGE_SIZE, HEADS, HEAD_DIM = 4, 2, 8


class World:
    """A cache whose pages the client manages, and calls over it."""

    def __init__(self, layout=Layout.INTERLEAVED, implementation="reference"):
        self.spec = CacheSpec(
            layout=layout, num_layers=2, num_pages=32, page_size=PAGE_SIZE, num_kv_heads=1, head_dim=HEAD_DIM,
            dtype=np.dtype(np.float32),
        )  # fmt: skip
        self.implementation = registry.create(implementation)
        self.rng = np.random.default_rng(0)

    def cache(self):
        return Cache(
            cache_id="c", incarnation_id="", tenant="", name="c", spec=self.spec, pages_by=PagesBy.CLIENT,
            implementation=self.implementation, pages=self.implementation.allocate(self.spec), quota=Quota(),
            sequences=None, warm_up=None, debug_checks=False,
        )  # fmt: skip

    def call(self, cache, pages, q_lens, kv_lens, *, padding=0, append=True, rows=None, **options):
        table = np.zeros((len(q_lens), max(map(len, pages), default=0)), np.int32)
        for row, held in zip(table, pages, strict=True):
            row[: len(held)] = held
        batch = RaggedBatch.compact(np.array(kv_lens, np.int32), table, np.array(q_lens, np.int32), PAGE_SIZE)
        tokens = sum(q_lens) + padding
        q, k, v = (self.rng.standard_normal((tokens, heads, HEAD_DIM), np.float32) for heads in (HEADS, 1, 1))
        return AttentionCall(
            cache=cache, layer=1, batch=batch, q=q, k=k if append else None, v=v if append else None,
            options=AttentionOptions(sm_scale=0.3, return_lse=True, **options), hints=KernelHints(), rows=rows,
        )  # fmt: skip


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_together_they_answer_and_write_as_one_after_the_other(layout, implementation):
    answers, held = [], []
    for together in (True, False):
        world = World(layout, implementation)
        cache = world.cache()
        calls = [
            world.call(cache, [[3, 7]], [5], [5], padding=3),
            world.call(cache, [[1], [9, 4, 2]], [2, 11], [3, 11]),
            world.call(cache, [], [], [], padding=2),
            world.call(cache, [[5], [6]], [1, 1], [4, 1], padding=1, rows=np.array([0, 2], np.int32)),
        ]
        assert all(call.joins(calls[:i]) for i, call in enumerate(calls) if i)
        answers.append(AttentionCall.run_all(calls) if together else [call.run() for call in calls])
        held.append(world.implementation.read(cache.pages, 1, np.arange(32, dtype=np.int32))[0])
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one.out, other.out, atol=1e-6)
        np.testing.assert_allclose(one.lse_natural, other.lse_natural, atol=1e-6)
        assert one.out.flags.writeable
    np.testing.assert_array_equal(*held)
    assert np.any(held[0])


def test_calls_that_differ_in_what_a_launch_shares_do_not_join():
    world = World()
    cache = world.cache()
    first = world.call(cache, [[3]], [1], [1])
    others = {
        "options": world.call(cache, [[4]], [1], [1], soft_cap=5.0),
        "appending": world.call(cache, [[4]], [1], [1], append=False),
        "writing a page that it reads": world.call(cache, [[4], [3]], [1, 1], [1, 2]),
        "size": world.call(cache, [list(range(4, 32))], [BATCH_TOKENS_MAX], [112]),
    }
    assert {name: call.joins([first]) for name, call in others.items()} == dict.fromkeys(others, False)
    reading = [world.call(cache, [[3]], [1], [2], append=False) for _ in range(2)]
    assert reading[0].joins(reading[1:])


def test_one_that_fails_does_not_touch_the_others():
    world = World()
    cache = world.cache()
    calls = [world.call(cache, [[page]], [2], [2]) for page in (1, 2, 3)]

    works = world.implementation.attend

    def attend(pages, layer, batch, q, **kwargs):
        if 2 in batch.page_indices:
            raise ZeroDivisionError
        return works(pages, layer, batch, q, **kwargs)

    world.implementation.attend = attend
    results = AttentionCall.run_all(calls)
    assert [type(result).__name__ for result in results] == ["Attended", "ZeroDivisionError", "Attended"]
    np.testing.assert_array_equal(results[0].out, calls[0].run().out)


def test_callers_of_a_busy_server_share_launches_and_get_their_own_answers():
    sizes = {"num_layers": 1, "num_pages": 64, "page_size": 4, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    with attnd_server() as server, Client(server.address, timeout_s=60) as client:
        cache = client.create_cache("busy", pages_by="server", **sizes)
        failures = []

        def caller(number):
            (sequence,) = cache.create_sequences(1)
            for length in range(1, 30):
                # Each caller's values are its number, so whatever the weights are, its answer is that.
                value = np.full((1, 1, 8), number, np.float32)
                step = cache.step([sequence], q_lens=[1], kv_lens=[length])
                out = step.attend(0, np.ones((1, 2, 8), np.float32), value, value)
                if not np.allclose(out, number, atol=1e-5):
                    failures.append((number, length, out))

        threads = [threading.Thread(target=caller, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        info = client.server_info()
        assert info.num_batches < info.num_calls
