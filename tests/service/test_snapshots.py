"""Snapshots of sequences: what a save reads stays as it is, and what a restore brings back."""

import pytest

from attnd.service.errors import DataLossError, ResourceExhaustedError
from attnd.service.quotas import Quota
from attnd.service.snapshots import SequenceState, Snapshot
from tests.service.test_sequence_sharing import forked, pages_of, truncate
from tests.service.test_sequences import extend, reserve, table_of


def test_a_snapshot_that_finds_no_memory_changes_nothing(monkeypatch):
    table, *_ = forked(5)
    snapshot = table.seal()
    quota = Quota()
    restored = table_of(quota=quota)

    def no_memory(_):
        raise MemoryError

    monkeypatch.setattr(restored.pool, "take", no_memory)
    with pytest.raises(MemoryError):
        restored.adopt(snapshot)
    assert len(restored) == 0
    assert quota.is_idle


def test_what_a_snapshot_holds_does_not_change_and_appending_copies_nothing():
    table = table_of()
    (handle,) = table.create(1)
    for layer in range(2):
        extend(table, handle, 12, 12, layer)
    snapshot = table.seal()
    held = pages_of(table, handle)
    reservation = reserve(table, [handle], [1], [13])
    assert not reservation.copies
    table.settle(reservation, commit=True)
    truncate(table, handle, 3)
    reservation = reserve(table, [handle], [1], [4])
    assert reservation.copies[0].sources.tolist() == held[:1]
    table.settle(reservation, commit=True)
    table.release([handle])
    assert snapshot.pages.tolist() == sorted(held)
    assert snapshot.sequences[0].layer_lens.tolist() == [12, 12]
    assert table.num_free_pages == 8 - 2
    table.unseal(snapshot)
    assert table.num_free_pages == 8


def test_a_fork_of_a_sealed_sequence_respects_the_seal():
    table = table_of()
    (handle,) = table.create(1)
    extend(table, handle, 8, 8)
    snapshot = table.seal()
    child = table.fork(handle)
    table.release([handle])
    truncate(table, child, 2)
    reservation = reserve(table, [child], [1], [3])
    assert reservation.copies[0].sources.tolist() == snapshot.pages.tolist()


def test_a_short_fork_does_not_write_over_what_a_save_reads_of_a_longer_one():
    table, parent, child = forked(10)
    truncate(table, child, 9)
    snapshot = table.seal()
    table.release([parent])
    # Only the child and the save hold the page now, and the child holds one token less of it.
    for layer in range(2):
        reservation = reserve(table, [child], [1], [10], layer)
        assert [each.sources.tolist() for each in reservation.copies] == ([] if layer else [[snapshot.pages[1]]])
        table.settle(reservation, commit=True)


def test_a_restored_table_has_the_same_tokens_under_new_handles_and_shares_the_same_pages():
    table, parent, child = forked(13)
    extend(table, child, 14, 1)
    (lost,) = table.create(1, lease_s=7.0)
    snapshot = table.seal()
    states = [
        each
        if each.handle != lost
        else SequenceState(
            handle=lost, layer_lens=each.layer_lens, pages=each.pages[:0], lease_s=each.lease_s, damaged=True
        )
        for each in snapshot.sequences
    ]
    restored = table_of()
    new = restored.adopt(Snapshot(tuple(states)))
    assert len(new) == len(snapshot.pages) == 3
    assert restored.num_free_pages == 8 - 3
    translated = dict(zip(snapshot.pages.tolist(), new.tolist(), strict=True))
    for old, sequence in zip(table, restored, strict=True):
        assert sequence.restored_from == old.handle != sequence.handle
        assert sequence.layer_lens.tolist() == old.layer_lens.tolist()
        assert sequence.pages.tolist() == [translated[page] for page in old.pages.tolist()]
    *_, damaged = restored
    with pytest.raises(DataLossError):
        reserve(restored, [damaged.handle], [1], [1])
    with pytest.raises(DataLossError):
        restored.fork(damaged.handle)
    restored.close()
    assert restored.num_free_pages == 8


def test_a_table_too_small_for_a_snapshot_stays_as_it_is():
    table = table_of()
    (handle,) = table.create(1)
    extend(table, handle, 40, 40)
    quota = Quota()
    small = table_of(num_pages=4, quota=quota)
    with pytest.raises(ResourceExhaustedError):
        small.adopt(table.seal())
    assert len(small) == 0
    assert quota.is_idle
