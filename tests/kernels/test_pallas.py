"""Our TPU kernels behind the protocol, in interpret mode: cases of the shared suite, and what is theirs alone."""

import time
from dataclasses import replace

import numpy as np
import pytest

from attnd.kernels import pallas_blocks
from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, KernelHints, Layout, RaggedBatch
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.pallas_blocks import Features, Tuning
from attnd.kernels.pallas_plan import LONG_TOKEN_BUCKETS, LaunchShape, launch_shapes, plan, reads_what_another_writes
from attnd.kernels.quantization import quantize_int8
from attnd.kernels.tpu_chips import CHIPS
from tests.support.calls import int32
from tests.support.cases import BY_NAME, Case
from tests.support.checking import check_answer, run
from tests.support.dense import dense_attention
from tests.support.interpreting import strict_pallas

# Interpreting is slow, so this is the part of the shared suite that has each feature, dtype, ratio of heads and kernel
# once; `make test-pallas` runs all of it. Most cases share their programs.
PLAIN = [
    "one token", "page boundaries", "first row empty", "last row empty", "row with keys but no queries",
    "shared pages", "large scores", "no padding", "zero scale", "negative scale", "k and v scales",
    "one token, split",
]  # fmt: skip
APPENDED = ["page boundaries appended", "middle row empty", "float32 interleaved", "float32 split"]
WINDOWED = ["window 1", "window 4", "window 8", "window 13", "window 2147483647"]
DIFFERENT = [
    "all options", "9 query heads on 3", "3 query heads on 3", "14 query heads on 2", "12 query heads on 1",
    "head_dim 256 split", "page_size 48 interleaved",
    "bfloat16 split", "float8_e4m3fn interleaved", "float8_e5m2 split", "int8 interleaved", "float16 queries",
]  # fmt: skip


@pytest.fixture(scope="module")
def implementation():
    return strict_pallas("on_wait")


@pytest.mark.parametrize("name", [*PLAIN, *APPENDED, *WINDOWED, *DIFFERENT])
def test_attends_as_the_dense_formula(implementation, name):
    inputs = BY_NAME[name].build()
    attended, _ = run(implementation, inputs)
    check_answer(inputs, attended.out, attended.lse_natural, implementation=implementation)
    assert attended.out.flags.writeable
    assert attended.out.flags.owndata


def test_attends_as_the_dense_formula_when_copies_run_at_once():
    inputs = BY_NAME["middle row empty"].build()
    attended, _ = run(strict_pallas("eager"), inputs)
    check_answer(inputs, attended.out, attended.lse_natural)


@pytest.mark.parametrize("name", [*APPENDED, "float8_e5m2 interleaved"])
def test_append_writes_the_new_tokens_and_no_other_byte(implementation, name):
    inputs = BY_NAME[name].build()
    _, pages = run(implementation, inputs)
    expected = inputs.pages.copy()
    batch, size = inputs.batch, inputs.case.page_size
    for token, position in enumerate(batch.token_positions):
        page, slot = batch.page_indices[batch.token_seqs[token], position // size], position % size
        for which, new in enumerate((inputs.k, inputs.v)):
            if inputs.case.layout is Layout.INTERLEAVED:
                expected[page, slot, which::2] = new[token]
            else:
                expected[which, :, page, slot] = new[token]
    every_page = np.arange(inputs.spec.num_pages, dtype=np.int32)
    held, _ = implementation.read(pages, inputs.layer, every_page)
    assert held.tobytes() == expected.tobytes()
    assert not np.any(implementation.read(pages, 1 - inputs.layer, every_page)[0])


@pytest.mark.parametrize("name", ["float32 interleaved", "bfloat16 split", "float8_e5m2 split"])
def test_written_pages_read_back_bit_for_bit_and_clear_to_zero(implementation, name):
    inputs = BY_NAME[name].build()
    pages = implementation.allocate(inputs.spec)
    axis = 0 if inputs.spec.layout is Layout.INTERLEAVED else 2
    some = int32([5, 1, 9])
    implementation.write(pages, 1, some, inputs.pages.take(some, axis))
    held, scales = implementation.read(pages, 1, some[::-1].copy())
    assert scales is None
    assert held.tobytes() == inputs.pages.take(some[::-1], axis).tobytes()
    implementation.clear(pages, some[:1])
    assert not np.any(implementation.read(pages, 1, some[:1])[0])
    assert implementation.read(pages, 1, some[1:])[0].tobytes() == inputs.pages.take(some[1:], axis).tobytes()


def test_quantized_pages_are_as_exact_as_bfloat16_products(implementation):
    inputs = BY_NAME["int8 split"].build()
    attended, pages = run(implementation, inputs)
    expected, lse = dense_attention(inputs)
    tokens = inputs.batch.num_tokens
    np.testing.assert_allclose(attended.out[:tokens], expected, atol=8e-3)
    np.testing.assert_allclose(attended.lse_natural[:tokens], lse, atol=8e-3)
    assert not np.any(attended.out[tokens:])
    every_page = np.arange(inputs.spec.num_pages, dtype=np.int32)
    weights, scales = implementation.read(pages, inputs.layer, every_page)
    for which, new in enumerate((inputs.k, inputs.v)):
        new_weights, new_scales = quantize_int8(new[:tokens])
        page, slot = inputs.batch.token_slots(inputs.case.page_size)
        np.testing.assert_array_equal(weights[which][:, page, slot].swapaxes(0, 1), new_weights)
        np.testing.assert_array_equal(scales[which][:, page, slot].swapaxes(0, 1), new_scales)
    implementation.clear(pages, every_page)
    assert not any(np.any(array) for array in implementation.read(pages, inputs.layer, every_page))


def test_window_over_quantized_pages_is_refused_and_writes_nothing(implementation):
    inputs = BY_NAME["int8 split"].build()
    with pytest.raises(UnsupportedError, match="no sliding window"):
        run(implementation, inputs, replace(inputs.options, sliding_window=4))


def test_new_scalars_and_lengths_compile_nothing(implementation):
    inputs = BY_NAME["page boundaries"].build()
    run(implementation, inputs)
    before = implementation.num_compiled_programs
    for sm_scale in (0.1, 0.2):
        run(implementation, BY_NAME["no padding"].build(), replace(inputs.options, sm_scale=sm_scale, k_scale=sm_scale))
    assert implementation.num_compiled_programs == before


def test_row_that_reads_what_another_row_appends_sees_it(implementation):
    # Row 1 reads the page that row 0 extends: its own last token lies in a page of its own.
    case = Case(name="reader", kv_lens=(12, 13), q_lens=(4, 1), append=True, padding=0)
    inputs = case.build()
    inputs.batch.page_indices[1, 0] = inputs.batch.page_indices[0, 0]
    first = inputs.batch.page_indices[0, 0]
    inputs.batch.kv_lens[0] = 8  # row 0 appends positions 4 to 7 of the page that both read
    for which, true in enumerate((inputs.keys, inputs.values)):
        inputs.pages[first, :4, which::2] = true[0][:4]
        new = (inputs.k, inputs.v)[which]
        true[0] = np.concatenate([true[0][:4], new[:4].astype(np.float64)])
        true[1] = np.concatenate([true[0][:8], true[1][8:]])
    assert reads_what_another_writes(inputs.batch, case.page_size, case.num_pages)
    attended, _ = run(implementation, inputs)
    expected, _ = dense_attention(inputs)
    np.testing.assert_allclose(attended.out, expected, atol=1e-5)


# Limits, known without compiling.
def spec(**changes):
    fields = {"layout": Layout.INTERLEAVED, "num_layers": 1, "num_pages": 1 << 17, "page_size": 16, "num_kv_heads": 8}
    fields |= {"head_dim": 128, "dtype": CACHE_DTYPES["bfloat16"]} | changes
    return CacheSpec(**fields)


def batch(kv_lens, q_lens, page_size=16):
    slots = -(-max(kv_lens) // page_size)
    table = np.arange(len(kv_lens) * slots, dtype=np.int32).reshape(len(kv_lens), slots) % (1 << 17)
    return RaggedBatch.compact(int32(kv_lens), table, int32(q_lens), page_size)


def test_too_large_a_page_table_is_refused_before_anything_compiles(implementation):
    started = time.monotonic()
    with pytest.raises(UnsupportedError, match=r"62500 pages needs a page table of 250000 bytes.* SMEM"):
        plan(batch([1_000_000], [1]), 16, 40_000, decodes=True)
    assert time.monotonic() - started < 1.0
    assert implementation.num_compiled_programs >= 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": CACHE_DTYPES["float16"]}, "dtype=float16 must be one of float32"),
        ({"num_kv_heads": 128, "head_dim": 4096}, "bytes of VMEM; v6e has"),
    ],
)
def test_cache_that_cannot_be_served_is_refused_with_the_reason(changes, reason):
    assert reason in pallas_blocks.unsupported(spec(**changes), Tuning(chip=CHIPS["v6e"]))


@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e", "tpu7x"])
def test_common_caches_are_served_everywhere(generation):
    for heads, head_dim, page_size in ((8, 128, 16), (1, 256, 128), (3, 64, 16), (8, 80, 32)):
        cache = spec(num_kv_heads=heads, head_dim=head_dim, page_size=page_size)
        assert pallas_blocks.unsupported(cache, Tuning(chip=CHIPS[generation])) is None


def test_blocks_shrink_until_they_fit():
    shape = LaunchShape(query_block=128, num_tokens=512, num_rows=8, pages_per_seq=64)
    cache, features = spec(), Features(append=True)
    roomy = pallas_blocks.chunk_config(cache, 32, "bfloat16", shape, features, Tuning(chip=CHIPS["v6e"]))
    small = replace(CHIPS["v6e"], vmem_bytes=roomy.vmem_limit_bytes // 2)
    tight = pallas_blocks.chunk_config(cache, 32, "bfloat16", shape, features, Tuning(chip=small))
    assert tight.vmem_limit_bytes <= small.vmem_bytes
    assert tight.query_block * tight.block_tokens < roomy.query_block * roomy.block_tokens


# Plans.
def test_rows_with_one_query_decode_and_the_others_do_not():
    launches = plan(batch([40, 300, 20, 90], [1, 200, 1, 30]), 16, 200_000, decodes=True)
    assert [launch.shape.query_block for launch in launches] == [1, 32, 128]
    assert [launch.tokens.tolist() for launch in launches[:1]] == [[0, 201]]
    np.testing.assert_array_equal(np.sort(np.concatenate([launch.tokens for launch in launches])), np.arange(232))


def test_long_prompt_is_cut_into_launches_that_see_what_came_before():
    size = LONG_TOKEN_BUCKETS[-1]
    launches = plan(batch([size * 2 + 5], [size * 2 + 3]), 16, 200_000, decodes=True)
    assert [int(launch.kv_lens[0]) for launch in launches] == [size + 2, 2 * size + 2, 2 * size + 5]
    assert [launch.tokens[0] for launch in launches] == [0, size, 2 * size]


def test_more_rows_than_a_launch_takes_become_several():
    launches = plan(batch([33] * 300, [1] * 300), 16, 200_000, decodes=True)
    assert [(launch.shape.num_rows, int(launch.num_seqs[0])) for launch in launches] == [(256, 256), (64, 44)]


def test_rows_shrink_as_their_tables_grow():
    launches = plan(batch([500_000] * 9, [1] * 9), 16, 200_000, decodes=True)
    assert all(launch.page_indices.size <= 200_000 for launch in launches)


def test_every_launch_has_a_shape_that_warm_up_compiles():
    rng = np.random.default_rng(0)
    shapes = set(launch_shapes(4096, 200_000, decodes=True))
    for _ in range(200):
        rows = int(rng.integers(1, 90))
        kv_lens = rng.integers(1, 16 * 4096, rows)
        q_lens = np.minimum(kv_lens, rng.choice([1, 1, 7, 40, 3000], rows))
        assert {launch.shape for launch in plan(batch(kv_lens, q_lens), 16, 200_000, decodes=True)} <= shapes


def test_hints_are_accepted(implementation):
    inputs = BY_NAME["one token"].build()
    pages = implementation.allocate(inputs.spec)
    implementation.write(pages, inputs.layer, np.arange(128, dtype=np.int32), inputs.pages)
    hints = KernelHints(num_kv_pages_per_block=2, num_queries_per_block=8)
    attended = implementation.attend(pages, inputs.layer, inputs.batch, inputs.q, options=inputs.options, hints=hints)
    check_answer(inputs, attended.out, attended.lse_natural)
