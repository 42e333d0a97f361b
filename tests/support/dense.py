"""Attention as one dense formula over true tokens, sharing nothing with the implementations; and wrong ones."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """How an answer goes wrong. The default is right."""

    causal_shift: int = 0
    window_shift: int = 0
    page_rotation: int = 0
    heads_rotation: int = 0
    drop_last_page: bool = False
    swap_k_and_v: bool = False
    ignore: tuple[str, ...] = ()


def dense_attention(inputs, mutation=None):
    """Returns out and lse of the batch's tokens, in float64."""
    mutation = mutation or Mutation()
    batch, options, case = inputs.batch, inputs.options, inputs.case
    set_options = {
        name: None if name in mutation.ignore else getattr(options, name)
        for name in ("sm_scale", "sliding_window", "soft_cap", "k_scale", "v_scale")
    }
    outs, lses = [], []
    for row in range(batch.num_seqs):
        keys, values = (_mutated(x[row], case.page_size, mutation) for x in (inputs.keys, inputs.values))
        if mutation.swap_k_and_v:
            keys, values = values, keys
        q = inputs.q[batch.cu_q_lens[row] : batch.cu_q_lens[row + 1]].astype(np.float64)
        out, lse = _dense_row(q, keys, values, int(batch.kv_lens[row]), mutation, **set_options)
        outs.append(out)
        lses.append(lse)
    return np.concatenate(outs), np.concatenate(lses)


def _mutated(tokens, page_size, mutation):
    kv_len = len(tokens)
    if mutation.page_rotation and kv_len > page_size:
        whole = kv_len // page_size * page_size
        tokens = np.concatenate([np.roll(tokens[:whole], page_size * mutation.page_rotation, axis=0), tokens[whole:]])
    if mutation.drop_last_page and kv_len > page_size:
        tokens = tokens[: (kv_len - 1) // page_size * page_size]
    return np.roll(tokens, mutation.heads_rotation, axis=1)


def _dense_row(q, keys, values, kv_len, mutation, *, sm_scale, sliding_window, soft_cap, k_scale, v_scale):
    group = q.shape[1] // keys.shape[1]
    keys, values = (np.repeat(x, group, axis=1) for x in (keys * (k_scale or 1.0), values * (v_scale or 1.0)))
    scores = np.einsum("qhd,khd->hqk", q, keys) * (1.0 if sm_scale is None else sm_scale)
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    distance = np.arange(kv_len - len(q), kv_len)[:, None] - np.arange(len(keys))
    seen = distance >= -mutation.causal_shift
    if sliding_window is not None:
        seen &= distance < sliding_window + mutation.window_shift
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # a wrong mask may leave a row nothing to see
        out = np.einsum("hqk,khd->qhd", weights / total, values)
        lse = scores.max(-1) + np.log(total[..., 0])
    return out, lse.T
