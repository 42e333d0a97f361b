"""The decode kernel in TPU interpret mode, against float64, over memory in which all that must not be read is NaN."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels import pallas_words
from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, Layout, RaggedBatch
from attnd.kernels.host_pages import HostPages, bits_of
from attnd.kernels.pallas_decode import decode
from attnd.kernels.pallas_decode_config import DecodeConfig
from attnd.kernels.pallas_decode_items import Item, Items
from attnd.kernels.pallas_words import Ref
from attnd.kernels.reference import Reference
from tests.support import mutations
from tests.support.interpreting import RaceDetected, counted_copies, jit_quickly, without_races


@dataclass(frozen=True)
class Case:
    """One call; rows past `kv_lens` are not in use."""

    kv_lens: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 128
    page_size: int = 16
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    block_tokens: int = 128
    append: bool = True
    rows: int = 0
    sm_scale: float = 0.1
    sliding_window: int | None = None
    soft_cap: float | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_factor: float = 1.0

    @property
    def tolerance(self) -> float:
        exact = self.q_dtype == self.kv_dtype == "float32"
        return (1e-5 if exact else 2e-2) * self.v_scale * (40 if self.kv_dtype == "int8" else 1)


@dataclass
class Call:
    """What goes into the kernel, and what must come out."""

    config: DecodeConfig
    arrays: tuple[np.ndarray, ...]
    scalars: dict[str, object]
    out: np.ndarray
    lse: np.ndarray
    pool: np.ndarray


def build(case: Case) -> Call:
    rng = np.random.default_rng(len(case.kv_lens))
    num_q_heads, num_kv_heads = case.heads
    used, rows = len(case.kv_lens), max(case.rows, len(case.kv_lens))
    kv_dtype, q_dtype = jnp.dtype(case.kv_dtype), jnp.dtype(case.q_dtype)
    counts = [-(-n // case.page_size) for n in case.kv_lens]
    num_pages, pages_per_seq = sum(counts) + 2, max([1, *counts]) + 1
    poison = np.array(99 if case.kv_dtype == "int8" else np.nan).astype(kv_dtype)
    free = list(rng.permutation(num_pages))
    table = np.full((rows, pages_per_seq), 10**6, np.int32)
    pool = np.full((num_pages, case.page_size, 2 * num_kv_heads, case.head_dim), poison, kv_dtype)
    new = np.full((rows, 2 * num_kv_heads, case.head_dim), poison, kv_dtype)
    for row, length in enumerate(case.kv_lens):
        table[row, : counts[row]] = [free.pop() for _ in range(counts[row])]
        tokens = rng.standard_normal((length, *pool.shape[2:]))
        tokens = (np.round(tokens * 30).clip(-128, 127) if case.kv_dtype == "int8" else tokens).astype(kv_dtype)
        for t in range(0 if case.sliding_window is None else max(0, length - case.sliding_window), length):
            if case.append and t == length - 1:
                new[row] = tokens[t]
            else:
                pool[table[row, t // case.page_size], t % case.page_size] = tokens[t]
    q = (rng.standard_normal((rows, num_q_heads, case.head_dim)) * case.q_factor).astype(q_dtype)
    q[used:] = np.nan
    kv_lens = np.full(rows, 10**6, np.int32)
    kv_lens[:used] = case.kv_lens
    out, lse, after = expect(case, pool, table, kv_lens, q, new)
    config = DecodeConfig(
        num_rows=rows, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=case.head_dim,
        page_size=case.page_size, num_pages=num_pages, pages_per_seq=pages_per_seq, q_dtype=case.q_dtype,
        kv_dtype=case.kv_dtype, block_tokens=case.block_tokens, windowed=case.sliding_window is not None,
        capped=case.soft_cap is not None, append=case.append, return_lse=True,
    )  # fmt: skip
    scalars: dict[str, object] = {n: np.float32(getattr(case, n)) for n in ("sm_scale", "k_scale", "v_scale")}
    if case.sliding_window is not None:
        scalars["sliding_window"] = np.int32(case.sliding_window)
    if case.soft_cap is not None:
        scalars["soft_cap"] = np.float32(case.soft_cap)
    if case.append:
        scalars |= {"k": new[:, 0::2], "v": new[:, 1::2]}
    arrays = (q, pool, kv_lens, table, np.array([used], np.int32))
    return Call(config=config, arrays=arrays, scalars=scalars, out=out, lse=lse, pool=after)


def expect(
    case: Case, pool: np.ndarray, table: np.ndarray, kv_lens: np.ndarray, q: np.ndarray, new: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns what the oracle makes of the rows in use, and zeros and -inf for the others."""
    spec = CacheSpec(
        layout=Layout.INTERLEAVED, num_layers=1, num_pages=len(pool), page_size=case.page_size,
        num_kv_heads=case.heads[1], head_dim=case.head_dim, dtype=pool.dtype,
    )  # fmt: skip
    pages = HostPages(spec=spec, bits=(bits_of(pool).copy(),), scales=())
    rows = np.flatnonzero(np.where(np.arange(len(q)) < len(case.kv_lens), kv_lens, 0))
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    if len(rows):
        batch = RaggedBatch.compact(kv_lens[rows], table[rows], np.ones(len(rows), np.int32), case.page_size)
        appended = {"k": new[rows, 0::2], "v": new[rows, 1::2]} if case.append else {}
        options = AttentionOptions(
            sm_scale=case.sm_scale, sliding_window=case.sliding_window, soft_cap=case.soft_cap, k_scale=case.k_scale,
            v_scale=case.v_scale, return_lse=True,
        )  # fmt: skip
        attended = Reference().attend(
            pages, 0, batch, q[rows].astype(np.float64), **appended, options=options, hints=KernelHints()
        )
        assert attended.lse_natural is not None
        out[rows], lse[rows] = attended.out, attended.lse_natural
    return out, lse, pages.bits[0]


def faults(case: Case, mode: str) -> list[str]:
    """Runs a case and returns what is wrong with the answer."""
    call = build(case)
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan")

    def run(*arrays: jax.Array, **scalars: jax.Array) -> tuple[jax.Array, ...]:
        return decode(call.config, *arrays, **scalars, interpret=params)

    try:
        with without_races():
            out, lse, pool = map(np.asarray, jit_quickly(run)(*call.arrays, **call.scalars))
    except RaceDetected:
        return ["a race"]
    found = []
    if not np.allclose(out.astype(np.float64), call.out, rtol=0, atol=case.tolerance):
        found.append(f"out differs by {np.abs(out.astype(np.float64) - call.out).max()}")
    if (out[call.out == 0] != 0).any():
        found.append("rows that are not in use are not zero")
    # The scores' own rounding grows with them.
    if not np.allclose(lse, call.lse, rtol=1e-6, atol=case.tolerance):
        found.append("lse differs")
    if (bits_of(pool) != call.pool).any() and not np.array_equal(bits_of(pool), call.pool, equal_nan=True):
        found.append("the pool differs")
    return found


RAGGED = Case((300, 5, 0, 129, 16, 520))
FULL = Case((700,), page_size=128)
CASES = {
    "ragged": RAGGED,
    "full_blocks": FULL,
    "nothing_appended_and_float32_queries": replace(RAGGED, append=False, rows=8, q_dtype="float32", sm_scale=1.0),
    "empty_batch": Case((), rows=2),
    "empty_rows_first_and_last": Case((0, 17, 0), heads=(12, 1), head_dim=64, sliding_window=1),
    "window_cap_and_scales": replace(RAGGED, sliding_window=100, soft_cap=3.0, k_scale=2.0, v_scale=3.0, page_size=8),
    "window_past_many_full_blocks": Case((900, 40), sliding_window=650),
    "page_larger_than_a_block": Case((300, 257), page_size=256, sliding_window=280, sm_scale=0.0),
    "float32": Case((300, 40), q_dtype="float32", kv_dtype="float32", sliding_window=150, soft_cap=5.0),
    "bfloat16_queries_of_five_heads": Case((150, 40), heads=(5, 5), head_dim=192, kv_dtype="float32"),
    "float8_e4m3fn": Case((150, 40), kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=2.0),
    "float8_e5m2_of_one_head": Case((150, 40), heads=(3, 1), kv_dtype="float8_e5m2", page_size=8),
    "int8_of_three_heads": Case((150, 40), heads=(21, 3), head_dim=80, kv_dtype="int8", k_scale=1 / 30, sm_scale=-0.1),
    "sixteen_heads_of_256": Case((150, 40, 300), heads=(16, 16), head_dim=256, block_tokens=64),
    "huge_scale": Case((300, 40), q_dtype="float32", kv_dtype="float32", sm_scale=1e30, q_factor=1e3),
}
EAGER = ("ragged", "window_cap_and_scales")


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    assert faults(CASES[name], "on_wait") == []


@pytest.mark.parametrize("name", EAGER)
def test_equals_float64_when_copies_run_at_once(name: str) -> None:
    assert faults(CASES[name], "eager") == []


def test_widens_every_finite_float8() -> None:
    codes = np.arange(256, dtype=np.uint32)
    values = codes.astype(np.uint8).view(jnp.float8_e4m3fn).astype(np.float32)
    words = np.tile((codes | codes[::-1] << 16)[:, np.newaxis], (1, 128))

    def kernel(words: Ref, wide: Ref) -> None:
        wide[...] = pallas_words.widen_e4m3fn(words[...])

    shape = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16)
    wide = np.asarray(pl.pallas_call(kernel, out_shape=shape, interpret=pltpu.InterpretParams())(words))
    wide, finite = wide.astype(np.float32)[:, 5], np.isfinite(values)
    np.testing.assert_array_equal(wide[0::2][finite].view(np.int32), values[finite].view(np.int32))
    np.testing.assert_array_equal(wide[1::2][::-1][finite], values[finite])


def items_of(kv_len: int, window: int | None) -> list[Item]:
    config = DecodeConfig(
        num_rows=1, num_q_heads=8, num_kv_heads=8, head_dim=128, page_size=16, num_pages=1, pages_per_seq=1024,
        q_dtype="bfloat16", kv_dtype="bfloat16", block_tokens=512, windowed=window is not None,
    )  # fmt: skip
    items = Items(config=config, kv_lens=jnp.array([kv_len]), num_seqs=1, window=window)
    found = [items.first(jnp.int32(0))]
    while not found[-1].closes:
        found.append(items.following(found[-1]))
    return found


@pytest.mark.parametrize("kv_len", [1, 127, 512, 513, 1023, 1024, 1025, 1500, 2049])
def test_items_tile_a_row(kv_len: int) -> None:
    items = items_of(kv_len, None)
    assert sum(int(item.tokens) for item in items) == kv_len
    starts = np.cumsum([0] + [int(item.tokens) for item in items[:-1]])
    np.testing.assert_array_equal(starts, [int(item.strip) * 16 for item in items])
    assert all(int(item.tokens) <= 512 for item in items)
    if len(items) > 1:
        assert abs(int(items[-1].tokens) - int(items[-2].tokens)) < 256


def test_a_window_costs_what_its_tokens_cost() -> None:
    items = items_of(16_000 + 7, 1024)
    assert len(items) <= len(items_of(1024, None)) + 1
    assert sum(int(item.tokens) for item in items) < 1024 + 16


def test_a_window_fetches_what_its_tokens_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    for case in (Case((16_007,), sliding_window=1024), Case((1024,))):
        with counted_copies(monkeypatch) as copies:
            assert faults(replace(case, block_tokens=512), "on_wait") == []
        started.append(len(copies))
    assert started[1] >= 1024 // 16
    assert started[0] <= started[1] + 512 // 16


def test_reads_and_writes_words_by_the_twin() -> None:
    values = np.random.default_rng(0).standard_normal((128, 128)).astype(jnp.bfloat16)

    def kernel(rows: Ref, words: Ref, low: Ref, high: Ref, copy: Ref) -> None:
        words[...] = pallas_words.load_words(rows, 8, 16, stride=2, interpret=True)
        low[...] = pallas_words.low_half(words[...], jnp.bfloat16)
        high[...] = pallas_words.high_half(words[...], jnp.bfloat16)
        copy[...] = jnp.zeros_like(copy)
        pallas_words.store_words(copy, words[...], 8, stride=2, interpret=True)

    halves = jax.ShapeDtypeStruct((16, 128), jnp.bfloat16)
    shapes = [
        jax.ShapeDtypeStruct((16, 128), jnp.uint32),
        halves,
        halves,
        jax.ShapeDtypeStruct((128, 128), jnp.bfloat16),
    ]
    words, low, high, copy = (
        np.asarray(x) for x in pl.pallas_call(kernel, out_shape=shapes, interpret=pltpu.InterpretParams())(values)
    )
    bits = values.view(np.uint16)
    even, odd = bits[16:80:4], bits[17:80:4]
    np.testing.assert_array_equal(words, even | odd.astype(np.uint32) << 16)
    np.testing.assert_array_equal(low.view(np.uint16), even)
    np.testing.assert_array_equal(high.view(np.uint16), odd)
    expected = np.zeros_like(bits)
    expected[16:80:4], expected[17:80:4] = even, odd
    np.testing.assert_array_equal(copy.view(np.uint16), expected)


MUTATED = Case((180, 70, 300), append=False, sliding_window=140, soft_cap=3.0)


def test_nothing_is_wrong_before_mutation() -> None:
    assert faults(MUTATED, "eager") == []


@pytest.mark.parametrize("name", mutations.DECODE)
def test_notices_a_wrong_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutations.DECODE[name](monkeypatch)
    assert faults(MUTATED, "eager") != []
