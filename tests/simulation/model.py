"""What should be true: every sequence with every token of every layer, and the calls in flight. Plain and slow."""

from dataclasses import dataclass, field

from attnd.service.sequence import Reservation, Sequence
from tests.simulation.tokens import Codec


class ViolationError(AssertionError):
    """The service did something else than the model."""


def require(condition: object, message: str, *values: object) -> None:
    """Raises ViolationError unless the condition holds."""
    if not condition:
        raise ViolationError(message % values)


@dataclass(slots=True, eq=False)
class Kept:
    """A sequence.

    Attributes:
        handle: Its handle.
        real: The service's own.
        layers: For each layer, the tokens that it holds.
        renewed_at: When it was used last, at least.
        in_flight: Calls admitted and not settled.
        gone: Why its handle is unknown now: "released", "expired"; empty while it lives.
        damaged: Whether it came damaged out of a save.
    """

    handle: bytes
    real: Sequence
    layers: list[list[int]]
    lease_s: float
    renewed_at: float
    in_flight: list["Call"] = field(default_factory=list)
    gone: str = ""
    damaged: bool = False

    @property
    def lens(self) -> list[int]:
        """Tokens of each layer."""
        return [len(tokens) for tokens in self.layers]

    def is_over(self, now: float) -> bool:
        """Whether its lease has ended."""
        return not self.in_flight and now >= self.real.expires_at


@dataclass(slots=True, eq=False)
class Call:
    """One Attend.

    Attributes:
        cache: Where it goes.
        handles: The sequences that it names.
        ids: For each, the tokens that it brings, at the positions before its kv_len.
        append: Whether it brings their keys and values.
        late: Whether its deadline passes before its work begins.
        kept: The sequences, once it is admitted.
        reservation: Its hold, once it is admitted.
        cancelled: Whether its caller went before its work was settled.
        settled: Whether its hold has ended.
    """

    cache: "KeptCache"
    handles: list[bytes]
    layer: int
    q_lens: list[int]
    kv_lens: list[int]
    ids: list[list[int]]
    append: bool
    late: bool = False
    kept: list[Kept] = field(default_factory=list)
    reservation: Reservation | None = None
    cancelled: bool = False
    settled: bool = False

    def rows(self) -> list[tuple[Kept, int, int, list[int]]]:
        """Returns sequence, first position, length after the call and tokens of each row that has any."""
        rows = zip(self.kept, self.q_lens, self.kv_lens, self.ids, strict=True)
        return [(kept, kv_len - q_len, kv_len, ids) for kept, q_len, kv_len, ids in rows if q_len]

    def conflicts(self) -> bool:
        """Whether it brings other tokens than its sequences hold at their positions."""
        if not self.append:
            return False
        for kept, start, end, ids in self.rows():
            held = kept.layers[self.layer][start:end]
            if held != ids[: len(held)]:
                return True
        return False

    def expected(self, kept: Kept, start: int, end: int, ids: list[int]) -> list[int]:
        """Returns the tokens that its row attends over."""
        tokens = kept.layers[self.layer]
        return tokens[:start] + ids if self.append else tokens[:end]


@dataclass(slots=True, eq=False)
class KeptCache:
    """A cache, and what is known of its table.

    Attributes:
        cache: The service's own.
        table: Its sequences.
        tenant: Whose it is.
        by_handle: Every sequence that it ever had.
        live: Those whose handles are known.
        calls: Calls admitted and not settled.
        save: The save in progress.
        returning: Pages on their way back.
        unclean: Pages that could not be cleaned.
        deleted: Whether it was deleted.
        deleting: Whether somebody has asked to delete it.
        restored: The save that it comes from.
        touched: Whether something was done to it since it was checked.
    """

    cache: object
    table: object
    tenant: str
    codec: Codec
    by_handle: dict[bytes, Kept] = field(default_factory=dict)
    live: dict[bytes, Kept] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    save: "Save | None" = None
    returning: set[int] = field(default_factory=set)
    unclean: set[int] = field(default_factory=set)
    deleted: bool = False
    deleting: bool = False
    restored: "Save | None" = None
    touched: bool = True

    @property
    def spec(self):
        """Shape of the cache."""
        return self.cache.spec

    def find(self, handle: bytes) -> Kept | None:
        """Returns the sequence that a handle should find now."""
        return self.live.get(handle)

    def expire(self, now: float) -> None:
        """Forgets the sequences whose lease is over."""
        for kept in [kept for kept in self.live.values() if kept.is_over(now)]:
            self.forget(kept, "expired")

    def forget(self, kept: Kept, why: str) -> None:
        """Makes a handle unknown."""
        kept.gone = why
        del self.live[kept.handle]

    def pages_needed(self, call: Call) -> int:
        """Returns the pages that a call has to take, by the page tables of everybody; it must name live sequences."""
        size, needed = self.spec.page_size, 0
        tables = [kept.real.pages.tolist() for kept in self.by_handle.values() if not kept.gone or kept.in_flight]
        snapshot, sealed = self.save and self.save.snapshot, {}
        if snapshot is not None:
            sealed = dict(zip(snapshot.pages.tolist(), snapshot.page_lens(size).tolist(), strict=True))
        for handle, kv_len in zip(call.handles, call.kv_lens, strict=True):
            kept = self.live[handle]
            mine, num_held = kept.real.pages.tolist(), len(kept.layers[call.layer])
            needed += max(0, -(-kv_len // size) - len(mine))
            if num_held >= kv_len:
                continue
            first = num_held // size
            for slot, page in enumerate(mine[first : -(-kv_len // size)], first):
                shared = sum(page in table for table in tables) > 1
                needed += shared or max(num_held - slot * size, 0) < sealed.get(page, 0)
        return needed


@dataclass(slots=True, eq=False)
class Save:
    """A snapshot and the tokens that it must show.

    Attributes:
        snapshot: The service's own.
        layers: For each of its sequences, the tokens of each layer.
        hit: Whether it was damaged on the disk.
    """

    snapshot: object
    layers: list[list[list[int]]]
    hit: bool = False

    @property
    def by_handle(self):
        """The state and the tokens of each sequence."""
        states = self.snapshot.sequences
        return {state.handle: (state, layers) for state, layers in zip(states, self.layers, strict=True)}
