"""The passes of a decode program, of any layout of the pages.

One grid step walks a flat list of items (see `pallas_decode_items`). A *pass* works on four of them at once:

    item      prev          cur           next          (one more)    fetched
    work      normalise,    softmax, PV   QK            copies in     copies
              store                                     flight        started

so the matrix unit never waits for a maximum, a rotation, a division or a copy: all of them belong to other items, often
of other rows. Four buffers hold the last four. The common pass, all of whose blocks are full, is straight-line code
without a mask, and starts its copies while its last products drain.

The scores of a pass wait in `scores` for the next pass, which moves them to `current` before it overwrites them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.pallas_decode_compute import (
    LOWEST,
    TILE,
    Blocks,
    Columns,
    Visible,
    operand_of_q,
    products,
    weighted,
)
from attnd.kernels.pallas_decode_config import NUM_BUFFERS, SUBLANES, Chunk, DecodeConfig
from attnd.kernels.pallas_decode_items import Copies, Item, Items
from attnd.kernels.pallas_words import Ref

LOG2_E: Final = 1.4426950408889634
LN_2: Final = 0.6931471805599453
# Eighths of a full block's copies that start before its last chunk.
EARLY_COPIES: Final = 3


class State(NamedTuple):
    """What goes from pass to pass: the items in the pipeline, and the buffer of `cur` (the next ones follow it)."""

    prev: Item
    cur: Item
    next: Item
    later: Item
    fetched: Item
    slot: Any

    def slot_of(self, ahead: int) -> Any:
        """Returns the buffer that comes `ahead` items after that of `cur`."""
        return lax.rem(self.slot + ahead, NUM_BUFFERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How a score s enters the softmax: as s * unit, or, with a cap, as tanh(s * bend) * unit, in units of log2.

    Attributes:
        negative: Whether q changes its sign, because the scale is negative.
        bend: Scale divided by the cap; None without one.
        unit: Scale, or the cap, times log2(e). Not negative.
        v_scale: Scale of the values.
    """

    negative: Any
    bend: Any
    unit: Any
    v_scale: Any

    @classmethod
    def of(cls, scale: Any, soft_cap: Any, v_scale: Any) -> "Scaling":
        """Returns the scaling by `scale` and, unless it is None, by `soft_cap`."""
        size = jnp.abs(scale)
        bend = None if soft_cap is None else size / soft_cap
        unit = (size if soft_cap is None else soft_cap) * LOG2_E
        return cls(negative=scale < 0, bend=bend, unit=unit, v_scale=v_scale)

    def bent(self, scores: Any) -> Any:
        """Returns scores bent by the cap, if there is one."""
        return scores if self.bend is None else jnp.tanh(scores * self.bend)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Refs of a program in VMEM.

    Attributes:
        q: [num_rows, q_rows, lanes].
        out: The same.
        lse: float32 [num_rows, states * 8, 128], each state's tile; None if it is not wanted.
        scores: float32 [score_tiles, 8, 128], those of the next item.
        current: float32 [score_tiles, 8, 128], those of the current item.
        sums: float32 [q_rows, lanes], weighted values of the current row.
        highest: float32 [states, 8, 128], highest score of the next item in each lane.
        top: float32 [states, 8, 128], highest score of the current row.
        total: float32 [states, 8, 128], weights of the current row in each lane.
    """

    q: Ref
    out: Ref
    lse: Ref | None
    scores: Ref
    current: Ref
    sums: Ref
    highest: Ref
    top: Ref
    total: Ref

    @staticmethod
    def scratch(config: DecodeConfig) -> dict[str, Any]:
        """Returns what the program needs beside q, out and lse."""
        scores = pltpu.VMEM((config.score_tiles, *TILE), jnp.float32)
        state = pltpu.VMEM((config.states, *TILE), jnp.float32)
        sums = pltpu.VMEM((config.q_rows, config.lanes), jnp.float32)
        return {"scores": scores, "current": scores, "sums": sums, "highest": state, "top": state, "total": state}


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The kernel, of any layout of the pages: what differs is in `copies`, `blocks` and `columns`."""

    config: DecodeConfig
    memory: Memory
    scaling: Scaling
    items: Items
    copies: Copies
    blocks: Blocks
    columns: Columns

    def run(self) -> None:
        """Walks the items, then zeroes the rows that are not in use."""

        @pl.when(self.items.num_seqs > 0)
        def _() -> None:
            self.memory.sums[...] = jnp.zeros_like(self.memory.sums)
            self.memory.total[...] = jnp.zeros_like(self.memory.total)
            self.memory.top[...] = jnp.full_like(self.memory.top, LOWEST)
            self.memory.highest[...] = jnp.full_like(self.memory.highest, LOWEST)
            first = self.items.first(jnp.int32(0))
            second = self.items.following(first)
            self.copies.fetch(first, 0)
            self.copies.fetch(second, 1)
            third = self.items.following(second)
            start = State(Item.nothing(), Item.nothing(), first, second, third, jnp.int32(NUM_BUFFERS - 1))
            lax.while_loop(lambda state: state.prev.row < self.items.num_seqs, self._step, start)

        @pl.loop(self.items.num_seqs, self.config.num_rows)
        def _(row: Any) -> None:
            self.memory.out[row] = jnp.zeros(self.memory.out.shape[1:], self.memory.out.dtype)
            if self.memory.lse is not None:
                self.memory.lse[row] = jnp.full(self.memory.lse.shape[1:], -jnp.inf)

    def _step(self, state: State) -> State:
        """Runs a pass and moves the pipeline on. What the scalar core does in the fast pass is hidden under it."""
        full = self.config.block_tokens
        fast = self.items.is_full(state.cur) & self.items.is_full(state.next) & (state.fetched.tokens == full)
        if self.config.append:
            fast = fast & ~state.next.closes & ~state.prev.closes
        ahead = lax.cond(fast, self._fast_pass, self._masked_pass, state)
        return State(state.cur, state.next, state.later, state.fetched, ahead, state.slot_of(1))

    def _fast_pass(self, state: State) -> Item:
        """Runs the common pass: full blocks, nothing masked, no new token. One basic block.

        Copies may not pass reads of the buffers. Most start under the drain of the last products; it would be too short
        for all of a block of small pages, so some start before the last chunk.
        """
        self.copies.wait_full(state.slot_of(1))
        ahead = self.items.following(state.fetched)
        strips = range(self.config.strips_per_block)
        early = len(strips) * EARLY_COPIES // 8

        def fetch(part: range) -> None:
            self.copies.fetch_strips(state.fetched, state.slot_of(3), part)

        self._pass(state, self.config.block_tokens, None, None, lambda: fetch(strips[:early]))
        fetch(strips[early:])
        return ahead

    def _masked_pass(self, state: State) -> Item:
        """Runs the smallest pass that holds both items."""
        self.copies.wait(state.next, state.slot_of(1))
        self.copies.append(state.next, state.slot_of(1))
        self.copies.await_departure(state.prev, state.slot_of(3))
        self.copies.fetch(state.fetched, state.slot_of(3))
        cur, following = self._visible(state.cur), self._visible(state.next)
        tokens = jnp.maximum(cur.end, following.end)
        smaller = -1
        for size in self.config.pass_tokens:

            @pl.when((tokens > smaller) & (tokens <= size))
            def _(size: int = size) -> None:
                @pl.when(cur.end > 0)
                def _() -> None:
                    self.copies.clear(state.cur, state.slot, size)

                self._pass(state, size, cur, following)

            smaller = size
        return self.items.following(state.fetched)

    def _visible(self, item: Item) -> Visible:
        return Visible(first=item.skipped if self.config.windowed else None, end=item.tokens)

    def _pass(
        self,
        state: State,
        tokens: int,
        cur: Visible | None,
        following: Visible | None,
        before_last_chunk: Callable[[], None] = lambda: None,
    ) -> None:
        """Finishes `prev`, weighs the values of `cur` and scores `next`; all tokens count where Visible is None."""
        config, columns, memory = self.config, self.columns, self.memory
        chunks = config.chunks(tokens)
        for i in range(len(chunks) * config.chunk_tiles):  # frees `scores` for the next item
            memory.current[i] = self.scaling.bent(memory.scores[i])
        self._finish(state.prev)
        opens = state.cur.opens == 1
        alphas, tops, totals = [], [], []
        for i in range(config.states):
            old = jnp.where(opens, LOWEST, memory.top[i])
            tops.append(jnp.maximum(old, columns.over_tokens(self.scaling.bent(memory.highest[i]), jnp.maximum)))
            memory.top[i] = tops[i]
            alphas.append(jnp.exp2((old - tops[i]) * self.scaling.unit))
            totals.append(jnp.where(opens, 0.0, memory.total[i] * alphas[i]))
        sums = jnp.where(opens, 0.0, memory.sums[...] * columns.to_rows(alphas, config.lanes))  # old ones may be NaN
        q = operand_of_q(config, memory.q[jnp.clip(state.next.row, 0, config.num_rows - 1)], self.scaling.negative)
        highest = [jnp.full(TILE, LOWEST, jnp.float32)] * config.states
        for chunk in chunks:
            if chunk is chunks[-1]:
                before_last_chunk()
            self._score(q, state.slot_of(1), chunk, highest, following)
            sums = sums + self._weigh(state.slot, chunk, tops, totals, cur)
        for i in range(config.states):
            memory.highest[i], memory.total[i] = highest[i], totals[i]
        memory.sums[...] = sums

    def _score(self, q: Any, slot: Any, chunk: Chunk, highest: list[Any], visible: Visible | None) -> None:
        """Leaves the folded scores of a chunk in `scores`, and raises `highest` to those that count."""
        config, columns = self.config, self.columns
        scores = products(config, q, self.blocks.keys(slot, chunk))
        for i in range(config.chunk_tiles // config.fold):
            token = chunk.token + i * config.tile_tokens
            for f, folded in enumerate(columns.folded(scores, chunk, i)):
                score = self.blocks.scaled_score(folded, slot, chunk, token)
                self.memory.scores[chunk.tile + i * config.fold + f] = score
                counted = score if visible is None else jnp.where(columns.visible(visible, token), score, LOWEST)
                highest[chunk.state + f] = jnp.maximum(highest[chunk.state + f], counted)

    def _weigh(self, slot: Any, chunk: Chunk, tops: list[Any], totals: list[Any], visible: Visible | None) -> Any:
        """Returns a chunk's weighted sum of values, and adds its weights to `totals`."""
        config, columns = self.config, self.columns
        spread = []
        for i in range(config.chunk_tiles // config.fold):
            token = chunk.token + i * config.tile_tokens
            weights = []
            for f in range(config.fold):
                score = self.memory.current[chunk.tile + i * config.fold + f]
                weight = jnp.exp2((score - tops[chunk.state + f]) * self.scaling.unit)
                counts = None if visible is None else columns.visible(visible, token)
                weight = weight if counts is None else jnp.where(counts, weight, 0.0)
                totals[chunk.state + f] = totals[chunk.state + f] + weight
                weights.append(self.blocks.scaled_weight(weight, slot, chunk, token, counts))
            spread.append(columns.spread(weights, chunk))
        return weighted(config, jnp.concatenate(spread, 1), self.blocks.values(slot, chunk))

    def _finish(self, prev: Item) -> None:
        """Stores the output of the row of `prev` as if it ended there; the row's last item leaves the right one."""
        config, columns, memory = self.config, self.columns, self.memory
        row = jnp.clip(prev.row, 0, config.num_rows - 1)
        totals = [columns.over_tokens(memory.total[i], jnp.add) for i in range(config.states)]
        scales = [jnp.where(total == 0.0, 0.0, self.scaling.v_scale / total) for total in totals]
        scale = columns.to_rows(scales, config.lanes)
        # The sums of an empty row may be NaN.
        memory.out[row] = jnp.where(scale == 0.0, 0.0, memory.sums[...] * scale).astype(memory.out.dtype)
        if memory.lse is None:
            return
        for i, total in enumerate(totals):
            lse = memory.top[i] * (self.scaling.unit * LN_2) + jnp.log(total)
            memory.lse[row, i * SUBLANES : (i + 1) * SUBLANES] = jnp.where(total == 0.0, -jnp.inf, lse)
