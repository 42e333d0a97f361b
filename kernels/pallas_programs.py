"""Compiled programs of our kernels: what a launch calls, with every scalar at run time."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Shaped

from attnd.kernels.contract import AttentionOptions, CacheSpec
from attnd.kernels.pallas_blocks import Features
from attnd.kernels.pallas_chunk import chunk
from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_decode import decode
from attnd.kernels.pallas_decode_config import DecodeConfig
from attnd.kernels.pallas_decode_split import decode_split
from attnd.kernels.pallas_decode_split_parts import SplitDecodeConfig
from attnd.kernels.pallas_plan import Launch
from attnd.kernels.pallas_pool import PoolShape, padded_heads

# Interpret mode simulates one TPU for the whole process: its users take turns.
INTERPRETER: Final = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What selects a program.

    Attributes:
        spec: The cache.
        num_q_heads: Query heads.
        config: The kernel's config; the chunk kernel's has the pool's heads.
    """

    spec: CacheSpec
    num_q_heads: int
    config: DecodeConfig | ChunkConfig

    @property
    def num_tokens(self) -> int:
        """Rows of q."""
        return self.config.num_tokens if isinstance(self.config, ChunkConfig) else self.config.num_rows


class Programs:
    """Compiles, counts and runs programs on one device."""

    def __init__(self, device: jax.Device, *, interpret: pltpu.InterpretParams | bool) -> None:
        self._device = device
        self._platform = device.platform
        self._interpret = pltpu.InterpretParams() if interpret is True else interpret
        self._compiled: dict[Program, jax.stages.Compiled] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, program: Program) -> bool:
        return program in self._compiled

    def compile(self, program: Program) -> None:
        """Compiles a program. Different threads may, at the same time."""
        options = interpreter_options() if self._interpret else None
        self._compiled[program] = self.lower(program).compile(compiler_options=options)

    def lower(self, program: Program) -> jax.stages.Lowered:
        """Returns a program before it is compiled. The pool is donated, and is the last result."""
        # Pallas asks the mesh for which TPU it compiles: the device may be one of a topology that is not here.
        mesh = Mesh(np.array([self._device]), ("device",))
        sharding = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
        arguments = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding),  # type: ignore[no-untyped-call]
            argument_shapes(program),
        )

        def run(pool: Any, arguments: Any) -> Any:
            return attend(program, pool, arguments, interpret=self._interpret)

        with jax.set_mesh(mesh):
            traced = jax.jit(run, donate_argnums=_donated(program.config)).trace(*arguments)
            lowered: jax.stages.Lowered = traced.lower(lowering_platforms=(self._platform,))
            return lowered

    def place(self, values: Any) -> Any:
        """Returns arrays on the device."""
        return jax.device_put(values, self._device)

    def run(self, program: Program, pool: Any, arguments: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Runs a compiled program; returns output, log-sum-exp and the pool, which may still be on their way."""
        compiled = self._compiled[program]
        if not self._interpret:
            results: tuple[Any, Any, Any] = compiled(pool, arguments)
            return results
        with INTERPRETER:
            results = compiled(pool, arguments)
            jax.block_until_ready(results)  # type: ignore[no-untyped-call]
            return results


def interpreter_options() -> dict[str, Any]:
    """Returns compiler options for interpret mode: its programs are large, run once, and should not be optimised."""
    options: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    if jax.__version_info__ < (0, 11):  # XLA has lost the option since
        options["xla_cpu_use_fusion_emitters"] = False
    return options


def _donated(config: DecodeConfig | ChunkConfig) -> tuple[int, ...]:
    """Returns which arguments a program takes over: the pool, unless it only reads it."""
    return () if isinstance(config, SplitDecodeConfig) else (0,)


def features_of(options: AttentionOptions, *, append: bool) -> Features:
    """Returns what a call uses."""
    return Features(
        append=append,
        windowed=options.sliding_window is not None,
        capped=options.soft_cap is not None,
        return_lse=options.return_lse,
    )


def argument_shapes(program: Program) -> tuple[Any, dict[str, Any]]:
    """Returns the shapes of the pool and of the other arguments."""
    spec, config = program.spec, program.config
    pool = PoolShape.of(spec)
    shapes: dict[str, Any] = {
        "q": ((program.num_tokens, program.num_q_heads, spec.head_dim), config.q_dtype),
        "kv_lens": ((config.num_rows,), "int32"),
        "page_indices": ((config.num_rows, config.pages_per_seq), "int32"),
        "num_seqs": ((1,), "int32"),
        **dict.fromkeys(("sm_scale", "k_scale", "v_scale"), ((), "float32")),
    }
    if isinstance(config, ChunkConfig):
        shapes["cu_q_lens"] = ((config.num_rows + 1,), "int32")
    if config.capped:
        shapes["soft_cap"] = ((), "float32")
    if config.windowed:
        shapes["sliding_window"] = ((), "int32")
    if config.append:
        shapes["k"] = shapes["v"] = ((program.num_tokens, spec.num_kv_heads, spec.head_dim), spec.dtype)
    arguments = {name: _array(*shape) for name, shape in shapes.items()}
    if isinstance(config, SplitDecodeConfig):
        weights, scales = _array(config.pool_shape, pool.dtype), _array(config.scales_shape, "float32")
        return (weights, weights, scales, scales), arguments
    return _array(pool.array_shape, pool.dtype), arguments


def arguments_of(
    program: Program,
    launch: Launch,
    metadata: Mapping[str, jax.Array],
    q: Float[np.ndarray, "tokens num_q_heads head_dim"],
    k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None,
    v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None,
    options: AttentionOptions,
) -> dict[str, Any]:
    """Returns the arguments of a launch; what pads them may hold anything."""
    config = program.config
    arguments: dict[str, Any] = dict(metadata)
    arrays = {"q": (q, np.dtype(config.q_dtype))}
    if k is not None and v is not None:
        arrays |= {"k": (k, k.dtype), "v": (v, v.dtype)}
    for name, (values, dtype) in arrays.items():
        padded = np.zeros((program.num_tokens, *values.shape[1:]), dtype)
        padded[: len(launch.tokens)] = values[launch.tokens]
        arguments[name] = padded
    arguments["sm_scale"] = np.float32(options.sm_scale)
    arguments["k_scale"] = np.float32(options.k_scale or 1.0)
    arguments["v_scale"] = np.float32(options.v_scale or 1.0)
    if options.soft_cap is not None:
        arguments["soft_cap"] = np.float32(options.soft_cap)
    if options.sliding_window is not None:
        arguments["sliding_window"] = np.int32(min(options.sliding_window, 2**31 - 1))
    if not isinstance(config, ChunkConfig):
        del arguments["cu_q_lens"]
    return arguments


def attend(
    program: Program, pool: Any, arguments: Mapping[str, Any], *, interpret: Any
) -> tuple[jax.Array, jax.Array | None, Any]:
    """Calls the kernel with the pool in its form, and heads padded where it leaves that to its caller.

    Returns:
        Output, log-sum-exp, and the pool; None for a pool that is only read.
    """
    spec, config = program.spec, program.config
    given = dict(arguments)
    q, kv_lens, page_indices, num_seqs = (given.pop(name) for name in ("q", "kv_lens", "page_indices", "num_seqs"))
    if isinstance(config, SplitDecodeConfig):
        keys, values, k_scales, v_scales = pool
        # A row past the batch is empty: its length is 0.
        out, lse = decode_split(
            config, q, keys, values, kv_lens, page_indices, k_scales=k_scales, v_scales=v_scales,
            sm_scale=given["sm_scale"] * given["k_scale"], attn_logits_soft_cap=given.get("soft_cap"),
            interpret=interpret,
        )  # fmt: skip
        return (out * given["v_scale"]).astype(out.dtype), lse, None
    if isinstance(config, DecodeConfig):
        kv = pool.reshape(config.pool_shape)
        out, lse, kv = decode(config, q, kv, kv_lens, page_indices, num_seqs, **given, interpret=interpret)
        return out, lse, kv.reshape(pool.shape)

    def padded(values: jax.Array) -> jax.Array:
        return padded_heads(spec, values, 1)[..., : spec.head_dim]

    q = q.reshape(-1, spec.num_kv_heads, program.num_q_heads // spec.num_kv_heads, spec.head_dim)
    q = padded(q).reshape(-1, config.num_q_heads, spec.head_dim)
    if config.append:
        given |= {name: padded(given[name]) for name in ("k", "v")}
    cu_q_lens = given.pop("cu_q_lens")
    out, lse, pool = chunk(config, q, pool, kv_lens, page_indices, cu_q_lens, num_seqs, **given, interpret=interpret)
    return out[:, : program.num_q_heads], None if lse is None else lse[:, : program.num_q_heads], pool


def _array(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))  # type: ignore[no-untyped-call]
