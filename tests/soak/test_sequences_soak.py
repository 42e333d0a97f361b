"""A few of the soak's figures about sequences, so that the soak itself is known to work."""

from tests.soak import cycles, lossy, simulated


def test_appends_through_a_lossy_proxy_are_done_once_and_in_place():
    (row,) = lossy.run(250, seed=1)
    assert row.failures == []


def test_thousands_of_cycles_give_all_pages_back():
    rows = cycles.run(5_000, seed=1)
    assert [row.failures for row in rows] == [[], []]


def test_the_attention_that_serves_on_a_cpu_agrees_with_the_model():
    (row,) = simulated.run(500, seed=1)
    assert row.failures == []
