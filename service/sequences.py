"""Sequences whose pages the server manages: handles, lengths, page tables, and what a call may do to them."""

import asyncio
import secrets
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Int32

from attnd.kernels.contract import CacheSpec, RaggedBatch
from attnd.kernels.errors import InvalidArgumentError
from attnd.service.errors import FailedPreconditionError, NotFoundError, ResourceExhaustedError
from attnd.service.pages import PagePool

HANDLE_BYTES: Final = 16
SEQUENCES_MAX: Final = 65536

Lens = Int32[np.ndarray, " num_seqs"]


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence of a cache.

    Attributes:
        handle: Unguessable and never used again, so that a stale handle finds nothing.
        layer_lens: int32 [num_layers]. Tokens that each layer holds.
        pages: int32. Its pages, in order; enough for the longest layer and for every call in flight.
        in_flight: Calls that use it now. Its pages are not given back while there are any.
        released: Whether its handle is gone and only calls in flight keep its pages.
    """

    handle: bytes
    layer_lens: Int32[np.ndarray, " num_layers"]
    pages: Int32[np.ndarray, " num_pages"]
    in_flight: list["Reservation"] = field(default_factory=list)
    released: bool = False

    @property
    def length(self) -> int:
        """Tokens of the layer that holds most."""
        return int(self.layer_lens.max())


@dataclass(slots=True, eq=False, kw_only=True)
class Reservation:
    """The hold of one call on its sequences, from admission until its work has ended.

    Attributes:
        sequences: In the order of the call.
        layer: The layer that it attends over.
        q_lens: int32 [num_seqs]. Tokens of the call.
        kv_lens: int32 [num_seqs]. Lengths after the call.
        held_lens: int32 [num_seqs]. Tokens that the layer held at admission; nobody changes them meanwhile.
        batch: What the kernel works on.
        settled: Set when the work has ended.
    """

    sequences: list[Sequence]
    layer: int
    q_lens: Lens
    kv_lens: Lens
    held_lens: Lens
    batch: RaggedBatch
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class SequenceTable:
    """The sequences of one cache. All methods are called from the event loop's thread.

    Args:
        spec: Shape of the cache.
        clear: Zeroes pages that nobody uses any more and then, later, calls its second argument.
    """

    def __init__(self, spec: CacheSpec, clear: Callable[[Int32[np.ndarray, " n"], Callable[[], None]], None]) -> None:
        self._spec = spec
        self._clear = clear
        self._pool = PagePool(spec.num_pages)
        self._sequences: dict[bytes, Sequence] = {}

    @property
    def num_free_pages(self) -> int:
        """Pages that a sequence can take now."""
        return self._pool.num_free

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def create(self, num_sequences: int) -> list[bytes]:
        """Returns the handles of new, empty sequences.

        Raises:
            InvalidArgumentError: The number is not in [1, SEQUENCES_MAX].
            ResourceExhaustedError: The cache holds its limit of sequences.
        """
        if not 1 <= num_sequences <= SEQUENCES_MAX:
            raise InvalidArgumentError.of("num_sequences", f"{num_sequences=} must be in [1, {SEQUENCES_MAX}].")
        if len(self) + num_sequences > SEQUENCES_MAX:
            message = f"The cache holds {len(self)} sequences; {num_sequences} more pass the limit of {SEQUENCES_MAX}."
            raise ResourceExhaustedError("SEQUENCES_EXHAUSTED", message)
        handles = [secrets.token_bytes(HANDLE_BYTES) for _ in range(num_sequences)]
        for handle in handles:
            layer_lens = np.zeros(self._spec.num_layers, np.int32)
            self._sequences[handle] = Sequence(handle, layer_lens, np.empty(0, np.int32))
        return handles

    def release(self, handles: Many[bytes]) -> None:
        """Forgets sequences, all or none. Pages in use are given back when the calls that use them end.

        Raises:
            InvalidArgumentError: A handle stands twice.
            NotFoundError: A handle is unknown.
        """
        sequences = self._find(handles)
        for sequence in sequences:
            del self._sequences[sequence.handle]
            sequence.released = True
            self._trim(sequence)

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
            FailedPreconditionError: The layer lacks tokens before the call's.
            ResourceExhaustedError: Too few pages are free.
        """
        while True:
            sequences = self._find(handles)
            blockers = (call for sequence in sequences for call in sequence.in_flight if call.layer == layer)
            if (blocker := next(blockers, None)) is None:
                break
            await blocker.settled.wait()
        held_lens = np.array([sequence.layer_lens[layer] for sequence in sequences], np.int32)
        self._require_held(kv_lens - q_lens if append else kv_lens, held_lens, layer)
        self._grow(sequences, kv_lens)
        batch = RaggedBatch.compact(kv_lens, self._page_table(sequences), q_lens, self._spec.page_size)
        reservation = Reservation(
            sequences=sequences, layer=layer, q_lens=q_lens, kv_lens=kv_lens, held_lens=held_lens, batch=batch
        )
        for sequence in sequences:
            sequence.in_flight.append(reservation)
        return reservation

    def settle(self, reservation: Reservation, *, commit: bool) -> None:
        """Ends a hold: the new lengths become true, or everything is as it was before `reserve`."""
        for sequence, kv_len in zip(reservation.sequences, reservation.kv_lens.tolist(), strict=True):
            if commit:
                sequence.layer_lens[reservation.layer] = max(sequence.layer_lens[reservation.layer], kv_len)
            sequence.in_flight.remove(reservation)
            self._trim(sequence)
        reservation.settled.set()

    def _find(self, handles: Many[bytes]) -> list[Sequence]:
        sequences = []
        seen: set[bytes] = set()
        for i, handle in enumerate(handles):
            if handle in seen:
                raise InvalidArgumentError.of(f"sequences[{i}]", f"Sequence {handle.hex()} must stand only once.")
            seen.add(handle)
            sequence = self._sequences.get(handle)
            if sequence is None:
                message = f"No sequence {handle[:HANDLE_BYTES].hex()} at sequences[{i}]."
                raise NotFoundError("SEQUENCE_NOT_FOUND", message)
            sequences.append(sequence)
        return sequences

    def _require_held(self, needed_lens: Lens, held_lens: Lens, layer: int) -> None:
        holes = np.flatnonzero(needed_lens > held_lens)
        if len(holes):
            i = int(holes[0])
            message = (
                f"Sequence {i} of the call needs {needed_lens[i]} tokens in layer {layer} before this call's; "
                f"the layer holds {held_lens[i]}."
            )
            raise FailedPreconditionError("SEQUENCE_HOLE", message)

    def _grow(self, sequences: list[Sequence], kv_lens: Lens) -> None:
        needed = -(-kv_lens.astype(np.int64) // self._spec.page_size)
        missing = np.maximum(needed - [len(sequence.pages) for sequence in sequences], 0)
        total = int(missing.sum())
        if not total:
            return
        parts = np.split(self._pool.take(total), np.cumsum(missing)[:-1])
        for sequence, part in zip(sequences, parts, strict=True):
            sequence.pages = np.concatenate([sequence.pages, part])

    def _page_table(self, sequences: list[Sequence]) -> Int32[np.ndarray, "num_seqs pages_per_seq"]:
        table = np.zeros((len(sequences), max((len(sequence.pages) for sequence in sequences), default=0)), np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            row[: len(sequence.pages)] = sequence.pages
        return table

    def _trim(self, sequence: Sequence) -> None:
        # A call in flight may have reserved pages beyond the committed length; they stay until the last one ends.
        if sequence.in_flight:
            return
        kept = 0 if sequence.released else -(-sequence.length // self._spec.page_size)
        if kept < len(sequence.pages):
            surplus, sequence.pages = sequence.pages[kept:], sequence.pages[:kept].copy()
            self._clear(surplus, lambda: self._pool.give(surplus))
