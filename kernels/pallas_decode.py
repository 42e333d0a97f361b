"""Decode attention for TPU over the interleaved layout: one query token a row, pages read in place, append fused.

One grid step walks a flat list of items (see `pallas_decode_items`). A *pass* works on four of them at once:

    item      prev          cur           next          (one more)    fetched
    work      normalise,    softmax, PV   QK            copies in     copies
              store                                     flight        started

so the matrix unit never waits for a maximum, a rotation, a division or a copy: all of them belong to other items, often
of other rows. Four buffers hold the last four. The common pass, all of whose blocks are full, is straight-line code
without a mask, and starts its copies while its last products drain.

The scores of a pass wait in `scores` for the next pass, which moves them to `current` before it overwrites them.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

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
from attnd.kernels.pallas_decode_config import LANES, NUM_BUFFERS, SUBLANES, DecodeConfig
from attnd.kernels.pallas_decode_items import Copies, Item, Items
from attnd.kernels.pallas_words import Ref

LOG2_E: Final = 1.4426950408889634
LN_2: Final = 0.6931471805599453
# Eighths of a full block's copies that start before its last chunk.
EARLY_COPIES: Final = 3


def decode(
    config: DecodeConfig,
    q: Float[Array, "num_rows num_q_heads head_dim"],
    kv_pages: Shaped[Array, "num_pages page_size rows_per_token lanes"],
    kv_lens: Int32[Array, " num_rows"],
    page_indices: Int32[Array, "num_rows pages_per_seq"],
    num_seqs: Int32[Array, " 1"],
    *,
    k: Shaped[Array, "num_rows num_kv_heads head_dim"] | None = None,
    v: Shaped[Array, "num_rows num_kv_heads head_dim"] | None = None,
    sm_scale: Float32[Array, ""] | float = 1.0,
    soft_cap: Float32[Array, ""] | float | None = None,
    sliding_window: Int32[Array, ""] | int | None = None,
    k_scale: Float32[Array, ""] | float = 1.0,
    v_scale: Float32[Array, ""] | float = 1.0,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[
    Float[Array, "num_rows num_q_heads head_dim"],
    Float32[Array, "num_rows num_q_heads"] | None,
    Shaped[Array, "num_pages page_size rows_per_token lanes"],
]:
    """Attends with one query token a row, softmax((q K^T) sm_scale k_scale) V v_scale, in float32.

    To be traced under `jax.jit`; a new config compiles, a new scalar does not. `kv_pages` is aliased to the last
    result: donate it. That holds for a pool of `config.pool_shape`; any other is padded, which copies it. A float32
    pool is attended over in float32, any other with bfloat16 products.

    Args:
        config: The static part.
        q: Queries. Rows past `num_seqs` may hold anything.
        kv_pages: Pool, k at even and v at odd head index: `config.pool_shape`, or [num_pages, page_size,
            2 * num_kv_heads, head_dim]. Only tokens of rows in use are read.
        kv_lens: Tokens that each row attends over, the new one included; 0 for an empty row.
        page_indices: Page ids. Slots past a row's `kv_lens` are never read.
        num_seqs: Rows in use.
        k: New keys in the pool's dtype, written at `kv_lens` - 1; given if and only if `config.append`.
        v: New values.
        sm_scale: Scale of the scores.
        soft_cap: Bends scores to (-soft_cap, soft_cap) before masking; given if and only if `config.capped`.
        sliding_window: Tokens that a query sees, itself included; given if and only if `config.windowed`.
        k_scale: Scale of the stored keys.
        v_scale: Scale of the stored values.
        interpret: Runs in TPU interpret mode.

    Returns:
        The output, zero in rows that are empty or past `num_seqs`; the natural log-sum-exp of the scores, -inf in such
        rows, None unless `config.return_lse`; and the pool with the new tokens in their pages.
    """
    assert (k is not None) == (v is not None) == config.append
    assert (sliding_window is not None) == config.windowed
    assert (soft_cap is not None) == config.capped
    scalars = [
        jnp.asarray(0 if x is None else x, jnp.float32).reshape(1) for x in (sm_scale, k_scale, v_scale, soft_cap)
    ]
    window = jnp.asarray(0 if sliding_window is None else sliding_window, jnp.int32).reshape(1)
    prefetched = [kv_lens, page_indices.reshape(-1), num_seqs, window, *scalars]
    inputs = [_rows_of_q(config, q)]
    if k is not None and v is not None:
        new = _padded(jnp.stack([k, v], 2), (config.num_rows, config.heads, 2, config.lanes))
        new = new.reshape(config.num_rows, config.rows_per_token, config.lanes)
        inputs.append(jnp.tile(new, (1, config.aligned_tokens, 1)))
    pool = _padded(kv_pages, config.pool_shape)
    inputs.append(pool.reshape(config.num_pages, -1, config.lanes))
    shaped: Any = jax.ShapeDtypeStruct
    outputs = [shaped(inputs[0].shape, q.dtype)]
    if config.return_lse:
        outputs.append(shaped((config.num_rows, config.fold * SUBLANES, LANES), jnp.float32))
    outputs.append(shaped(inputs[-1].shape, kv_pages.dtype))
    in_vmem, in_hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    results = pl.pallas_call(
        lambda *refs: _Program(config, refs, bool(interpret)).run(),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(1,),
            in_specs=[in_vmem] * (len(inputs) - 1) + [in_hbm],
            out_specs=[in_vmem] * (len(outputs) - 1) + [in_hbm],
            scratch_shapes=list(_scratch(config).values()),
        ),
        out_shape=outputs,
        input_output_aliases={len(prefetched) + len(inputs) - 1: len(outputs) - 1},
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True, disable_semaphore_checks=True, vmem_limit_bytes=config.vmem_bytes
        ),
        interpret=interpret,
        name="decode",
    )(*prefetched, *inputs)
    lse = _lse_of_heads(config, results[1]) if config.return_lse else None
    kv_pages = results[-1].reshape(pool.shape)[:, :, : kv_pages.shape[2], : kv_pages.shape[3]]
    return _heads_of_rows(config, results[0]), lse, kv_pages


def _padded(x: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """Pads with zeros; XLA drops it where there is nothing to pad."""
    return jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def _rows_of_q(config: DecodeConfig, q: Float[Array, "rows num_q_heads head_dim"]) -> Float[Array, "rows q_rows lanes"]:
    q = q.reshape(config.num_rows, config.num_kv_heads, config.group_size, config.head_dim)
    q = _padded(q, (config.num_rows, config.heads, config.group_rows, config.lanes))
    return q.reshape(config.num_rows, config.q_rows, config.lanes)


def _heads_of_rows(
    config: DecodeConfig, out: Float[Array, "rows q_rows lanes"]
) -> Float[Array, "rows num_q_heads head_dim"]:
    out = out.reshape(config.num_rows, config.heads, config.group_rows, config.lanes)
    out = out[:, : config.num_kv_heads, : config.group_size, : config.head_dim]
    return out.reshape(config.num_rows, config.num_q_heads, config.head_dim)


def _lse_of_heads(config: DecodeConfig, tiles: Float32[Array, "rows sub lanes"]) -> Float32[Array, "rows heads"]:
    """Picks each query head's value out of the folded tiles, where it stands at (row, kv head)."""
    kv_head = jnp.arange(config.num_q_heads) // config.group_size
    row = kv_head * config.group_rows + jnp.arange(config.num_q_heads) % config.group_size
    return tiles[:, row % (SUBLANES * config.fold), kv_head]


def _scratch(config: DecodeConfig) -> dict[str, Any]:
    aligned_rows, dtype = config.aligned_tokens * config.rows_per_token, jnp.dtype(config.kv_dtype)
    state = pltpu.VMEM((config.fold, *TILE), jnp.float32)
    scratch = {
        "blocks": pltpu.VMEM((NUM_BUFFERS, config.block_tokens * config.rows_per_token, config.lanes), dtype),
        "arrivals": pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
        "scores": pltpu.VMEM((config.score_tiles, *TILE), jnp.float32),
        "current": pltpu.VMEM((config.score_tiles, *TILE), jnp.float32),
        "sums": pltpu.VMEM((config.q_rows, config.lanes), jnp.float32),
        "highest": state,
        "top": state,
        "total": state,
    }
    if config.append:
        scratch["departures"] = pltpu.SemaphoreType.DMA((NUM_BUFFERS,))
        if config.aligned_tokens > 1:
            scratch["staged"] = pltpu.VMEM((NUM_BUFFERS, aligned_rows, config.lanes), dtype)
    return scratch


class _State(NamedTuple):
    """What goes from pass to pass: the items in the pipeline, and the buffer of `cur` (the next ones follow it)."""

    prev: Item
    cur: Item
    next: Item
    later: Item
    fetched: Item
    slot: Any

    def slot_of(self, ahead: int) -> Any:
        return lax.rem(self.slot + ahead, NUM_BUFFERS)


class _Program:
    """The kernel. Its refs carry their names in `_scratch`; shapes of the others stand in `__init__`."""

    def __init__(self, config: DecodeConfig, refs: tuple[Ref, ...], interpret: bool) -> None:
        left: Iterator[Ref] = iter(refs)
        # Scalar prefetch.
        kv_lens = next(left)  # [num_rows]
        page_indices = next(left)  # [num_rows * pages_per_seq]
        self.num_seqs = next(left)[0]
        window = next(left)[0]
        scale = next(left)[0] * next(left)[0]  # sm_scale, k_scale
        self.v_scale = next(left)[0]
        soft_cap = next(left)[0]
        # Inputs.
        self.q = next(left)  # [num_rows, q_rows, lanes]
        new = next(left) if config.append else None  # [num_rows, aligned_tokens * rows_per_token, lanes]
        next(left)  # the pool, which is the last output too
        # Outputs.
        self.out = next(left)  # [num_rows, q_rows, lanes]
        self.lse = next(left) if config.return_lse else None  # [num_rows, fold * 8, 128]
        pool = next(left)  # [num_pages, page_size * rows_per_token, lanes]
        scratch = dict(zip(_scratch(config), left, strict=True))
        self.scores, self.current = scratch["scores"], scratch["current"]
        self.sums, self.highest, self.top, self.total = (scratch[n] for n in ("sums", "highest", "top", "total"))

        self.config = config
        self.negative = scale < 0
        # A score s enters the softmax as s * unit; with a cap, as tanh(s * bend) * unit. Both in units of log2.
        self.bend = jnp.abs(scale) / soft_cap if config.capped else None
        self.unit = (soft_cap if config.capped else jnp.abs(scale)) * LOG2_E
        self.columns = Columns(config)
        self.blocks = Blocks(config=config, ref=scratch["blocks"], interpret=interpret)
        self.items = Items(
            config=config, kv_lens=kv_lens, num_seqs=self.num_seqs, window=window if config.windowed else None
        )
        self.copies = Copies(
            items=self.items,
            page_indices=page_indices,
            pool=pool,
            blocks=scratch["blocks"],
            arrivals=scratch["arrivals"],
            new=new,
            staged=scratch.get("staged"),
            departures=scratch.get("departures"),
        )

    def run(self) -> None:
        """Walks the items, then zeroes the rows that are not in use."""

        @pl.when(self.num_seqs > 0)
        def _() -> None:
            self.sums[...] = jnp.zeros_like(self.sums)
            self.total[...] = jnp.zeros_like(self.total)
            self.top[...] = jnp.full_like(self.top, LOWEST)
            self.highest[...] = jnp.full_like(self.highest, LOWEST)
            first = self.items.first(jnp.int32(0))
            second = self.items.following(first)
            self.copies.fetch(first, 0)
            self.copies.fetch(second, 1)
            third = self.items.following(second)
            start = _State(Item.nothing(), Item.nothing(), first, second, third, jnp.int32(NUM_BUFFERS - 1))
            lax.while_loop(lambda state: state.prev.row < self.num_seqs, self._step, start)

        @pl.loop(self.num_seqs, self.config.num_rows)
        def _(row: Any) -> None:
            self.out[row] = jnp.zeros(self.out.shape[1:], self.out.dtype)
            if self.lse is not None:
                self.lse[row] = jnp.full(self.lse.shape[1:], -jnp.inf)

    def _step(self, state: _State) -> _State:
        """Runs a pass and moves the pipeline on. What the scalar core does in the fast pass is hidden under it."""
        full = self.config.block_tokens
        fast = self.items.is_full(state.cur) & self.items.is_full(state.next) & (state.fetched.tokens == full)
        if self.config.append:
            fast = fast & ~state.next.closes & ~state.prev.closes
        ahead = lax.cond(fast, self._fast_pass, self._masked_pass, state)
        return _State(state.cur, state.next, state.later, state.fetched, ahead, state.slot_of(1))

    def _fast_pass(self, state: _State) -> Item:
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

    def _masked_pass(self, state: _State) -> Item:
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
        state: _State,
        tokens: int,
        cur: Visible | None,
        following: Visible | None,
        before_last_chunk: Callable[[], None] = lambda: None,
    ) -> None:
        """Finishes `prev`, weighs the values of `cur` and scores `next`; all tokens count where Visible is None."""
        config, columns = self.config, self.columns
        tiles = tokens // config.tile_tokens * config.fold
        for i in range(tiles):  # frees `scores` for the next item
            score = self.scores[i]
            self.current[i] = score if self.bend is None else jnp.tanh(score * self.bend)
        self._finish(state.prev)
        starts = state.cur.opens == 1
        alphas, tops, totals = [], [], []
        for f in range(config.fold):
            old = jnp.where(starts, LOWEST, self.top[f])
            highest = self.highest[f] if self.bend is None else jnp.tanh(self.highest[f] * self.bend)
            tops.append(jnp.maximum(old, columns.over_tokens(highest, jnp.maximum)))
            self.top[f] = tops[f]
            alphas.append(jnp.exp2((old - tops[f]) * self.unit))
            totals.append(jnp.where(starts, 0.0, self.total[f] * alphas[f]))
        sums = self.sums[...] * columns.to_rows(alphas, config.lanes)
        sums = jnp.where(starts, 0.0, sums)  # what came before may be NaN
        q = operand_of_q(config, self.q[jnp.clip(state.next.row, 0, config.num_rows - 1)], self.negative)
        highest = [jnp.full(TILE, LOWEST, jnp.float32)] * config.fold
        chunks = tokens // config.chunk_tokens
        for chunk in range(chunks):
            if chunk == chunks - 1:
                before_last_chunk()
            self._score(q, state.slot_of(1), chunk, highest, following)
            sums = sums + self._weigh(state.slot, chunk, tops, totals, cur)
        for f in range(config.fold):
            self.highest[f], self.total[f] = highest[f], totals[f]
        self.sums[...] = sums

    def _score(self, q: Any, slot: Any, chunk: int, highest: list[Any], visible: Visible | None) -> None:
        """Leaves the folded scores of a chunk in `scores`, and raises `highest` to those that count."""
        config, columns = self.config, self.columns
        scores = products(config, q, self.blocks.keys(slot, chunk))
        per_chunk = config.chunk_tokens // config.tile_tokens
        for t in range(per_chunk):
            tile = chunk * per_chunk + t
            for f, score in enumerate(columns.folded(scores, t)):
                self.scores[tile * config.fold + f] = score
                counted = score
                if visible is not None:
                    counted = jnp.where(columns.visible(visible, tile * config.tile_tokens), score, LOWEST)
                highest[f] = jnp.maximum(highest[f], counted)

    def _weigh(self, slot: Any, chunk: int, tops: list[Any], totals: list[Any], visible: Visible | None) -> Any:
        """Returns a chunk's weighted sum of values, and adds its weights to `totals`."""
        config, columns = self.config, self.columns
        per_chunk = config.chunk_tokens // config.tile_tokens
        spread = []
        for t in range(per_chunk):
            tile = chunk * per_chunk + t
            weights = []
            for f in range(config.fold):
                weight = jnp.exp2((self.current[tile * config.fold + f] - tops[f]) * self.unit)
                if visible is not None:
                    weight = jnp.where(columns.visible(visible, tile * config.tile_tokens), weight, 0.0)
                totals[f] = totals[f] + weight
                weights.append(weight)
            spread.append(columns.spread(weights))
        return weighted(config, jnp.concatenate(spread, 1), self.blocks.values(slot, chunk))

    def _finish(self, prev: Item) -> None:
        """Stores the output of the row of `prev` as if it ended there; the row's last item leaves the right one."""
        config, columns = self.config, self.columns
        row = jnp.clip(prev.row, 0, config.num_rows - 1)
        totals = [columns.over_tokens(self.total[f], jnp.add) for f in range(config.fold)]
        scales = [jnp.where(t == 0.0, 0.0, self.v_scale / t) for t in totals]
        scale = columns.to_rows(scales, config.lanes)
        # The sums of an empty row may be NaN.
        self.out[row] = jnp.where(scale == 0.0, 0.0, self.sums[...] * scale).astype(self.out.dtype)
        if self.lse is None:
            return
        for f, total in enumerate(totals):
            lse = self.top[f] * (self.unit * LN_2) + jnp.log(total)
            self.lse[row, f * SUBLANES : (f + 1) * SUBLANES] = jnp.where(total == 0.0, -jnp.inf, lse)
