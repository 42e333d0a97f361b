"""Every implementation on every case: the numbers, the padding, and which bytes of the pages change."""

import dataclasses

import numpy as np
import pytest

from attnd.kernels import registry
from attnd.kernels.contract import INT8_SCALE, KernelHints, Layout
from tests.support.cases import BY_NAME, CASES, Case
from tests.support.checking import check_answer, run
from tests.support.interpreting import DMA_MODES, strict_pallas

# Interpreting the TPU kernels takes minutes: `make test-pallas` does, and `test_pallas` has a part of it.
SLOW = [pytest.param(mode, marks=pytest.mark.pallas_suite, id=f"pallas_{mode}") for mode in DMA_MODES]

# float16 pages, and pages that are no whole tiles of memory.
REFUSED = ("float16 interleaved", "float16 split", "page_size 1 interleaved", "page_size 7 split")


@pytest.fixture(scope="session", params=["reference", "xla", "numba", *SLOW])
def implementation(request):
    return strict_pallas(request.param) if request.param in DMA_MODES else registry.create(request.param)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attends_as_the_dense_formula(implementation, case):
    inputs = case.build()
    if (reason := implementation.unsupported(case.spec)) is not None:
        assert case.name in REFUSED
        pytest.skip(reason)
    attended, _ = run(implementation, inputs)
    check_answer(inputs, attended.out, attended.lse_natural, implementation=implementation)
    assert attended.out.flags.writeable
    assert attended.out.flags.owndata


APPENDING = [case for case in CASES if case.append]


@pytest.mark.parametrize("case", APPENDING, ids=lambda case: case.name)
def test_append_writes_the_new_tokens_and_no_other_byte(implementation, case):
    inputs = case.build()
    if (reason := implementation.unsupported(case.spec)) is not None:
        pytest.skip(reason)
    _, pages = run(implementation, inputs)
    expected, scales = inputs.pages.copy(), inputs.scales
    batch, size = inputs.batch, case.page_size
    for token, position in enumerate(batch.token_positions):
        page, slot = batch.page_indices[batch.token_seqs[token], position // size], position % size
        for which, new in enumerate((inputs.k, inputs.v)):
            if case.layout is Layout.INTERLEAVED:
                expected[page, slot, which::2] = new[token]
            elif inputs.scales is None:
                expected[which, :, page, slot] = new[token]
            else:
                top = np.abs(new[token]).max(-1, keepdims=True)
                scales[which, :, page, slot] = top
                expected[which, :, page, slot] = np.clip(
                    np.rint(new[token] * (np.float32(INT8_SCALE) / top)), -128, 127
                )
    every_page = np.arange(inputs.spec.num_pages, dtype=np.int32)
    held, held_scales = implementation.read(pages, inputs.layer, every_page)
    assert held.dtype == inputs.spec.dtype
    assert held.tobytes() == expected.tobytes()
    if scales is not None:
        np.testing.assert_array_equal(held_scales, scales)
    other, _ = implementation.read(pages, 1 - inputs.layer, every_page)
    assert not np.any(other)


def test_repeated_append_gives_the_same_answer_and_pages(implementation):
    inputs = BY_NAME["middle row empty"].build()
    first, pages = run(implementation, inputs)
    every_page = np.arange(inputs.spec.num_pages, dtype=np.int32)
    before, _ = implementation.read(pages, inputs.layer, every_page)
    again = implementation.attend(
        pages, inputs.layer, inputs.batch, inputs.q, k=inputs.k, v=inputs.v, options=inputs.options, hints=KernelHints()
    )
    np.testing.assert_array_equal(first.out, again.out)
    assert before.tobytes() == implementation.read(pages, inputs.layer, every_page)[0].tobytes()


@pytest.mark.parametrize("name", ["float32 interleaved", "bfloat16 split", "int8 split"])
def test_written_pages_read_back_bit_for_bit_and_clear_to_zero(implementation, name):
    inputs = BY_NAME[name].build()
    pages = implementation.allocate(inputs.spec)
    every_page = np.arange(inputs.spec.num_pages, dtype=np.int32)
    assert not np.any(implementation.read(pages, 0, every_page)[0])
    axis = 0 if inputs.spec.layout is Layout.INTERLEAVED else 2
    some = np.array([5, 1, 9], np.int32)
    implementation.write(
        pages, 1, some, inputs.pages.take(some, axis), None if inputs.scales is None else inputs.scales.take(some, axis)
    )
    held, scales = implementation.read(pages, 1, some[::-1].copy())
    assert held.tobytes() == inputs.pages.take(some[::-1], axis).tobytes()
    if inputs.scales is not None:
        assert scales.tobytes() == inputs.scales.take(some[::-1], axis).tobytes()
    implementation.clear(pages, some[:1])
    assert not np.any(implementation.read(pages, 1, some[:1])[0])
    assert implementation.read(pages, 1, some[1:])[0].tobytes() == inputs.pages.take(some[1:], axis).tobytes()


@pytest.mark.parametrize("name", ["float32 interleaved", "bfloat16 split", "int8 split"])
def test_copied_pages_are_the_same_bit_for_bit_in_every_layer_and_nothing_else_changes(implementation, name):
    inputs = BY_NAME[name].build()
    pages = implementation.allocate(inputs.spec)
    every_page = np.arange(inputs.spec.num_pages, dtype=np.int32)
    axis = 0 if inputs.spec.layout is Layout.INTERLEAVED else 2
    for layer in range(inputs.spec.num_layers):
        implementation.write(pages, layer, every_page, inputs.pages, inputs.scales)
    sources, targets = np.array([4, 4, 2], np.int32), np.array([9, 0, 3], np.int32)
    implementation.copy(pages, sources, targets)
    origins = every_page.copy()
    origins[targets] = sources
    for layer in range(inputs.spec.num_layers):
        held, scales = implementation.read(pages, layer, every_page)
        assert held.tobytes() == inputs.pages.take(origins, axis).tobytes()
        if inputs.scales is not None:
            assert scales.tobytes() == inputs.scales.take(origins, axis).tobytes()


@pytest.mark.parametrize("name", ["float32 interleaved", "bfloat16 split", "int8 split"])
def test_a_poisoned_page_would_show_in_any_answer(implementation, name):
    inputs = BY_NAME[name].build()
    pages = implementation.allocate(inputs.spec)
    implementation.poison(pages, 2)
    for layer in range(inputs.spec.num_layers):
        held, scales = implementation.read(pages, layer, np.array([2], np.int32))
        assert np.isnan((held if scales is None else scales).astype(np.float32)).all()
        assert not np.any(implementation.read(pages, layer, np.array([1, 3], np.int32))[0])


def test_lse_comes_only_when_asked_for(implementation):
    inputs = BY_NAME["page boundaries"].build()
    attended, _ = run(implementation, inputs, dataclasses.replace(inputs.options, return_lse=False))
    assert attended.lse_natural is None


def test_window_of_one_returns_the_tokens_own_value(implementation):
    inputs = BY_NAME["window 1"].build()
    attended, _ = run(implementation, inputs)
    own = np.concatenate([values[-n:] for values, n in zip(inputs.values, inputs.batch.q_lens, strict=True)])
    np.testing.assert_allclose(attended.out[: len(own)], np.repeat(own, 2, axis=1), rtol=1e-6)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(14, 2), (12, 1)])
def test_each_query_head_reads_its_own_kv_head(implementation, num_q_heads, num_kv_heads):
    name = f"{num_q_heads} query heads on {num_kv_heads}"
    inputs = BY_NAME[name].build()
    for head in range(num_kv_heads):
        inputs.pages[:, :, 2 * head + 1] = head
    attended, _ = run(implementation, inputs)
    heads = np.arange(num_q_heads) // (num_q_heads // num_kv_heads)
    expected = np.broadcast_to(heads[:, None], attended.out[: inputs.batch.num_tokens].shape)
    np.testing.assert_allclose(attended.out[: inputs.batch.num_tokens], expected, rtol=1e-6)


def test_answer_does_not_depend_on_neighbours_or_order(implementation):
    alone = Case(name="alone", kv_lens=(13,), q_lens=(5,)).build()
    pair = Case(name="pair", kv_lens=(9, 13), q_lens=(3, 5)).build()
    for row, reach in enumerate(alone.batch.page_indices[0, :2]):
        pair.pages[pair.batch.page_indices[1, row]] = alone.pages[reach]
    pair.q[3:8] = alone.q[:5]
    expected, got = run(implementation, alone)[0].out[:5], run(implementation, pair)[0].out[3:8]
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_no_padding_row_returns_a_real_row(implementation):
    inputs = dataclasses.replace(BY_NAME["no padding"], padding=8).build()
    inputs.q[inputs.batch.num_tokens :] = inputs.q[0]
    attended, _ = run(implementation, inputs)
    assert not np.any(attended.out[inputs.batch.num_tokens :])


def test_last_row_of_a_chunk_equals_the_decode_of_that_token(implementation):
    chunk = Case(name="chunk", kv_lens=(100,), q_lens=(40,), padding=0).build()
    expected = run(implementation, chunk)[0].out[-1]
    decode = Case(name="decode", kv_lens=(100,), q_lens=(1,), padding=0).build()
    decode.pages, decode.batch, decode.q = (
        chunk.pages,
        dataclasses.replace(decode.batch, page_indices=chunk.batch.page_indices),
        chunk.q[-1:],
    )
    np.testing.assert_allclose(run(implementation, decode)[0].out[0], expected, atol=1e-5)


def test_what_the_output_cannot_hold_is_infinite(implementation):
    inputs = BY_NAME["float16 queries"].build()
    options = dataclasses.replace(inputs.options, v_scale=1e7)
    attended, _ = run(implementation, inputs, options)
    assert np.any(np.isinf(attended.out))
    assert not np.any(np.isnan(attended.out))
