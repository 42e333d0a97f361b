"""A small batch, and what attention over it should give."""

import numpy as np

KV_LENS, PAGE_INDICES, CU_Q_LENS, NUM_SEQS = [9, 13], [[3, 7], [5, 2]], [0, 3, 8], [2]


def attention(q, k, v, scale=1.0):
    """Causal attention of one sequence in float64: q [T, H, D] are the last of k, v [L, KV, D]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, q.shape[1] // k.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("thd,lhd->htl", q, k) * scale
    scores[:, np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]] = -np.inf
    lse = np.logaddexp.reduce(scores, axis=-1)
    return np.einsum("htl,lhd->thd", np.exp(scores - lse[..., None]), v), lse.T


def ragged(run, cache, q, **changes):
    call = {"kv_lens": KV_LENS, "page_indices": PAGE_INDICES, "cu_q_lens": CU_Q_LENS, "num_seqs": NUM_SEQS, **changes}
    return run(cache.ragged_paged_attention(0, q, **call))


def interleaved(k, v):
    """[L, KV, D] twice to pages of eight tokens, K at even and V at odd heads, the last page's tail zero."""
    tokens = np.stack([k, v], axis=2).reshape(len(k), -1, k.shape[-1])
    pages = np.zeros((-(-len(k) // 8) * 8, *tokens.shape[1:]), k.dtype)
    pages[: len(k)] = tokens
    return pages.reshape(-1, 8, *tokens.shape[1:])
