"""Sequences whose pages the server manages: handles, lengths, page tables, leases, and what a call may do to them."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Final

import numpy as np
from jaxtyping import Int32

from attnd.kernels.contract import CacheSpec, RaggedBatch
from attnd.kernels.errors import InvalidArgumentError
from attnd.service.errors import DataLossError, NotFoundError, ResourceExhaustedError
from attnd.service.pages import PagePool, Pages
from attnd.service.quotas import Quota
from attnd.service.sequence import (
    Batches,
    Lens,
    PageCopies,
    Reservation,
    Sequence,
    call_in_the_way,
    missing_pages,
    require_held,
    slots_to_copy,
)
from attnd.service.snapshots import SequenceState, Snapshot
from attnd.service.world import World

HANDLE_BYTES: Final = 16
SEQUENCES_MAX: Final = 65536
LEASE_S_MAX: Final = 10.0 * 365 * 24 * 3600

_NO_PAGES: Final = np.empty(0, np.int32)


class SequenceTable:
    """The sequences of one cache. All methods are called from the event loop's thread.

    Args:
        spec: Shape of the cache as its pages lie in memory: page 0 is reserved.
        clear: Zeroes pages and then, later, calls its second argument with whether that worked.
        quota: Of the tenant.
        world: Time and chance.
        lease_s: Seconds that a sequence lives without being used, unless it says so itself.
    """

    def __init__(
        self,
        spec: CacheSpec,
        clear: Callable[[Pages, Callable[[bool], None]], None],
        *,
        quota: Quota,
        world: World,
        lease_s: float,
    ) -> None:
        self._spec = spec
        self._clear = clear
        self._quota = quota
        self._world = world
        self._lease_s = lease_s
        self._pool = PagePool(spec.num_pages - 1, quota)
        self._batches = Batches(spec.page_size)
        self._sequences: dict[bytes, Sequence] = {}
        self._unclean: list[Pages] = []
        self._closed = False

    @property
    def num_free_pages(self) -> int:
        """Pages that a sequence can take now."""
        return self._pool.num_free

    @property
    def pool(self) -> PagePool:
        """Who holds which page. To look at, not to change."""
        return self._pool

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequence in self._sequences.values() if not self._is_expired(sequence))

    # Life and death.

    def create(self, num_sequences: int, lease_s: float | None = None) -> list[bytes]:
        """Returns the handles of new, empty sequences.

        Args:
            num_sequences: How many.
            lease_s: Seconds that each lives without being used; None: the server's default.

        Raises:
            InvalidArgumentError: The number is not in [1, SEQUENCES_MAX], or the lease not in (0, LEASE_S_MAX].
            ResourceExhaustedError: The cache holds its limit of sequences, or the tenant its quota.
        """
        if not 1 <= num_sequences <= SEQUENCES_MAX:
            raise InvalidArgumentError.of("num_sequences", f"{num_sequences=} must be in [1, {SEQUENCES_MAX}].")
        lease_s = self._lease_s if lease_s is None else lease_s
        if not 0 < lease_s <= LEASE_S_MAX:
            raise InvalidArgumentError.of("lease_s", f"{lease_s=} must be in (0, {LEASE_S_MAX:.0f}].")
        self._make_room(num_sequences)
        self._admit(num_sequences)
        return [self._add(np.zeros(self._spec.num_layers, np.int32), lease_s).handle for _ in range(num_sequences)]

    def fork(self, handle: bytes) -> bytes:
        """Returns the handle of a new sequence that holds another's tokens; what either appends is its own.

        Both hold the same pages, the last one included, until one of them writes there. Calls in flight go on: their
        tokens are not the new sequence's.

        Raises:
            NotFoundError: The handle is unknown.
            DataLossError: Some of its tokens are lost.
            ResourceExhaustedError: The cache holds its limit of sequences, or the tenant its quota.
        """
        self._make_room(1)  # before the parent is found: the sweep must not take it
        (parent,) = self._find_whole([handle], field="sequence")
        self._admit(1)
        child = self._add(parent.layer_lens.copy(), parent.lease_s)
        child.pages = parent.pages[: self._num_pages(parent.length)].copy()
        self._pool.share(child.pages)
        parent.shares = child.shares = True
        return child.handle

    async def truncate(self, handle: bytes, length: int) -> None:
        """Shortens a sequence to its first `length` tokens, when the calls in flight on it have ended.

        Raises:
            InvalidArgumentError: The length is negative or beyond the sequence's.
            NotFoundError: The handle is unknown.
            DataLossError: Some of its tokens are lost.
        """
        while True:
            (sequence,) = self._find_whole([handle], field="sequence")
            if not sequence.in_flight:
                break
            await sequence.in_flight[0].wait()
        if not 0 <= length <= sequence.length:
            message = f"{length=} must be in [0, {sequence.length}], the sequence's."
            raise InvalidArgumentError.of("length", message)
        np.minimum(sequence.layer_lens, length, out=sequence.layer_lens)
        self._trim(sequence)

    def release(self, handles: Many[bytes]) -> None:
        """Forgets sequences, all or none. Pages in use are given back when the calls that use them end.

        Raises:
            InvalidArgumentError: A handle stands twice.
            NotFoundError: A handle is unknown.
        """
        for sequence in self._find(handles):
            self._remove(sequence)

    def keep_alive(self, handles: Many[bytes]) -> None:
        """Renews leases, all or none, as any use does.

        Raises:
            InvalidArgumentError: A handle stands twice.
            NotFoundError: A handle is unknown.
        """
        self._find(handles)

    def sweep(self) -> None:
        """Releases the sequences whose lease is over, and cleans again what could not be cleaned."""
        for sequence in [each for each in self._sequences.values() if self._is_expired(each)]:
            self._remove(sequence)
        unclean, self._unclean = self._unclean, []
        for pages in unclean:
            self._give_back(pages)

    def close(self) -> None:
        """Releases all sequences, for ever: the pages that come back from now on are never taken again."""
        self._closed = True
        for sequence in list(self._sequences.values()):
            self._remove(sequence)
        unclean, self._unclean = self._unclean, []
        for pages in unclean:
            self._pool.give(pages)

    # Calls.

    async def reserve(
        self, handles: Many[bytes], q_lens: Lens, kv_lens: Lens, layer: int, *, append: bool
    ) -> Reservation:
        """Takes the pages that a call needs and holds its sequences until `settle`. Changes nothing if it raises.

        Waits while another call is at work on one of the sequences in the same layer, so that a call finds the
        tokens of those before it and never half of them.

        Args:
            handles: The sequences, each at most once.
            q_lens: int32 [num_seqs]. New tokens of each, >= 0 and <= kv_lens.
            kv_lens: int32 [num_seqs]. Lengths after the call.
            layer: The layer, in [0, num_layers).
            append: Whether the call brings its tokens' keys and values.

        Raises:
            InvalidArgumentError: A handle stands twice.
            NotFoundError: A handle is unknown.
            DataLossError: Some tokens of a sequence are lost.
            FailedPreconditionError: The layer lacks tokens before the call's.
            ResourceExhaustedError: Too few pages are free, or the tenant's quota is smaller.
        """
        # Numbers of Python's: most calls have so few sequences that NumPy takes longer.
        ends, starts = kv_lens.tolist(), (kv_lens - q_lens).tolist()
        while True:
            sequences = self._find_whole(handles)
            blocker = call_in_the_way(sequences, layer)
            if blocker is None:
                held_lens = [sequence.layer_lens.item(layer) for sequence in sequences]
                require_held(starts if append else ends, held_lens, layer)
                to_copy = slots_to_copy(sequences, held_lens, ends, self._pool, self._spec.page_size)
                blocker = next((call for sequence, _ in to_copy for call in sequence.in_flight), None)
            if blocker is None:
                break
            await blocker.wait()
        copies, fresh, batch = self._pages_for(sequences, q_lens, kv_lens, to_copy)
        reservation = Reservation(
            sequences=sequences,
            layer=layer,
            q_lens=q_lens,
            kv_lens=kv_lens,
            held_lens=np.array(held_lens, np.int32),
            rewrites=append and held_lens != starts,
            batch=batch,
            copies=copies,
            fresh=fresh,
        )
        reservation.begin()
        return reservation

    def settle(self, reservation: Reservation, *, commit: bool) -> None:
        """Ends a hold: the new lengths become true, or everything is as it was before `reserve`."""
        for copies in reservation.copies:
            if commit:
                copies.sequence.replace_pages(copies.slots, copies.targets)
            self._drop(copies.sources if commit else copies.targets)
        now = self._world.now()
        for sequence, kv_len in zip(reservation.sequences, reservation.kv_lens.tolist(), strict=True):
            if commit:
                sequence.layer_lens[reservation.layer] = max(sequence.layer_lens[reservation.layer], kv_len)
            sequence.in_flight.remove(reservation)
            sequence.expires_at = now + sequence.lease_s
            self._trim(sequence)
        if reservation.settled is not None:
            reservation.settled.set()

    # Saves.

    def seal(self) -> Snapshot:
        """Returns all sequences as they are. Until `unseal`, calls go on and leave what the snapshot reads as it is."""
        for sequence in self:
            sequence.shares = True
        snapshot = Snapshot(tuple(SequenceState.of(each, self._num_pages(each.length)) for each in self))
        self._pool.seal(snapshot.pages, snapshot.page_lens(self._spec.page_size))
        return snapshot

    def unseal(self, snapshot: Snapshot) -> None:
        """Ends a snapshot. There is one at a time."""
        self._give_back(self._pool.unseal(snapshot.pages))

    def adopt(self, snapshot: Snapshot) -> Pages:
        """Brings sequences back, under new handles; returns the pages that take the place of `snapshot.pages`.

        Raises:
            ResourceExhaustedError: Too few pages are free, or the tenant's quota is smaller; nothing is changed.
        """
        states, old = snapshot.sequences, snapshot.pages
        self._make_room(len(states))
        self._admit(len(states))
        try:
            new = self._pool.take(len(old))
        except BaseException:
            self._quota.give_sequences(len(states))
            raise
        for state in states:
            sequence = self._add(state.layer_lens.copy(), state.lease_s)
            sequence.pages = new[np.searchsorted(old, state.pages)]
            sequence.restored_from, sequence.damaged, sequence.shares = state.handle, state.damaged, True
            self._pool.share(sequence.pages)
        self._drop(new)
        return new

    # Helpers.

    def _find(self, handles: Many[bytes], field: str = "sequences") -> list[Sequence]:
        """Returns sequences, their leases renewed."""
        sequences = []
        seen: set[bytes] = set()
        for i, handle in enumerate(handles):
            sequence = self._sequences.get(handle)
            if sequence is None or handle in seen or self._is_expired(sequence):
                place = f"sequences[{i}]" if field == "sequences" else field
                if handle in seen:
                    raise InvalidArgumentError.of(place, f"Sequence {handle.hex()} must stand only once.")
                raise NotFoundError("SEQUENCE_NOT_FOUND", f"No sequence {handle[:HANDLE_BYTES].hex()} at {place}.")
            seen.add(handle)
            sequences.append(sequence)
        now = self._world.now()
        for sequence in sequences:
            sequence.expires_at = now + sequence.lease_s
        return sequences

    def _find_whole(self, handles: Many[bytes], field: str = "sequences") -> list[Sequence]:
        sequences = self._find(handles, field)
        for sequence in sequences:
            if sequence.damaged:
                message = f"Tokens of sequence {sequence.handle.hex()} were lost: its save is damaged. Release it."
                raise DataLossError("SEQUENCE_DAMAGED", message)
        return sequences

    def _is_expired(self, sequence: Sequence) -> bool:
        return not sequence.in_flight and self._world.now() >= sequence.expires_at

    def _make_room(self, num_sequences: int) -> None:
        """Sweeps if there is no room for more sequences: those whose lease is over count until they are released."""
        if num_sequences > min(SEQUENCES_MAX - len(self), self._quota.num_sequences_left):
            self._quota.sweep()

    def _admit(self, num_sequences: int) -> None:
        if len(self) + num_sequences > SEQUENCES_MAX:
            message = f"The cache holds {len(self)} sequences; {num_sequences} more pass the limit of {SEQUENCES_MAX}."
            raise ResourceExhaustedError("SEQUENCES_EXHAUSTED", message)
        self._quota.take_sequences(num_sequences)

    def _add(self, layer_lens: Int32[np.ndarray, " num_layers"], lease_s: float) -> Sequence:
        handle = self._world.token(HANDLE_BYTES)
        expires_at = self._world.now() + lease_s
        sequence = Sequence(handle=handle, layer_lens=layer_lens, lease_s=lease_s, expires_at=expires_at)
        self._sequences[handle] = sequence
        return sequence

    def _remove(self, sequence: Sequence) -> None:
        del self._sequences[sequence.handle]
        self._quota.give_sequences(1)
        sequence.released = True
        self._trim(sequence)

    def _num_pages(self, length: int) -> int:
        return -(-length // self._spec.page_size)

    def _pages_for(
        self, sequences: list[Sequence], q_lens: Lens, kv_lens: Lens, to_copy: list[tuple[Sequence, np.ndarray]]
    ) -> tuple[list[PageCopies], Pages, RaggedBatch]:
        """Takes all pages that a call needs, or none; returns those, what it copies first, and its batch."""
        if not to_copy and (known := self._batches.known(sequences, q_lens, kv_lens)) is not None:
            return [], _NO_PAGES, known  # another layer of the same step
        copies, fresh = self._take(sequences, kv_lens, to_copy)
        try:
            return copies, fresh, self._batches.of(sequences, copies, q_lens, kv_lens)
        except BaseException:
            for each in copies:
                self._drop(each.targets)
            for sequence in sequences:
                self._trim(sequence)
            raise

    def _take(
        self, sequences: list[Sequence], kv_lens: Lens, to_copy: list[tuple[Sequence, np.ndarray]]
    ) -> tuple[list[PageCopies], Pages]:
        """Takes all pages that a call needs, or none: those it copies to, and those its sequences grow by."""
        sizes = [*(len(slots) for _, slots in to_copy), *missing_pages(sequences, kv_lens, self._spec.page_size)]
        if not any(sizes):
            return [], _NO_PAGES
        try:
            fresh = self._pool.take(sum(sizes))
        except ResourceExhaustedError:
            self._quota.sweep()  # what it releases is free a moment later: the error says when to try again
            fresh = self._pool.take(sum(sizes))
        parts = iter(np.split(fresh, np.cumsum(sizes)[:-1]))
        copies = [PageCopies(sequence, slots, sequence.pages[slots], next(parts)) for sequence, slots in to_copy]
        for sequence, part in zip(sequences, parts, strict=True):
            sequence.pages = np.concatenate([sequence.pages, part])
        return copies, fresh

    def _trim(self, sequence: Sequence) -> None:
        # A call in flight may have reserved pages beyond the committed length; they stay until the last one ends.
        if sequence.in_flight:
            return
        kept = 0 if sequence.released else self._num_pages(sequence.length)
        if kept < len(sequence.pages):
            surplus, sequence.pages = sequence.pages[kept:], sequence.pages[:kept].copy()
            self._drop(surplus)

    def _drop(self, pages: Pages) -> None:
        self._give_back(self._pool.drop(pages))

    def _give_back(self, pages: Pages) -> None:
        if not len(pages):
            return

        def cleared(done: bool) -> None:
            # Nobody sweeps a closed table: what it kept would stand in the tenant's quota for ever.
            if done or self._closed:
                self._pool.give(pages)
            else:
                self._unclean.append(pages)

        self._clear(pages, cleared)
