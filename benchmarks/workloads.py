"""The attention workloads: decode, prefill and mixed batches of a Llama-3-8B layer, and the right answers to them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import ml_dtypes
import numpy as np

from attnd.kernels.contract import CacheSpec, Layout, RaggedBatch

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)
FLOAT32: Final = np.dtype(np.float32)
# A wrong mask or page shows as an error of about 1; rounding of inputs is shared by all competitors.
TOLERANCES: Final = {BFLOAT16: 2e-2, FLOAT32: 1e-4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads and pages of a layer."""

    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One call: pages of one layer, metadata and queries.

    Attributes:
        name: What it stands for, with its lengths.
        spec: Shape of the cache, one layer.
        kv_pages: [num_pages, page_size, 2 * num_kv_heads, head_dim]. Permuted; NaN wherever nothing may be read.
        batch: The metadata.
        q: [tokens, num_q_heads, head_dim], the cache's dtype.
        sm_scale: Factor of the scores.
    """

    name: str
    spec: CacheSpec
    kv_pages: np.ndarray
    batch: RaggedBatch
    q: np.ndarray
    sm_scale: float

    @property
    def pages_used(self) -> np.ndarray:
        """The pages that must be read, row after row, int32."""
        return np.concatenate([self.row_pages(row) for row in range(self.batch.num_seqs)])

    @property
    def pages_size_bytes(self) -> int:
        """Bytes of the pages that must be read."""
        return len(self.pages_used) * int(self.kv_pages[0].nbytes)

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products over the visible keys alone."""
        visible = (self.batch.token_positions.astype(np.int64) + 1).sum()
        return float(4 * visible * self.q.shape[1] * self.spec.head_dim)

    def row_pages(self, row: int) -> np.ndarray:
        """Returns the pages of one row, int32."""
        return self.batch.page_indices[row, : -(-int(self.batch.kv_lens[row]) // self.spec.page_size)]

    def row_tokens(self, row: int) -> slice:
        """Returns the query rows of one sequence."""
        return slice(int(self.batch.cu_q_lens[row]), int(self.batch.cu_q_lens[row + 1]))


def make(name: str, q_lens: Sequence[int], kv_lens: Sequence[int], dtype: np.dtype, heads: Heads) -> Workload:
    """Returns a workload of standard normal numbers, the same at each call."""
    rng = np.random.default_rng(0)
    num_pages_of = [-(-kv_len // heads.page_size) for kv_len in kv_lens]
    num_pages = sum(num_pages_of) + 2
    spec = CacheSpec(
        layout=Layout.INTERLEAVED,
        num_layers=1,
        num_pages=num_pages,
        page_size=heads.page_size,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        dtype=dtype,
    )
    kv_pages = rng.standard_normal(spec.pages_shape(num_pages), np.float32).astype(dtype)
    order = rng.permutation(num_pages).astype(np.int32)
    page_indices = np.zeros((len(kv_lens), max(num_pages_of)), np.int32)
    first = 0
    for row, (count, kv_len) in enumerate(zip(num_pages_of, kv_lens, strict=True)):
        page_indices[row, :count] = order[first : first + count]
        kv_pages[page_indices[row, count - 1], (kv_len - 1) % heads.page_size + 1 :] = np.nan
        first += count
    kv_pages[order[first:]] = np.nan
    batch = RaggedBatch(
        kv_lens=np.array(kv_lens, np.int32),
        page_indices=page_indices,
        cu_q_lens=np.cumsum([0, *q_lens]).astype(np.int32),
    )
    q = rng.standard_normal((sum(q_lens), heads.num_q_heads, heads.head_dim), np.float32).astype(dtype)
    return Workload(name=name, spec=spec, kv_pages=kv_pages, batch=batch, q=q, sm_scale=heads.head_dim**-0.5)


def decode(dtype: np.dtype) -> Workload:
    """Returns D: 32 sequences of 512 to 2048 tokens, one query token each."""
    lens = _spread_lens(32)
    return make("D: 32 decodes of 512-2048", [1] * 32, lens, dtype, Heads())


def prefill(dtype: np.dtype, q_len: int, kv_len: int) -> Workload:
    """Returns P: one sequence, its last `q_len` of `kv_len` tokens."""
    return make(f"P: prefill {q_len}/{kv_len}", [q_len], [kv_len], dtype, Heads())


def mixed(dtype: np.dtype) -> Workload:
    """Returns M: 28 decodes and one chunk of 256 tokens at the end of 1024, in the middle of the batch."""
    lens = _spread_lens(28)
    return make(
        "M: 28 decodes of 512-2048 + chunk 256/1024",
        [*[1] * 14, 256, *[1] * 14],
        [*lens[:14], 1024, *lens[14:]],
        dtype,
        Heads(),
    )


def answer(workload: Workload) -> np.ndarray:
    """Returns the output in float64, [tokens, num_q_heads, head_dim]."""
    out = np.empty(workload.q.shape)
    spec, batch = workload.spec, workload.batch
    for row in range(batch.num_seqs):
        kv_len = int(batch.kv_lens[row])
        kv = workload.kv_pages[workload.row_pages(row)].reshape(-1, spec.num_kv_heads, 2, spec.head_dim)[:kv_len]
        keys, values = np.moveaxis(kv.astype(np.float64), (2, 1), (0, 1))
        tokens = workload.row_tokens(row)
        q = workload.q[tokens].astype(np.float64).swapaxes(0, 1)
        grouped = q.reshape(spec.num_kv_heads, -1, spec.head_dim)
        scores = grouped @ keys.swapaxes(1, 2) * workload.sm_scale
        scores = scores.reshape(q.shape[0], q.shape[1], kv_len)
        scores[:, np.arange(kv_len) > batch.token_positions[tokens, np.newaxis]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        result = weights.reshape(spec.num_kv_heads, -1, kv_len) @ values
        out[tokens] = result.reshape(q.shape).swapaxes(0, 1)
    return out


def check(name: str, got: np.ndarray, expected: np.ndarray, dtype: np.dtype) -> None:
    """Makes sure that nobody is timed on wrong answers.

    Raises:
        AssertionError: A competitor's output is wrong.
    """
    error = float(np.abs(got.astype(np.float64) - expected).max())
    if not error <= TOLERANCES[dtype]:
        raise AssertionError(f"{name}: largest error {error:.3g} exceeds {TOLERANCES[dtype]:g}")


def _spread_lens(count: int) -> list[int]:
    """Returns lengths that cover 512 to 2048 evenly, in random order."""
    lens = np.linspace(512, 2048, count).astype(int)
    return [int(length) for length in np.random.default_rng(1).permutation(lens)]
