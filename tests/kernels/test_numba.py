"""The numba kernel: its arithmetic, how work is cut, what compiles when, and a cache that may be shared or missing."""

import json
import os
import subprocess
import sys

import numba
import numpy as np
import pytest

from attnd.kernels import numba_kernel, registry
from attnd.kernels.contract import CACHE_DTYPES, AttentionOptions, KernelHints, Layout, RaggedBatch
from attnd.kernels.numba import Numba
from attnd.kernels.numba_work import merge, split
from tests.support.cases import BY_NAME, Case
from tests.support.checking import check_answer, run

HINTS = KernelHints()
WIDENED = {name: name for name in numba_kernel.KINDS if CACHE_DTYPES[name].itemsize < 4}


def _batch(rng, spec, q_lens, kv_lens):
    used = -(-np.array(kv_lens) // spec.page_size)
    table = rng.integers(0, spec.num_pages, (len(used), max(used))).astype(np.int32)
    return RaggedBatch.compact(np.array(kv_lens, np.int32), table, np.array(q_lens, np.int32), spec.page_size)


def test_every_cache_dtype_has_a_kernel():
    assert set(numba_kernel.KINDS) == set(CACHE_DTYPES)


@pytest.mark.parametrize("name", WIDENED)
def test_every_number_of_a_narrow_dtype_is_widened_exactly(name):
    kind = numba_kernel.KINDS.index(name)
    dtype = CACHE_DTYPES[name]
    bits = np.arange(2 ** (8 * dtype.itemsize)).astype(f"u{dtype.itemsize}")
    widened = numba_kernel._widened

    @numba.njit
    def widen(bits, out):
        for i in range(len(bits)):
            out[i] = widened(bits[i], kind)

    out = np.empty(len(bits), np.float32)
    widen(bits, out)
    with np.errstate(invalid="ignore"):
        expected = bits.view(dtype).astype(np.float32)
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.signbit(out[out == 0]), np.signbit(expected[expected == 0]))


@pytest.mark.parametrize(
    ("name", "x"),
    [
        ("exp", np.concatenate([-np.geomspace(1e-30, 87, 20000), [0.0, -1e30, -np.inf]])),
        ("tanh", np.concatenate([np.geomspace(1e-30, 1e30, 20000), -np.geomspace(1e-30, 1e30, 20000), [0.0, np.inf]])),
    ],
)
def test_exponential_and_tangent_are_exact_to_float32(name, x):
    function = getattr(numba_kernel, f"_{name}")

    @numba.njit
    def apply(x, out):
        for i in range(len(x)):
            out[i] = function(x[i])

    x = x.astype(np.float32)
    out = np.empty_like(x)
    apply(x, out)
    expected = getattr(np, name)(x.astype(np.float64))
    np.testing.assert_allclose(out, expected, rtol=3e-7, atol=2e-38)


@pytest.mark.parametrize("name", ["exp", "tanh"])
def test_what_is_not_a_number_stays_so(name):
    function = getattr(numba_kernel, f"_{name}")
    assert np.isnan(function(np.float32(np.nan)))


@pytest.mark.parametrize("seed", range(20))
def test_every_token_meets_every_key_that_it_sees_once(seed):
    rng = np.random.default_rng(seed)
    num_seqs = int(rng.integers(1, 12))
    q_lens = rng.integers(1, 6, num_seqs)
    kv_lens = q_lens + rng.integers(0, 500, num_seqs)
    window = int(rng.integers(1, 200)) if seed % 2 else None
    num_threads = int(rng.integers(1, 5))
    case = Case(name="plan", kv_lens=(1,), q_lens=(1,), num_pages=10**6)
    batch = _batch(rng, case.spec, q_lens, kv_lens)
    decodes, chunks = split(batch, window, q_len_max=3, key_size=2**18, num_threads=num_threads)
    met = [np.zeros(batch.kv_lens[row], int) for row in batch.token_seqs]
    slots = []
    for token, row, start, end, slot in np.concatenate(decodes.threads).tolist() if decodes else []:
        assert start < end
        assert row == batch.token_seqs[decodes.tokens[token]]
        assert slot == token or decodes.extras[slot - len(decodes.tokens)] == token
        met[decodes.tokens[token]][start:end] += 1
        slots.append(slot)
    assert sorted(slots) == list(range(decodes.num_slots if decodes else 0))
    for token in chunks.tokens if chunks else []:
        met[token] += 1
    if chunks:
        np.testing.assert_array_equal(chunks.batch.q_lens, batch.q_lens[batch.q_lens > 3])
        np.testing.assert_array_equal(chunks.batch.token_positions, batch.token_positions[chunks.tokens])
    for token, counts in enumerate(met):
        position = batch.token_positions[token]
        first = 0 if window is None else max(0, position - window + 1)
        if chunks and token in chunks.tokens:
            continue
        assert np.all(counts[first : position + 1] == 1)
        assert counts.sum() == position + 1 - first


def test_threads_have_alike_to_do():
    batch = RaggedBatch(
        kv_lens=np.array([9000, 10, 500], np.int32),
        page_indices=np.zeros((3, 1200), np.int32),
        cu_q_lens=np.arange(4, dtype=np.int32),
    )
    decodes, _ = split(batch, None, q_len_max=1, key_size=2**18, num_threads=4)
    keys = [int((items[:, 3] - items[:, 2]).sum()) for items in decodes.threads]
    assert len(keys) == 4
    assert max(keys) - min(keys) <= 128


def test_small_work_stays_on_one_thread():
    batch = RaggedBatch(
        kv_lens=np.array([100], np.int32), page_indices=np.zeros((1, 13), np.int32), cu_q_lens=np.array([0, 1], "i4")
    )
    decodes, _ = split(batch, None, q_len_max=1, key_size=192, num_threads=4)
    assert len(decodes.threads) == 1


def test_merged_parts_weigh_as_their_keys():
    rng = np.random.default_rng(0)
    lse = rng.normal(size=(4, 2, 3)).astype(np.float32)
    out = rng.normal(size=(4, 2, 3, 5)).astype(np.float32)
    weights = np.exp(lse[[0, 2, 3]].astype(np.float64))
    expected = (out[[0, 2, 3]] * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    merge(np.array([0, 0]), out, lse)
    np.testing.assert_allclose(out[0], expected, rtol=1e-5)
    np.testing.assert_allclose(lse[0], np.log(weights.sum(0)), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("window", [None, 5000])
def test_one_long_row_is_shared_by_threads_and_merged(window, dtype):
    options = AttentionOptions(sm_scale=0.12, sliding_window=window, v_scale=1.5)
    case = Case(
        name="long row", kv_lens=(9000,), q_lens=(1,), page_size=100, num_kv_heads=4, num_q_heads=28, head_dim=64,
        options=options, dtype=dtype, layout=Layout.SPLIT,
    )  # fmt: skip
    inputs = case.build()
    implementation = Numba()
    implementation._num_threads = 3
    attended, _ = run(implementation, inputs)
    check_answer(inputs, attended.out, attended.lse_natural)
    assert len(implementation._split.decodes.extras) == 2


def test_no_call_after_warm_up_compiles():
    case = Case(name="warm", kv_lens=(1,), q_lens=(1,), dtype="bfloat16")
    implementation, spec, rng = Numba(), case.spec, np.random.default_rng(0)
    progress = []
    compiled = implementation.warm_up(spec, case.num_q_heads, lambda *done: progress.append(done))
    assert progress == [(i + 1, compiled) for i in range(compiled)]
    assert implementation.num_compiled_programs == compiled == 4
    assert implementation.warm_up(spec, case.num_q_heads) == 0
    pages = implementation.allocate(spec)
    for i in range(60):
        q_lens = rng.integers(1, 12, int(rng.integers(1, 40)))
        batch = _batch(rng, spec, q_lens, q_lens + rng.integers(0, 200, len(q_lens)))
        q = np.zeros((batch.num_tokens + i % 3, case.num_q_heads, case.head_dim), ("f4", np.float16)[i % 2])
        options = AttentionOptions(
            sm_scale=1 + i * 1e-6,
            soft_cap=30 + i * 1e-6 if i % 2 else None,
            sliding_window=i + 1 if i % 3 else None,
            v_scale=1 + i * 1e-6,
            return_lse=bool(i % 5),
        )
        attended = implementation.attend(pages, 0, batch, q, options=options, hints=HINTS)
        assert attended.timings.compile_ns == 0
    assert implementation.num_compiled_programs == compiled


def test_compiling_is_told_apart_from_attending():
    inputs = Case(name="cold", kv_lens=(9,), q_lens=(1,)).build()
    attended, _ = run(Numba(), inputs)
    assert attended.timings.compile_ns > attended.timings.kernel_ns > 0


def test_kernel_refuses_other_types_rather_than_compile():
    kernel = numba_kernel.compiled("float32")
    with pytest.raises(TypeError, match="No matching definition"):
        kernel(np.zeros(4, np.float64), *[None] * 8)


def test_kernel_runs_without_the_gil():
    assert numba_kernel.compiled("float32").targetoptions["nogil"]


def test_a_failed_call_leaves_the_implementation_usable():
    inputs = BY_NAME["one token"].build()
    implementation = Numba()
    attended, pages = run(implementation, inputs)
    with pytest.raises(ValueError, match="reshape"):
        implementation.attend(pages, 1, inputs.batch, inputs.q[:, :, :7], options=inputs.options, hints=HINTS)
    again, _ = run(implementation, inputs)
    np.testing.assert_array_equal(attended.out, again.out)


def test_without_numba_it_says_so_and_auto_takes_plain_jax(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "attnd.kernels.numba_kernel")
    spec = BY_NAME["one token"].spec
    assert "attnd[cpu]" in Numba().unsupported(spec)
    assert registry.choose(spec, "cpu").name == "xla"


# In processes of their own: the cache's place is chosen when numba is imported.
COMPILE = """
import json, logging, sys
logging.basicConfig(stream=sys.stdout)
from attnd.kernels.numba_kernel import compiled
stats = compiled("int8").stats
print(json.dumps([sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))
"""


def _start(**environment):
    command = [sys.executable, "-W", "error", "-c", COMPILE]
    return subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def _finish(process):
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    return output


def test_processes_share_the_cache_even_while_it_is_written(tmp_path):
    both = [_start(NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in both:
        assert sum(json.loads(_finish(process))) == 1
    assert json.loads(_finish(_start(NUMBA_CACHE_DIR=str(tmp_path)))) == [1, 0]
    for file in tmp_path.rglob("*.nb[ic]"):
        file.write_bytes(b"junk")
    output = _finish(_start(NUMBA_CACHE_DIR=str(tmp_path)))
    assert "compiled anew" in output
    assert json.loads(output.splitlines()[-1])[0] == 0
