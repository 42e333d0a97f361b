"""Runs simulations: `python -m tests.simulation.run SEED [OPERATIONS]` replays what a failure names."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

from attnd.kernels import registry
from attnd.service import sequence
from tests.simulation.operations import Operations
from tests.simulation.world import SimulatedWorld

OPERATIONS_OF_A_WORLD = 300
DEEP_EVERY = 25
QUIET_EVERY = 60


class FoundError(Exception):
    """A simulation found a violation.

    Attributes:
        operations: Operations done before it.
    """

    def __init__(self, seed: int, operations: int, log: list[str], cause: BaseException) -> None:
        text = f"seed {seed}, after {operations} operations: {type(cause).__name__}: {cause}"
        replay = f"python -m tests.simulation.run {seed} {operations + 1}"
        super().__init__(f"{text}\nreplay: {replay}\nbefore it: {' '.join(log[-20:])}")
        self.operations = operations


@dataclass
class Tally:
    """What a simulation did.

    Attributes:
        outcomes: How often a request ended how.
        log: All operations and answers, in their order.
    """

    outcomes: Counter = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)

    def add(self, world: SimulatedWorld) -> None:
        """Adds what happened in a world."""
        self.outcomes.update(world.outcomes)
        self.log += world.log


def simulate(seed: int, operations: int, *, numbers=None, every: int = 50, tally: Tally | None = None) -> None:
    """Does operations in one world after another.

    Args:
        seed: What everything follows from.
        operations: How many.
        numbers: The implementation whose attention is computed now and then; None: the reference.
        every: How rarely.
        tally: Where to count what was done.

    Raises:
        FoundError: Something was not as the model says.
    """
    logging.getLogger("attnd").setLevel(logging.CRITICAL)  # work that is made to fail is told of in the log
    done = 0
    while done < operations:
        world = SimulatedWorld(f"{seed}/{done}", numbers or registry.create("reference"), every)
        count = min(OPERATIONS_OF_A_WORLD, operations - done)
        try:
            with _in_place_of_the_real_ones(world):
                for _ in _life(world, count):
                    done += 1
        except Exception as error:
            world.abandon()
            raise FoundError(seed, done, world.log, error) from error
        if tally is not None:
            tally.add(world)


def _in_place_of_the_real_ones(world: SimulatedWorld) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(world.loop.running())
    stack.enter_context(mock.patch.object(registry, "choose", return_value=world.implementation))
    table = partial(_page_table, world.faults, sequence.page_table)
    stack.enter_context(mock.patch.object(sequence, "page_table", table))
    return stack


def _page_table(faults, real, *args):
    faults.strike("table", MemoryError)
    return real(*args)


def _life(world: SimulatedWorld, count: int) -> Iterator[None]:
    operations = Operations(world)
    for i in range(1, count + 1):
        operations.one()
        world.reap()
        world.check(deep=i % DEEP_EVERY == 0)
        if i % QUIET_EVERY == 0:
            world.settle()
        yield
    world.end()


if __name__ == "__main__":
    started = time.process_time()
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 10_000
    simulate(int(sys.argv[1]), number)
    print(f"{number} operations, {(time.process_time() - started) / number * 1e6:.0f} us each")
