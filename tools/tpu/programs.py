"""The programs that are compiled for TPUs: other people's kernels, at the shapes at which ours are compared with them.

Each function takes the topology's devices and gives a lowered program. Only the child process imports them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention, quantization_utils
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

INT32 = jnp.int32


def lower(devices: Any, function: Any, arguments: tuple[Any, ...], *, donate: tuple[int, ...] = ()) -> Any:
    """Returns a function lowered for the first device."""
    # Other people's kernels ask the mesh which TPU they are for.
    mesh = Mesh(np.array(devices[:1]), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    with jax.set_mesh(mesh):
        return jax.jit(function, donate_argnums=donate).trace(*placed).lower(lowering_platforms=("tpu",))


def array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of an argument."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def jax_ragged(
    devices: Any,
    *,
    num_tokens: int = 64,
    num_seqs: int = 64,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    num_pages: int = 4096,
    pages_per_seq: int = 128,
    q_dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    pages_per_block: int = 8,
    queries_per_block: int = 32,
    vmem_limit_bytes: int | None = 64 << 20,
    soft_cap: float | None = None,
    sliding_window: int | None = None,
) -> Any:
    """JAX's ragged kernel."""
    function = partial(
        ragged_paged_attention,
        sm_scale=head_dim**-0.5, soft_cap=soft_cap, sliding_window=sliding_window,
        num_kv_pages_per_block=pages_per_block, num_queries_per_block=queries_per_block,
        vmem_limit_bytes=vmem_limit_bytes,
    )  # fmt: skip
    return lower(devices, function, (
        array((num_tokens, num_q_heads, head_dim), q_dtype),
        array((num_pages, page_size, 2 * num_kv_heads, head_dim), kv_dtype),
        array((num_seqs,), INT32),
        array((num_seqs, pages_per_seq), INT32),
        array((num_seqs + 1,), INT32),
        array((1,), INT32),
    ))  # fmt: skip


def jax_paged(
    devices: Any,
    *,
    num_seqs: int = 64,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 16,
    num_pages: int = 4096,
    pages_per_seq: int = 128,
    q_dtype: str = "bfloat16",
    kv_dtype: str = "bfloat16",
    pages_per_block: int = 8,
    soft_cap: float | None = None,
    megacore_mode: str | None = None,
    inline_seq_dim: bool = True,
) -> Any:
    """JAX's decode kernel."""
    pages: Any = array((num_kv_heads, num_pages, page_size, head_dim), kv_dtype)
    if kv_dtype == "int8":
        scales = array((num_kv_heads, num_pages, page_size, 1), jnp.float32)
        pages = quantization_utils.QuantizedTensor(pages, scales)
    function = partial(
        paged_attention,
        pages_per_compute_block=pages_per_block, attn_logits_soft_cap=soft_cap,
        megacore_mode=megacore_mode, inline_seq_dim=inline_seq_dim,
    )  # fmt: skip
    return lower(devices, function, (
        array((num_seqs, num_q_heads, head_dim), q_dtype),
        pages,
        pages,
        array((num_seqs,), INT32),
        array((num_seqs, pages_per_seq), INT32),
    ))  # fmt: skip


def flywheel(
    devices: Any,
    *,
    num_tokens: int = 64,
    num_seqs: int = 64,
    num_q_heads: int = 32,
    num_kv_heads: int = 8,
    head_dim: int = 128,
    page_size: int = 128,
    num_pages: int = 2048,
    pages_per_seq: int = 32,
) -> Any:
    """flywheel-tpu with its own block sizes: decode, with the append fused, or prefill if there are more tokens."""
    from flywheel_tpu import flash_attn_with_kvcache  # noqa: PLC0415 - a peer that may not be installed

    bf16 = jnp.bfloat16
    decode = num_tokens == num_seqs

    def function(q: Any, kv: Any, k: Any, v: Any, lens: Any, table: Any, cu_q_lens: Any) -> Any:
        options = {"causal": True, "cache_seqlens": lens, "block_table": table}
        if decode:
            return flash_attn_with_kvcache(q[:, None], kv, None, k[:, None], v[:, None], **options)
        return flash_attn_with_kvcache(q, kv, None, k, v, cu_seqlens_q=cu_q_lens, **options)

    new = array((num_tokens, num_kv_heads, head_dim), bf16)
    arguments = (
        array((num_tokens, num_q_heads, head_dim), bf16),
        array((num_pages, page_size, 2 * num_kv_heads, head_dim), bf16),
        new,
        new,
        array((num_seqs,), INT32),
        array((num_seqs, pages_per_seq), INT32),
        array((num_seqs + 1,), INT32),
    )
    return lower(devices, function, arguments, donate=(1,))
