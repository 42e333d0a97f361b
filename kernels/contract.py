"""What every implementation of the kernels is given and gives: the shapes, the batch, the options, the protocol."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Protocol, TypeVar, runtime_checkable

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Int32, Shaped

from attnd.kernels.errors import InvalidArgumentError, Violation

CACHE_DTYPES: Final[Mapping[str, np.dtype]] = {
    np.dtype(dtype).name: np.dtype(dtype)
    for dtype in (
        np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8,
    )
}  # fmt: skip
Q_DTYPES: Final[Mapping[str, np.dtype]] = {
    np.dtype(dtype).name: np.dtype(dtype) for dtype in (np.float32, ml_dtypes.bfloat16, np.float16)
}
# JAX's int8 quantization maps the largest magnitude of a token and head to 127.5 and saturates.
INT8_SCALE: Final = 127.5


class Layout(enum.StrEnum):
    """How a page lies in memory."""

    INTERLEAVED = "interleaved"
    """[num_pages, page_size, 2 * num_kv_heads, head_dim], K at even and V at odd head index."""
    SPLIT = "split"
    """K and V apart, each [num_kv_heads, num_pages, page_size, head_dim]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """The shape of a cache.

    An int8 cache of layout SPLIT keeps a float32 scale for each token and head: value = int8 * scale / 127.5. An
    int8 or float8 cache of layout INTERLEAVED is scaled by the per-tensor `k_scale` and `v_scale` of each call.

    Raises:
        InvalidArgumentError: A size is out of range or the dtype is none of `CACHE_DTYPES`.
    """

    layout: Layout
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: np.dtype

    def __post_init__(self) -> None:
        limits = {
            "num_layers": 1024, "num_pages": 2**31 - 1, "page_size": 65536, "num_kv_heads": 1024, "head_dim": 4096,
        }  # fmt: skip
        violations = [
            Violation(f"spec.{name}", f"{name}={getattr(self, name)} must be in [1, {limit}].")
            for name, limit in limits.items()
            if not 1 <= getattr(self, name) <= limit
        ]
        if self.dtype.name not in CACHE_DTYPES:
            violations.append(
                Violation("spec.dtype", f"dtype={self.dtype.name} must be one of {', '.join(CACHE_DTYPES)}.")
            )
        if violations:
            raise InvalidArgumentError(violations)

    @property
    def quantized_per_token(self) -> bool:
        """Whether a float32 scale for each token and head lies beside the int8 pages."""
        return self.layout is Layout.SPLIT and self.dtype == np.int8

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one layer's pages; for SPLIT, K and V stacked on a leading axis of 2."""
        return self.pages_shape(self.num_pages)

    def pages_shape(self, num_pages: int) -> tuple[int, ...]:
        """Returns the shape of `num_pages` pages of one layer, as `write` takes and `read` gives them."""
        if self.layout is Layout.INTERLEAVED:
            return (num_pages, self.page_size, 2 * self.num_kv_heads, self.head_dim)
        return (2, self.num_kv_heads, num_pages, self.page_size, self.head_dim)

    def scales_shape(self, num_pages: int) -> tuple[int, ...]:
        """Returns the shape of the scales of `num_pages` pages of one layer of an int8 SPLIT cache."""
        return (2, self.num_kv_heads, num_pages, self.page_size, 1)

    @property
    def size_bytes(self) -> int:
        """Bytes of all pages and scales over all layers."""
        layer = math.prod(self.layer_shape) * self.dtype.itemsize
        if self.quantized_per_token:
            layer += math.prod(self.scales_shape(self.num_pages)) * 4
        return self.num_layers * layer


@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """Metadata of one call after validation. Implementations trust it.

    Every row has 1 <= q_len <= kv_len: empty rows have been compacted out (a kernel that prefetches for the next row
    would give it the empty row's pages). Table slots that kv_lens does not reach hold page 0.

    Rows of q past cu_q_lens[-1] are padding; their output is exactly zero and their lse -inf.
    """

    kv_lens: Int32[np.ndarray, " num_seqs"]
    page_indices: Int32[np.ndarray, "num_seqs pages_per_seq"]
    cu_q_lens: Int32[np.ndarray, "num_seqs+1"]

    @classmethod
    def compact(
        cls,
        kv_lens: Int32[np.ndarray, " rows"],
        page_indices: Int32[np.ndarray, "rows pages_per_seq"],
        q_lens: Int32[np.ndarray, " rows"],
        page_size: int,
    ) -> "RaggedBatch":
        """Builds the batch of the rows that are not empty, in their order, over arrays of its own.

        Args:
            kv_lens: Tokens each row attends over, in [q_len, pages_per_seq * page_size].
            page_indices: Page ids. Slots past a row's kv_len may hold anything: page 0 takes their place, because a
                kernel that reads whole tiles of the table follows them too.
            q_lens: Query tokens of each row, >= 0; rows of 0 are dropped.
            page_size: Tokens of a page.
        """
        rows = np.flatnonzero(q_lens)
        if len(rows) < len(q_lens):
            kv_lens, page_indices, q_lens = kv_lens[rows], page_indices[rows], q_lens[rows]
        # Rounds up without kv_len + page_size - 1, which int32 cannot always hold.
        used_slots = -(-kv_lens // np.int32(page_size))
        slots = np.arange(page_indices.shape[1], dtype=np.int32)
        cu_q_lens = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(q_lens, out=cu_q_lens[1:])
        return cls(
            kv_lens=np.array(kv_lens),
            page_indices=np.where(slots < used_slots[:, np.newaxis], page_indices, np.int32(0)),
            cu_q_lens=cu_q_lens,
        )

    @classmethod
    def concatenated(cls, batches: Sequence["RaggedBatch"]) -> "RaggedBatch":
        """Returns the rows of all batches, in order, as one."""
        width = max(batch.page_indices.shape[1] for batch in batches)
        page_indices = np.zeros((sum(batch.num_seqs for batch in batches), width), np.int32)
        cu_q_lens = np.zeros(len(page_indices) + 1, np.int32)
        row = 0
        for batch in batches:
            end = row + batch.num_seqs
            page_indices[row:end, : batch.page_indices.shape[1]] = batch.page_indices
            cu_q_lens[row + 1 : end + 1] = cu_q_lens[row] + batch.cu_q_lens[1:]
            row = end
        return cls(
            kv_lens=np.concatenate([batch.kv_lens for batch in batches]),
            page_indices=page_indices,
            cu_q_lens=cu_q_lens,
        )

    @property
    def num_seqs(self) -> int:
        """Rows, none of them empty."""
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens over all rows."""
        return int(self.cu_q_lens[-1])

    @cached_property
    def q_lens(self) -> Int32[np.ndarray, " num_seqs"]:
        """Query tokens of each row."""
        return np.diff(self.cu_q_lens)

    @cached_property
    def token_seqs(self) -> Int32[np.ndarray, " num_tokens"]:
        """Row of each query token."""
        return np.repeat(np.arange(self.num_seqs, dtype=np.int32), self.q_lens)

    @cached_property
    def token_positions(self) -> Int32[np.ndarray, " num_tokens"]:
        """Position of each query token in its sequence: the last is kv_len - 1."""
        ends = (self.kv_lens - self.cu_q_lens[1:])[self.token_seqs]
        positions: np.ndarray = np.arange(self.num_tokens, dtype=np.int32) + ends
        return positions

    def token_slots(self, page_size: int) -> tuple[Int32[np.ndarray, " num_tokens"], Int32[np.ndarray, " num_tokens"]]:
        """Returns page and offset in the page of each query token: where its k and v are written."""
        page, offset = np.divmod(self.token_positions, np.int32(page_size))
        return self.page_indices[self.token_seqs, page], offset


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Scalars of one call, after validation. All are run-time values: a new one compiles nothing.

    Only whether `sliding_window`, `soft_cap` and `return_lse` are set may select a program. `sliding_window` counts
    the query itself. `soft_cap` bends scores before masking. `k_scale`, `v_scale` multiply the stored k, v.
    """

    sm_scale: float = 1.0
    sliding_window: int | None = None
    soft_cap: float | None = None
    k_scale: float | None = None
    v_scale: float | None = None
    return_lse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelHints:
    """How a kernel should work, never what it computes. Validated by JAX's rules; an implementation may ignore them."""

    num_kv_pages_per_block: int | None = None
    num_queries_per_block: int | None = None
    vmem_limit_bytes: int | None = None
    pages_per_compute_block: int | None = None
    megacore_mode: str | None = None
    inline_seq_dim: bool = True


@dataclass(slots=True, kw_only=True)
class KernelTimings:
    """Where an implementation's time went, in nanoseconds."""

    write_ns: int = 0
    compile_ns: int = 0
    kernel_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """The answer to one call.

    Attributes:
        out: q's dtype and shape; writable and owned by the receiver. Padding rows are zero.
        lse_natural: Natural log of the sum of exponentials of the (scaled, capped, masked) scores; -inf in padding
            rows. None unless asked for.
        timings: Where the time went.
    """

    out: Float[np.ndarray, "tokens num_q_heads head_dim"]
    lse_natural: Float32[np.ndarray, "tokens num_q_heads"] | None = None
    timings: KernelTimings = field(default_factory=KernelTimings)


@runtime_checkable
class Pages(Protocol):
    """The pages of one cache, all layers, in an implementation's own form. Only its implementation looks inside."""

    @property
    def spec(self) -> CacheSpec:
        """Shape of the cache."""
        ...


PagesT = TypeVar("PagesT", bound=Pages)


@runtime_checkable
class Implementation(Protocol[PagesT]):
    """One way to store pages and attend over them.

    Calls come from one thread at a time. Inputs have passed `validation`: an implementation trusts them.
    """

    @property
    def name(self) -> str:
        """Name by which it is chosen and reported."""
        ...

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled so far. It stands still once the shapes in use are warm."""
        ...

    def unsupported(self, spec: CacheSpec) -> str | None:
        """Returns why it cannot serve a cache of this shape, decided without compiling; None if it can."""
        ...

    def allocate(self, spec: CacheSpec) -> PagesT:
        """Returns zeroed pages whose memory has been touched."""
        ...

    def write(
        self,
        pages: PagesT,
        layer: int,
        page_indices: Int32[np.ndarray, " n"],
        kv_pages: Shaped[np.ndarray, "..."],
        scales: Float32[np.ndarray, "..."] | None = None,
    ) -> None:
        """Overwrites whole pages of a layer.

        Args:
            pages: The cache's pages, changed in place.
            layer: The layer.
            page_indices: Distinct page ids in [0, num_pages).
            kv_pages: `spec.pages_shape(n)`, in the cache's dtype.
            scales: `spec.scales_shape(n)` if and only if `spec.quantized_per_token`.
        """
        ...

    def read(
        self, pages: PagesT, layer: int, page_indices: Int32[np.ndarray, " n"]
    ) -> tuple[Shaped[np.ndarray, "..."], Float32[np.ndarray, "..."] | None]:
        """Returns copies of whole pages of a layer, and their scales, shaped and typed as `write` takes them."""
        ...

    def clear(self, pages: PagesT, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Zeroes pages in every layer."""
        ...

    def copy(self, pages: PagesT, sources: Int32[np.ndarray, " n"], targets: Int32[np.ndarray, " n"]) -> None:
        """Overwrites each page of `targets` with the page of `sources` at its place, in every layer.

        Args:
            pages: The cache's pages, changed in place.
            sources: Page ids; may repeat.
            targets: Distinct page ids, none of them a source.
        """
        ...

    def poison(self, pages: PagesT, page: int) -> None:
        """Fills a page, in every layer, with what shows in any answer that it reaches: NaN where there is one."""
        ...

    def warm_up(self, spec: CacheSpec, num_q_heads: int, on_progress: Callable[[int, int], None] | None = None) -> int:
        """Compiles every program that calls with `num_q_heads` can need; returns how many were new.

        Args:
            spec: Shape of the cache.
            num_q_heads: Query heads.
            on_progress: Told how many programs of how many are ready, after each.
        """
        ...

    def attend(
        self,
        pages: PagesT,
        layer: int,
        batch: RaggedBatch,
        q: Float[np.ndarray, "tokens num_q_heads head_dim"],
        *,
        k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
        options: AttentionOptions,
        hints: KernelHints,
    ) -> Attended:
        """Writes k and v to their slots, if given, then attends.

        Query token t of a row sees the keys at positions <= its own (bottom-right causal). Scores, sums and the
        product with v are accumulated in float32 at least. Only the pages that `batch` names are read or written.

        Args:
            pages: The cache's pages, changed in place.
            layer: The layer.
            batch: Validated metadata; at least one row.
            q: Float32, bfloat16 or float16; rows past `batch.num_tokens` are padding.
            k: New keys for the first `batch.num_tokens` rows, in the cache's dtype; float32 if the cache is
                quantized per token (they are quantized here). Rows past them are ignored.
            v: New values.
            options: Scalars.
            hints: How to work.
        """
        ...
