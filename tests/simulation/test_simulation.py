"""The service under a simulation that knows every token: nothing is ever otherwise than the model says."""

import pytest

from attnd.kernels import registry
from tests.simulation.run import Tally, simulate


@pytest.mark.parametrize("seed", range(10))
def test_ten_thousand_operations_leave_every_token_in_its_place(seed: int):
    simulate(seed, 10_000)


def test_real_attention_sees_just_the_tokens_of_each_sequence():
    simulate(1000, 1500, numbers=registry.create("reference"), every=2)


def test_a_seed_replays_exactly():
    first, second = Tally(), Tally()
    simulate(7, 1200, tally=first)
    simulate(7, 1200, tally=second)
    assert first == second
    assert first.log


def test_a_simulation_meets_every_outcome():
    tally = Tally()
    simulate(0, 5_000, tally=tally)
    for outcome in (
        "ok", "cancelled", "CONFLICTING_WRITE", "SEQUENCE_HOLE", "SEQUENCE_NOT_FOUND", "CACHE_NOT_FOUND",
        "PAGES_EXHAUSTED", "TENANT_PAGES_EXHAUSTED", "QUEUE_FULL", "QUEUED_TOO_LONG", "SEQUENCE_DAMAGED",
        "SimulatedFault", "MemoryError", "InvalidArgumentError",
    ):  # fmt: skip
        assert tally.outcomes["attend", outcome], outcome
    for what in ("create_sequences", "fork_sequence", "truncate_sequence", "release_sequences", "keep_alive", "save",
                 "restore", "create_cache", "list_sequences"):  # fmt: skip
        assert tally.outcomes[what, "ok"], what
