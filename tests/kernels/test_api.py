"""Attention in process: JAX arrays in and out, and the faults that JAX's kernels let through."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from attnd import kernels
from attnd.kernels.quantization import dequantize_int8

INT8_PAGES = np.zeros((2, 8, 8, 128), np.int8)
SCALES = np.zeros((2, 8, 8, 1), np.float32)


def ragged_arguments(**changes):
    """Two rows over eight pages of 8 tokens; 4 query heads on 2."""
    rng = np.random.default_rng(0)
    arguments = {
        "q": jnp.array(rng.standard_normal((8, 4, 128)), jnp.float32),
        "kv_pages": jnp.array(rng.standard_normal((8, 8, 4, 128)), jnp.float32),
        "kv_lens": jnp.array([9, 13], jnp.int32),
        "page_indices": jnp.array([[0, 1], [2, 3]], jnp.int32),
        "cu_q_lens": jnp.array([0, 3, 8], jnp.int32),
        "num_seqs": jnp.array([2], jnp.int32),
    }
    return {**arguments, **{name: jnp.asarray(value) for name, value in changes.items()}}


def attend(arguments=None, **options):
    return kernels.ragged_paged_attention(*(arguments or ragged_arguments()).values(), **options)


@pytest.fixture(scope="module")
def right():
    return np.asarray(ref_ragged_paged_attention(*ragged_arguments().values()))


def int32(values):
    return np.array(values, np.int32)


def test_answers_as_jax_with_jax_arrays(right):
    out = attend()
    assert isinstance(out, jnp.ndarray)
    np.testing.assert_allclose(out, right, atol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "xla", "numba", "auto"])
def test_named_implementations_agree(right, implementation):
    np.testing.assert_allclose(attend(implementation=implementation), right, atol=1e-5)


@pytest.mark.parametrize(
    ("implementation", "reason"),
    [("pallas", "needs a TPU"), ("jax_ops", "need a TPU")],
)
def test_implementation_that_cannot_run_here_is_unsupported(implementation, reason):
    with pytest.raises(kernels.UnsupportedError, match=reason):
        attend(implementation=implementation)


def test_lse_and_updated_pages_come_back_when_asked_for(right):
    arguments = ragged_arguments()
    k, v = (jnp.ones((8, 2, 128), jnp.float32) * x for x in (2, 3))
    out, lse, updated = attend(arguments, k=k, v=v, return_lse=True)
    assert lse.shape == (8, 4)
    expected = np.array(ragged_arguments()["kv_pages"])
    np.testing.assert_array_equal(arguments["kv_pages"], expected)
    for row, position in [(0, 6), (0, 7), (0, 8), *((1, p) for p in range(8, 13))]:
        expected[2 * row + position // 8, position % 8, 0::2] = 2
        expected[2 * row + position // 8, position % 8, 1::2] = 3
    np.testing.assert_array_equal(updated, expected)
    again = attend(ragged_arguments(kv_pages=updated))
    np.testing.assert_allclose(out, again, atol=1e-6)


def test_empty_row_does_not_leak_into_the_next():
    arguments = ragged_arguments(
        page_indices=int32([[0, 1], [2, 3], [4, 5]]),
        kv_lens=int32([9, 0, 13]),
        cu_q_lens=int32([0, 3, 3, 8]),
        num_seqs=int32([3]),
    )
    pages = np.array(arguments["kv_pages"])
    pages[:2, :, 1::2], pages[2:4, :, 1::2], pages[4:6, :, 1::2] = 1.0, 2.0, 3.0
    out = attend({**arguments, "kv_pages": jnp.array(pages)})
    np.testing.assert_allclose(out[:3], 1.0, rtol=1e-6)
    np.testing.assert_allclose(out[3:], 3.0, rtol=1e-6)


@pytest.mark.parametrize("tokens", [8, 0])
def test_no_rows_answer_zeros_and_the_next_call_is_right(right, tokens):
    nothing = ragged_arguments(num_seqs=int32([0]), cu_q_lens=int32([0, 0, 0]), kv_lens=int32([0, 0]))
    out, lse = attend({**nothing, "q": nothing["q"][:tokens]}, return_lse=True)
    assert out.shape == (tokens, 4, 128)
    assert not np.any(out)
    assert np.all(np.asarray(lse) == -np.inf)
    np.testing.assert_allclose(attend(), right, atol=1e-5)


def test_padding_rows_are_zero_and_their_nan_stays_there(right):
    q = np.full((16, 4, 128), np.nan, np.float32)
    q[:8] = ragged_arguments()["q"]
    out = attend(ragged_arguments(q=q))
    np.testing.assert_allclose(out[:8], right, atol=1e-5)
    assert not np.any(out[8:])


def test_non_finite_memory_that_is_not_read_does_not_matter(right):
    pages = np.array(ragged_arguments()["kv_pages"])
    pages[4:], pages[1, 1:], pages[3, 5:] = np.nan, np.inf, np.nan
    np.testing.assert_allclose(attend(ragged_arguments(kv_pages=pages)), right, atol=1e-5)


def test_non_finite_filler_page_zero_does_not_matter(right):
    pages = np.concatenate([np.full((1, 8, 4, 128), np.nan, np.float32), ragged_arguments()["kv_pages"]])
    arguments = ragged_arguments(kv_pages=pages, page_indices=int32([[1, 2, 0, 0], [3, 4, 0, 0]]))
    np.testing.assert_allclose(attend(arguments, num_kv_pages_per_block=4), right, atol=1e-5)


def test_refuses_a_page_past_the_pool_and_the_next_call_is_right(right):
    with pytest.raises(kernels.InvalidArgumentError, match="99"):
        attend(ragged_arguments(page_indices=int32([[0, 99], [2, 3]])))
    np.testing.assert_allclose(attend(), right, atol=1e-5)


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_junk_beyond_the_used_slots_and_rows_does_not_matter(right, block):
    junk = 10**6
    arguments = ragged_arguments(
        page_indices=int32([[0, 1, junk, -7], [2, 3, -7, junk], [junk] * 4, [-7] * 4]),
        kv_lens=int32([9, 13, junk, -5]),
        cu_q_lens=int32([0, 3, 8, junk, -1]),
    )
    np.testing.assert_allclose(attend(arguments, num_kv_pages_per_block=block), right, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_q_lens": int32([0, 9, 8])}, "cu_q_lens"),
        ({"kv_lens": int32([2, 3])}, "q_len=3 must be less or equal to kv_len=2 at sequence 0."),
        ({"kv_lens": int32([9, 24])}, "pages_per_seq=2 must be greater or equal to"),
        ({"page_indices": np.zeros((2, 2), np.float32)}, "must be int32"),
        ({"kv_pages": np.zeros((8, 8, 3, 128), np.float32)}, "num_combined_kv_heads=3 must be even."),
        ({"kv_pages": np.zeros((8, 8, 4), np.float32)}, r"must be \[num_pages"),
    ],
)
def test_refuses_what_no_implementation_can_answer(changes, message):
    with pytest.raises(ValueError, match=message):
        attend(ragged_arguments(**changes))


@pytest.mark.parametrize(
    "options",
    [
        {"soft_cap": 0.0}, {"soft_cap": -5.0}, {"soft_cap": np.inf}, {"soft_cap": np.nan}, {"sliding_window": 0},
        {"sm_scale": np.nan}, {"k_scale": 0.0}, {"v_scale": -0.05}, {"k_scale": np.nan},
    ],
)  # fmt: skip
def test_refuses_scalars_that_give_nonsense(options):
    with pytest.raises(kernels.InvalidArgumentError):
        attend(**options)


def test_whole_and_narrow_scalars_are_converted(right):
    np.testing.assert_allclose(attend(k_scale=1, v_scale=np.float32(1), sm_scale=1), right, atol=1e-5)


def test_zero_scale_is_honoured_and_unset_is_one(right):
    np.testing.assert_allclose(attend(sm_scale=1.0), right, atol=1e-5)
    assert not np.allclose(attend(sm_scale=0.0), right, atol=1e-3)


def decode_arguments(**changes):
    """Four rows over eight pages of 8 tokens; 8 query heads on 2."""
    rng = np.random.default_rng(1)
    k_pages, v_pages = (jnp.array(rng.standard_normal((2, 8, 8, 128)), jnp.float32) for _ in "kv")
    arguments = {
        "q": jnp.array(rng.standard_normal((4, 8, 128)), jnp.float32) / 10,
        "k_pages": k_pages,
        "v_pages": v_pages,
        "lengths": jnp.array([16, 9, 0, 13], jnp.int32),
        "page_indices": jnp.array([[5, 0], [2, 7], [-7, 10**6], [4, 1]], jnp.int32),
    }
    return {**arguments, **changes}


def decode(arguments, **options):
    return kernels.paged_attention(*arguments.values(), **{"pages_per_compute_block": 1, **options})


def decode_formula(arguments, k_pages, v_pages):
    out = np.zeros(arguments["q"].shape)
    for row, length in enumerate(np.asarray(arguments["lengths"])):
        table = np.asarray(arguments["page_indices"])[row, : -(-length // 8)]
        for head in range(8 if length else 0):
            k, v = (np.asarray(x)[head // 4, table].reshape(-1, 128)[:length] for x in (k_pages, v_pages))
            weights = np.exp(k @ np.asarray(arguments["q"])[row, head].astype(np.float64))
            out[row, head] = weights @ v / weights.sum()
    return out


@pytest.mark.parametrize("options", [{}, {"pages_per_compute_block": 2}, {"inline_seq_dim": False}])
def test_decode_is_as_exact_as_float32_and_rows_of_length_zero_are_zero(options):
    arguments = decode_arguments()
    out = decode(arguments, **options)
    np.testing.assert_allclose(out, decode_formula(arguments, arguments["k_pages"], arguments["v_pages"]), atol=1e-5)
    assert not np.any(out[2])


def test_decode_dequantizes_as_jax():
    arguments = decode_arguments()
    quantized = {name: quantization_utils.quantize_to_int8(arguments[name]) for name in ("k_pages", "v_pages")}
    values = [dequantize_int8(np.asarray(x.weight), np.asarray(x.scales)) for x in quantized.values()]
    out = decode({**arguments, **quantized})
    np.testing.assert_allclose(out, decode_formula(arguments, *values), atol=1e-5)


def test_decode_appends_and_returns_both_pages():
    arguments = decode_arguments()
    k, v = (jnp.full((4, 2, 128), x, jnp.float32) for x in (0.5, 7.0))
    out, lse, k_pages, v_pages = decode(arguments, k=k, v=v, return_lse=True)
    expected = np.array(arguments["v_pages"])
    for row, length in enumerate([16, 9, 0, 13]):
        if length:
            page = arguments["page_indices"][row, (length - 1) // 8]
            expected[:, page, (length - 1) % 8] = 7.0
    np.testing.assert_array_equal(v_pages, expected)
    np.testing.assert_allclose(out, decode_formula(arguments, k_pages, v_pages), atol=1e-5)
    assert np.all(np.isneginf(lse).all(axis=1) == [False, False, True, False])


def test_decode_appends_quantized_tokens_that_read_back_within_a_step():
    arguments = decode_arguments()
    quantized = {name: quantization_utils.quantize_to_int8(arguments[name]) for name in ("k_pages", "v_pages")}
    new = np.zeros((4, 2, 128), np.float32)
    new[..., :3] = 1, -1, 0.5
    _, k_pages, v_pages = decode({**arguments, **quantized}, k=jnp.array(new), v=jnp.array(new * 0))
    np.testing.assert_array_equal(k_pages.weight[0, 7, 0, :4], [127, -128, 64, 0])
    assert not np.any(v_pages.weight[0, 7, 0])
    assert v_pages.scales[0, 7, 0] == 0
    again = decode({**arguments, "k_pages": k_pages, "v_pages": v_pages})
    values = [dequantize_int8(np.asarray(x.weight), np.asarray(x.scales)) for x in (k_pages, v_pages)]
    np.testing.assert_allclose(again, decode_formula(arguments, *values), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"lengths": jnp.array([24, 9, 0, 13], jnp.int32)}, {}, "24"),
        ({"lengths": jnp.array([-3, 9, -1, 13], jnp.int32)}, {}, "-3"),
        ({}, {"pages_per_compute_block": 3}, "must be divisible by pages per sequence. Got 3 and 2."),
        ({}, {"pages_per_compute_block": 0}, "pages_per_compute_block"),
        ({}, {"pages_per_compute_block": -1}, "pages_per_compute_block"),
        ({"v_pages": jnp.zeros((2, 8, 8, 64))}, {}, "k_pages and v_pages must have the same shape."),
        ({"k_pages": INT8_PAGES, "v_pages": INT8_PAGES}, {}, "scales"),
        ({"k_pages": kernels.QuantizedPages(INT8_PAGES, SCALES)}, {}, "both carry scales"),
    ],
)  # fmt: skip
def test_decode_refuses(changes, options, message):
    with pytest.raises(ValueError, match=message):
        decode(decode_arguments(**changes), **options)


def test_decode_refuses_megacore_where_there_is_none():
    with pytest.raises(kernels.UnsupportedError, match="megacore"):
        decode(decode_arguments(), megacore_mode="kv_head")
