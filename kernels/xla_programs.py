"""Compiled programs of plain JAX attention, and the memory in which they take their inputs."""

from functools import partial
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Float32, Shaped

from attnd.kernels.contract import AttentionOptions, CacheSpec
from attnd.kernels.host_pages import HostPages, aligned_zeros
from attnd.kernels.xla_kernel import ArgumentShape, Inputs, Pool, ProgramShape, attend, input_shapes, pool_shapes
from attnd.kernels.xla_results import by_head
from attnd.kernels.xla_work import Bucket, Call, Paging

BUCKETS: Final = (
    Bucket(queries=1, items=64),
    Bucket(queries=16, items=16),
    Bucket(queries=128, items=4),
)
NO_WINDOW: Final = 2**31 - 1


def program_shape(spec: CacheSpec, num_q_heads: int, bucket: Bucket) -> ProgramShape:
    """Returns what selects the program of a call."""
    paging = Paging.of(spec)
    one = bucket.queries == 1
    return ProgramShape(
        layout=spec.layout,
        dtype=spec.dtype.name,
        scaled=spec.quantized_per_token,
        num_pages=spec.num_pages * paging.parts,
        page_size=paging.page_size,
        num_kv_heads=spec.num_kv_heads,
        num_q_heads=num_q_heads,
        head_dim=spec.head_dim,
        # What a step holds should stay in a core's cache: many heads of one query, or one head of many.
        heads=paging.heads if one else 1,
        queries=bucket.queries,
        items=bucket.items,
        slots=paging.slots,
        tile=paging.tile_of_one if one else paging.tile,
    )


def alias(array: Shaped[np.ndarray, "..."], device: jax.Device) -> jax.Array:
    """Returns a JAX array over the memory of `array`. It must never be donated."""
    device_array: jax.Array = jax.device_put(array, device, may_alias=True)
    assert not array.size or device_array.unsafe_buffer_pointer() == array.ctypes.data
    return device_array


def alias_pages(host: HostPages, device: jax.Device) -> tuple[Pool[jax.Array], ...]:
    """Returns the aliases of every layer, in the shape that programs take."""
    wanted = pool_shapes(program_shape(host.spec, host.spec.num_kv_heads, BUCKETS[0]))
    scales = host.scales or (np.zeros(0, np.float32),) * len(host.bits)
    return tuple(
        Pool(alias(kv.reshape(wanted.kv.shape), device), alias(scale.reshape(wanted.scales.shape), device))
        for kv, scale in zip(host.bits, scales, strict=True)
    )


class Staging(NamedTuple):
    """Inputs of one call of a program: written by NumPy, aliased by JAX, so that a call transfers nothing."""

    host: Inputs[np.ndarray]
    device: Inputs[jax.Array]


class Program:
    """One compiled program. Threads may run it at the same time, each with inputs of its own."""

    def __init__(self, shape: ProgramShape, device: jax.Device) -> None:
        self._inputs = input_shapes(shape)
        self._device = device
        self._compiled = _compile(shape, device)
        self._idle: list[Staging] = []

    def stage(
        self, call: Call, q: Float[np.ndarray, "tokens num_q_heads head_dim"], options: AttentionOptions
    ) -> Staging:
        """Writes the inputs of a call."""
        staging = self._idle.pop() if self._idle else self._allocate()
        host = staging.host
        scale = np.float32(options.sm_scale * (options.k_scale or 1.0))
        if call.bucket.queries == 1:
            blocks = host.q[: len(call.tokens)]
            np.multiply(q[call.tokens].reshape(blocks.shape), scale, out=blocks, dtype=np.float32)
        else:
            for block, token, length in zip(host.q, call.tokens, call.lengths, strict=False):
                rows = by_head(q[token : token + length], len(block))
                np.multiply(rows, scale, out=block[:, :length], dtype=np.float32)
        host.items[: len(call.items)] = call.items
        host.table[: len(call.table)] = call.table
        host.counts[0] = len(call.items)
        host.counts[1] = min(options.sliding_window or NO_WINDOW, NO_WINDOW)
        host.soft_cap[0] = options.soft_cap or 0.0
        return staging

    def run(
        self, pool: Pool[jax.Array], staging: Staging
    ) -> tuple[
        Float32[np.ndarray, "items num_kv_heads queries group head_dim"],
        Float32[np.ndarray, "items num_kv_heads queries group"],
    ]:
        """Attends over the items of a staged call; see `xla_kernel.attend` for what it returns."""
        out, lse = (np.asarray(result) for result in self._compiled(pool, staging.device))
        self._idle.append(staging)
        shape = staging.host.q.shape
        return out.reshape(shape), lse.reshape(shape[:-1])

    def _allocate(self) -> Staging:
        host = jax.tree.map(lambda array: aligned_zeros(*array), self._inputs, is_leaf=_is_shape)
        return Staging(host, jax.tree.map(lambda array: alias(array, self._device), host))


def _compile(shape: ProgramShape, device: jax.Device) -> Any:
    sharding = jax.sharding.SingleDeviceSharding(device)
    pool, inputs = jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(*array, sharding=sharding),  # type: ignore[no-untyped-call]
        (pool_shapes(shape), input_shapes(shape)),
        is_leaf=_is_shape,
    )
    # By itself XLA uses half of what AVX-512 has; where there is none, the option changes nothing.
    options: dict[str, str | bool] = {"xla_cpu_prefer_vector_width": "512"}
    return jax.jit(partial(attend, shape)).lower(pool, inputs).compile(compiler_options=options)


def _is_shape(node: object) -> bool:
    return isinstance(node, ArgumentShape)
