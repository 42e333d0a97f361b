"""JAX's own two TPU kernels behind the protocol: to compare with, and to fall back on by request."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.paged_attention.quantization_utils import QuantizedTensor
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jaxtyping import Float, Float32, Int32, Shaped

from attnd.kernels.contract import (
    Attended,
    AttentionOptions,
    CacheSpec,
    KernelHints,
    KernelTimings,
    Layout,
    RaggedBatch,
)
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.quantization import quantize_int8
from attnd.kernels.tpu_chips import LANES, chip_of

RAGGED_DTYPES: Final = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
SPLIT_DTYPES: Final = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
# A soft cap or a window is a constant of JAX's programs: each new one compiles, so their number is bounded.
CONSTANTS_MAX: Final = 16
_BLOCK_TOKENS: Final = 512
_QUERIES_PER_BLOCK: Final = 32
_VMEM_LIMIT_BYTES: Final = 48 << 20
# Rounding up to these keeps the number of programs small.
_TOKEN_BUCKETS: Final = (8, 64, 512, 2048, 8192)
_ROW_BUCKETS: Final = (8, 64, 512)
_SLOT_BUCKETS: Final = (128, 1024, 8192)


def unsupported(spec: CacheSpec) -> str | None:
    """Returns what JAX's kernels cannot serve, as their sources and the compiler say; None if they can."""
    ragged = spec.layout is Layout.INTERLEAVED
    dtypes, head_dims = (RAGGED_DTYPES, (128,)) if ragged else (SPLIT_DTYPES, (128, 256))
    if spec.dtype.name not in dtypes:
        return f"dtype={spec.dtype.name} must be one of {', '.join(dtypes)} in layout {spec.layout}."
    if spec.head_dim not in head_dims:
        return f"head_dim={spec.head_dim} must be {' or '.join(map(str, head_dims))} in layout {spec.layout}."
    if not ragged:
        return None
    packing = 4 // spec.dtype.itemsize
    combined = 2 * spec.num_kv_heads
    whole, rest = divmod(combined, packing)
    if rest or not (whole in {1, 2, 4, 8} or whole % 8 == 0):
        return (
            f"2 * num_kv_heads={combined}, packed by {packing} ({spec.dtype.name}), must give 1, 2, 4 or a multiple "
            f"of 8 rows."
        )
    return None


def table_size_bytes(num_rows: int, pages_per_seq: int) -> int:
    """Returns what a page table takes of SMEM: the ragged kernel's has rows of whole vectors."""
    return num_rows * (-(-pages_per_seq // LANES) * LANES) * 4


@dataclass(slots=True, kw_only=True)
class JaxPages:
    """The pages of one cache. What changes a layer's arrays takes them over.

    Attributes:
        spec: Shape of the cache.
        layers: For each layer, its pages as `spec.layer_shape` has them.
        scales: For each layer, the scales; empty unless the cache is quantized per token.
    """

    spec: CacheSpec
    layers: list[jax.Array] = field(repr=False)
    scales: list[jax.Array] = field(repr=False)


class JaxOps:
    """Attends with `ragged_paged_attention` or `paged_attention` of JAX, by the cache's layout.

    They know no lse, and the second no window: such calls are unsupported. `sm_scale` and the scales of keys go into q,
    that of values into the output, so a new one compiles nothing; a new soft cap or window does. The second kernel is
    as accurate as bfloat16, whatever the pages are.
    """

    name = "jax_ops"

    def __init__(self) -> None:
        device = jax.devices()[0]
        self._chip = chip_of(device.device_kind)
        self._platform = device.platform
        self._ragged = jax.jit(_ragged, static_argnames=("soft_cap", "sliding_window", "pages_per_block"))
        self._paged = jax.jit(_paged, static_argnames=("soft_cap", "pages_per_block", "hints"))
        self._append = jax.jit(_append, static_argnums=0, donate_argnums=1)
        self._write = jax.jit(_write, static_argnums=0, donate_argnums=1)
        self._clear = jax.jit(_clear, static_argnums=0, donate_argnums=1)
        self._constants: set[tuple[float | None, int | None]] = set()

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled so far."""
        programs: tuple[Any, ...] = (self._ragged, self._paged, self._append, self._write, self._clear)
        return sum(program._cache_size() for program in programs)  # noqa: SLF001 - JAX has no other count

    def unsupported(self, spec: CacheSpec) -> str | None:
        """Returns why it cannot serve a cache of this shape, decided without compiling; None if it can."""
        if self._chip is None:
            return f"JAX's kernels need a TPU; the devices here are of platform {self._platform!r}."
        return unsupported(spec)

    def allocate(self, spec: CacheSpec) -> JaxPages:
        """Returns zeroed pages."""
        layers = range(spec.num_layers)
        scales = layers if spec.quantized_per_token else ()
        return JaxPages(
            spec=spec,
            layers=[jnp.zeros(spec.layer_shape, spec.dtype).block_until_ready() for _ in layers],
            scales=[jnp.zeros(spec.scales_shape(spec.num_pages), jnp.float32) for _ in scales],
        )

    def write(
        self,
        pages: JaxPages,
        layer: int,
        page_indices: Int32[np.ndarray, " n"],
        kv_pages: Shaped[np.ndarray, "..."],
        scales: Float32[np.ndarray, "..."] | None = None,
    ) -> None:
        """Overwrites whole pages of a layer."""
        pages.layers[layer] = self._write(pages.spec, pages.layers[layer], page_indices, kv_pages)
        if scales is not None:
            pages.scales[layer] = self._write(pages.spec, pages.scales[layer], page_indices, scales)

    def read(
        self, pages: JaxPages, layer: int, page_indices: Int32[np.ndarray, " n"]
    ) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """Returns copies of whole pages of a layer, and their scales."""
        axis = 0 if pages.spec.layout is Layout.INTERLEAVED else 2
        held = np.array(jnp.take(pages.layers[layer], page_indices, axis))
        return held, np.array(jnp.take(pages.scales[layer], page_indices, axis)) if pages.scales else None

    def clear(self, pages: JaxPages, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Zeroes pages in every layer."""
        for arrays in (pages.layers, pages.scales):
            for layer, array in enumerate(arrays):
                arrays[layer] = self._clear(pages.spec, array, page_indices)

    def copy(self, pages: JaxPages, sources: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, " n"]) -> None:
        """Copies pages over others in every layer."""
        for layer in range(pages.spec.num_layers):
            self.write(pages, layer, targets, *self.read(pages, layer, sources))

    def poison(self, pages: JaxPages, page: int) -> None:
        """Leaves the page as it is: these kernels read unused table slots and mask scores only, so NaN would spread."""

    def warm_up(
        self,
        spec: CacheSpec,  # noqa: ARG002 - part of the protocol
        num_q_heads: int,  # noqa: ARG002
        on_progress: Callable[[int, int], None] | None = None,  # noqa: ARG002
    ) -> int:
        """Returns 0: JAX's kernels compile at their first call, since their constants are not known before."""
        return 0

    def attend(
        self,
        pages: JaxPages,
        layer: int,
        batch: RaggedBatch,
        q: Float[np.ndarray, "tokens num_q_heads head_dim"],
        *,
        k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        options: AttentionOptions,
        hints: KernelHints,
    ) -> Attended:
        """Writes k and v to their slots, if given, then attends. Padding rows of the output are zero.

        Raises:
            UnsupportedError: The call uses what JAX's kernels do not have, or needs too large a page table.
        """
        started_ns = time.perf_counter_ns()
        spec = pages.spec
        call = _RaggedCall.of(batch) if spec.layout is Layout.INTERLEAVED else _RaggedCall.of_tokens(batch)
        self._check(spec, call, options)
        if k is not None and v is not None:
            self._append_tokens(pages, layer, batch, k, v)
        written_ns = time.perf_counter_ns()
        scale = np.float32(options.sm_scale * (options.k_scale or 1.0))
        padded = np.zeros((call.num_tokens, *q.shape[1:]), np.float32 if q.dtype == np.float16 else q.dtype)
        padded[: batch.num_tokens] = q[: batch.num_tokens] * scale
        if spec.layout is Layout.INTERLEAVED:
            result = self._ragged(
                padded, pages.layers[layer], **call.metadata, soft_cap=options.soft_cap,
                sliding_window=options.sliding_window,
                pages_per_block=hints.num_kv_pages_per_block or call.pages_per_block(spec.page_size),
            )  # fmt: skip
        else:
            result = self._paged(
                padded, pages.layers[layer], pages.scales[layer] if pages.scales else None,
                call.metadata["kv_lens"], call.metadata["page_indices"], soft_cap=options.soft_cap,
                pages_per_block=hints.pages_per_compute_block or call.pages_per_block(spec.page_size),
                hints=(hints.megacore_mode, hints.inline_seq_dim),
            )  # fmt: skip
        out = np.zeros(q.shape, q.dtype)
        answers = np.asarray(result)[: batch.num_tokens].astype(np.float32) * np.float32(options.v_scale or 1.0)
        out[: batch.num_tokens] = answers
        timings = KernelTimings(write_ns=written_ns - started_ns, kernel_ns=time.perf_counter_ns() - written_ns)
        return Attended(out=out, timings=timings)

    def _check(self, spec: CacheSpec, call: "_RaggedCall", options: AttentionOptions) -> None:
        """Refuses what would fail to compile, or compile without end."""
        if options.return_lse:
            raise UnsupportedError("JAX's kernels return no lse.")
        if spec.layout is Layout.SPLIT and options.sliding_window is not None:
            raise UnsupportedError("JAX's decode kernel has no sliding window.")
        rows, slots = call.metadata["page_indices"].shape
        limit = (self._chip.smem_bytes if self._chip else 1 << 20) - (64 << 10)
        if table_size_bytes(rows, slots) > limit:
            raise UnsupportedError(
                f"a page table of {rows} x {slots} slots needs {table_size_bytes(rows, slots)} bytes of SMEM; there "
                f"are {limit}."
            )
        constants = (options.soft_cap, options.sliding_window)
        if constants not in self._constants and len(self._constants) == CONSTANTS_MAX:
            raise UnsupportedError(
                f"JAX's kernels compile for each soft_cap and sliding_window; {CONSTANTS_MAX} are in use."
            )
        self._constants.add(constants)

    def _append_tokens(self, pages: JaxPages, layer: int, batch: RaggedBatch, k: np.ndarray, v: np.ndarray) -> None:
        """Writes new tokens to their slots; a program for each bucket of their number."""
        page, offset = batch.token_slots(pages.spec.page_size)
        size = _bucket(batch.num_tokens, _TOKEN_BUCKETS)
        slots = np.full((2, size), pages.spec.num_pages, np.int32)  # past the end: writes nothing
        slots[:, : batch.num_tokens] = page, offset
        new = np.zeros((2, size, *k.shape[1:]), k.dtype)
        new[:, : batch.num_tokens] = k[: batch.num_tokens], v[: batch.num_tokens]
        if pages.scales:
            new, scales = quantize_int8(new)
            pages.scales[layer] = self._append(pages.spec, pages.scales[layer], slots, scales)
        pages.layers[layer] = self._append(pages.spec, pages.layers[layer], slots, new)


@dataclass(frozen=True, slots=True)
class _RaggedCall:
    """A batch's metadata, padded."""

    num_tokens: int
    metadata: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, batch: RaggedBatch) -> "_RaggedCall":
        """Pads a batch."""
        rows = _bucket(batch.num_seqs, _ROW_BUCKETS)
        cu_q_lens = np.full(rows + 1, batch.num_tokens, np.int32)
        cu_q_lens[: batch.num_seqs + 1] = batch.cu_q_lens
        lens, table = _padded(batch.kv_lens, batch.page_indices, rows)
        metadata = {
            "kv_lens": lens, "page_indices": table, "cu_q_lens": cu_q_lens,
            "num_seqs": np.array([batch.num_seqs], np.int32),
        }  # fmt: skip
        return cls(_bucket(batch.num_tokens, _TOKEN_BUCKETS), metadata)

    @classmethod
    def of_tokens(cls, batch: RaggedBatch) -> "_RaggedCall":
        """Makes a row of each query token, which sees the tokens up to its own."""
        rows = _bucket(batch.num_tokens, _TOKEN_BUCKETS)
        lens, table = _padded(batch.token_positions + 1, batch.page_indices[batch.token_seqs], rows)
        return cls(rows, {"kv_lens": np.maximum(lens, 1), "page_indices": table})

    def pages_per_block(self, page_size: int) -> int:
        """Returns a block size: a power of two, so that it divides the table's rows."""
        pages = max(1, _BLOCK_TOKENS // page_size)
        return min(1 << (pages.bit_length() - 1), int(self.metadata["page_indices"].shape[1]))


def _padded(lens: np.ndarray, table: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    slots = _bucket(table.shape[1], _SLOT_BUCKETS)
    padded = np.zeros((rows, slots), np.int32)
    padded[: len(table), : table.shape[1]] = table
    padded_lens = np.zeros(rows, np.int32)
    padded_lens[: len(lens)] = lens
    return padded_lens, padded


def _bucket(size: int, buckets: tuple[int, ...]) -> int:
    """Returns the smallest bucket that holds `size`, or the next power of two."""
    return next((bucket for bucket in buckets if bucket >= size), 1 << (size - 1).bit_length())


def _ragged(
    q: Any, kv_pages: Any, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any, *,
    soft_cap: float | None, sliding_window: int | None, pages_per_block: int,
) -> jax.Array:  # fmt: skip
    result: jax.Array = ragged_paged_attention(
        q, kv_pages, kv_lens, page_indices, cu_q_lens, num_seqs, soft_cap=soft_cap, sliding_window=sliding_window,
        num_kv_pages_per_block=pages_per_block, num_queries_per_block=_QUERIES_PER_BLOCK,
        vmem_limit_bytes=_VMEM_LIMIT_BYTES,
    )  # fmt: skip
    return result


def _paged(
    q: Any, kv_pages: Any, scales: Any, lengths: Any, page_indices: Any, *,
    soft_cap: float | None, pages_per_block: int, hints: tuple[str | None, bool],
) -> jax.Array:  # fmt: skip
    pages = [kv_pages[which] if scales is None else QuantizedTensor(kv_pages[which], scales[which]) for which in (0, 1)]
    result: jax.Array = paged_attention(
        q, *pages, lengths, page_indices, attn_logits_soft_cap=soft_cap, pages_per_compute_block=pages_per_block,
        megacore_mode=hints[0], inline_seq_dim=hints[1],
    )  # fmt: skip
    return result


def _append(spec: CacheSpec, pages: jax.Array, slots: jax.Array, new: jax.Array) -> jax.Array:
    page, offset = slots
    for which in (0, 1):
        if spec.layout is Layout.INTERLEAVED:
            pages = pages.at[page, offset, which::2].set(new[which], mode="drop")
        else:
            pages = pages.at[which, :, page, offset].set(new[which], mode="drop")
    return pages


def _write(spec: CacheSpec, pages: jax.Array, page_indices: jax.Array, values: jax.Array) -> jax.Array:
    if spec.layout is Layout.INTERLEAVED:
        return pages.at[page_indices].set(values)
    return pages.at[:, :, page_indices].set(values)


def _clear(spec: CacheSpec, pages: jax.Array, page_indices: jax.Array) -> jax.Array:
    return _write(spec, pages, page_indices, jnp.zeros((), pages.dtype))
