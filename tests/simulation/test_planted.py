"""Bugs as people make them are found: a simulation that finds nothing has to be one that would have."""

import pytest

from tests.simulation.planted import BUGS, planted
from tests.simulation.run import FoundError, simulate

OPERATIONS_MAX = 3000


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("seed", [0, 1])
def test_finds_a_planted_bug(bug: str, seed: int):
    with planted(bug), pytest.raises(FoundError):
        simulate(seed, OPERATIONS_MAX)


def test_finds_nothing_where_nothing_is_planted():
    simulate(0, OPERATIONS_MAX)
