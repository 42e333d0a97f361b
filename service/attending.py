"""One attention call between its admission and its answer: what runs on the engine's thread."""

from collections.abc import Hashable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Float, Int32, Shaped

from attnd.kernels.contract import Attended, AttentionOptions, KernelHints, RaggedBatch
from attnd.kernels.launch import append_dtype, launch
from attnd.kernels.stored import first_difference
from attnd.service.batching import Joinable
from attnd.service.caches import Cache
from attnd.service.errors import FailedPreconditionError
from attnd.service.sequence import Reservation

# Beyond it a batch gains nothing and lets the calls behind it wait.
BATCH_TOKENS_MAX: Final = 1024


@dataclass(slots=True, eq=False, kw_only=True)  # frozen, it would take twice as long to make
class AttentionCall(Joinable[Attended]):
    """A validated call.

    Attributes:
        cache: The cache.
        layer: The layer.
        batch: The metadata that the kernel works on.
        q: Queries.
        k: New keys, of any dtype that may be cast to the cache's.
        v: New values.
        options: Scalars.
        hints: How the kernel should work.
        rows: Rows of q that `batch` covers; None if they are the first ones.
        reservation: The hold on the sequences, if the server manages the pages.
    """

    cache: Cache
    layer: int
    batch: RaggedBatch
    q: Float[np.ndarray, "tokens num_q_heads head_dim"]
    k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None
    v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None
    options: AttentionOptions
    hints: KernelHints
    rows: Int32[np.ndarray, " num_rows"] | None = None
    reservation: Reservation | None = None

    @property
    def place(self) -> tuple[str, int]:
        """The layer of a cache that it works on."""
        return self.cache.cache_id, self.layer

    @property
    def kind(self) -> Hashable:
        """What decides which programs it runs, and how much they have to do within a factor of two."""
        batch, options = self.batch, self.options
        return (
            self.cache.cache_id,
            self.q.shape[1],
            self.q.dtype.num,
            batch.num_seqs.bit_length(),
            batch.num_tokens.bit_length(),
            batch.page_indices.shape[1].bit_length(),
            self.k is None,
            options.sliding_window is None,
            options.soft_cap is None,
            options.return_lse,
        )

    def joins(self, others: Many["AttentionCall"]) -> bool:
        """Returns whether one launch can serve it and others: one program, and nobody reads what another writes."""
        first = others[0]
        return (
            self.options == first.options
            and self.hints == first.hints
            and self.q.dtype == first.q.dtype
            and self.q.shape[1:] == first.q.shape[1:]
            and (self.k is None) == (first.k is None)
            and self.batch.num_tokens + sum(other.batch.num_tokens for other in others) <= BATCH_TOKENS_MAX
            and (self.k is None or not any(self._shares_pages(other) for other in others))
        )

    def run(self) -> Attended:
        """Writes and attends.

        Raises:
            FailedPreconditionError: The call brings other tokens than the sequence holds at their positions.
            DataLossError: The call reads a page of the client's that was lost.
        """
        warm_up_ns = self.prepare()
        attended = self.launch()
        attended.timings.compile_ns += warm_up_ns
        return attended

    @classmethod
    def run_all(cls, calls: Many["AttentionCall"]) -> list[Attended | Exception]:
        """Writes and attends for calls that join, in one launch; one that fails does not touch the others."""
        results: dict[int, Attended | Exception] = {}
        for i, call in enumerate(calls):
            try:
                call.prepare()
            except Exception as error:
                results[i] = error
        ready = [i for i in range(len(calls)) if i not in results]
        try:
            results.update(zip(ready, _run_as_one([calls[i] for i in ready]), strict=True))
        except Exception:
            # Somebody's call, or the size of all: each on its own shows whose.
            results.update((i, _outcome(calls[i])) for i in ready)
        return [results[i] for i in range(len(calls))]

    def prepare(self) -> int:
        """Does what must come before the launch; returns the nanoseconds that compiling took.

        Raises:
            FailedPreconditionError: As `run`.
            DataLossError: As `run`.
        """
        self._mind_client_pages()
        self._require_clean_pages()
        self._copy_shared_pages()
        self._require_same_tokens()
        warm_up = self.cache.warm_up
        return 0 if warm_up is None or not self.batch.num_seqs else warm_up.run(self.q.shape[1])

    def launch(self) -> Attended:
        """Writes and attends, prepared. Once more, it writes the same."""
        return launch(
            self.cache.implementation,
            self.cache.pages,
            self.layer,
            self.batch,
            self.q,
            rows=self.rows,
            k=self.k,
            v=self.v,
            options=self.options,
            hints=self.hints,
        )

    def _shares_pages(self, other: "AttentionCall") -> bool:
        # Sequences do not: a call holds its own for itself, and copies what it would share.
        if self.reservation is not None:
            return False
        return bool(np.intersect1d(self.batch.page_indices, other.batch.page_indices).size)

    def covered(self, values: Shaped[np.ndarray, "tokens heads head_dim"]) -> Shaped[np.ndarray, "rows heads head_dim"]:
        """Returns the rows of q, k or v that are not padding."""
        covered: np.ndarray = values[: self.batch.num_tokens] if self.rows is None else values[self.rows]
        return covered

    def settle(self, done: bool) -> None:
        """Ends the hold on the sequences, if there is one. On the event loop's thread, when the work has ended."""
        if self.reservation is not None:
            self.cache.require_sequences().settle(self.reservation, commit=done)

    async def room(self) -> None:
        """Waits while a save keeps all that it can of what calls overwrite. On the event loop's thread."""
        if self.cache.client_pages is not None and self.k is not None:
            await self.cache.client_pages.room()

    def _mind_client_pages(self) -> None:
        client_pages = self.cache.client_pages
        if client_pages is None:
            return
        client_pages.require_whole_batch(self.layer, self.batch)
        if self.k is not None:
            client_pages.before_write(self.layer, self.batch.token_slots(self.cache.spec.page_size)[0])

    def _require_clean_pages(self) -> None:
        if not self.cache.debug_checks or self.reservation is None or not len(self.reservation.fresh):
            return
        for layer in [self.layer] if self.reservation.followed else range(self.cache.spec.num_layers):
            held = self.cache.implementation.read(self.cache.pages, layer, self.reservation.fresh)
            assert not any(np.any(each) for each in held if each is not None), "a page was free and not clean"

    def _copy_shared_pages(self) -> None:
        if self.reservation is None or not self.reservation.copies:
            return
        sources, targets = zip(*((each.sources, each.targets) for each in self.reservation.copies), strict=True)
        self.cache.implementation.copy(self.cache.pages, np.concatenate(sources), np.concatenate(targets))

    def _require_same_tokens(self) -> None:
        if self.reservation is None or not self.reservation.rewrites or self.k is None or self.v is None:
            return
        # Rows of the reservation that have no tokens in this call are not in the batch; theirs need no check.
        held_lens = self.reservation.held_lens[self.reservation.q_lens > 0]
        rewritten = self.batch.token_positions < held_lens[self.batch.token_seqs]
        if not rewritten.any():
            return
        differing = first_difference(
            self.cache.implementation,
            self.cache.pages,
            self.layer,
            self.batch,
            np.flatnonzero(rewritten),
            self.k,
            self.v,
        )
        if differing is not None:
            message = (
                f"Token {differing} of the call differs from the one that its sequence holds at position "
                f"{self.batch.token_positions[differing]} of layer {self.layer}: truncate the sequence first."
            )
            raise FailedPreconditionError("CONFLICTING_WRITE", message)


def _run_as_one(calls: Many[AttentionCall]) -> list[Attended]:
    if not calls:
        return []
    first, batch = calls[0], RaggedBatch.concatenated([call.batch for call in calls])
    appended: dict[str, Any] = {}
    if first.k is not None:
        dtype = append_dtype(first.cache.spec)
        for name in ("k", "v"):
            appended[name] = np.concatenate(
                [call.covered(getattr(call, name)).astype(dtype, copy=False) for call in calls]
            )
    q = np.concatenate([call.covered(call.q) for call in calls])
    attended = launch(
        first.cache.implementation, first.cache.pages, first.layer, batch, q,
        options=first.options, hints=first.hints, **appended,
    )  # fmt: skip
    ends = np.cumsum([call.batch.num_tokens for call in calls])
    return [
        _part(call, attended, slice(int(end) - call.batch.num_tokens, int(end)))
        for call, end in zip(calls, ends, strict=True)
    ]


def _part(call: AttentionCall, attended: Attended, tokens: slice) -> Attended:
    """Returns a call's own rows of an answer, with zeros where its padding is."""
    rows = slice(call.batch.num_tokens) if call.rows is None else call.rows
    out, lse = np.zeros(call.q.shape, call.q.dtype), None
    out[rows] = attended.out[tokens]
    if attended.lse_natural is not None:
        lse = np.full(call.q.shape[:2], -np.inf, np.float32)
        lse[rows] = attended.lse_natural[tokens]
    return Attended(out=out, lse_natural=lse, timings=attended.timings)


def _outcome(call: AttentionCall) -> Attended | Exception:
    try:
        return call.launch()
    except Exception as error:
        return error
