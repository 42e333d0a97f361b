"""Sequences: what a call may do to them, and that a failed one does nothing."""

import asyncio

import numpy as np
import pytest

from attnd.kernels.contract import CacheSpec, Layout
from attnd.kernels.errors import InvalidArgumentError
from attnd.service.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError
from attnd.service.quotas import Quota
from attnd.service.sequences import SequenceTable
from attnd.service.world import World


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def table_of(num_pages=8, page_size=8, num_layers=2, *, cleared=None, quota=None, clock=None, lease_s=60.0):
    spec = CacheSpec(
        layout=Layout.INTERLEAVED,
        num_layers=num_layers,
        num_pages=num_pages + 1,
        page_size=page_size,
        num_kv_heads=1,
        head_dim=4,
        dtype=np.dtype(np.float32),
    )

    def clear(pages, then):
        if cleared is not None:
            cleared.extend(pages.tolist())
        then(True)

    world = World(now=clock or Clock())
    table = SequenceTable(spec, clear, quota=quota or Quota(), world=world, lease_s=lease_s)
    if quota is None:
        table._quota.sweep = table.sweep
    return table


def reserve(table, handles, q_lens, kv_lens, layer=0, *, append=True):
    lens = [np.array(x, np.int32) for x in (q_lens, kv_lens)]
    return asyncio.run(table.reserve(handles, *lens, layer, append=append))


def extend(table, handle, kv_len, q_len, layer=0):
    table.settle(reserve(table, [handle], [q_len], [kv_len], layer), commit=True)


def state(table):
    return table.num_free_pages, [(s.handle, s.layer_lens.tolist(), s.pages.tolist(), len(s.in_flight)) for s in table]


def test_handles_are_16_bytes_and_never_repeat():
    table = table_of()
    first = table.create(100)
    table.release(first)
    second = table.create(100)
    assert {len(handle) for handle in first + second} == {16}
    assert len({*first, *second}) == 200


@pytest.mark.parametrize("length", [7, 8, 9, 15, 16, 17])
def test_a_sequence_holds_just_the_pages_that_its_length_needs(length):
    table = table_of()
    (handle,) = table.create(1)
    for kv_len in range(1, length + 1):
        extend(table, handle, kv_len, 1)
    (sequence,) = table
    assert sequence.length == length
    assert len(sequence.pages) == -(-length // 8)
    assert table.num_free_pages == 8 - len(sequence.pages)


def test_no_two_sequences_share_a_page():
    table = table_of(num_pages=16)
    handles = table.create(4)
    reservation = reserve(table, handles, [9, 1, 0, 20], [9, 1, 0, 20])
    table.settle(reservation, commit=True)
    pages = np.concatenate([sequence.pages for sequence in table])
    assert len(set(pages.tolist())) == len(pages) == 2 + 1 + 0 + 3
    assert reservation.batch.page_indices[0, :2].tolist() == next(iter(table)).pages.tolist()


def test_a_reservation_that_needs_too_many_pages_changes_nothing():
    table = table_of(num_pages=3)
    a, b = table.create(2)
    extend(table, a, 14, 14)
    before = state(table)
    with pytest.raises(ResourceExhaustedError, match="needs 2 more pages, of 3 are 1 free") as caught:
        reserve(table, [a, b], [4, 4], [18, 4])
    assert caught.value.reason == "PAGES_EXHAUSTED"
    assert state(table) == before
    extend(table, a, 18, 4)
    assert table.num_free_pages == 0


def test_a_call_that_fails_gives_its_pages_back():
    cleared = []
    table = table_of(cleared=cleared)
    (handle,) = table.create(1)
    extend(table, handle, 5, 5)
    before = state(table)
    reservation = reserve(table, [handle], [20], [25])
    new_pages = reservation.sequences[0].pages[1:].tolist()
    table.settle(reservation, commit=False)
    assert state(table) == before
    assert sorted(cleared) == sorted(new_pages)


def test_rejects_a_hole_and_reads_beyond_what_the_layer_holds():
    table = table_of()
    (handle,) = table.create(1)
    extend(table, handle, 5, 5, layer=0)
    before = state(table)
    for q_lens, kv_lens, layer, append in [([1], [7], 0, True), ([1], [6], 1, True), ([1], [6], 0, False)]:
        with pytest.raises(FailedPreconditionError) as caught:
            reserve(table, [handle], q_lens, kv_lens, layer, append=append)
        assert caught.value.reason == "SEQUENCE_HOLE"
    assert state(table) == before
    extend(table, handle, 6, 6, layer=1)


def test_pages_of_a_released_sequence_stay_until_its_calls_have_ended():
    cleared = []
    table = table_of(cleared=cleared)
    a, b = table.create(2)
    extend(table, a, 8, 8)
    reservation = reserve(table, [a], [1], [9])
    held = reservation.sequences[0].pages.tolist()
    table.release([a])
    extend(table, b, 40, 40)
    assert not set(held) & {page for sequence in table for page in sequence.pages.tolist()}
    assert not cleared
    table.settle(reservation, commit=True)
    assert sorted(cleared) == sorted(held)
    assert table.num_free_pages == 8 - 5


def test_releasing_twice_is_not_found_and_frees_once():
    table = table_of(num_pages=4)
    (a,) = table.create(1)
    extend(table, a, 16, 16)
    table.release([a])
    with pytest.raises(NotFoundError):
        table.release([a])
    assert table.num_free_pages == 4
    b, c = table.create(2)
    extend(table, b, 16, 16)
    extend(table, c, 16, 16)
    pages = [set(sequence.pages.tolist()) for sequence in table]
    assert not pages[0] & pages[1]


def test_release_is_all_or_none():
    table = table_of()
    a, b = table.create(2)
    with pytest.raises(NotFoundError):
        table.release([a, b"x" * 16])
    with pytest.raises(InvalidArgumentError):
        table.release([a, a])
    assert len(table) == 2


def test_stale_foreign_and_made_up_handles_are_answered_alike():
    table, other = table_of(), table_of()
    (stale,) = table.create(1)
    table.release([stale])
    (foreign,) = other.create(1)
    answers = set()
    for handle in (stale, foreign, b"\0" * 16, b"", b"x" * 1000):
        with pytest.raises(NotFoundError) as caught:
            reserve(table, [handle], [1], [1])
        answers.add((caught.value.reason, caught.value.message.replace(handle[:16].hex() or "-", "-", 1)[:12]))
    assert len({reason for reason, _ in answers}) == 1


def test_a_call_waits_for_the_one_before_it_on_the_same_sequence_and_layer():
    async def scenario():
        table = table_of()
        (handle,) = table.create(1)
        one = np.array([1], np.int32)
        first = await table.reserve([handle], one, one, 0, append=True)
        other_layer = await table.reserve([handle], one, one, 1, append=True)
        waiting = asyncio.create_task(table.reserve([handle], one, one + 1, 0, append=True))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        table.settle(first, commit=True)
        second = await asyncio.wait_for(waiting, 5)
        assert second.held_lens.tolist() == [1]
        table.settle(second, commit=True)
        table.settle(other_layer, commit=True)
        assert [sequence.layer_lens.tolist() for sequence in table] == [[2, 1]]

    asyncio.run(scenario())


def test_ten_thousand_calls_some_of_them_failing_leave_no_page_behind():
    async def scenario():
        rng = np.random.default_rng(0)
        table = table_of(num_pages=32)
        for _ in range(400):
            handles = table.create(2)
            lens = np.zeros(2, np.int32)
            for _ in range(25):
                q_lens = np.full(2, rng.integers(1, 5), np.int32)
                commit = bool(rng.random() > 0.05)
                reservation = await table.reserve(handles, q_lens, lens + q_lens, 0, append=True)
                table.settle(reservation, commit=commit)
                lens += q_lens * commit
            table.release(handles)
        assert table.num_free_pages == 32
        assert len(table) == 0

    asyncio.run(scenario())
