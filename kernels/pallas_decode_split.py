"""Decode attention for TPU over the split layout, with the contract of JAX's `paged_attention`, scales and all.

See `pallas_decode_program` for how it works.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32, Shaped

from attnd.kernels.contract import INT8_SCALE
from attnd.kernels.pallas_decode import heads_of_rows, padded, rows_of_q
from attnd.kernels.pallas_decode_config import LANES, NUM_BUFFERS, SUBLANES
from attnd.kernels.pallas_decode_items import Items
from attnd.kernels.pallas_decode_program import Memory, Program, Scaling
from attnd.kernels.pallas_decode_split_parts import HeadBlocks, HeadColumns, SplitCopies, SplitDecodeConfig
from attnd.kernels.pallas_words import Ref


def decode_split(
    config: SplitDecodeConfig,
    q: Float[Array, "num_rows num_q_heads head_dim"],
    k_pages: Shaped[Array, "num_kv_heads num_pages page_size lanes"],
    v_pages: Shaped[Array, "num_kv_heads num_pages page_size lanes"],
    lengths: Int32[Array, " num_rows"],
    page_indices: Int32[Array, "num_rows pages_per_seq"],
    *,
    k_scales: Float32[Array, "..."] | None = None,
    v_scales: Float32[Array, "..."] | None = None,
    sm_scale: Float32[Array, ""] | float = 1.0,
    attn_logits_soft_cap: Float32[Array, ""] | float | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "num_rows num_q_heads head_dim"], Float32[Array, "num_rows num_q_heads"] | None]:
    """Attends with one query token a row, softmax(q K^T sm_scale) V, in float32. To be traced under `jax.jit`.

    Args:
        config: The static part; not `windowed`, not `append`.
        q: Queries.
        k_pages: Keys, of `config.pool_shape`; with a last axis of `head_dim` they are padded, which copies them.
        v_pages: Values, shaped likewise.
        lengths: Tokens that each row attends over; 0 for an empty row.
        page_indices: Page ids. Slots past a row's length are not followed.
        k_scales: Scale of each token of int8 keys, whose value is int8 * scale / 127.5; given if and only if
            `config.scaled`. Of `config.scales_shape`; [num_kv_heads, num_pages, page_size, 1] is turned into it, which
            copies all of them.
        v_scales: Scales of the values.
        sm_scale: Scale of the scores; 1.0 in JAX's kernel.
        attn_logits_soft_cap: Bends scores; given if and only if `config.capped`.
        interpret: Runs in TPU interpret mode.

    Returns:
        The output, zero in empty rows; and the natural log-sum-exp of the scores, -inf in empty rows, None unless
        `config.return_lse`.
    """
    assert not config.windowed
    assert not config.append
    assert (k_scales is not None) == (v_scales is not None) == config.scaled
    assert (attn_logits_soft_cap is not None) == config.capped
    unscaled = 1.0 / INT8_SCALE if config.scaled else 1.0
    cap = 0.0 if attn_logits_soft_cap is None else attn_logits_soft_cap
    prefetched = [lengths, page_indices.reshape(-1), jnp.asarray(sm_scale, jnp.float32).reshape(1) * unscaled]
    prefetched.append(jnp.asarray(cap, jnp.float32).reshape(1))
    inputs = [rows_of_q(config, q)]
    in_hbm = [padded(pages, config.pool_shape) for pages in (k_pages, v_pages)]
    if k_scales is not None and v_scales is not None:
        in_hbm += [_scales_of_rows(config, scales, lengths, page_indices) for scales in (k_scales, v_scales)]
    shaped: Any = jax.ShapeDtypeStruct
    outputs = [shaped(inputs[0].shape, q.dtype)]
    if config.return_lse:
        outputs.append(shaped((config.num_rows, config.states * SUBLANES, LANES), jnp.float32))
    vmem, hbm = pl.BlockSpec(memory_space=pltpu.VMEM), pl.BlockSpec(memory_space=pltpu.HBM)
    results = pl.pallas_call(
        lambda *refs: _program(config, refs, unscaled, interpret=bool(interpret)).run(),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(1,),
            in_specs=[vmem] + [hbm] * len(in_hbm),
            out_specs=[vmem] * len(outputs),
            scratch_shapes=list(_scratch(config).values()),
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            disable_bounds_checks=True, disable_semaphore_checks=True, vmem_limit_bytes=config.vmem_bytes
        ),
        interpret=interpret,
        name="decode_split",
    )(*prefetched, *inputs, *in_hbm)
    lse = _lse_of_heads(config, results[1]) if config.return_lse else None
    return heads_of_rows(config, results[0]), lse


def _scales_of_rows(
    config: SplitDecodeConfig,
    scales: Float32[Array, "..."],
    lengths: Int32[Array, " num_rows"],
    page_indices: Int32[Array, "num_rows pages_per_seq"],
) -> Float32[Array, "num_rows num_kv_heads scale_tokens"]:
    """Gathers the scales of each row's tokens side by side: those of one small page are too short for a copy."""
    if scales.ndim == 4:
        scales = scales[..., 0].swapaxes(0, 1).reshape(config.scales_shape)
    used = jnp.arange(config.pages_per_seq) * config.page_size < lengths[:, None]
    pages = jnp.where(used, page_indices.reshape(config.num_rows, config.pages_per_seq), 0)
    rows = scales[pages].reshape(config.num_rows, config.pages_per_seq, config.heads, config.page_size)
    rows = rows.swapaxes(1, 2).reshape(config.num_rows, config.heads, -1)
    return padded(rows, (config.num_rows, config.heads, config.scale_tokens))


def _lse_of_heads(
    config: SplitDecodeConfig, tiles: Float32[Array, "rows sub lanes"]
) -> Float32[Array, "rows num_q_heads"]:
    """Picks each query head's value out of the tiles of its kv head."""
    kv_head = jnp.arange(config.num_q_heads) // config.group_size
    row = kv_head * config.group_rows + jnp.arange(config.num_q_heads) % config.group_size
    per_head = SUBLANES * config.fold
    return tiles[:, kv_head * per_head + row % per_head, 0]


def _scratch(config: SplitDecodeConfig) -> dict[str, Any]:
    pages = pltpu.VMEM(
        (NUM_BUFFERS, config.heads, config.block_tokens, config.lanes), jnp.dtype(config.kv_dtype)
    )  # fmt: skip
    scratch = Memory.scratch(config) | {
        "blocks": pages,
        "value_blocks": pages,
        "arrivals": pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
    }
    if config.scaled:
        scales = pltpu.VMEM((NUM_BUFFERS, config.heads, config.block_tokens), jnp.float32)
        scratch |= {"k_scales": scales, "v_scales": scales}
    return scratch


def _program(config: SplitDecodeConfig, refs: tuple[Ref, ...], v_scale: float, *, interpret: bool) -> Program:
    """Gives the refs their names: those of `_scratch` come last."""
    left = iter(refs)
    # Scalar prefetch.
    lengths = next(left)  # [num_rows]
    page_indices = next(left)  # [num_rows * pages_per_seq]
    scale, soft_cap = (next(left)[0] for _ in range(2))
    # Inputs.
    q = next(left)  # [num_rows, q_rows, lanes]
    k_pool, v_pool = next(left), next(left)  # [heads, num_pages, page_size, lanes]
    scale_pools = [next(left) for _ in range(2 * config.scaled)]  # [num_rows, heads, scale_tokens]
    # Outputs.
    out = next(left)  # [num_rows, q_rows, lanes]
    lse = next(left) if config.return_lse else None  # [num_rows, states * 8, 128]
    scratch = dict(zip(_scratch(config), left, strict=True))
    scales = (scratch["k_scales"], scratch["v_scales"]) if config.scaled else None
    items = Items(config=config, kv_lens=lengths, num_seqs=config.num_rows, window=None)
    return Program(
        config=config,
        memory=Memory(q=q, out=out, lse=lse, **{name: scratch[name] for name in Memory.scratch(config)}),
        scaling=Scaling.of(scale, soft_cap if config.capped else None, v_scale),
        items=items,
        copies=SplitCopies(
            items=items,
            page_indices=page_indices,
            pool=k_pool,
            blocks=scratch["blocks"],
            arrivals=scratch["arrivals"],
            new=None,
            staged=None,
            departures=None,
            value_pool=v_pool,
            value_blocks=scratch["value_blocks"],
            scales=tuple(zip(scale_pools, scales or (), strict=True)),
        ),
        blocks=HeadBlocks(
            config=config,
            ref=scratch["blocks"],
            interpret=interpret,
            values_ref=scratch["value_blocks"],
            scales=scales,
        ),
        columns=HeadColumns(config),
    )
