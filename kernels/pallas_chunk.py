"""The chunk kernel: paged attention for sequences that bring several query tokens (prefill, chunks, mixed batches).

A tile is up to `query_block` queries of one sequence with all their heads. The kernel walks the tiles in order, and
the kv blocks of a tile from the last to the first: those that need a mask in edge steps, the others on the fast path
(see `pallas_chunk_compute`). While a block is worked on, the next block's pages arrive in the other buffer, be it of
this tile or the next; queries arrive a tile ahead, and answers leave while the next tile is worked on.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Bool, Float, Float32, Int32, Shaped

from attnd.kernels import pallas_chunk_compute as compute
from attnd.kernels import pallas_chunk_schedule as schedule
from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_chunk_schedule import Count, Refs, Scalar, Tile
from attnd.kernels.pallas_pool import moved
from attnd.kernels.pallas_put import put_tokens, scatters_in_place

_F32, _I32 = jnp.float32, jnp.int32
# Larger windows are all alike; differences of positions with this one still fit int32.
_WINDOW_MAX = 1 << 30
_SCALARS = ("kv_lens", "cu_q_lens", "table", "num_seqs", "window", "factors")
_SEMAPHORES = ("q_semaphore", "out_semaphore", "append_semaphore", "kv_semaphores")


def chunk(
    config: ChunkConfig,
    q: Float[jax.Array, "num_tokens num_q_heads head_dim"],
    kv_pages: Shaped[jax.Array, "num_pages ..."],
    kv_lens: Int32[jax.Array, " num_rows"],
    page_indices: Int32[jax.Array, "num_rows pages_per_seq"],
    cu_q_lens: Int32[jax.Array, " num_rows+1"],
    num_seqs: Int32[jax.Array, " 1"],
    *,
    k: Shaped[jax.Array, "num_tokens num_kv_heads head_dim"] | None = None,
    v: Shaped[jax.Array, "num_tokens num_kv_heads head_dim"] | None = None,
    sm_scale: Any = 1.0,
    soft_cap: Any = None,
    sliding_window: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Attends causally, each query at its place at the end of its sequence.

    Sums and products accumulate in float32. Keys and values are multiplied as bfloat16 unless the cache is float32,
    weights likewise.

    Args:
        config: What selects the program. A new one compiles.
        q: Queries of row `i` at [cu_q_lens[i], cu_q_lens[i + 1]). Rows elsewhere are not looked at.
        kv_pages: The pool, [num_pages, page_size, 2 * num_kv_heads, head_dim] with K at even heads, or the same memory
            as `config.pool_shape`. The first form is free where it needs no padding: head_dim a multiple of 128 and
            a power of two of kv heads; elsewhere it is copied, so keep the pool in the second form. Padding lanes
            are zero. Donated, if k and v are given: the result aliases it.
        kv_lens: Tokens of each row with the new ones, at least its queries.
        page_indices: Page ids; slots past a row's length are not looked at.
        cu_q_lens: Where each row's queries begin and end. It need not begin at 0.
        num_seqs: Rows that count. 0 is fine, so are rows without queries.
        k: New keys, at the places of q; written to their pages before any query looks.
        v: New values.
        sm_scale: Factor of the scores.
        soft_cap: Bends scores to cap * tanh(score / cap), if `config.capped`.
        sliding_window: Keys that a query sees, itself included, if `config.windowed`.
        k_scale: Factor of the stored keys.
        v_scale: Factor of the stored values.
        interpret: False, or `pltpu.InterpretParams`.

    Returns:
        out: As q; exactly zero outside [cu_q_lens[0], cu_q_lens[num_seqs]).
        lse: Float32 [num_tokens, num_q_heads], natural log of the sum of exponentials of the scores, -inf outside;
            None unless `config.return_lse`.
        kv_pages: The pool, in the form it came.
    """
    out, lse, pool, _ = _run(
        config, q, kv_pages, (kv_lens, page_indices, cu_q_lens, num_seqs), k, v,
        _scalars(config, sm_scale, soft_cap, sliding_window, k_scale, v_scale), interpret,
    )  # fmt: skip
    return out, lse, pool


def chunk_counted(
    config: ChunkConfig, q: jax.Array, kv_pages: jax.Array, kv_lens: jax.Array, page_indices: jax.Array,
    cu_q_lens: jax.Array, num_seqs: jax.Array, *, k: jax.Array | None = None, v: jax.Array | None = None,
    sm_scale: Any = 1.0, soft_cap: Any = None, sliding_window: Any = None, k_scale: Any = None, v_scale: Any = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None, jax.Array, Int32[jax.Array, " counts"]]:  # fmt: skip
    """Attends as `chunk` does and returns what it did, too: an entry for each `Count`. For `config.counted`."""
    out, lse, pool, counts = _run(
        config, q, kv_pages, (kv_lens, page_indices, cu_q_lens, num_seqs), k, v,
        _scalars(config, sm_scale, soft_cap, sliding_window, k_scale, v_scale), interpret,
    )  # fmt: skip
    assert counts is not None
    return out, lse, pool, counts


def _scalars(
    config: ChunkConfig, sm_scale: Any, soft_cap: Any, sliding_window: Any, k_scale: Any, v_scale: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the window [1] and the factors of scores, of capped scores and of values [3]."""
    scale = jnp.asarray(sm_scale, _F32) * jnp.asarray(1.0 if k_scale is None else k_scale, _F32)
    cap = jnp.asarray(soft_cap if config.capped else 1.0, _F32)
    factor = scale / cap if config.capped else scale * compute.LOG2E
    values = jnp.asarray(1.0 if v_scale is None else v_scale, _F32)
    window = jnp.minimum(jnp.asarray(sliding_window if config.windowed else _WINDOW_MAX, _I32), _WINDOW_MAX)
    return window.reshape(1), jnp.stack([factor, cap * compute.LOG2E, values])


def _run(
    config: ChunkConfig,
    q: jax.Array,
    kv_pages: jax.Array,
    metadata: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    k: jax.Array | None,
    v: jax.Array | None,
    scalars: tuple[jax.Array, jax.Array],
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None, jax.Array, jax.Array | None]:
    """Lays arguments out as the kernel takes them, calls it, and lays its results out as callers want them."""
    kv_lens, page_indices, cu_q_lens, num_seqs = metadata
    pad_lanes = config.lanes - config.head_dim
    q_padding = ((0, 0), (0, config.q_rows_per_token - config.num_q_heads), (0, pad_lanes))
    q_rows = jnp.pad(q, q_padding).reshape(-1, config.lanes)
    pool = kv_pages
    if pool.ndim == 4:
        pool = jnp.pad(pool, ((0, 0),) * 3 + ((0, pad_lanes),)).reshape(config.pool_shape)
    inputs = [q_rows, pool]
    if config.append:
        assert k is not None
        assert v is not None
        pairs = jnp.stack([k, v], axis=2).astype(pool.dtype)
        new_kv = jnp.pad(pairs, ((0, 0),) * 3 + ((0, pad_lanes),)).reshape(-1, config.lanes)
        if config.append_in_kernel:
            inputs = [q_rows, pool, new_kv]
        else:
            inputs = [q_rows, _scatter(config, pool, new_kv, metadata, interpret)]
    results = _call(config, [kv_lens, cu_q_lens, page_indices.reshape(-1), num_seqs, *scalars], inputs, interpret)
    out = results["out"].reshape(-1, config.q_rows_per_token, config.lanes)
    out = out[:, : config.num_q_heads, : config.head_dim]
    lse = _lse_of_tokens(config, results["lse"], cu_q_lens, num_seqs) if config.return_lse else None
    if not config.append:
        return out, lse, kv_pages, results.get("counts")
    pool = results["pool"] if config.append_in_kernel else inputs[1]
    if kv_pages.ndim == 4:
        pool = pool.reshape(*kv_pages.shape[:3], config.lanes)[..., : config.head_dim]
    return out, lse, pool, results.get("counts")


def _call(
    config: ChunkConfig, scalars: list[jax.Array], inputs: list[jax.Array], interpret: Any
) -> dict[str, jax.Array]:
    """Calls the kernel; returns its results by name."""
    # Not `pl.ANY`: XLA would copy a pool that is small enough to VMEM and back.
    hbm, smem = (pl.BlockSpec(memory_space=space) for space in (pltpu.HBM, pltpu.SMEM))
    q_rows, pool = inputs[:2]
    outputs: dict[str, tuple[Any, Any]] = {"out": (_shape(q_rows.shape, q_rows.dtype), hbm)}
    if config.append_in_kernel:
        outputs["pool"] = (_shape(pool.shape, pool.dtype), hbm)
    if config.return_lse:
        outputs["lse"] = (_shape((config.tiles_max, *config.lse_shape), _F32), hbm)
    if config.counted:
        outputs["counts"] = (_shape((len(Count),), _I32), smem)
    scratch = config.scratch_shapes()
    input_names = ["q", "pool_in", "new_kv"] if config.append_in_kernel else ["q", "pool"]
    names = [*_SCALARS, *input_names, *outputs, *scratch, *_SEMAPHORES]
    results = pl.pallas_call(
        functools.partial(_kernel, config=config, names=tuple(names), interpreted=bool(interpret)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[hbm] * len(inputs),
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=[
                *(pltpu.VMEM(shape, dtype) for shape, dtype in scratch.values()),
                *[pltpu.SemaphoreType.DMA(())] * 3,
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=[shape for shape, _ in outputs.values()],
        input_output_aliases={len(scalars) + 1: list(outputs).index("pool")} if config.append_in_kernel else {},
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True,
            disable_semaphore_checks=True,
            vmem_limit_bytes=config.vmem_limit_bytes,
        ),
        interpret=interpret,
        name="attnd_chunk",
    )(*scalars, *inputs)
    return dict(zip(outputs, results, strict=True))


def _shape(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def _lse_of_tokens(
    config: ChunkConfig,
    lse: Float32[jax.Array, "tiles items columns"],
    cu_q_lens: Int32[jax.Array, " num_rows+1"],
    num_seqs: Int32[jax.Array, " 1"],
) -> Float32[jax.Array, "num_tokens num_q_heads"]:
    """Returns the log-sum-exp of each token, out of the tiles'."""
    starts = cu_q_lens[:-1]
    rows = jnp.arange(config.num_rows, dtype=_I32)
    q_lens = jnp.where(rows < num_seqs[0], cu_q_lens[1:] - starts, 0)
    tiles = -(-q_lens // config.query_block)
    token = jnp.arange(config.num_tokens, dtype=_I32)
    row, inside = _rows_of_tokens(config, cu_q_lens, num_seqs)
    part, place = jnp.divmod(token - starts[row], config.query_block)
    tile = (jnp.cumsum(tiles) - tiles)[row] + part
    column = jnp.arange(config.num_q_heads)[:, jnp.newaxis] % config.group * config.query_block + place
    item = jnp.arange(config.num_q_heads)[:, jnp.newaxis] // config.group * config.items_per_head
    values = lse[tile, item + column // config.columns, column % config.columns].T
    return jnp.where(inside[:, jnp.newaxis], values, -jnp.inf)


def _rows_of_tokens(
    config: ChunkConfig, cu_q_lens: Int32[jax.Array, " num_rows+1"], num_seqs: Int32[jax.Array, " 1"]
) -> tuple[Int32[jax.Array, " num_tokens"], Bool[jax.Array, " num_tokens"]]:
    """Returns the row of each token, and whether it has one."""
    token = jnp.arange(config.num_tokens, dtype=_I32)
    # The ends of rows that do not count may hold anything; put past all tokens they keep the order.
    counts = jnp.arange(config.num_rows) < num_seqs[0]
    ends = jnp.where(counts, cu_q_lens[1:], config.num_tokens)
    row = jnp.minimum(jnp.searchsorted(ends, token, side="right"), config.num_rows - 1).astype(_I32)
    return row, counts[row] & (token >= cu_q_lens[0]) & (token < cu_q_lens[row + 1])


def _scatter(
    config: ChunkConfig,
    pool: Shaped[jax.Array, "num_pages rows lanes"],
    new_kv: Shaped[jax.Array, "new_rows lanes"],
    metadata: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    interpret: Any,
) -> Shaped[jax.Array, "num_pages rows lanes"]:
    """Writes new tokens to their pages; in place if the pool is donated."""
    kv_lens, page_indices, cu_q_lens, num_seqs = metadata
    row, inside = _rows_of_tokens(config, cu_q_lens, num_seqs)
    token = jnp.arange(config.num_tokens, dtype=_I32)
    slot, offset = jnp.divmod(jnp.maximum(token + kv_lens[row] - cu_q_lens[row + 1], 0), config.page_size)
    # Indices past the pool are dropped, and distinct as promised.
    page = jnp.where(inside, page_indices[row, jnp.minimum(slot, config.pages_per_seq - 1)], config.num_pages + token)
    tokens = new_kv.reshape(-1, config.rows_per_token, config.lanes)
    if not scatters_in_place(pool.dtype, config.lanes):
        return put_tokens(pool, page, offset, tokens, interpret=interpret)
    rows = offset[:, jnp.newaxis] * config.rows_per_token + jnp.arange(config.rows_per_token, dtype=_I32)

    def scatter(pool: jax.Array, tokens: jax.Array) -> jax.Array:
        return pool.at[page[:, jnp.newaxis], rows].set(tokens, mode="drop", unique_indices=True)

    return moved(scatter, pool, tokens)


# ---- The kernel.
def _kernel(*references: Any, config: ChunkConfig, names: tuple[str, ...], interpreted: bool) -> None:
    """Walks the tiles."""
    by_name = dict(zip(names, references, strict=True))
    by_name.pop("pool_in", None)  # the same memory as the result
    refs = Refs(config=config, interpreted=interpreted, **by_name)
    num_seqs = refs.num_seqs[0]
    if refs.counts is not None:
        for what in Count:
            refs.counts[what] = 0
    if config.append_in_kernel:
        schedule.append_new_tokens(refs)
    row, part = schedule.first_tile(refs)

    @pl.when(row < num_seqs)
    def _() -> None:
        tile = schedule.tile_at(refs, row, part)
        schedule.copy_queries(refs, tile, schedule.start)
        schedule.fetch_block(refs, tile, tile.top, 0)
        zero = jnp.int32(0)
        state = lax.while_loop(
            lambda state: state[0] < num_seqs,
            functools.partial(_tile, refs),
            (row, part, zero, zero, zero, zero),
        )
        _answers_left(refs, state[2], state[5])

    begin = jnp.where(num_seqs > 0, refs.cu_q_lens[0], 0)
    schedule.zero_answers(refs, 0, begin)
    schedule.zero_answers(refs, jnp.where(num_seqs > 0, refs.cu_q_lens[num_seqs], 0), config.num_tokens)


def _answers_left(refs: Refs, index: Scalar, rows: Scalar) -> None:
    """Waits until the answers of the tile before tile `index`, of `rows` queries, have left their buffers."""
    schedule.copy_answers(refs, 0, rows, schedule.wait)
    schedule.copy_lse(refs, index - 1, schedule.wait)


def _tile(refs: Refs, state: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """Attends for one tile, or finds that its anchors were too low and asks to be called again.

    Args:
        refs: The kernel's references.
        state: Row and part of the tile; its index; nonzero if it runs again; the buffer in which its first block
            arrives; rows of the tile before.

    Returns:
        The next state.
    """
    row, part, index, exact, slot, rows_before = state
    num_seqs = refs.num_seqs[0]
    tile = schedule.tile_at(refs, row, part)
    next_row, next_part = schedule.following_tile(refs, row, part)
    more = next_row < num_seqs
    ahead = schedule.tile_at(refs, next_row, next_part)

    @pl.when(exact == 0)
    def _() -> None:
        schedule.copy_queries(refs, tile, schedule.wait)
        compute.build_queries(refs, tile)
        pl.when(more)(lambda: schedule.copy_queries(refs, ahead, schedule.start))

    @pl.when(exact != 0)
    def _() -> None:  # the buffer is taken by the next tile's first block
        pl.when(more)(lambda: schedule.await_block(refs, ahead, ahead.top, slot))
        schedule.fetch_block(refs, tile, tile.top, slot)

    compute.reset(refs)
    slot = lax.fori_loop(0, tile.top - tile.low + 1, functools.partial(_block, refs, tile, ahead, more, exact), slot)
    again = (exact == 0) & compute.overflowed(refs)
    refs.count(Count.RERUNS, again.astype(_I32))

    @pl.when(jnp.logical_not(again))
    def _() -> None:
        pl.when(index > 0)(lambda: _answers_left(refs, index, rows_before))
        compute.store_answers(refs)
        schedule.copy_answers(refs, tile.first, tile.rows, schedule.start)
        schedule.copy_lse(refs, index, schedule.start)
        refs.count(Count.TILES)

    done = (next_row, next_part, index + 1, jnp.int32(0), slot, tile.rows)
    repeat = (row, part, index, jnp.int32(1), slot, rows_before)
    return tuple(jnp.where(again, *choice) for choice in zip(repeat, done, strict=True))


def _block(refs: Refs, tile: Tile, ahead: Tile, more: Scalar, exact: Scalar, nth: Scalar, slot: Scalar) -> Scalar:
    """Attends to one block of a tile while the next block arrives; returns the next block's buffer."""
    config = refs.config
    block = tile.top - nth

    interior = (block >= tile.inner_low) & (block < tile.inner_top) & (exact == 0)
    # Inside a run of interior blocks the next block is whole: its copies are started in the middle of the arithmetic,
    # where they cost nothing.
    inside = interior & (block > tile.inner_low)

    @pl.when(jnp.logical_not(inside) & (block > tile.low))
    def _() -> None:
        schedule.fetch_block(refs, tile, block - 1, 1 - slot)

    @pl.when((block == tile.low) & more)
    def _() -> None:
        schedule.fetch_block(refs, ahead, ahead.top, 1 - slot)

    schedule.await_block(refs, tile, block, slot)
    if config.has_interior:
        pl.when(interior & (block == tile.inner_top - 1))(lambda: compute.begin_interior(refs))

        @pl.when(inside)
        def _() -> None:
            schedule.fetch_whole_block(refs, tile, block - 1, 1 - slot)
            compute.interior_block(refs, slot)

        @pl.when(interior & jnp.logical_not(inside))
        def _() -> None:
            compute.interior_block(refs, slot)
            compute.end_interior(refs)

        refs.count(Count.INTERIOR_BLOCKS, interior.astype(_I32))

    @pl.when(jnp.logical_not(interior))
    def _() -> None:
        first, stop = schedule.edge_steps(refs, tile, block)
        pl.loop(first, stop)(lambda step: compute.edge_step(refs, tile, block, slot, step, exact))
        refs.count(Count.EDGE_STEPS, stop - first)

    return 1 - slot
