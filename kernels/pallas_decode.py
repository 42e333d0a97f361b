"""Decode attention for TPU over the interleaved layout: one query token a row, pages read in place, append fused.

See `pallas_decode_program` for how it works.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from attnd.kernels.pallas_decode_compute import Blocks, Columns
from attnd.kernels.pallas_decode_config import LANES, NUM_BUFFERS, SUBLANES, DecodeConfig
from attnd.kernels.pallas_decode_items import Copies, Items
from attnd.kernels.pallas_decode_program import Memory, Program, Scaling
from attnd.kernels.pallas_words import Ref


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
    inputs = [rows_of_q(config, q)]
    if k is not None and v is not None:
        new = padded(jnp.stack([k, v], 2), (config.num_rows, config.heads, 2, config.lanes))
        new = new.reshape(config.num_rows, config.rows_per_token, config.lanes)
        inputs.append(jnp.tile(new, (1, config.aligned_tokens, 1)))
    pool = padded(kv_pages, config.pool_shape)
    inputs.append(pool.reshape(config.num_pages, -1, config.lanes))
    shaped: Any = jax.ShapeDtypeStruct
    outputs = [shaped(inputs[0].shape, q.dtype)]
    if config.return_lse:
        outputs.append(shaped((config.num_rows, config.states * SUBLANES, LANES), jnp.float32))
    outputs.append(shaped(inputs[-1].shape, kv_pages.dtype))
    in_vmem, in_hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    results = pl.pallas_call(
        lambda *refs: _program(config, refs, interpret=bool(interpret)).run(),
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
    return heads_of_rows(config, results[0]), lse, kv_pages


def padded(x: Shaped[Array, "..."], shape: tuple[int, ...]) -> Shaped[Array, "..."]:
    """Pads with zeros; XLA drops it where there is nothing to pad."""
    return jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def rows_of_q(config: DecodeConfig, q: Float[Array, "rows num_q_heads head_dim"]) -> Float[Array, "rows q_rows lanes"]:
    """Pads the query heads of each kv head, and head_dim, with zeros."""
    q = q.reshape(config.num_rows, config.num_kv_heads, config.group_size, config.head_dim)
    q = padded(q, (config.num_rows, config.heads, config.group_rows, config.lanes))
    return q.reshape(config.num_rows, config.q_rows, config.lanes)


def heads_of_rows(
    config: DecodeConfig, out: Float[Array, "rows q_rows lanes"]
) -> Float[Array, "rows num_q_heads head_dim"]:
    """Returns the output without what pads it: the inverse of `rows_of_q`."""
    out = out.reshape(config.num_rows, config.heads, config.group_rows, config.lanes)
    out = out[:, : config.num_kv_heads, : config.group_size, : config.head_dim]
    return out.reshape(config.num_rows, config.num_q_heads, config.head_dim)


def _lse_of_heads(config: DecodeConfig, tiles: Float32[Array, "rows sub lanes"]) -> Float32[Array, "rows heads"]:
    """Picks each query head's value out of the folded tiles, where it stands at (row, kv head)."""
    kv_head = jnp.arange(config.num_q_heads) // config.group_size
    row = kv_head * config.group_rows + jnp.arange(config.num_q_heads) % config.group_size
    return tiles[:, row % (SUBLANES * config.fold), kv_head]


def _scratch(config: DecodeConfig) -> dict[str, Any]:
    dtype = jnp.dtype(config.kv_dtype)
    aligned_rows = config.aligned_tokens * config.rows_per_token
    scratch = Memory.scratch(config) | {
        "blocks": pltpu.VMEM((NUM_BUFFERS, config.block_tokens * config.rows_per_token, config.lanes), dtype),
        "arrivals": pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
    }
    if config.append:
        scratch["departures"] = pltpu.SemaphoreType.DMA((NUM_BUFFERS,))
        if config.aligned_tokens > 1:
            scratch["staged"] = pltpu.VMEM((NUM_BUFFERS, aligned_rows, config.lanes), dtype)
    return scratch


def _program(config: DecodeConfig, refs: tuple[Ref, ...], *, interpret: bool) -> Program:
    """Gives the refs their names: those of `_scratch` come last."""
    left = iter(refs)
    # Scalar prefetch.
    kv_lens = next(left)  # [num_rows]
    page_indices = next(left)  # [num_rows * pages_per_seq]
    num_seqs, window, sm_scale, k_scale, v_scale, soft_cap = (next(left)[0] for _ in range(6))
    # Inputs.
    q = next(left)  # [num_rows, q_rows, lanes]
    new = next(left) if config.append else None  # [num_rows, aligned_tokens * rows_per_token, lanes]
    next(left)  # the pool, which is the last output too
    # Outputs.
    out = next(left)  # [num_rows, q_rows, lanes]
    lse = next(left) if config.return_lse else None  # [num_rows, states * 8, 128]
    pool = next(left)  # [num_pages, page_size * rows_per_token, lanes]
    scratch = dict(zip(_scratch(config), left, strict=True))
    items = Items(config=config, kv_lens=kv_lens, num_seqs=num_seqs, window=window if config.windowed else None)
    return Program(
        config=config,
        memory=Memory(q=q, out=out, lse=lse, **{name: scratch[name] for name in Memory.scratch(config)}),
        scaling=Scaling.of(sm_scale * k_scale, soft_cap if config.capped else None, v_scale),
        items=items,
        copies=Copies(
            items=items,
            page_indices=page_indices,
            pool=pool,
            blocks=scratch["blocks"],
            arrivals=scratch["arrivals"],
            new=new,
            staged=scratch.get("staged"),
            departures=scratch.get("departures"),
        ),
        blocks=Blocks(config=config, ref=scratch["blocks"], interpret=interpret),
        columns=Columns(config),
    )
