"""From a ragged batch to what the numba kernel does: items of one query token and a range of its keys, by thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float32, Int32, Int64

from attnd.kernels.contract import RaggedBatch
from attnd.kernels.xla_work import WORTH_A_THREAD

# A row's keys are cut between threads at a multiple of this.
_CUT: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Decodes:
    """The work of the numba kernel.

    Attributes:
        tokens: Rows of the caller's q; `items` count in them.
        threads: For each thread, int64 rows of (token, row of the table, first key, one past the last, slot). The slot
            of a token is the token itself, but a part of its keys that another thread attends over has an extra one.
        extras: Token of each extra slot; they come after those of the tokens.
        table: Page ids of the batch's rows, over an array of its own.
    """

    tokens: Int64[np.ndarray, " n"]
    threads: Sequence[Int64[np.ndarray, "_ 5"]]
    extras: Int64[np.ndarray, " extras"]
    table: Int32[np.ndarray, "rows pages_per_seq"]

    @property
    def num_slots(self) -> int:
        """Results of the kernel."""
        return len(self.tokens) + len(self.extras)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The rows that the numba kernel leaves alone: a batch of their own, over some rows of the caller's q."""

    batch: RaggedBatch
    tokens: Int64[np.ndarray, " m"]


def split(
    batch: RaggedBatch, sliding_window: int | None, *, q_len_max: int, key_size: int, num_threads: int
) -> tuple[Decodes | None, Chunks | None]:
    """Returns the work of the kernel and what is left of a batch.

    Args:
        batch: Validated metadata.
        sliding_window: Keys that a query sees; others are not read.
        q_len_max: Most query tokens of a row that the kernel takes, each by itself.
        key_size: Numbers of a key, over all heads.
        num_threads: Threads that may work side by side.
    """
    short = batch.q_lens <= q_len_max
    of_short = short[batch.token_seqs]
    chunks = None if short.all() else _chunks(batch, np.flatnonzero(~short), np.flatnonzero(~of_short))
    if not short.any():
        return None, chunks
    tokens = np.flatnonzero(of_short)
    rows = batch.token_seqs[tokens].astype(np.int64)
    ends = batch.token_positions[tokens].astype(np.int64) + 1
    starts = np.zeros_like(ends) if sliding_window is None else np.maximum(ends - sliding_window, 0)
    total = int(np.sum(ends - starts))
    threads = min(num_threads, max(1, total * key_size // WORTH_A_THREAD))
    items, extras = _shared(rows, starts, ends, threads)
    return Decodes(tokens=tokens, threads=items, extras=extras, table=np.array(batch.page_indices)), chunks


def merge(
    extras: Int64[np.ndarray, " extras"],
    out: Float32[np.ndarray, "slots num_kv_heads group head_dim"],
    lse: Float32[np.ndarray, "slots num_kv_heads group"],
) -> None:
    """Adds extra slots, the last ones, to the slots of their tokens: each result weighs exp(lse)."""
    first = len(out) - len(extras)
    for slot, token in enumerate(extras.tolist(), start=first):
        merged = np.logaddexp(lse[token], lse[slot])
        out[token] *= np.exp(lse[token] - merged)[..., np.newaxis]
        out[token] += out[slot] * np.exp(lse[slot] - merged)[..., np.newaxis]
        lse[token] = merged


def _chunks(batch: RaggedBatch, rows: Int64[np.ndarray, " n"], tokens: Int64[np.ndarray, " m"]) -> Chunks:
    cu_q_lens = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(batch.q_lens[rows], out=cu_q_lens[1:])
    return Chunks(
        batch=RaggedBatch(kv_lens=batch.kv_lens[rows], page_indices=batch.page_indices[rows], cu_q_lens=cu_q_lens),
        tokens=tokens,
    )


def _shared(
    rows: Int64[np.ndarray, " n"], starts: Int64[np.ndarray, " n"], ends: Int64[np.ndarray, " n"], num_threads: int
) -> tuple[list[Int64[np.ndarray, "_ 5"]], Int64[np.ndarray, " extras"]]:
    """Gives every thread about as many keys, in the order of the tokens; returns its items and the extra slots."""
    lengths = ends - starts
    sums = np.cumsum(lengths)
    goals = sums[-1] * np.arange(1, num_threads) // num_threads
    reached = np.searchsorted(sums, goals, side="right")
    before = (sums - lengths)[reached]
    cuts = before + (goals - before) // _CUT * _CUT
    bounds = np.unique(np.concatenate([[0], sums, cuts]))
    tokens = np.searchsorted(sums, bounds[:-1], side="right")
    # Bounds count all keys of the batch; a token's own begin at its start.
    own = starts[tokens] - (sums - lengths)[tokens]
    first, last = bounds[:-1] + own, bounds[1:] + own
    extra = first > starts[tokens]
    slots = np.where(extra, len(rows) + np.cumsum(extra) - 1, tokens)
    items = np.stack([tokens, rows[tokens], first, last, slots], axis=1)
    shares = np.searchsorted(cuts, bounds[:-1], side="right")
    return [items[shares == thread] for thread in np.unique(shares)], tokens[extra]
