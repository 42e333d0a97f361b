"""Named cases of attention: what every implementation must get right, over poisoned memory."""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from attnd.kernels.contract import CACHE_DTYPES, Q_DTYPES, AttentionOptions, CacheSpec, Layout, RaggedBatch
from attnd.kernels.quantization import dequantize_int8, quantize_int8

JUNK = 10**6


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. Sequences are random, their pages permuted; every byte that must not be read is poisoned.

    Attributes:
        append: Whether the queries' k and v come with the call; their slots are poisoned before.
        padding: Rows of q, k and v past the tokens, all NaN.
        shared: Whether all sequences read the same pages, as far as each reaches; the first is the longest.
        q_factor: Multiplies q, to reach large scores.
    """

    name: str
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    layout: Layout = Layout.INTERLEAVED
    dtype: str = "float32"
    q_dtype: str = "float32"
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    page_size: int = 8
    num_pages: int = 128
    options: AttentionOptions = field(default_factory=lambda: AttentionOptions(sm_scale=0.18))
    append: bool = False
    padding: int = 3
    shared: bool = False
    q_factor: float = 1.0
    seed: int = 0

    @property
    def spec(self) -> CacheSpec:
        return CacheSpec(
            layout=self.layout,
            num_layers=2,
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=CACHE_DTYPES[self.dtype],
        )

    def build(self) -> "Inputs":
        return Inputs(self)


class Inputs:
    """The arrays of a case. `keys` and `values` are the sequences' true tokens, as the cache's dtype holds them."""

    layer = 1

    def __init__(self, case: Case) -> None:
        self.case, self.spec, self.options = case, case.spec, replace(case.options, return_lse=True)
        self._rng = np.random.default_rng(case.seed)
        self.batch = RaggedBatch.compact(
            np.array(case.kv_lens, np.int32), self._tables(), np.array(case.q_lens, np.int32), case.page_size
        )
        tokens = self.batch.num_tokens + case.padding
        self.q = self._normal((tokens, case.num_q_heads, case.head_dim)) * case.q_factor
        self.q[self.batch.num_tokens :] = np.nan
        self.q = self.q.astype(Q_DTYPES[case.q_dtype])
        self._fill(tokens)

    def _normal(self, shape):
        return self._rng.standard_normal(shape).astype(np.float32)

    def _tables(self):
        """Tables of permuted pages; page 0 belongs to nobody, slots past a row's end hold junk."""
        case = self.case
        used = [-(-kv_len // case.page_size) for kv_len in case.kv_lens]
        table = np.full((len(used), max(used) + 1), JUNK, np.int32)
        table[::2] = -7
        free = (self._rng.permutation(case.num_pages - 1) + 1).tolist()
        common = [free.pop() for _ in range(max(used))] if case.shared else []
        for row, count in enumerate(used):
            table[row, :count] = common[:count] if case.shared else [free.pop() for _ in range(count)]
        return table

    def _fill(self, tokens: int) -> None:
        """Poisons the pages, then writes the tokens that a call may read."""
        case, spec, batch = self.case, self.spec, self.batch
        quantized = spec.dtype == np.int8
        self.pages = np.full(spec.pages_shape(spec.num_pages), 127 if quantized else np.nan, spec.dtype)
        self.scales = None
        if spec.quantized_per_token:
            self.scales = np.full(spec.scales_shape(spec.num_pages), np.nan, np.float32)
        shape = (tokens, case.num_kv_heads, case.head_dim)
        poison = 0 if quantized and not spec.quantized_per_token else np.nan
        new = [np.full(shape, poison, np.float32 if spec.quantized_per_token else spec.dtype) for _ in "kv"]
        self.keys, self.values = [], []
        for row in range(batch.num_seqs):
            for which, true in enumerate((self.keys, self.values)):
                true.append(self._fill_row(row, which, new[which], reuse=true))
        self.k, self.v = new if case.append else (None, None)

    def _fill_row(self, row: int, which: int, new, reuse):
        case, spec, batch = self.case, self.spec, self.batch
        kv_len, q_len = int(batch.kv_lens[row]), int(batch.q_lens[row])
        if spec.dtype == np.int8 and not spec.quantized_per_token:
            stored = self._rng.integers(-128, 128, (kv_len, case.num_kv_heads, case.head_dim)).astype(np.int8)
            given, scales, true = stored, None, stored.astype(np.float64)
        elif spec.quantized_per_token:
            given = self._normal((kv_len, case.num_kv_heads, case.head_dim))
            stored, scales = quantize_int8(given)
            true = dequantize_int8(stored, scales)
        else:
            given = stored = self._normal((kv_len, case.num_kv_heads, case.head_dim)).astype(spec.dtype)
            scales, true = None, stored.astype(np.float64)
        if case.shared and reuse:  # the pages hold the first row's tokens already
            return reuse[0][:kv_len]
        new[batch.cu_q_lens[row] : batch.cu_q_lens[row + 1]] = given[kv_len - q_len :]
        window = self.options.sliding_window or kv_len
        first = max(0, kv_len - q_len - window + 1)
        for position in range(first, kv_len - q_len if case.append else kv_len):
            page, slot = batch.page_indices[row, position // case.page_size], position % case.page_size
            if case.layout is Layout.INTERLEAVED:
                self.pages[page, slot, which::2] = stored[position]
            else:
                self.pages[which, :, page, slot] = stored[position]
            if self.scales is not None:
                self.scales[which, :, page, slot] = scales[position]
        return true


def _options(**kwargs):
    return AttentionOptions(sm_scale=0.18, **kwargs)


RAGGED = [
    Case(name="one token", kv_lens=(1,), q_lens=(1,)),
    Case(name="page boundaries", kv_lens=(7, 8, 9, 15, 16, 17), q_lens=(1, 8, 9, 1, 16, 2)),
    Case(name="page boundaries appended", kv_lens=(7, 8, 9, 15, 16, 17), q_lens=(1, 8, 9, 1, 16, 2), append=True),
    Case(name="first row empty", kv_lens=(0, 13), q_lens=(0, 5)),
    Case(name="middle row empty", kv_lens=(9, 0, 13), q_lens=(3, 0, 5), append=True),
    Case(name="last row empty", kv_lens=(9, 13, 0), q_lens=(3, 5, 0)),
    Case(name="row with keys but no queries", kv_lens=(9, 8, 13), q_lens=(3, 0, 1)),
    Case(name="more rows than a program takes", kv_lens=tuple(range(1, 76)), q_lens=(1,) * 75, num_pages=420),
    Case(name="chunks among decodes", kv_lens=(300, 20, 400, 5), q_lens=(300, 1, 70, 3), append=True),
    Case(name="chunk over a long context", kv_lens=(700,), q_lens=(20,)),
    Case(name="shared pages", kv_lens=(24, 9, 13), q_lens=(1, 3, 5), shared=True),
    Case(name="large scores", kv_lens=(40, 17), q_lens=(9, 1), q_factor=300.0),
    Case(name="no padding", kv_lens=(9, 13), q_lens=(3, 5), padding=0),
]
OPTIONS = [
    *(
        Case(name=f"window {w}", kv_lens=(9, 13, 30), q_lens=(3, 5, 1), options=_options(sliding_window=w))
        for w in (1, 4, 8, 9, 13, 100, 2**31 - 1)
    ),
    Case(name="window on a long row", kv_lens=(600, 300), q_lens=(40, 1), options=_options(sliding_window=16)),
    Case(name="soft cap", kv_lens=(9, 13), q_lens=(3, 1), q_factor=10, options=_options(soft_cap=5.0)),
    Case(name="tiny soft cap", kv_lens=(9, 13), q_lens=(3, 1), q_factor=10, options=_options(soft_cap=1e-6)),
    Case(name="zero scale", kv_lens=(9, 13), q_lens=(3, 1), options=AttentionOptions(sm_scale=0.0)),
    Case(name="negative scale", kv_lens=(9, 13), q_lens=(3, 1), options=AttentionOptions(sm_scale=-0.2)),
    Case(name="k and v scales", kv_lens=(9, 13), q_lens=(3, 1), options=_options(k_scale=0.5, v_scale=3.0)),
    Case(
        name="all options",
        kv_lens=(50, 13, 300),
        q_lens=(20, 1, 1),
        append=True,
        q_factor=4,
        options=_options(sliding_window=21, soft_cap=2.0, k_scale=0.9, v_scale=1.5),
    ),
]
DTYPES = [
    Case(
        name=f"{dtype} {layout}",
        kv_lens=(9, 130, 33),
        q_lens=(3, 1, 5),
        layout=layout,
        dtype=dtype,
        q_dtype="bfloat16" if dtype == "bfloat16" else "float32",
        append=True,
        options=_options(k_scale=0.02, v_scale=0.05) if (dtype, layout) == ("int8", "interleaved") else _options(),
    )
    for dtype in CACHE_DTYPES
    for layout in Layout
] + [Case(name=f"{dtype} queries", kv_lens=(9, 13), q_lens=(3, 1), q_dtype=dtype) for dtype in ("bfloat16", "float16")]
HEADS = [
    Case(name=f"{q} query heads on {kv}", kv_lens=(20, 9), q_lens=(3, 1), num_q_heads=q, num_kv_heads=kv)
    for q, kv in ((3, 3), (9, 3), (8, 2), (14, 2), (12, 1), (7, 1))
] + [
    Case(name=f"head_dim {head_dim} {layout}", kv_lens=(20, 9), q_lens=(3, 1), head_dim=head_dim, layout=layout)
    for head_dim, layout in ((5, "split"), (64, "interleaved"), (80, "split"), (96, "interleaved"), (256, "split"))
]
PAGE_SIZES = [
    Case(
        name=f"page_size {page_size} {layout}",
        kv_lens=(2 * page_size + 1, page_size, 300),
        q_lens=(2, 1, 1),
        page_size=page_size,
        layout=layout,
        num_pages=320 if page_size == 1 else 128,
        append=True,
    )
    for page_size, layout in ((1, "interleaved"), (7, "split"), (48, "interleaved"), (300, "split"))
]
SPLIT = [
    replace(case, name=f"{case.name}, split", layout=Layout.SPLIT)
    for case in (*RAGGED[:5], RAGGED[8], OPTIONS[1], OPTIONS[-1])
]
CASES = [
    replace(case, layout=Layout(case.layout), seed=seed)
    for seed, case in enumerate([*RAGGED, *OPTIONS, *DTYPES, *HEADS, *PAGE_SIZES, *SPLIT])
]
BY_NAME = {case.name: case for case in CASES}
# Absolute and relative, by q's dtype: half a unit in the last place, and what float32 sums lose.
TOLERANCES = {
    np.dtype(np.float32): 1e-5,
    np.dtype(ml_dtypes.bfloat16): 8e-3,
    np.dtype(np.float16): 1e-3,
}
