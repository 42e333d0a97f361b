"""Every competitor answers tiny workloads right, so that nobody is timed on wrong answers."""

import numpy as np
import pytest

from attnd.kernels.contract import AttentionOptions, KernelHints
from attnd.kernels.reference import Reference
from benchmarks import attention, native, workloads

HEADS = workloads.Heads(num_q_heads=6, num_kv_heads=2, head_dim=16, page_size=4)
SHAPES = {
    "decode": ([1, 1, 1], [5, 8, 1]),
    "prefill": ([7], [7]),
    "chunk": ([3], [11]),
    "mixed": ([1, 5, 1], [4, 9, 6]),
}


@pytest.fixture(params=SHAPES)
def workload(request):
    return workloads.make(request.param, *SHAPES[request.param], workloads.FLOAT32, HEADS)


def test_answer_agrees_with_the_reference_implementation(workload):
    reference = Reference()
    pages = reference.allocate(workload.spec)
    reference.write(pages, 0, np.arange(workload.spec.num_pages, dtype=np.int32), workload.kv_pages)
    options = AttentionOptions(sm_scale=workload.sm_scale)
    attended = reference.attend(pages, 0, workload.batch, workload.q, options=options, hints=KernelHints())
    np.testing.assert_allclose(workloads.answer(workload), attended.out, atol=1e-6)


def test_our_implementation_and_the_stream_run(workload):
    expected = workloads.answer(workload)
    for call in (*(attention.ours(workload, expected, name) for name in attention.OURS), attention.stream(workload)):
        assert call() > 0


def test_jax_reference_runs():
    workload = workloads.make("mixed", *SHAPES["mixed"], workloads.FLOAT32, HEADS)
    assert attention.jax_reference(workload, workloads.answer(workload))() > 0


def test_check_refuses_a_wrong_answer_and_nan(workload):
    expected = workloads.answer(workload)
    for wrong in (expected + 1e-3, np.full_like(expected, np.nan)):
        with pytest.raises(AssertionError, match="largest error"):
            workloads.check("wrong", wrong, expected, workloads.FLOAT32)


def test_workloads_have_the_documented_shapes():
    decode, mixed = workloads.decode(workloads.BFLOAT16), workloads.mixed(workloads.BFLOAT16)
    assert decode.batch.num_seqs == 32
    assert (decode.batch.kv_lens.min(), decode.batch.kv_lens.max()) == (512, 2048)
    assert decode.q.shape == (32, 32, 128)
    assert mixed.batch.num_seqs == 29
    assert mixed.q.shape == (28 + 256, 32, 128)
    assert mixed.kv_pages.shape[1:] == (16, 16, 128)


def test_page_table_is_permuted_and_pages_are_distinct():
    pages = workloads.make("decode", [1] * 4, [64] * 4, workloads.FLOAT32, HEADS).pages_used
    assert len(set(pages.tolist())) == len(pages)
    assert (np.diff(pages) != 1).any()


@pytest.mark.parametrize("compiler", ["C", "NumPy"])
@pytest.mark.parametrize("words", [7, 64])
def test_page_reader_reads_every_word(monkeypatch, compiler, words):
    if compiler == "NumPy":
        monkeypatch.setattr(native, "compile_c", lambda *_: None)
    reader = native.PageReader(num_threads=3)
    if reader.name != compiler:
        pytest.skip("no C compiler")
    pool = np.random.default_rng(0).integers(0, 2**63, (9, words), dtype=np.uint64)
    pages = np.array([8, 0, 3, 5], np.int32)
    assert reader.read(pool, pages) == int(pool[pages].sum(dtype=np.uint64))
