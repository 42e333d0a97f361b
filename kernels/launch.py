"""From a validated call to an implementation: what every one of them is spared."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int32, Shaped

from attnd.kernels.contract import Attended, AttentionOptions, CacheSpec, Implementation, KernelHints, RaggedBatch


def launch(
    implementation: Implementation[Any],
    pages: Any,
    layer: int,
    batch: RaggedBatch,
    q: Float[np.ndarray, "tokens num_q_heads head_dim"],
    *,
    rows: Int32[np.ndarray, " num_rows"] | None = None,
    k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
    v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None = None,
    options: AttentionOptions,
    hints: KernelHints,
) -> Attended:
    """Attends, with keys and values of any dtype that may be cast, and with rows that attend over nothing.

    Args:
        implementation: What serves the pages.
        pages: The pages, changed in place if `k` and `v` are given.
        layer: The layer.
        batch: Validated metadata; may have no rows.
        q: Queries; rows that `batch` does not cover are answered with zeros.
        rows: Rows of q, k and v that `batch` covers, in its order; None if they are the first ones.
        k: New keys, cast to the cache's dtype.
        v: New values.
        options: Scalars.
        hints: How to work.
    """
    if batch.num_seqs == 0:
        return _nothing(q, options)
    if k is not None and v is not None:
        dtype = append_dtype(pages.spec)
        k, v = k.astype(dtype, copy=False), v.astype(dtype, copy=False)
    if rows is None or len(rows) == len(q):
        return implementation.attend(pages, layer, batch, q, k=k, v=v, options=options, hints=hints)
    if k is not None and v is not None:
        k, v = k[rows], v[rows]
    part = implementation.attend(pages, layer, batch, q[rows], k=k, v=v, options=options, hints=hints)
    whole = _nothing(q, options)
    whole.out[rows] = part.out
    if whole.lse_natural is not None:
        whole.lse_natural[rows] = part.lse_natural
    return Attended(out=whole.out, lse_natural=whole.lse_natural, timings=part.timings)


def append_dtype(spec: CacheSpec) -> np.dtype:
    """Returns the dtype in which implementations take new keys and values."""
    return np.dtype(np.float32) if spec.quantized_per_token else spec.dtype


def _nothing(q: Float[np.ndarray, "tokens num_q_heads head_dim"], options: AttentionOptions) -> Attended:
    lse = np.full(q.shape[:2], -np.inf, np.float32) if options.return_lse else None
    return Attended(out=np.zeros(q.shape, q.dtype), lse_natural=lse)
