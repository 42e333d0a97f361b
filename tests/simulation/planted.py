"""Bugs as people make them, each put into the service's own code for as long as a context lasts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from unittest import mock

import numpy as np

from attnd.kernels.contract import Attended, RaggedBatch
from attnd.kernels.host_pages import HostPages
from attnd.service import attending, restoring
from attnd.service import sequences as sequences_module
from attnd.service.attending import AttentionCall
from attnd.service.caches import CacheRegistry
from attnd.service.engine import Engine
from attnd.service.pages import PagePool
from attnd.service.quotas import Quota
from attnd.service.sequences import SequenceTable
from attnd.service.snapshots import Snapshot

Bug = tuple[object, str, Callable]


def _after(cls, name, then):
    """Returns a bug that does something more after a method."""
    real = getattr(cls, name)

    def method(self, *args, **kwargs):
        result = real(self, *args, **kwargs)
        then(self, result, *args, **kwargs)
        return result

    return cls, name, method


def _free_list_takes_a_page_twice() -> Bug:
    def give(pool, pages):
        twice = np.concatenate([pages, pages[:1]])
        end = min(pool._num_free + len(twice), len(pool._free))
        pool._free[pool._num_free : end] = twice[: end - pool._num_free]
        pool._num_free = end
        pool._quota.give_pages(len(pages))

    return PagePool, "give", give


def _writes_to_shared_pages() -> Bug:
    return sequences_module, "slots_to_copy", lambda *_: []


def _copies_nothing_of_a_shared_page() -> Bug:
    return AttentionCall, "_copy_shared_pages", lambda _: None


def _freed_pages_are_not_zeroed() -> Bug:
    return HostPages, "clear", lambda *_: None


def _unclean_pages_are_given_out() -> Bug:
    def give_back(table, pages):
        if len(pages):
            table._clear(pages, lambda _done: table._pool.give(pages))

    return SequenceTable, "_give_back", give_back


def _the_last_shared_page_is_not_counted() -> Bug:
    def share(pool, pages):
        pool._holders[pages[:-1]] += 1

    return PagePool, "share", share


def _a_dropped_page_is_counted_by_one_that_goes_on_to_hold_it() -> Bug:
    def drop(pool, pages):
        pool._holders[pages] -= 1
        return pages[pool._holders[pages] <= 1]

    return PagePool, "drop", drop


def _lengths_are_true_before_the_write() -> Bug:
    real = SequenceTable.reserve

    async def reserve(table, handles, q_lens, kv_lens, layer, *, append):
        reservation = await real(table, handles, q_lens, kv_lens, layer, append=append)
        for sequence, kv_len in zip(reservation.sequences, kv_lens.tolist(), strict=True):
            sequence.layer_lens[layer] = max(sequence.layer_lens[layer], kv_len)
        return reservation

    return SequenceTable, "reserve", reserve


def _pages_are_freed_under_a_call() -> Bug:
    real = SequenceTable._trim

    def trim(table, sequence):
        in_flight, sequence.in_flight = sequence.in_flight, []
        real(table, sequence)
        sequence.in_flight = in_flight

    return SequenceTable, "_trim", trim


def _a_lease_ends_under_a_call() -> Bug:
    return SequenceTable, "_is_expired", lambda table, sequence: table._world.now() >= sequence.expires_at


def _a_call_does_not_renew_the_lease_when_it_ends() -> Bug:
    real = SequenceTable.settle

    def settle(table, reservation, *, commit):
        before = [sequence.expires_at for sequence in reservation.sequences]
        real(table, reservation, commit=commit)
        for sequence, expires_at in zip(reservation.sequences, before, strict=True):
            sequence.expires_at = expires_at

    return SequenceTable, "settle", settle


def _the_quota_forgets_to_give_back() -> Bug:
    real = Quota.give_pages
    return Quota, "give_pages", lambda quota, num_pages: real(quota, num_pages - (num_pages > 2))


def _a_refused_create_keeps_its_quota() -> Bug:
    real = Quota.take_sequences

    def take_sequences(quota, num_sequences):
        try:
            real(quota, num_sequences)
        finally:
            if quota._sequences_max is not None and quota._num_sequences + num_sequences > quota._sequences_max:
                quota._num_sequences += 1

    return Quota, "take_sequences", take_sequences


def _what_is_over_is_not_swept_for_new_sequences() -> Bug:
    return SequenceTable, "_make_room", lambda table, num_sequences: None


def _a_failed_call_keeps_the_pages_that_it_copied_to() -> Bug:
    real = SequenceTable.settle

    def settle(table, reservation, *, commit):
        if not commit:
            reservation.copies.clear()
        real(table, reservation, commit=commit)

    return SequenceTable, "settle", settle


def _work_of_a_caller_that_is_gone_is_committed() -> Bug:
    real = Engine._finish

    def finish(engine, job, ran, error):
        settle = job.settle
        job.settle = lambda done: settle(done or (error is None and job.future.cancelled()))
        real(engine, job, ran, error)

    return Engine, "_finish", finish


def _failed_work_is_committed() -> Bug:
    real = Engine._finish

    def finish(engine, job, ran, error):
        settle = job.settle
        job.settle = lambda _done: settle(True)
        real(engine, job, ran, error)

    return Engine, "_finish", finish


def _a_handle_is_used_again() -> Bug:
    real = SequenceTable._add

    def add(table, layer_lens, lease_s):
        sequence = real(table, layer_lens, lease_s)
        freed = vars(table).setdefault("freed_handles", [])
        if freed:
            del table._sequences[sequence.handle]
            sequence.handle = freed.pop()
            table._sequences[sequence.handle] = sequence
        return sequence

    def remove(table, _, sequence):
        vars(table).setdefault("freed_handles", []).append(sequence.handle)

    return SequenceTable, "_add", add, _after(SequenceTable, "_remove", remove)


def _a_released_handle_is_still_found() -> Bug:
    def remove(table, _, sequence):
        if sequence.in_flight:
            table._sequences[sequence.handle] = sequence

    return _after(SequenceTable, "_remove", remove)


def _a_restore_mixes_up_pages() -> Bug:
    real = SequenceTable.adopt

    def adopt(table, snapshot):
        return np.roll(real(table, snapshot), 1)

    return SequenceTable, "adopt", adopt


def _a_damaged_page_is_restored() -> Bug:
    real = restoring.decode

    def decode(save_id, spec, file, data):
        layers, whole = real(save_id, spec, file, data)
        return layers, np.ones_like(whole)

    return restoring, "decode", decode


def _holes_are_accepted() -> Bug:
    return sequences_module, "require_held", lambda *_: None


def _conflicts_are_merged() -> Bug:
    return AttentionCall, "_require_same_tokens", lambda _: None


def _a_fork_shares_tokens_of_calls_in_flight() -> Bug:
    def fork(table, child, handle):
        parent = table._sequences[handle]
        for call in parent.in_flight:
            row = call.sequences.index(parent)
            lens = table._sequences[child].layer_lens
            lens[call.layer] = max(lens[call.layer], min(call.kv_lens[row], parent.length))

    return _after(SequenceTable, "fork", fork)


def _a_seal_is_ignored() -> Bug:
    return PagePool, "sealed_lens", lambda _, pages: np.zeros(len(pages), np.int32)


def _a_save_forgets_the_longer_of_two_that_share_a_page() -> Bug:
    def page_lens(snapshot, page_size):
        pages = snapshot.pages
        lens = np.full(len(pages), page_size, np.int32)
        for sequence in snapshot.sequences:
            starts = np.arange(len(sequence.pages), dtype=np.int32) * page_size
            places = np.searchsorted(pages, sequence.pages)
            lens[places] = np.minimum(lens[places], int(sequence.layer_lens.max()) - starts)
        return lens

    return Snapshot, "page_lens", page_lens


def _a_copying_call_is_not_alone() -> Bug:
    def call_in_the_way(sequences, layer):
        calls = (call for sequence in sequences for call in sequence.in_flight)
        return next((call for call in calls if call.layer == layer), None)

    return sequences_module, "call_in_the_way", call_in_the_way


def _calls_on_one_layer_overlap() -> Bug:
    def call_in_the_way(sequences, layer):
        calls = (call for sequence in sequences for call in sequence.in_flight)
        return next((call for call in calls if call.copies), None)

    return sequences_module, "call_in_the_way", call_in_the_way


def _a_truncation_leaves_the_other_layers() -> Bug:
    real = SequenceTable.truncate

    async def truncate(table, handle, length):
        before = table._sequences[handle].layer_lens.copy() if handle in table._sequences else None
        await real(table, handle, length)
        lens = table._sequences[handle].layer_lens
        lens[1:] = np.minimum(before[1:], lens[0] + 1) if len(lens) > 1 else lens[1:]

    return SequenceTable, "truncate", truncate


def _a_truncation_does_not_wait() -> Bug:
    async def truncate(table, handle, length):
        (sequence,) = table._find_whole([handle], field="sequence")
        if 0 <= length <= sequence.length:
            np.minimum(sequence.layer_lens, length, out=sequence.layer_lens)
            table._trim(sequence)

    return SequenceTable, "truncate", truncate


def _a_foreign_cache_is_found() -> Bug:
    return CacheRegistry, "by_id", lambda registry, cache_id, _tenant: registry._by_id[cache_id]


def _keeping_alive_stops_half_way() -> Bug:
    def keep_alive(table, handles):
        for handle in handles:
            table._find([handle])

    return SequenceTable, "keep_alive", keep_alive


def _a_full_queue_does_not_settle() -> Bug:
    real = Engine.run

    async def run(engine, work, *, settle=lambda _done: None, **options):
        if engine._depth >= engine._queue_depth_max:
            settle = lambda _done: None  # noqa: E731 - the bug
        return await real(engine, work, settle=settle, **options)

    return Engine, "run", run


def _a_call_that_cannot_be_prepared_runs_with_the_others() -> Bug:
    def run_all(_, calls):
        for call in calls:
            with suppress(Exception):
                call.prepare()
        return attending._run_as_one(calls)

    return AttentionCall, "run_all", classmethod(run_all)


def _calls_of_different_layers_run_as_one() -> Bug:
    return AttentionCall, "place", property(lambda call: call.cache.cache_id)


def _rows_of_a_batch_change_their_tables() -> Bug:
    real = RaggedBatch.concatenated

    def concatenated(_, batches):
        batch = real(batches)
        return replace(batch, page_indices=batch.page_indices[::-1].copy())

    return RaggedBatch, "concatenated", classmethod(concatenated)


def _a_launch_that_failed_is_taken_for_done() -> Bug:
    return attending, "_outcome", lambda call: Attended(out=np.zeros(call.q.shape, call.q.dtype))


BUGS = {
    function.__name__.removeprefix("_"): function
    for function in (
        _free_list_takes_a_page_twice,
        _writes_to_shared_pages,
        _copies_nothing_of_a_shared_page,
        _freed_pages_are_not_zeroed,
        _unclean_pages_are_given_out,
        _the_last_shared_page_is_not_counted,
        _a_dropped_page_is_counted_by_one_that_goes_on_to_hold_it,
        _lengths_are_true_before_the_write,
        _pages_are_freed_under_a_call,
        _a_lease_ends_under_a_call,
        _a_call_does_not_renew_the_lease_when_it_ends,
        _the_quota_forgets_to_give_back,
        _a_refused_create_keeps_its_quota,
        _what_is_over_is_not_swept_for_new_sequences,
        _a_failed_call_keeps_the_pages_that_it_copied_to,
        _work_of_a_caller_that_is_gone_is_committed,
        _failed_work_is_committed,
        _a_handle_is_used_again,
        _a_released_handle_is_still_found,
        _a_restore_mixes_up_pages,
        _a_damaged_page_is_restored,
        _holes_are_accepted,
        _conflicts_are_merged,
        _a_fork_shares_tokens_of_calls_in_flight,
        _a_seal_is_ignored,
        _a_save_forgets_the_longer_of_two_that_share_a_page,
        _a_copying_call_is_not_alone,
        _calls_on_one_layer_overlap,
        _a_truncation_leaves_the_other_layers,
        _a_truncation_does_not_wait,
        _a_foreign_cache_is_found,
        _keeping_alive_stops_half_way,
        _a_full_queue_does_not_settle,
        _a_call_that_cannot_be_prepared_runs_with_the_others,
        _calls_of_different_layers_run_as_one,
        _rows_of_a_batch_change_their_tables,
        _a_launch_that_failed_is_taken_for_done,
    )
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Puts a bug into the service."""
    target, attribute, broken, *more = BUGS[name]()
    with mock.patch.object(target, attribute, broken):
        if not more:
            yield
            return
        target, attribute, broken = more[0]
        with mock.patch.object(target, attribute, broken):
            yield
