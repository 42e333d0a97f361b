"""Stands between the service and one of its sequence tables, and holds everything that passes against the model."""

import asyncio

from attnd.kernels.errors import InvalidArgumentError
from attnd.service.errors import DataLossError, FailedPreconditionError, NotFoundError, ResourceExhaustedError
from attnd.service.pages import PagePool
from attnd.service.sequences import SEQUENCES_MAX
from tests.simulation import checks
from tests.simulation.model import Call, Kept, KeptCache, Save, require


class Recorder:
    """Wraps the methods of one table. The class's own are looked up at each call, so that bugs can be planted there.

    Args:
        kept: The cache.
        sim: Gives the time, the handles ever seen, the call of the running task and of a batch.
    """

    def __init__(self, kept: KeptCache, sim) -> None:
        self._kept = kept
        self._sim = sim
        self._table = kept.table
        self._clear = kept.table._clear
        self._swept_some = False
        for name in ("create", "fork", "truncate", "release", "keep_alive", "reserve", "settle", "seal", "unseal",
                     "adopt", "close", "sweep"):  # fmt: skip
            setattr(self._table, name, getattr(self, name))
        self._table._clear = self.clear
        self._table.pool.take = self.take

    def _real(self, name, *args, **kwargs):
        self._kept.touched = True
        return getattr(type(self._table), name)(self._table, *args, **kwargs)

    # Pages.

    def take(self, num_pages):
        self._sim.faults.strike("take", MemoryError)
        return PagePool.take(self._table.pool, num_pages)

    def clear(self, pages, then):
        kept, ids = self._kept, pages.tolist()
        require(not kept.returning.intersection(ids), "pages come back that are on their way back already")
        kept.returning.update(ids)
        kept.unclean.difference_update(ids)

        def cleared(done):
            kept.touched = True
            kept.returning.difference_update(ids)
            if not (done or kept.deleted):
                kept.unclean.update(ids)
            then(done)

        self._clear(pages, cleared)

    # Sequences.

    def create(self, num_sequences, lease_s=None):
        try:
            handles = self._real("create", num_sequences, lease_s)
        except InvalidArgumentError:
            require(num_sequences < 1 or (lease_s is not None and not lease_s > 0), "a legal create was refused")
            raise
        except ResourceExhaustedError:
            self._require_no_room(num_sequences)
            raise
        for handle in handles:
            layers = [[] for _ in range(self._kept.spec.num_layers)]
            self._add(handle, layers, self._sim.config.lease_s if lease_s is None else lease_s)
        return handles

    def fork(self, handle):
        parent = self._kept.find(handle)
        try:
            child = self._real("fork", handle)
        except ResourceExhaustedError:
            require(parent is not None, "an unknown handle was a matter of quota")
            self._require_no_room(1)
            self._renew([handle])
            raise
        except (NotFoundError, DataLossError) as error:
            self._require_right(error, [handle])
            raise
        self._require_known([handle], whole=True)
        self._renew([handle])
        self._add(child, [tokens.copy() for tokens in parent.layers], parent.lease_s)
        return child

    async def truncate(self, handle, length):
        try:
            await self._real("truncate", handle, length)
        except InvalidArgumentError:
            kept = self._kept.find(handle)
            require(kept is not None, "a length of an unknown handle was judged")
            require(not 0 <= length <= max(kept.lens), "a legal truncation was refused")
            raise
        except (NotFoundError, DataLossError) as error:
            self._require_right(error, [handle])
            raise
        self._require_known([handle], whole=True)
        kept = self._kept.find(handle)
        require(not kept.in_flight, "a sequence was truncated while a call was at work on it")
        require(0 <= length <= max(kept.lens), "truncated to %d of %s", length, kept.lens)
        kept.layers = [tokens[:length] for tokens in kept.layers]
        self._renew([handle])

    def release(self, handles):
        self._all_or_none("release", handles)
        for handle in handles:
            self._kept.forget(self._kept.live[handle], "released")

    def keep_alive(self, handles):
        self._all_or_none("keep_alive", handles)
        self._renew(handles)

    def close(self):
        self._kept.deleted = True
        for kept in list(self._kept.live.values()):
            self._kept.forget(kept, "released")
        self._kept.unclean.clear()  # their memory goes with the cache
        self._real("close")

    def sweep(self):
        over = [each for each in self._table._sequences.values() if self._table._is_expired(each)]
        self._swept_some = bool(over)
        self._real("sweep")

    # Calls.

    async def reserve(self, handles, q_lens, kv_lens, layer, *, append):
        call = self._sim.call_of_task()
        try:
            reservation = await self._real("reserve", handles, q_lens, kv_lens, layer, append=append)
        except asyncio.CancelledError:
            require(call.cancelled, "a call was cancelled by nobody")
            raise
        except Exception as error:
            self._refused(call, error)
            raise
        self._admitted(call, reservation)
        return reservation

    def _refused(self, call: Call, error: Exception) -> None:
        if isinstance(error, FailedPreconditionError):
            require(error.reason == "SEQUENCE_HOLE", "reserve refused with %s", error.reason)
            self._require_known(call.handles)
            require(self._has_hole(call), "a call without a hole was refused for one")
            self._renew(call.handles)
        elif isinstance(error, ResourceExhaustedError):
            self._require_known(call.handles)
            self._renew(call.handles)
            needed, free = self._kept.pages_needed(call), self._table.num_free_pages
            room = self._sim.room_for_pages(self._kept)
            # Sequences whose lease is over share pages until they are swept, which the refusal itself does.
            swept_some, self._swept_some = self._swept_some, False
            require(needed > min(free, room) or swept_some, "%d pages were refused, %d are free", needed, free)
        elif isinstance(error, InvalidArgumentError):
            require(len(set(call.handles)) < len(call.handles), "a legal call was refused: %s", error)
        elif isinstance(error, NotFoundError | DataLossError):
            self._require_right(error, call.handles)
        else:
            require(self._sim.is_injected(error), "reserve raised %r", error)

    def _admitted(self, call: Call, reservation) -> None:
        cache = self._kept
        self._require_known(call.handles, whole=True)
        require(not self._has_hole(call), "a hole was accepted")
        call.kept = [cache.live[handle] for handle in call.handles]
        call.reservation = reservation
        self._renew(call.handles)
        held = [len(kept.layers[call.layer]) for kept in call.kept]
        require(reservation.held_lens.tolist() == held, "admitted over %s, held %s", reservation.held_lens, held)
        copied = [each.sequence for each in reservation.copies]
        for kept in call.kept:
            for other in kept.in_flight:
                require(other.layer != call.layer, "two calls are at work on one sequence and layer")
                theirs = [each.sequence for each in other.reservation.copies]
                require(kept.real not in copied and kept.real not in theirs, "a copied sequence is in use")
        fresh = set(reservation.fresh.tolist())
        require(not fresh & (cache.returning | cache.unclean), "pages were taken before they were clean: %s", fresh)
        for kept in call.kept:
            kept.in_flight.append(call)
        cache.calls.append(call)
        self._sim.admitted(call)

    def settle(self, reservation, *, commit):
        call = self._sim.call_of(reservation)
        require(not call.settled, "a call was settled twice")
        finishing = self._sim.engine.finishing
        expected = finishing is not None and finishing[0] is None and not call.cancelled
        require(commit == expected, "a call was settled with %s instead of %s", commit, expected)
        self._real("settle", reservation, commit=commit)
        call.settled = True
        self._kept.calls.remove(call)
        now = self._sim.now()
        for kept in call.kept:
            kept.in_flight.remove(call)
            kept.renewed_at = now
        if commit and call.append:
            for kept, start, end, ids in call.rows():
                tokens = kept.layers[call.layer]
                if end > len(tokens):
                    tokens[start:] = ids

    # Saves.

    def seal(self):
        with self._sim.noting():
            snapshot = self._real("seal")
            live = [each for each in self._kept.live.values() if not each.is_over(self._sim.now())]
            handles = [each.handle for each in live]
            require([each.handle for each in snapshot.sequences] == handles, "a snapshot of others")
            require(self._kept.save is None, "two saves at once")
        self._kept.save = Save(snapshot, [[tokens.copy() for tokens in each.layers] for each in live])
        self._sim.lives.sealed(self._kept.save)
        return snapshot

    def unseal(self, snapshot):
        with self._sim.noting():
            checks.check_snapshot(self._kept)
        self._kept.save = None
        self._real("unseal", snapshot)

    def adopt(self, snapshot):
        saved = self._kept.restored
        with self._sim.noting():
            try:
                new = self._real("adopt", snapshot)
            except ResourceExhaustedError:
                room = min(self._table.num_free_pages, self._sim.room_for_pages(self._kept))
                fits = len(snapshot.pages) <= room
                fits = fits and len(snapshot.sequences) <= self._sim.room_for_sequences(self._kept)
                require(not fits, "a restore was refused that fits")
                raise
            handles = [handle for handle in self._table._sequences if handle not in self._kept.by_handle]
            require(len(handles) == len(snapshot.sequences), "a restore brought %d sequences", len(handles))
            for handle, state in zip(handles, snapshot.sequences, strict=True):
                before, layers = saved.by_handle[state.handle]
                require(state.layer_lens.tolist() == [len(tokens) for tokens in layers], "a restore of another length")
                require(state.damaged == before.damaged or saved.hit, "a whole save came back damaged")
                kept = self._add(handle, [tokens.copy() for tokens in layers], state.lease_s)
                kept.damaged = state.damaged
                require(kept.real.restored_from == state.handle, "a restored sequence has lost its name")
        return new

    # Helpers.

    def _all_or_none(self, name, handles):
        try:
            self._real(name, handles)
        except InvalidArgumentError:
            require(len(set(handles)) < len(handles), "a legal %s was refused", name)
            raise
        except NotFoundError as error:
            self._require_right(error, handles)
            raise
        self._require_known(handles)
        require(len(set(handles)) == len(handles), "%s took a handle twice", name)

    def _add(self, handle, layers, lease_s) -> Kept:
        require(handle not in self._sim.handles, "a handle was given out again")
        require(len(handle) == 16, "a handle of %d bytes", len(handle))
        self._sim.handles.add(handle)
        real = self._table._sequences[handle]
        kept = Kept(handle, real, layers, lease_s, self._sim.now())
        self._kept.by_handle[handle] = self._kept.live[handle] = kept
        return kept

    def _has_hole(self, call: Call) -> bool:
        rows = zip(call.handles, call.q_lens, call.kv_lens, strict=True)
        return any(
            kv_len - (q_len if call.append else 0) > len(self._kept.live[handle].layers[call.layer])
            for handle, q_len, kv_len in rows
        )

    def _require_known(self, handles, *, whole=False):
        for handle in handles:
            kept = self._kept.find(handle)
            require(kept is not None, "an unknown handle found something: %s", self._whence(handle))
            require(not (whole and kept.damaged), "a damaged sequence was used")

    def _require_right(self, error, handles):
        found = [self._kept.find(handle) for handle in handles]
        if isinstance(error, DataLossError):
            require(any(kept is not None and kept.damaged for kept in found), "a whole sequence was called damaged")
        else:
            require(None in found, "a living sequence was not found")

    def _whence(self, handle):
        kept = self._kept.by_handle.get(handle)
        return "never here" if kept is None else kept.gone

    def _require_no_room(self, num_sequences):
        room = min(SEQUENCES_MAX - len(self._table), self._sim.room_for_sequences(self._kept))
        require(num_sequences > room, "%d sequences were refused where %d fit", num_sequences, room)
        for kept in self._sim.caches_of(self._kept.cache.quota):
            over = kept.table._sequences.keys() - kept.live.keys()
            require(not over, "sequences were refused, while those whose lease is over count")

    def _renew(self, handles):
        for handle in handles:
            kept = self._kept.live[handle]
            kept.renewed_at = self._sim.now()
