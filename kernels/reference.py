"""The oracle: attention in float64, one sequence after another, boring on purpose."""

import time
from collections.abc import Callable

import numpy as np
from jaxtyping import Float, Float32, Float64, Int32, Shaped

from attnd.kernels.contract import (
    Attended,
    AttentionOptions,
    CacheSpec,
    KernelHints,
    KernelTimings,
    Layout,
    RaggedBatch,
)
from attnd.kernels.host_pages import HostPages
from attnd.kernels.quantization import dequantize_int8
from attnd.kernels.stored import poison


class Reference:
    """Attends in float64 with NumPy, over pages that NumPy owns. Compiles nothing; pages change in place."""

    name = "reference"
    num_compiled_programs = 0

    def unsupported(self, spec: CacheSpec) -> str | None:  # noqa: ARG002 - part of the protocol
        """Returns None: every shape is served."""
        return None

    def allocate(self, spec: CacheSpec) -> HostPages:
        """Returns zeroed pages whose memory has been touched."""
        return HostPages.zeros(spec)

    def write(
        self,
        pages: HostPages,
        layer: int,
        page_indices: Int32[np.ndarray, " n"],
        kv_pages: Shaped[np.ndarray, "..."],
        scales: Float32[np.ndarray, "..."] | None = None,
    ) -> None:
        """Overwrites whole pages of a layer."""
        pages.write(layer, page_indices, kv_pages, scales)

    def read(
        self, pages: HostPages, layer: int, page_indices: Int32[np.ndarray, " n"]
    ) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """Returns copies of whole pages of a layer, and their scales."""
        return pages.read(layer, page_indices)

    def clear(self, pages: HostPages, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Zeroes pages in every layer."""
        pages.clear(page_indices)

    def copy(self, pages: HostPages, sources: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, " n"]) -> None:
        """Copies pages over others in every layer."""
        pages.copy(sources, targets)

    def poison(self, pages: HostPages, page: int) -> None:
        """Fills a page with NaN in every layer."""
        poison(self, pages, page)

    def warm_up(
        self,
        spec: CacheSpec,  # noqa: ARG002 - part of the protocol
        num_q_heads: int,  # noqa: ARG002
        on_progress: Callable[[int, int], None] | None = None,  # noqa: ARG002
    ) -> int:
        """Returns 0: nothing is compiled."""
        return 0

    def attend(
        self,
        pages: HostPages,
        layer: int,
        batch: RaggedBatch,
        q: Float[np.ndarray, "tokens num_q_heads head_dim"],
        *,
        k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        options: AttentionOptions,
        hints: KernelHints,  # noqa: ARG002 - part of the protocol
    ) -> Attended:
        """Writes k and v to their slots, if given, then attends. Padding rows of the output are zero."""
        started_ns = time.perf_counter_ns()
        if k is not None and v is not None:
            pages.append(layer, batch, k, v)
        written_ns = time.perf_counter_ns()
        out = np.zeros(q.shape, np.float64)
        lse = np.full(q.shape[:2], -np.inf, np.float32)
        for i in range(batch.num_seqs):
            rows = slice(batch.cu_q_lens[i], batch.cu_q_lens[i + 1])
            keys, values = _stored(pages, layer, batch.page_indices[i], int(batch.kv_lens[i]), options)
            out[rows], lse[rows] = _attend_sequence(q[rows].astype(np.float64), keys, values, options)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            narrow = out.astype(q.dtype)
        timings = KernelTimings(write_ns=written_ns - started_ns, kernel_ns=time.perf_counter_ns() - written_ns)
        return Attended(out=narrow, lse_natural=lse if options.return_lse else None, timings=timings)


def _stored(
    pages: HostPages, layer: int, table: Int32[np.ndarray, " pages_per_seq"], kv_len: int, options: AttentionOptions
) -> tuple[Float64[np.ndarray, "kv_len num_kv_heads head_dim"], Float64[np.ndarray, "kv_len num_kv_heads head_dim"]]:
    """Returns the keys and values of one sequence, scaled."""
    spec = pages.spec
    kv_pages, scales = pages.read(layer, table[: -(-kv_len // spec.page_size)])
    with np.errstate(invalid="ignore"):  # a page's unused tail may hold anything
        kv = kv_pages.astype(np.float64) if scales is None else dequantize_int8(kv_pages, scales)
    if spec.layout is Layout.INTERLEAVED:
        tokens = kv.reshape(-1, spec.num_kv_heads, 2, spec.head_dim)[:kv_len]
        keys, values = tokens[:, :, 0], tokens[:, :, 1]
    else:
        heads = kv.reshape(2, spec.num_kv_heads, -1, spec.head_dim)[:, :, :kv_len]
        keys, values = heads[0].swapaxes(0, 1), heads[1].swapaxes(0, 1)
    return keys * (options.k_scale or 1.0), values * (options.v_scale or 1.0)


def _attend_sequence(
    q: Float64[np.ndarray, "q_len num_q_heads head_dim"],
    keys: Float64[np.ndarray, "kv_len num_kv_heads head_dim"],
    values: Float64[np.ndarray, "kv_len num_kv_heads head_dim"],
    options: AttentionOptions,
) -> tuple[Float64[np.ndarray, "q_len num_q_heads head_dim"], Float64[np.ndarray, "q_len num_q_heads"]]:
    """Returns the output and the log-sum-exp of one sequence's queries, which are its last tokens."""
    heads_per_kv_head = q.shape[1] // keys.shape[1]
    out = np.empty(q.shape)
    lse = np.empty(q.shape[:2])
    for t in range(len(q)):
        end = len(keys) - len(q) + t + 1
        start = 0 if options.sliding_window is None else max(0, end - options.sliding_window)
        for head in range(q.shape[1]):
            kv_head = head // heads_per_kv_head
            scores = keys[start:end, kv_head] @ q[t, head] * options.sm_scale
            if options.soft_cap is not None:
                scores = options.soft_cap * np.tanh(scores / options.soft_cap)
            top = scores.max()
            weights = np.exp(scores - top)
            out[t, head] = weights @ values[start:end, kv_head] / weights.sum()
            lse[t, head] = top + np.log(weights.sum())
    return out, lse
