"""Forks, truncations, leases, quotas and snapshots of sequences: who holds which page, and until when."""

import asyncio

import numpy as np
import pytest

from attnd.kernels.errors import InvalidArgumentError
from attnd.service import sequence
from attnd.service.errors import NotFoundError, ResourceExhaustedError
from attnd.service.quotas import Quota
from tests.service.test_sequences import Clock, extend, reserve, state, table_of


def by_handle(table, handle):
    return next(sequence for sequence in table if sequence.handle == handle)


def pages_of(table, handle):
    return by_handle(table, handle).pages.tolist()


def truncate(table, handle, length):
    asyncio.run(table.truncate(handle, length))


def forked(length, **kwargs):
    table = table_of(**kwargs)
    (parent,) = table.create(1)
    for layer in range(2):
        extend(table, parent, length, length, layer)
    return table, parent, table.fork(parent)


@pytest.mark.parametrize(("length", "num_pages"), [(0, 0), (5, 1), (8, 1), (9, 2), (16, 2)])
def test_a_fork_takes_no_page(length, num_pages):
    table, parent, child = forked(length)
    assert pages_of(table, parent) == pages_of(table, child)
    assert by_handle(table, child).layer_lens.tolist() == [length, length]
    assert table.num_free_pages == 8 - num_pages


def test_the_first_to_append_to_a_shared_page_copies_it_and_the_other_keeps_it():
    table, parent, child = forked(5)
    (shared,) = pages_of(table, parent)
    reservation = reserve(table, [parent], [1], [6])
    (copies,) = reservation.copies
    assert copies.sources.tolist() == [shared]
    assert reservation.batch.page_indices.tolist() == [copies.targets.tolist()]
    table.settle(reservation, commit=True)
    assert pages_of(table, child) == [shared]
    assert pages_of(table, parent) == copies.targets.tolist() != [shared]
    assert not reserve(table, [child], [1], [6]).copies


@pytest.mark.parametrize("length", [8, 16])
def test_a_fork_at_a_page_boundary_appends_to_fresh_pages_and_copies_nothing(length):
    table, parent, child = forked(length)
    for handle in (parent, child):
        reservation = reserve(table, [handle], [1], [length + 1])
        assert not reservation.copies
        table.settle(reservation, commit=True)
    assert pages_of(table, parent)[:-1] == pages_of(table, child)[:-1]
    assert pages_of(table, parent)[-1] != pages_of(table, child)[-1]


def test_parent_and_child_in_one_call_write_to_pages_of_their_own():
    table, parent, child = forked(5)
    reservation = reserve(table, [parent, child], [1, 1], [6, 6])
    first, second = reservation.batch.page_indices[:, 0].tolist()
    table.settle(reservation, commit=True)
    assert first != second
    assert pages_of(table, parent) + pages_of(table, child) == [first, second]
    assert table.num_free_pages == 8 - 2


def test_a_failed_copying_call_leaves_everything_as_it_was():
    table, parent, child = forked(5)
    before = state(table), table.pool.holders().tolist()
    table.settle(reserve(table, [parent, child], [12, 1], [17, 6]), commit=False)
    assert (state(table), table.pool.holders().tolist()) == before


def test_a_copy_that_finds_no_free_page_changes_nothing():
    table, parent, _ = forked(5, num_pages=1)
    before = state(table)
    with pytest.raises(ResourceExhaustedError):
        reserve(table, [parent], [1], [6])
    assert state(table) == before


def test_a_repeated_call_copies_nothing():
    table, parent, _ = forked(5)
    reservation = reserve(table, [parent], [5], [5])
    assert not reservation.copies
    table.settle(reservation, commit=True)


def test_a_layer_that_lags_behind_copies_the_shared_pages_that_it_fills():
    table = table_of()
    (parent,) = table.create(1)
    extend(table, parent, 10, 10, layer=0)
    extend(table, parent, 3, 3, layer=1)
    child = table.fork(parent)
    assert by_handle(table, child).layer_lens.tolist() == [10, 3]
    reservation = reserve(table, [child], [7], [10], layer=1)
    assert reservation.copies[0].slots.tolist() == [0, 1]
    table.settle(reservation, commit=True)
    assert not set(pages_of(table, parent)) & set(pages_of(table, child))


def test_a_copying_call_has_its_sequence_for_itself():
    async def scenario():
        table = table_of()
        (parent,) = table.create(1)
        five, one = np.array([5], np.int32), np.array([1], np.int32)
        for layer in range(2):
            table.settle(await table.reserve([parent], five, five, layer, append=True), commit=True)
        reading = await table.reserve([parent], five, five, 1, append=False)
        table.fork(parent)
        copying = asyncio.create_task(table.reserve([parent], one, five + 1, 0, append=True))
        await asyncio.sleep(0.01)
        assert not copying.done()
        table.settle(reading, commit=True)
        held = await copying
        behind = asyncio.create_task(table.reserve([parent], one, five + 1, 1, append=True))
        await asyncio.sleep(0.01)
        assert not behind.done()
        table.settle(held, commit=True)
        assert not (await behind).copies

    asyncio.run(scenario())


def test_a_fork_during_a_copying_call_holds_the_tokens_from_before_it():
    table, parent, child = forked(5)
    (shared,) = pages_of(table, parent)
    reservation = reserve(table, [parent], [1], [6])
    grandchild = table.fork(parent)
    table.settle(reservation, commit=True)
    assert pages_of(table, grandchild) == pages_of(table, child) == [shared]
    assert by_handle(table, grandchild).length == 5


def test_pages_are_free_when_the_last_holder_is_gone():
    cleared = []
    table, parent, child = forked(13, cleared=cleared)
    pages = pages_of(table, parent)
    table.release([parent])
    assert not cleared
    table.release([child])
    assert sorted(cleared) == sorted(pages)
    assert table.num_free_pages == 8


def test_truncating_gives_pages_back_and_appending_goes_on_from_there():
    table = table_of()
    (handle,) = table.create(1)
    for layer in range(2):
        extend(table, handle, 20, 20, layer)
    truncate(table, handle, 9)
    truncate(table, handle, 9)
    sequence = by_handle(table, handle)
    assert (sequence.layer_lens.tolist(), len(sequence.pages), table.num_free_pages) == ([9, 9], 2, 6)
    extend(table, handle, 10, 1)
    truncate(table, handle, 0)
    assert table.num_free_pages == 8


@pytest.mark.parametrize("length", [-1, 21, 2**31])
def test_refuses_to_truncate_to_a_length_that_the_sequence_does_not_have(length):
    table = table_of()
    (handle,) = table.create(1)
    extend(table, handle, 20, 20)
    before = state(table)
    with pytest.raises(InvalidArgumentError, match=r"must be in \[0, 20\]"):
        truncate(table, handle, length)
    assert state(table) == before


def test_truncating_one_of_two_leaves_the_other_its_tokens():
    table, parent, child = forked(20)
    truncate(table, child, 9)
    assert pages_of(table, child) == pages_of(table, parent)[:2]
    reservation = reserve(table, [child], [1], [10])
    assert [each.slots.tolist() for each in reservation.copies] == [[1]]
    table.settle(reservation, commit=True)
    assert by_handle(table, parent).layer_lens.tolist() == [20, 20]


def test_truncating_waits_for_the_calls_in_flight():
    async def scenario():
        table = table_of()
        (handle,) = table.create(1)
        five = np.array([5], np.int32)
        call = await table.reserve([handle], five, five, 0, append=True)
        truncating = asyncio.create_task(table.truncate(handle, 2))
        await asyncio.sleep(0.01)
        assert not truncating.done()
        table.settle(call, commit=True)
        await truncating
        assert by_handle(table, handle).length == 2

    asyncio.run(scenario())


def test_a_lease_ends_a_sequence_and_every_use_renews_it():
    clock = Clock()
    table = table_of(clock=clock, lease_s=10.0)
    used, kept, left = table.create(3)
    (longer,) = table.create(1, lease_s=100.0)
    for handle in (used, kept, left, longer):
        extend(table, handle, 5, 5)
    for _ in range(3):
        clock.now += 6
        table.keep_alive([kept])
        extend(table, used, 5, 5)
    with pytest.raises(NotFoundError):
        table.keep_alive([left])
    with pytest.raises(NotFoundError):
        table.fork(left)
    assert {sequence.handle for sequence in table} == {used, kept, longer}
    table.sweep()
    assert len(table) == 3
    assert table.num_free_pages == 8 - 3


def test_a_lease_does_not_end_while_a_call_is_in_flight():
    clock = Clock()
    table = table_of(clock=clock, lease_s=10.0)
    (handle,) = table.create(1)
    reservation = reserve(table, [handle], [5], [5])
    clock.now += 100
    table.sweep()
    table.settle(reservation, commit=True)
    clock.now += 9
    extend(table, handle, 6, 1)


def test_keeping_alive_is_all_or_none():
    clock = Clock()
    table = table_of(clock=clock, lease_s=10.0)
    (handle,) = table.create(1)
    clock.now += 6
    with pytest.raises(NotFoundError):
        table.keep_alive([handle, b"x" * 16])
    clock.now += 6
    with pytest.raises(NotFoundError):
        table.keep_alive([handle])


@pytest.mark.parametrize("lease_s", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_refuses_a_lease_that_is_none(lease_s):
    table = table_of()
    with pytest.raises(InvalidArgumentError, match="lease_s"):
        table.create(1, lease_s=lease_s)
    assert len(table) == 0


def test_a_call_that_needs_pages_takes_those_of_sequences_whose_lease_is_over():
    clock = Clock()
    table = table_of(clock=clock, lease_s=10.0)
    (idle,) = table.create(1)
    extend(table, idle, 64, 64)
    clock.now += 11
    (handle,) = table.create(1)
    extend(table, handle, 64, 64)


def test_a_quota_covers_all_caches_of_a_tenant_and_counts_a_shared_page_once():
    quota = Quota(pages_max=3, sequences_max=4)
    one, other = table_of(quota=quota), table_of(quota=quota)
    (a,), (b,) = one.create(1), other.create(1)
    extend(one, a, 16, 16)
    fork = one.fork(a)
    extend(other, b, 8, 8)
    assert (quota.num_pages, quota.num_sequences) == (3, 3)
    with pytest.raises(ResourceExhaustedError) as caught:
        extend(other, b, 9, 1)
    assert caught.value.reason == "TENANT_PAGES_EXHAUSTED"
    with pytest.raises(ResourceExhaustedError) as caught:
        other.create(2)
    assert caught.value.reason == "TENANT_SEQUENCES_EXHAUSTED"
    one.release([a])
    assert (quota.num_pages, quota.num_sequences) == (3, 2)
    one.release([fork])
    other.close()
    assert quota.is_idle


def test_sequences_whose_lease_is_over_take_no_room_from_new_ones_of_their_tenant():
    clock, quota = Clock(), Quota(pages_max=4, sequences_max=4, sweep=lambda: (one.sweep(), other.sweep()))
    one, other = (table_of(quota=quota, clock=clock) for _ in range(2))
    (a,), (b, _) = one.create(1, lease_s=300.0), other.create(2)
    extend(one, a, 8, 8)
    extend(other, b, 24, 24)
    for refused in (lambda: one.create(2), lambda: extend(one, a, 9, 1)):
        with pytest.raises(ResourceExhaustedError):
            refused()
    clock.now += 61
    extend(one, a, 32, 24)
    assert (quota.num_pages, quota.num_sequences) == (4, 1)
    one.create(3, lease_s=10.0)
    clock.now += 11
    child = one.fork(a)
    assert [sequence.handle for sequence in one] == [a, child]
    assert quota.num_sequences == 2


def test_pages_that_could_not_be_cleaned_are_not_given_out_until_they_are():
    table = table_of(num_pages=2)
    (handle,) = table.create(1)
    extend(table, handle, 16, 16)
    works = table._clear
    table._clear = lambda pages, then: then(False)
    table.release([handle])
    assert table.num_free_pages == 0
    (handle,) = table.create(1)
    with pytest.raises(ResourceExhaustedError):
        reserve(table, [handle], [1], [1])
    table._clear = works
    table.sweep()
    assert table.num_free_pages == 2


def test_pages_that_could_not_be_cleaned_leave_the_quota_with_their_cache():
    quota = Quota()
    table = table_of(quota=quota)
    a, b = table.create(2)
    extend(table, a, 16, 16)
    extend(table, b, 16, 16)
    table._clear = lambda pages, then: then(False)
    table.release([a])
    assert quota.num_pages == 4
    table.close()
    assert quota.is_idle


@pytest.mark.parametrize("length", [0, 5, 6])
def test_a_call_whose_table_finds_no_memory_changes_nothing(monkeypatch, length):
    def no_memory(*_):
        raise MemoryError

    table, parent, _ = forked(length)
    before = state(table), table.pool.holders().tolist()
    monkeypatch.setattr(sequence, "page_table", no_memory)
    with pytest.raises(MemoryError):
        reserve(table, [parent], [12], [length + 12])
    monkeypatch.undo()
    assert (state(table), table.pool.holders().tolist()) == before
    extend(table, parent, length + 12, 12)
