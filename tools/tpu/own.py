"""Our own kernels as programs to compile, at any shape."""

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnd.kernels import pallas_blocks
from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, Layout
from attnd.kernels.pallas_blocks import Features, Tuning
from attnd.kernels.pallas_chunk import chunk as chunk_kernel
from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_decode import decode as decode_kernel
from attnd.kernels.pallas_decode_config import DecodeConfig
from attnd.kernels.pallas_decode_split import decode_split
from attnd.kernels.pallas_decode_split_parts import SplitDecodeConfig
from attnd.kernels.pallas_plan import LaunchShape
from attnd.kernels.pallas_pool import PoolShape, append_tokens, clear_pages, copy_pages, write_pages
from attnd.kernels.pallas_programs import Program, Programs
from attnd.kernels.pallas_quantized import array_shapes, set_quantized_pages, set_quantized_tokens
from attnd.kernels.tpu_chips import CHIPS
from tools.tpu.programs import INT32, array, lower
from tools.tpu.shapes import LLAMA


def decode(devices: Any, **changes: Any) -> Any:
    """The decode kernel; new tokens are appended unless told otherwise."""
    config = DecodeConfig(**LLAMA | {"append": True} | changes)

    def function(q: Any, kv: Any, lens: Any, table: Any, num_seqs: Any, k: Any, v: Any, scalars: Any) -> Any:
        new = {"k": k, "v": v} if config.append else {}
        return decode_kernel(config, q, kv, lens, table, num_seqs, **new, **_given(config, scalars))

    return lower(devices, function, _arguments(config, config.num_rows), donate=(1,))


def chunk(devices: Any, **changes: Any) -> Any:
    """The chunk kernel; new tokens are appended unless told otherwise."""
    shape = LLAMA | {"num_rows": 8, "num_tokens": 1024, "append": True} | changes
    config = ChunkConfig(**{name: value for name, value in shape.items() if name in _names(ChunkConfig)})

    def function(
        q: Any, kv: Any, lens: Any, table: Any, num_seqs: Any, k: Any, v: Any, scalars: Any, cu_q_lens: Any
    ) -> Any:
        new = {"k": k, "v": v} if config.append else {}
        return chunk_kernel(config, q, kv, lens, table, cu_q_lens, num_seqs, **new, **_given(config, scalars))

    arguments = (*_arguments(config, config.num_tokens), array((config.num_rows + 1,), INT32))
    return lower(devices, function, arguments, donate=(1,))


def split(devices: Any, **changes: Any) -> Any:
    """The decode kernel of int8 pages of layout SPLIT, with a scale for each token and head."""
    config = SplitDecodeConfig(**LLAMA | {"kv_dtype": "int8", "scaled": True} | changes)

    def function(q: Any, k: Any, v: Any, lens: Any, table: Any, k_scales: Any, v_scales: Any, sm_scale: Any) -> Any:
        return decode_split(config, q, k, v, lens, table, k_scales=k_scales, v_scales=v_scales, sm_scale=sm_scale)

    pages, scales = array(config.pool_shape, config.kv_dtype), array(config.scales_shape, jnp.float32)
    arguments = (
        array((config.num_rows, config.num_q_heads, config.head_dim), config.q_dtype),
        pages,
        pages,
        array((config.num_rows,), INT32),
        array((config.num_rows, config.pages_per_seq), INT32),
        scales,
        scales,
        array((), jnp.float32),
    )
    return lower(devices, function, arguments)


def _arguments(config: DecodeConfig | ChunkConfig, num_tokens: int) -> tuple[Any, ...]:
    new = array((num_tokens, config.num_kv_heads, config.head_dim), config.kv_dtype)
    scalar = array((), jnp.float32)
    return (
        array((num_tokens, config.num_q_heads, config.head_dim), config.q_dtype),
        array((config.num_pages, config.page_size, 2 * config.num_kv_heads, config.head_dim), config.kv_dtype),
        array((config.num_rows,), INT32),
        array((config.num_rows, config.pages_per_seq), INT32),
        array((1,), INT32),
        new,
        new,
        {"sm_scale": scalar, "soft_cap": scalar, "k_scale": scalar, "v_scale": scalar,
         "sliding_window": array((), INT32)},
    )  # fmt: skip


def _given(config: DecodeConfig | ChunkConfig, scalars: dict[str, Any]) -> dict[str, Any]:
    """Returns the scalars that a call of this config takes; they are arguments, as in use."""
    unused = {name for name, used in (("soft_cap", config.capped), ("sliding_window", config.windowed)) if not used}
    return {name: value for name, value in scalars.items() if name not in unused}


def _names(config: type) -> set[str]:
    return {each.name for each in fields(config)}


def cache_spec(spec: dict[str, Any]) -> CacheSpec:
    """Returns a cache out of what JSON can carry."""
    return CacheSpec(**spec | {"layout": Layout(spec["layout"]), "dtype": CACHE_DTYPES[spec["dtype"]]})


def attnd(
    devices: Any,
    *,
    spec: dict[str, Any],
    num_q_heads: int,
    q_dtype: str,
    shape: dict[str, int],
    features: dict[str, bool],
    generation: str,
    limits: bool = True,
) -> Any:
    """A program as the server runs it: padding, one of the kernels, the pool donated."""
    cache = cache_spec(spec)
    launch = LaunchShape(**shape)
    tuning = Tuning(chip=CHIPS[generation], limits=limits)
    make = pallas_blocks.decode_config if launch.is_decode else pallas_blocks.chunk_config
    config = make(cache, num_q_heads, q_dtype, launch, Features(**features), tuning)
    return Programs(devices[0], interpret=False).lower(Program(spec=cache, num_q_heads=num_q_heads, config=config))


def moved(devices: Any, *, spec: dict[str, Any], move: str, size: int = 64) -> Any:
    """What writes, clears or copies `size` pages, or appends as many tokens, of a layer ahead of any kernel."""
    cache = cache_spec(spec)
    indices, values = array((size,), INT32), array(cache.pages_shape(size), cache.dtype)
    if cache.quantized_per_token:
        return _moved_quantized(devices, cache, move, size)
    pool = PoolShape.of(cache)
    arguments: dict[str, tuple[Any, ...]] = {
        "write": (partial(write_pages, cache), indices, values),
        "clear": (clear_pages, indices),
        "copy": (copy_pages, indices, indices),
        "append": (
            partial(append_tokens, cache), indices, indices,
            array((size, cache.num_kv_heads, 2, cache.head_dim), cache.dtype),
        ),
    }  # fmt: skip
    function, *rest = arguments[move]
    return lower(devices, function, (array(pool.array_shape, pool.dtype), *rest), donate=(0,))


def _moved_quantized(devices: Any, cache: CacheSpec, move: str, size: int) -> Any:
    """The same for K or V of an int8 cache with a scale for each token, which is cleared and copied by writing."""
    indices = array((size,), INT32)
    weights_shape, scales_shape = array_shapes(cache)
    weights, scales = array(weights_shape, jnp.int8), array(scales_shape, jnp.float32)
    new = array((size, cache.num_kv_heads, cache.head_dim), jnp.int8)
    if move == "append":
        arguments = (weights, scales, (indices, indices), new, array((*new.shape[:-1], 1), jnp.float32))
        return lower(devices, set_quantized_tokens, arguments, donate=(0, 1))
    pages = array(cache.pages_shape(size)[1:], jnp.int8)
    arguments = (weights, scales, (indices,), pages, array((*pages.shape[:-1], 1), jnp.float32))
    return lower(devices, set_quantized_pages, arguments, donate=(0, 1))


def sharded(devices: Any, *, kernel: str, num_devices: int = 4, **changes: Any) -> Any:
    """A kernel under `shard_map` over kv heads: each device has its heads of q, of the new tokens and of the pool."""
    shape = LLAMA | {"num_tokens": 1024, "append": True} | changes
    local = {name: shape[name] // num_devices for name in ("num_q_heads", "num_kv_heads")}
    config: DecodeConfig | ChunkConfig
    if kernel == "decode":
        config = DecodeConfig(
            **{name: value for name, value in (shape | local).items() if name in _names(DecodeConfig)}
        )
    else:
        config = ChunkConfig(**{name: value for name, value in (shape | local).items() if name in _names(ChunkConfig)})
    mesh = Mesh(np.array(devices[:num_devices]), ("heads",))
    whole, heads, pool_heads = PartitionSpec(), PartitionSpec(None, "heads"), PartitionSpec(None, None, "heads")
    specs = (heads, pool_heads, whole, whole, whole, whole, heads, heads)

    def function(q: Any, kv: Any, lens: Any, table: Any, cu_q_lens: Any, num_seqs: Any, k: Any, v: Any) -> Any:
        if isinstance(config, DecodeConfig):
            return decode_kernel(config, q, kv, lens, table, num_seqs, k=k, v=v)[::2]
        pool = kv.reshape(config.pool_shape)
        out, _, pool = chunk_kernel(config, q, pool, lens, table, cu_q_lens, num_seqs, k=k, v=v)
        return out, pool.reshape(kv.shape)

    rows, tokens = config.num_rows, config.num_tokens if isinstance(config, ChunkConfig) else config.num_rows
    new = array((tokens, shape["num_kv_heads"], shape["head_dim"]), config.kv_dtype)
    arguments = (
        array((tokens, shape["num_q_heads"], shape["head_dim"]), config.q_dtype),
        array((config.num_pages, config.page_size, 2 * shape["num_kv_heads"], shape["head_dim"]), config.kv_dtype),
        array((rows,), INT32),
        array((rows, config.pages_per_seq), INT32),
        array((rows + 1,), INT32),
        array((1,), INT32),
        new,
        new,
    )
    placed = tuple(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))
        for x, spec in zip(arguments, specs, strict=True)
    )
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=(heads, pool_heads), check_vma=False)
        return jax.jit(mapped, donate_argnums=1).trace(*placed).lower(lowering_platforms=("tpu",))
