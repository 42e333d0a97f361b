"""Plain JAX: programs stay few, work is cut so that everything is done once, and pages are aliased, not copied."""

import dataclasses

import numpy as np
import pytest

from attnd.kernels.contract import AttentionOptions, KernelHints, Layout, RaggedBatch
from attnd.kernels.xla import Xla
from attnd.kernels.xla_work import Bucket, Paging, plan
from tests.support.cases import Case
from tests.support.checking import check_answer, run

HINTS = KernelHints()


def _batch(rng, spec, q_lens, kv_lens):
    used = -(-np.array(kv_lens) // spec.page_size)
    table = rng.integers(0, spec.num_pages, (len(used), max(used))).astype(np.int32)
    return RaggedBatch.compact(np.array(kv_lens, np.int32), table, np.array(q_lens, np.int32), spec.page_size)


@pytest.mark.parametrize("layout", Layout)
def test_no_call_after_warm_up_compiles(layout):
    """Neither a shape nor a scalar: R04 is a storm of compiles from soft caps and batch sizes."""
    case = Case(name="warm", kv_lens=(1,), q_lens=(1,), layout=layout, dtype="bfloat16")
    implementation, spec, rng = Xla(), case.spec, np.random.default_rng(0)
    progress = []
    compiled = implementation.warm_up(spec, case.num_q_heads, lambda *done: progress.append(done))
    assert progress == [(i + 1, compiled) for i in range(compiled)]
    assert implementation.num_compiled_programs == compiled == 3
    assert implementation.warm_up(spec, case.num_q_heads) == 0
    pages = implementation.allocate(spec)
    for i in range(120):
        num_seqs = int(rng.integers(1, 90))
        q_lens = rng.integers(1, 3, num_seqs)
        q_lens[0] = i + 1 if i < 110 else 600
        kv_lens = q_lens + rng.integers(0, 200, num_seqs)
        batch = _batch(rng, spec, q_lens, kv_lens)
        q = np.zeros((batch.num_tokens + i % 3, case.num_q_heads, case.head_dim), ("f4", np.float16)[i % 2])
        options = AttentionOptions(
            sm_scale=1 + i * 1e-6,
            soft_cap=30 + i * 1e-6 if i % 2 else None,
            sliding_window=i + 1 if i % 3 else None,
            k_scale=1 + i * 1e-6,
            return_lse=bool(i % 5),
        )
        attended = implementation.attend(pages, 0, batch, q, options=options, hints=HINTS)
        assert attended.timings.compile_ns == 0
    assert implementation.num_compiled_programs == compiled


def test_compiling_is_told_apart_from_attending():
    inputs = Case(name="cold", kv_lens=(9,), q_lens=(1,), head_dim=24).build()
    attended, _ = run(Xla(), inputs)
    assert attended.timings.compile_ns > attended.timings.kernel_ns > 0


@pytest.mark.parametrize("window", [None, 5000])
def test_one_long_row_is_shared_by_threads_and_merged(window):
    case = Case(
        name="long row",
        kv_lens=(9000,),
        q_lens=(1,),
        page_size=100,
        num_kv_heads=4,
        head_dim=64,
        options=AttentionOptions(sm_scale=0.12, sliding_window=window),
    )
    check_answer(case.build(), *_answer(Xla(), case))


@pytest.mark.parametrize("q_len", [1, 16, 128])
def test_more_threads_than_blocks_are_no_harm(q_len):
    """Many heads are worth two threads, but keys that fit into one tile cannot be shared."""
    case = Case(name="one block", kv_lens=(130,), q_lens=(q_len,), num_kv_heads=16, num_q_heads=16, head_dim=128)
    check_answer(case.build(), *_answer(Xla(), case))


def test_a_chunk_shared_by_threads_is_merged():
    case = Case(name="long chunk", kv_lens=(2000,), q_lens=(200,), page_size=20, num_kv_heads=4, head_dim=64)
    check_answer(case.build(), *_answer(Xla(), case))


def _answer(implementation, case):
    attended, _ = run(implementation, case.build())
    return attended.out, attended.lse_natural


def test_appended_tokens_are_seen_through_the_alias():
    case = Case(name="alias", kv_lens=(13,), q_lens=(1,), append=True, padding=0)
    inputs = case.build()
    implementation = Xla()
    pages = implementation.allocate(inputs.spec)
    for bits, pool in zip(pages.host.bits, pages.pools, strict=True):
        assert pool.kv.unsafe_buffer_pointer() == bits.ctypes.data
    first, _ = run(implementation, inputs)
    inputs.v = inputs.v + np.float32(1)
    second, _ = run(implementation, inputs)
    assert not np.allclose(first.out, second.out)


def test_a_failed_call_leaves_the_implementation_usable():
    inputs = Case(name="after a failure", kv_lens=(13,), q_lens=(5,)).build()
    implementation = Xla()
    attended, pages = run(implementation, inputs)
    with pytest.raises(ValueError, match="broadcast"):
        implementation.attend(pages, 1, inputs.batch, inputs.q[:, :, :7], options=inputs.options, hints=HINTS)
    again, _ = run(implementation, inputs)
    np.testing.assert_array_equal(attended.out, again.out)


@pytest.mark.parametrize("seed", range(20))
def test_every_query_meets_every_key_that_it_sees_once(seed):
    """Blocks, threads, key ranges and calls cut the work; nothing is lost or done twice, whatever the limits."""
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 3, 8, 150]))
    num_seqs = int(rng.integers(1, 12))
    q_lens = rng.integers(1, 30, num_seqs)
    kv_lens = q_lens + rng.integers(0, 300, num_seqs)
    window = int(rng.integers(1, 200)) if seed % 2 else None
    case = Case(name="plan", kv_lens=(1,), q_lens=(1,), page_size=page_size, num_pages=10**6)
    batch = _batch(rng, case.spec, q_lens, kv_lens)
    paging = dataclasses.replace(Paging.of(case.spec), slots=int(rng.integers(260, 400)))
    buckets = [Bucket(queries=1, items=3), Bucket(queries=8, items=2)]
    work = plan(batch, window, paging=paging, key_size=2**18, buckets=buckets, num_threads=int(rng.integers(1, 4)))
    assert work.threads
    assert all(work.threads)
    met = [np.zeros((n, kv), int) for n, kv in zip(q_lens, kv_lens, strict=True)]
    for call in (call for calls in work.threads for call in calls):
        assert len(call.items) <= call.bucket.items
        assert len(call.table) <= paging.slots
        for token, length, item in zip(call.tokens, call.lengths, call.items, strict=True):
            position, slot, start, end = item.tolist()
            row = int(batch.token_seqs[token])
            assert length <= call.bucket.queries
            assert position == batch.token_positions[token]
            assert start % paging.page_size == 0
            first = token - batch.cu_q_lens[row]
            met[row][first : first + length, start:end] += 1
            for key in range(start, end):
                part = call.table[slot + (key - start) // paging.page_size]
                page, offset = divmod(part * paging.page_size + key % paging.page_size, page_size)
                assert (page, offset) == (batch.page_indices[row, key // page_size], key % page_size)
    for row, counts in enumerate(met):
        positions = np.arange(kv_lens[row] - q_lens[row], kv_lens[row])[:, None]
        keys = np.arange(kv_lens[row])
        seen = (keys <= positions) & (keys > positions - (window or 2**31))
        assert np.all(counts[seen] == 1)
        assert counts.max() == 1
