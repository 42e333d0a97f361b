"""A few of the soak's figures, so that the soak itself is known to work."""

from tests.soak import calls, crashes, damages


def test_a_server_that_is_killed_under_load_restarts_with_its_last_completed_save_or_a_newer_one():
    (row,) = crashes.run(3, seed=4)
    assert row.failures == []


def test_a_damaged_save_is_found_out_and_costs_what_was_hit_and_no_more():
    (row,) = damages.run(len(damages.DAMAGES), seed=4)
    assert row.failures == []


def test_calls_of_mixed_sizes_and_cancelled_streams_leave_nothing_behind():
    rows = calls.run(6000, seed=4)
    assert [row.failures for row in rows] == [[], [], [], []]
