"""torch's scaled_dot_product_attention over a paged cache, in each of the ways that make it fast on CPU.

Three questions make the variants: how the pages reach SDPA (a fresh gather, a gather into buffers that are kept, or
already gathered), how the pool lies in memory, and how grouped heads are given to SDPA. `attention.py` lets all of
them run and keeps the fastest. Masks, tables and buffers are made beforehand: only the gather, SDPA and the copy to
the output are timed.
"""

import importlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from benchmarks.workloads import Workload

# Query heads that share keys as rows of one block, or SDPA's own grouping.
STYLES = ("rows", "gqa")
FETCHES = ("gather", "gather into kept buffers", "pre-gathered")


def load() -> Any | None:
    """Returns torch, or None where it is not installed."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        return None


class TorchSdpa:
    """SDPA for one workload. K and V pools are apart and in the layout that suits torch, not in ours."""

    def __init__(self, torch: Any, workload: Workload) -> None:
        self._torch = torch
        self._workload = workload
        spec, batch = workload.spec, workload.batch
        self._heads, self._head_dim = spec.num_kv_heads, spec.head_dim
        self._group = workload.q.shape[1] // spec.num_kv_heads
        kv = _tensor(torch, workload.kv_pages).view(spec.num_pages, spec.page_size, spec.num_kv_heads, 2, spec.head_dim)
        token_major = [kv[:, :, :, side].contiguous() for side in range(2)]
        self._pools = {
            "token-major": token_major,
            "head-major": [pool.permute(2, 0, 1, 3).contiguous() for pool in token_major],
        }
        self._page_axis = {"token-major": 0, "head-major": 1}
        self._tables = [torch.from_numpy(workload.row_pages(row).astype(np.int64)) for row in range(batch.num_seqs)]
        self._q = _tensor(torch, workload.q)
        self._masks = [self._masks_of(row) for row in range(batch.num_seqs)]
        longest = max(len(table) for table in self._tables)
        self._buffers = {
            layout: [torch.empty_like(pool.narrow(self._page_axis[layout], 0, longest)).flatten() for pool in pools]
            for layout, pools in self._pools.items()
        }
        self._ready = [
            tuple(side.contiguous() for side in self._rows(row, "head-major", FETCHES[0]))
            for row in range(batch.num_seqs)
        ]

    def variants(self, fetch: str) -> Mapping[str, Callable[[], Any]]:
        """Returns the ways to run with one of `FETCHES`, by name; each returns a tensor of q's shape and dtype."""
        layouts = ("head-major",) if fetch == FETCHES[2] else tuple(self._pools)
        # A decode by enable_gqa reads each key once per query head and never wins.
        styles = STYLES if self._workload.batch.q_lens.max() > 1 else STYLES[:1]

        def run_as(layout: str, style: str) -> Callable[[], Any]:
            return lambda: self.run(fetch, layout, style)

        return {f"{layout}/{style}": run_as(layout, style) for layout, style in itertools.product(layouts, styles)}

    def run(self, fetch: str, layout: str, style: str) -> Any:
        """Attends once; returns a torch tensor of q's shape and dtype."""
        with self._torch.inference_mode():
            out = self._torch.empty_like(self._q)
            for row in range(self._workload.batch.num_seqs):
                keys, values = self._ready[row] if fetch == FETCHES[2] else self._rows(row, layout, fetch)
                tokens = self._workload.row_tokens(row)
                self._attend(self._q[tokens], keys, values, self._masks[row][style], style, out[tokens])
            return out

    def _rows(self, row: int, layout: str, fetch: str) -> list[Any]:
        """Returns keys and values of one sequence, [1, num_kv_heads, kv_len, head_dim]."""
        kv_len, table = int(self._workload.batch.kv_lens[row]), self._tables[row]
        axis = self._page_axis[layout]
        sides = []
        for pool, buffer in zip(self._pools[layout], self._buffers[layout], strict=True):
            shape = [*pool.shape]
            shape[axis] = len(table)
            out = buffer[: int(np.prod(shape))].view(shape) if fetch == FETCHES[1] else None
            pages = self._torch.index_select(pool, axis, table, out=out)
            if layout == "token-major":
                side = pages.view(-1, self._heads, self._head_dim)[:kv_len].transpose(0, 1)
            else:
                side = pages.view(self._heads, -1, self._head_dim)[:, :kv_len]
            sides.append(side[None])
        return sides

    def _attend(self, q: Any, keys: Any, values: Any, mask: Any, style: str, out: Any) -> None:
        """Writes the output of one sequence; q and out are [q_len, num_q_heads, head_dim]."""
        sdpa = self._torch.nn.functional.scaled_dot_product_attention
        scale, q_len = self._workload.sm_scale, len(q)
        if style == STYLES[1] and mask is not None:
            square = q_len == keys.shape[2]
            result = sdpa(
                q.transpose(0, 1)[None], keys, values, attn_mask=None if square else mask, is_causal=square,
                scale=scale, enable_gqa=True,
            )  # fmt: skip
            out.copy_(result[0].transpose(0, 1))
            return
        # The heads that share keys become rows of one query block: SDPA then reads each key once.
        rows = q.view(q_len, self._heads, self._group, self._head_dim).permute(1, 2, 0, 3)
        rows = rows.reshape(1, self._heads, self._group * q_len, self._head_dim)
        result = sdpa(rows, keys, values, attn_mask=mask, scale=scale)
        grouped = result.view(self._heads, self._group, q_len, self._head_dim).permute(2, 0, 1, 3)
        out.view(q_len, self._heads, self._group, self._head_dim).copy_(grouped)

    def _masks_of(self, row: int) -> dict[str, Any]:
        """Returns the causal mask of one sequence, added to the scores, for each style; None for a decode."""
        positions = self._workload.batch.token_positions[self._workload.row_tokens(row)]
        if len(positions) == 1:
            return dict.fromkeys(STYLES)
        hidden = np.arange(int(self._workload.batch.kv_lens[row])) > positions[:, np.newaxis]
        mask = self._torch.from_numpy(np.where(hidden, np.float32("-inf"), np.float32(0))).to(self._q.dtype)
        return {STYLES[0]: mask.repeat(self._group, 1)[None, None], STYLES[1]: mask}


def to_numpy(tensor: Any) -> np.ndarray:
    """Returns a tensor's values as float32."""
    values: np.ndarray = tensor.float().numpy()
    return values


def _tensor(torch: Any, array: np.ndarray) -> Any:
    """Returns a tensor over an array's memory; NumPy's bfloat16 is foreign to torch, its bits are not."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
