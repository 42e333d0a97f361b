"""Compiled programs of plain JAX attention, and the memory in which they take their inputs."""

from functools import partial
from typing import Final, NamedTuple

import jax
import numpy as np
from jaxtyping import Float, Shaped

from attnd.kernels.contract import AttentionOptions, CacheSpec
from attnd.kernels.host_pages import HostPages, aligned_zeros
from attnd.kernels.xla_kernel import ArgumentShape, Inputs, Pool, ProgramShape, attend, input_shapes, pool_shapes
from attnd.kernels.xla_work import Bucket, Call, Paging

BUCKETS: Final = (
    Bucket(queries=1, items=8),
    Bucket(queries=1, items=64),
    Bucket(queries=16, items=16),
    Bucket(queries=64, items=8),
    Bucket(queries=256, items=2),
)
TILE: Final = 128
SLOTS: Final = 1 << 16
NO_WINDOW: Final = 2**31 - 1


def paging_of(spec: CacheSpec) -> Paging:
    """Returns how programs see the pages of a cache."""
    return Paging.of(spec.page_size, TILE, SLOTS)


def program_shape(spec: CacheSpec, num_q_heads: int, bucket: Bucket, *, capped: bool) -> ProgramShape:
    """Returns what selects the program of a call."""
    paging = paging_of(spec)
    return ProgramShape(
        layout=spec.layout,
        dtype=spec.dtype.name,
        scaled=spec.quantized_per_token,
        num_pages=spec.num_pages * paging.parts,
        page_size=paging.page_size,
        num_kv_heads=spec.num_kv_heads,
        num_q_heads=num_q_heads,
        head_dim=spec.head_dim,
        queries=bucket.queries,
        items=bucket.items,
        slots=SLOTS,
        tile=paging.tile,
        capped=capped,
    )


class Staging(NamedTuple):
    """Inputs of one program on one thread: written by NumPy, aliased by JAX, so that a call transfers nothing."""

    host: Inputs[np.ndarray]
    device: Inputs[jax.Array]


class Programs:
    """Compiles, counts and runs programs. Different threads may run at the same time, each under its own number."""

    def __init__(self) -> None:
        self._device = jax.devices("cpu")[0]
        self._compiled: dict[ProgramShape, jax.stages.Compiled] = {}
        self._staging: dict[tuple[ProgramShape, int], Staging] = {}

    def __len__(self) -> int:
        return len(self._compiled)

    def __contains__(self, shape: ProgramShape) -> bool:
        return shape in self._compiled

    def alias(self, array: Shaped[np.ndarray, "..."]) -> jax.Array:
        """Returns an array over the memory of `array`, which must be aligned."""
        device_array: jax.Array = jax.device_put(array, self._device, may_alias=True)
        assert not array.size or device_array.unsafe_buffer_pointer() == array.ctypes.data
        return device_array

    def pools(self, host: HostPages) -> tuple[Pool[jax.Array], ...]:
        """Returns the aliases of every layer. They are never donated."""
        wanted = pool_shapes(program_shape(host.spec, host.spec.num_kv_heads, BUCKETS[0], capped=False))
        scales = host.scales or (np.zeros(0, np.float32),) * len(host.bits)
        return tuple(
            Pool(self.alias(kv.reshape(wanted.kv.shape)), self.alias(scale.reshape(wanted.scales.shape)))
            for kv, scale in zip(host.bits, scales, strict=True)
        )

    def compile(self, shape: ProgramShape) -> None:
        """Compiles a program."""
        sharding = jax.sharding.SingleDeviceSharding(self._device)
        pool, inputs = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(*array, sharding=sharding),  # type: ignore[no-untyped-call]
            (pool_shapes(shape), input_shapes(shape)),
            is_leaf=lambda node: isinstance(node, ArgumentShape),
        )
        self._compiled[shape] = jax.jit(partial(attend, shape)).lower(pool, inputs).compile()

    def run(
        self,
        shape: ProgramShape,
        pool: Pool[jax.Array],
        call: Call,
        q: Float[np.ndarray, "tokens num_q_heads head_dim"],
        options: AttentionOptions,
        *,
        thread: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Runs a compiled program, as `xla_kernel.attend` describes it."""
        staging = self._staging.get((shape, thread))
        if staging is None:
            staging = self._staging[shape, thread] = self._stage(shape)
        host = staging.host
        scale = np.float32(options.sm_scale * (options.k_scale or 1.0))
        for i, (token, length) in enumerate(zip(call.tokens.tolist(), call.lengths.tolist(), strict=True)):
            row = i * shape.queries
            np.multiply(q[token : token + length], scale, out=host.q[row : row + length], dtype=np.float32)
        host.items[: len(call.items)] = call.items
        host.table[: len(call.table)] = call.table
        host.counts[0] = len(call.items)
        host.counts[1] = min(options.sliding_window or NO_WINDOW, NO_WINDOW)
        host.soft_cap[0] = options.soft_cap or 1.0
        out, lse = self._compiled[shape](pool, staging.device)
        return np.asarray(out), np.asarray(lse)

    def _stage(self, shape: ProgramShape) -> Staging:
        """Allocates the inputs of a program."""
        host = Inputs(*(aligned_zeros(*array) for array in input_shapes(shape)))
        return Staging(host, Inputs(*(self.alias(array) for array in host)))
