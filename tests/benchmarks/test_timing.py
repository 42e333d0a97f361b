"""Turns, shares and ratios; no test looks at a clock."""

import itertools

import pytest

from benchmarks import timing


def fixed(*seconds):
    """A call that claims to have taken the given seconds, over and over."""
    values = itertools.cycle(seconds)
    return lambda: next(values)


def test_competitors_take_turns_in_rotated_order():
    order = []
    calls = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    timing.interleave(calls, budget_s=1e9, warmups=0, rounds_max=3, settle_s=0)
    assert "".join(order) == "abcbcacab"


def test_warm_up_calls_are_not_counted():
    result = timing.interleave({"a": fixed(100.0, 1.0, 1.0, 1.0)}, budget_s=1e9, rounds_max=3, settle_s=0)
    assert result["a"].median_s == 1.0


def test_slow_competitor_stops_at_its_share_and_fast_one_goes_on():
    calls = {"slow": fixed(10.0), "fast": fixed(0.1)}
    result = timing.interleave(calls, budget_s=8.0, rounds_min=3, rounds_max=20, settle_s=0)
    assert len(result["slow"].rounds) == 3
    assert len(result["fast"].rounds) == 20


def test_ratio_pairs_rounds_so_that_a_noisy_moment_cancels():
    ours = timing.Timing({0: 1.0, 1: 50.0, 2: 1.0})
    theirs = timing.Timing({0: 2.0, 1: 100.0, 2: 2.0, 3: 7.0})
    ratio = timing.ratio(theirs, ours)
    assert (ratio.low, ratio.value, ratio.high) == (2.0, 2.0, 2.0)


def test_fastest_is_the_one_with_the_best_try():
    assert timing.fastest({"steady": fixed(2.0), "best": fixed(3.0, 1.0)}) == "best"


def test_single_round_has_no_spread():
    assert timing.Timing({0: 2.0}).quartiles_s == (2.0, 2.0)


def test_timed_returns_seconds():
    assert timing.timed(lambda: None)() >= 0


@pytest.mark.parametrize("count", [1, 2, 5])
def test_quartiles_lie_within_the_rounds(count):
    rounds = timing.Timing({turn: float(turn) for turn in range(count)})
    low, high = rounds.quartiles_s
    assert 0 <= low <= rounds.median_s <= high <= count - 1
