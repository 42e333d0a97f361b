"""Simulated operations, which may leave nothing otherwise than the model says; and planted bugs, to be found."""

from statistics import median

from tests.simulation.implementation import XlaNumbers
from tests.simulation.planted import BUGS, planted
from tests.simulation.run import FoundError, simulate
from tests.soak.report import Row

OPERATIONS_OF_A_SEED = 10_000
OPERATIONS_TO_FIND = 3000
XLA_SEEDS = 20
"""One seed in so many has its attention computed by the implementation that serves on a CPU."""


def run(count: int, seed: int) -> list[Row]:
    """Does `count` operations."""
    row = Row("simulated operations leave every token, page, lease and quota as the model says", count)
    for i in range(-(-count // OPERATIONS_OF_A_SEED)):
        numbers, every = (XlaNumbers(), 10) if i % XLA_SEEDS == 0 else (None, 50)
        operations = min(OPERATIONS_OF_A_SEED, count - i * OPERATIONS_OF_A_SEED)
        try:
            simulate(seed + i, operations, numbers=numbers, every=every)
        except FoundError as error:
            row.fail(str(error))
        row.progress(i * OPERATIONS_OF_A_SEED + operations)
    return [row]


def find(count: int, seed: int) -> list[Row]:
    """Looks for each planted bug with `count` seeds; all but one in twenty must find it."""
    return [_find(bug, count, seed) for bug in BUGS]


def _find(bug: str, count: int, seed: int) -> Row:
    row = Row(f"found: {bug.replace('_', ' ')}", count)
    found, missed = [], []
    for each in range(seed, seed + count):
        try:
            with planted(bug):
                simulate(each, OPERATIONS_TO_FIND)
            missed.append(each)
        except FoundError as error:
            found.append(error.operations)
    row.notes = f"by {len(found)} of {count}, after {median(found or [0]):.0f} operations, at most {max(found or [0])}"
    if len(missed) > count // 20:
        row.fail(f"seeds {missed} do not find it in {OPERATIONS_TO_FIND} operations")
    return row
