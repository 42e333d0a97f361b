"""One sequence whose pages the server manages, and the hold that a call has on it."""

import asyncio
import operator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from jaxtyping import Int32

from attnd.kernels.contract import RaggedBatch
from attnd.service.errors import FailedPreconditionError
from attnd.service.pages import RESERVED_PAGE, PagePool, Pages

Lens = Int32[np.ndarray, " num_seqs"]

_PAGES: Final = operator.attrgetter("pages")


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One sequence of a cache.

    Attributes:
        handle: Unguessable and never used again, so that a stale handle finds nothing.
        layer_lens: int32 [num_layers]. Tokens that each layer holds.
        pages: int32. Its pages, in order; enough for the longest layer and for every call in flight.
        lease_s: Seconds that it lives without being used.
        expires_at: When it is gone unless it is used before or a call is in flight.
        shares: Whether another sequence, or a save, may hold some of its pages.
        restored_from: The handle that it had before the restart that restored it; empty if there was none.
        damaged: Whether some of its tokens were lost in a save.
        in_flight: Calls that use it now. Its pages are not given back while there are any.
        released: Whether its handle is gone and only calls in flight keep its pages.
    """

    handle: bytes
    layer_lens: Int32[np.ndarray, " num_layers"]
    pages: Pages = field(default_factory=lambda: np.empty(0, np.int32))
    lease_s: float
    expires_at: float
    shares: bool = False
    restored_from: bytes = b""
    damaged: bool = False
    in_flight: list["Reservation"] = field(default_factory=list)
    released: bool = False

    @property
    def length(self) -> int:
        """Tokens of the layer that holds most."""
        lens: list[int] = self.layer_lens.tolist()  # for so few numbers, sooner than NumPy
        return max(lens)

    def replace_pages(self, slots: np.ndarray, targets: Pages) -> None:
        """Puts other pages into some places of the page table, which is an array of its own afterwards."""
        pages = self.pages.copy()
        pages[slots] = targets
        self.pages = pages


@dataclass(frozen=True, slots=True, eq=False)
class PageCopies:
    """Pages of a sequence that a call copies before it writes, because somebody else reads them as they are.

    Attributes:
        sequence: The sequence.
        slots: Their places in its page table.
        sources: int32. The pages that it holds until the call has ended, and keeps if the call fails.
        targets: int32. The pages that take their place if it succeeds.
    """

    sequence: Sequence
    slots: np.ndarray
    sources: Pages
    targets: Pages


@dataclass(slots=True, eq=False, kw_only=True)
class Reservation:
    """The hold of one call on its sequences, from admission until its work has ended.

    Attributes:
        sequences: In the order of the call.
        layer: The layer that it attends over.
        q_lens: int32 [num_seqs]. Tokens of the call.
        kv_lens: int32 [num_seqs]. Lengths after the call.
        held_lens: int32 [num_seqs]. Tokens that the layer held at admission; nobody changes them meanwhile.
        rewrites: Whether some of the call's tokens may be among them.
        batch: What the kernel works on.
        copies: What is copied before anything is written. While there are any, no other call uses the sequences.
        fresh: int32. Pages that were free before.
        followed: Whether other layers' calls came to its sequences since: one that is run before it, as part of a
            batch, writes to its fresh pages first.
        settled: Set when the work has ended; None as long as nobody has waited for that.
    """

    sequences: list[Sequence]
    layer: int
    q_lens: Lens
    kv_lens: Lens
    held_lens: Lens
    rewrites: bool
    batch: RaggedBatch
    copies: list[PageCopies]
    fresh: Pages
    followed: bool = False
    settled: asyncio.Event | None = None

    def begin(self) -> None:
        """Takes its place among the calls in flight."""
        for sequence in self.sequences:
            for earlier in sequence.in_flight:
                earlier.followed = True
            sequence.in_flight.append(self)

    async def wait(self) -> None:
        """Returns when the work has ended."""
        if self.settled is None:
            self.settled = asyncio.Event()
        await self.settled.wait()


def require_held(needed_lens: list[int], held_lens: list[int], layer: int) -> None:
    """Raises FailedPreconditionError if a layer lacks tokens before those of a call."""
    if any(map(operator.gt, needed_lens, held_lens)):
        i = next(i for i, needed in enumerate(needed_lens) if needed > held_lens[i])
        message = (
            f"Sequence {i} of the call needs {needed_lens[i]} tokens in layer {layer} before this call's; "
            f"the layer holds {held_lens[i]}."
        )
        raise FailedPreconditionError("SEQUENCE_HOLE", message)


def call_in_the_way(sequences: list[Sequence], layer: int) -> Reservation | None:
    """Returns a call in flight that a call of a layer must wait for: one of its layer, or one that copies pages."""
    for sequence in sequences:
        for call in sequence.in_flight:
            if call.layer == layer or call.copies:
                return call
    return None


def slots_to_copy(
    sequences: list[Sequence], held_lens: list[int], kv_lens: list[int], pool: PagePool, page_size: int
) -> list[tuple[Sequence, np.ndarray]]:
    """Returns the places, in page tables, of pages that a call writes new tokens to and others read."""
    to_copy = []
    for sequence, start, end in zip(sequences, held_lens, kv_lens, strict=True):
        if not sequence.shares or start >= end:
            continue
        first = start // page_size
        pages = sequence.pages[first : -(-end // page_size)]
        read_by_others = pool.is_shared(pages)
        # The first token of the call in each of them. Whose tokens a save reads there does not matter.
        starts = np.maximum(start - np.arange(first, first + len(pages)) * page_size, 0)
        read_by_others |= starts < pool.sealed_lens(pages)
        slots = np.flatnonzero(read_by_others) + first
        if len(slots):
            to_copy.append((sequence, slots))
    return to_copy


def missing_pages(sequences: list[Sequence], kv_lens: Lens, page_size: int) -> list[int]:
    """Returns how many pages each sequence lacks for its length after a call."""
    needed = -(-kv_lens.astype(np.int64) // page_size)
    missing: list[int] = np.maximum(needed - [len(sequence.pages) for sequence in sequences], 0).tolist()
    return missing


class Batches:
    """Makes the batches of calls. The layers of a planned step get the same one: kernels plan their work on it once.

    Args:
        page_size: Tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        # Arrays of pages and lengths are never changed, only replaced: the same arrays make the same batch.
        self._made_of: list[np.ndarray] = []
        self._batch: RaggedBatch | None = None

    def known(self, sequences: list[Sequence], q_lens: Lens, kv_lens: Lens) -> RaggedBatch | None:
        """Returns the latest batch if it was made of the same, whose pages were enough for it."""
        made_of = self._made_of
        if len(made_of) != 2 + len(sequences) or q_lens is not made_of[0] or kv_lens is not made_of[1]:
            return None
        return self._batch if all(map(operator.is_, map(_PAGES, sequences), made_of[2:])) else None

    def of(
        self,
        sequences: list[Sequence],
        copies: list[PageCopies],
        q_lens: Lens,
        kv_lens: Lens,
    ) -> RaggedBatch:
        """Returns the batch of a call.

        Args:
            sequences: Its sequences.
            copies: Pages that it copies first: others than the sequences' stand in its table.
            q_lens: int32 [num_seqs]. Tokens of the call.
            kv_lens: int32 [num_seqs]. Lengths after the call.
        """
        batch = RaggedBatch.compact(kv_lens, page_table(sequences, copies), q_lens, self._page_size)
        made_of = [q_lens, kv_lens, *map(_PAGES, sequences)]
        self._made_of, self._batch = ([], None) if copies else (made_of, batch)
        return batch


def page_table(sequences: list[Sequence], copies: list[PageCopies]) -> Int32[np.ndarray, "num_seqs pages_per_seq"]:
    """Returns the pages of sequences after the copies; unused slots hold the reserved page."""
    num_slots = max((len(sequence.pages) for sequence in sequences), default=0)
    table = np.full((len(sequences), num_slots), RESERVED_PAGE, np.int32)
    for row, sequence in zip(table, sequences, strict=True):
        row[: len(sequence.pages)] = sequence.pages
    for each in copies:
        table[sequences.index(each.sequence), each.slots] = each.targets
    return table
