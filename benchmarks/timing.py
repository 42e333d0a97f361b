"""Interleaved timing: competitors take turns, so that a noisy moment meets all of them alike."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

Call = Callable[[], float]
"""Does the work once and returns the seconds that it took."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What one competitor needed.

    Attributes:
        rounds: Seconds by number of the round; a slow competitor sits out rounds once its time is used up.
    """

    rounds: Mapping[int, float]

    @property
    def median_s(self) -> float:
        """Median of the rounds, in seconds."""
        return statistics.median(self.rounds.values())

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """First and third quartile, in seconds."""
        return _quartiles(self.rounds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """How many times a quantity is another: median and quartiles of the ratios round by round."""

    value: float
    low: float
    high: float


def timed(function: Callable[[], object]) -> Call:
    """Returns a call that times `function` by the wall clock."""

    def call() -> float:
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return call


def interleave(
    calls: Mapping[str, Call],
    *,
    budget_s: float,
    warmups: int = 1,
    rounds_min: int = 3,
    rounds_max: int = 200,
    settle_s: float = 0.005,
) -> dict[str, Timing]:
    """Lets the competitors take turns, each round in a rotated order.

    Args:
        calls: The competitors by name.
        budget_s: Time for all rounds; each competitor may use an equal share, and stops after `rounds_min` beyond it.
        warmups: Calls of each competitor that are not counted: the first compiles.
        rounds_min: Rounds that even the slowest competitor takes part in.
        rounds_max: Rounds after which all stop.
        settle_s: Pause before each call. OpenMP's threads spin for milliseconds after their work and would steal the
            next competitor's cores.
    """
    for call in calls.values():
        for _ in range(warmups):
            call()
    names = list(calls)
    rounds: dict[str, dict[int, float]] = {name: {} for name in names}
    share_s = budget_s / max(len(names), 1)
    for turn in range(rounds_max):
        start = turn % len(names)
        running = [
            name
            for name in names[start:] + names[:start]
            if turn < rounds_min or sum(rounds[name].values()) + settle_s * turn < share_s
        ]
        if not running:
            break
        for name in running:
            time.sleep(settle_s)
            rounds[name][turn] = calls[name]()
    return {name: Timing(rounds[name]) for name in names}


def fastest(calls: Mapping[str, Call], *, tries: int = 2) -> str:
    """Returns the name of the competitor, warm already, with the best of a few interleaved tries."""
    timings = interleave(calls, budget_s=0, warmups=0, rounds_min=tries)
    return min(timings, key=lambda name: min(timings[name].rounds.values()))


def ratio(numerator: Timing, denominator: Timing) -> Ratio:
    """Returns how many times longer `numerator` took than `denominator`.

    Only rounds in which both took part count: neighbours in time share the machine's mood.
    """
    common = numerator.rounds.keys() & denominator.rounds.keys()
    ratios = [numerator.rounds[turn] / denominator.rounds[turn] for turn in common]
    low, high = _quartiles(ratios)
    return Ratio(value=statistics.median(ratios), low=low, high=high)


def _quartiles(values: Iterable[float]) -> tuple[float, float]:
    ordered = sorted(values)
    if len(ordered) < 2:
        return ordered[0], ordered[0]
    first, _, third = statistics.quantiles(ordered, n=4, method="inclusive")
    return first, third
