"""Scalars, new keys and values, and written slots: what every call judges alike."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnd.kernels import validation
from attnd.kernels.contract import Layout
from tests.support import calls
from tests.support.calls import int32, ragged_refusal

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
INTERLEAVED, SPLIT = Layout.INTERLEAVED, Layout.SPLIT
ROUNDS_TO_INFINITY = 2.0**128 - 2.0**103


def tokens(dtype=np.float32, shape=(8, 2, 128)) -> np.ndarray:
    return np.zeros(shape, dtype)


def accepts(**changes) -> bool:
    return calls.refusal(validation.ragged_batch, calls.ragged(**changes)) is None


@pytest.mark.parametrize("sm_scale", [0.0, -0.0, 0, 1, -1.0, 0.125, 1e-50, float(np.finfo(np.float32).max)])
def test_accepts_any_finite_sm_scale(sm_scale):
    assert accepts(sm_scale=sm_scale)


@pytest.mark.parametrize("sm_scale", [float("nan"), float("inf"), -float("inf"), 1e39, -1e39, ROUNDS_TO_INFINITY])
def test_rejects_sm_scales_that_are_not_finite_in_float32(sm_scale):
    assert str(ragged_refusal(sm_scale=sm_scale)) == f"sm_scale={sm_scale} must be finite in float32."


@pytest.mark.parametrize("name", ["soft_cap", "k_scale", "v_scale"])
@pytest.mark.parametrize("value", [1, 0.05, 1e-6, 2.0**-126, np.nextafter(ROUNDS_TO_INFINITY, 0)])
def test_accepts_positive_factors(name, value):
    assert accepts(**{name: value})


@pytest.mark.parametrize("name", ["soft_cap", "k_scale", "v_scale"])
@pytest.mark.parametrize("value", [-5.0, -1, float("inf"), float("nan"), 1e-50, 1e-40, 1e39, ROUNDS_TO_INFINITY])
def test_rejects_factors_that_are_not_positive_in_float32(name, value):
    error = ragged_refusal(**{name: value})
    assert error.violations == ((name, f"{name}={value} must be finite and greater than 0 in float32."),)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [0, 0.0, -0.0])
def test_rejects_scales_of_zero(name, value):
    assert ragged_refusal(**{name: value}).violations[0].field == name


@pytest.mark.parametrize("soft_cap", [0, 0.0, -0.0])
def test_rejects_a_soft_cap_of_zero_in_the_documented_words(soft_cap):
    assert ragged_refusal(soft_cap=soft_cap).violations == (("soft_cap", f"soft_cap={soft_cap} must not be 0.0."),)


@pytest.mark.parametrize("window", [1, 4, 8, 100, 2**31 - 1, 2**31, 2**62])
def test_accepts_windows_of_any_size(window):
    assert accepts(sliding_window=window)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("sm_scale", "1", "a number, not str"),
        ("sm_scale", None, "a number, not NoneType"),
        ("soft_cap", [30.0], "a number, not list"),
        ("k_scale", 1j, "a number, not complex"),
        pytest.param("k_scale", 10**5000, "a number, not int", id="unprintable"),
        ("sliding_window", 2.5, "an integer of 64 bits, not float"),
        ("sliding_window", 2**63, "an integer of 64 bits, not int"),
        ("vmem_limit_bytes", "64M", "an integer of 64 bits, not str"),
    ],
)
def test_rejects_what_is_no_number_of_its_kind(name, value, kind):
    assert ragged_refusal(**{name: value}).violations == ((name, f"{name} must be {kind}."),)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_rejects_scales_of_a_tensor_where_each_token_has_its_own(name):
    error = ragged_refusal(spec=calls.cache(layout=SPLIT, dtype=np.int8), **{name: 0.5})
    assert error.violations == ((name, f"{name}=0.5 must be unset: each token of the cache has its own scale."),)
    assert accepts(spec=calls.cache(layout=INTERLEAVED, dtype=np.int8), **{name: 0.5})


@pytest.mark.parametrize(("given_name", "missing"), [("k", "v"), ("v", "k")])
def test_rejects_keys_without_values(given_name, missing):
    error = ragged_refusal(**{given_name: tokens()})
    assert error.violations == ((missing, f"{missing} must be given too: k and v go together."),)


@pytest.mark.parametrize("shape", [(7, 2, 128), (9, 2, 128), (8, 1, 128), (8, 4, 128), (8, 2, 64), (8, 256), ()])
@pytest.mark.parametrize("name", ["k", "v"])
def test_rejects_new_tokens_of_another_shape(name, shape):
    error = ragged_refusal(**{"k": tokens(), "v": tokens()} | {name: tokens(shape=shape)})
    assert error.violations == (
        (f"{name}.shape", f"{name}.shape={shape} must be (8, 2, 128): q's tokens, num_kv_heads, head_dim."),
    )


@pytest.mark.parametrize(
    ("layout", "cache_dtype", "takes"),
    [
        *((layout, dtype, FLOATS) for layout in Layout for dtype in FLOATS),
        *((layout, dtype, [*FLOATS, dtype]) for layout in Layout for dtype in (E4M3, E5M2)),
        (INTERLEAVED, np.int8, [np.int8]),
        (SPLIT, np.int8, FLOATS),
    ],
)
@pytest.mark.parametrize("dtype", [*FLOATS, E4M3, E5M2, np.int8, np.float64, np.int32, ">f4"])
def test_takes_new_tokens_that_the_cache_can_stand_for(layout, cache_dtype, takes, dtype):
    spec = calls.cache(layout=layout, dtype=cache_dtype)
    assert accepts(spec=spec, k=tokens(dtype), v=tokens(dtype)) == (dtype in takes)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["k", "v"])
def test_rejects_new_tokens_that_no_scale_can_stand_for(name, dtype, value):
    spec, broken = calls.cache(layout=SPLIT, dtype=np.int8), tokens(dtype)
    broken[5, 1, 127] = value
    error = ragged_refusal(spec=spec, **{"k": tokens(dtype), "v": tokens(dtype)} | {name: broken})
    assert error.violations == ((f"{name}[5]", f"{name}[5] must be finite: its largest magnitude becomes its scale."),)
    assert accepts(**{"k": tokens(dtype), "v": tokens(dtype)} | {name: broken})


def test_padding_rows_of_new_tokens_are_not_looked_at():
    k = tokens()
    k[3:] = np.nan
    spec = calls.cache(layout=SPLIT, dtype=np.int8)
    assert accepts(spec=spec, k=k, v=k, cu_q_lens=int32([0, 3, 3]))


def test_two_sequences_may_not_write_one_slot():
    table = int32([[0, 1], [2, 1]])
    error = ragged_refusal(page_indices=table, k=tokens(), v=tokens())
    assert error.violations == (
        (
            "page_indices[1,1]",
            "page_idx=1 must take one token in each slot: its slot 0 is written by sequence 0 and again by sequence 1.",
        ),
    )
    assert accepts(page_indices=table)


def test_one_sequence_may_not_write_one_slot_twice():
    twice = {"kv_lens": int32([0, 16]), "page_indices": int32([[0, 3], [2, 2]]), "k": tokens(), "v": tokens()}
    assert accepts(**twice, cu_q_lens=int32([0, 0, 8]))
    twice |= {name: np.zeros((9, *heads, 128), np.float32) for name, heads in (("q", [4]), ("k", [2]), ("v", [2]))}
    error = ragged_refusal(**twice, cu_q_lens=int32([0, 0, 9]))
    assert error.violations[0].field == "page_indices[1,1]"
    assert "its slot 7 is written by sequence 1 and again by sequence 1" in str(error)


def test_names_the_sequences_of_the_call_not_of_the_compacted_batch():
    error = ragged_refusal(
        kv_lens=int32([9, 9, 9]),
        page_indices=int32([[0, 1], [0, 1], [0, 1]]),
        cu_q_lens=int32([0, 1, 1, 2]),
        num_seqs=int32([3]),
        k=tokens(),
        v=tokens(),
    )
    assert error.violations[0].field == "page_indices[2,1]"
    assert "its slot 0 is written by sequence 0 and again by sequence 2" in str(error)


def test_sequences_may_share_pages_that_they_only_read():
    assert accepts(
        kv_lens=int32([17, 17]),
        page_indices=int32([[0, 1, 2], [0, 1, 3]]),
        cu_q_lens=int32([0, 1, 2]),
        k=tokens(),
        v=tokens(),
    )


@st.composite
def written(draw):
    """Rows over few pages, so that about half of the batches write a slot twice."""
    page_size = draw(st.integers(1, 4))
    kv_lens = draw(st.lists(st.integers(1, page_size * 3), min_size=1, max_size=3))
    q_lens = [draw(st.integers(0, min(kv_len, 4))) for kv_len in kv_lens]
    table = [draw(st.lists(st.integers(0, 9), min_size=3, max_size=3)) for _ in kv_lens]
    return page_size, kv_lens, q_lens, table


@given(written())
def test_refuses_exactly_the_batches_that_write_a_slot_twice(batch):
    page_size, kv_lens, q_lens, table = batch
    slots = [
        (row[position // page_size], position % page_size)
        for row, kv_len, q_len in zip(table, kv_lens, q_lens, strict=True)
        for position in range(kv_len - q_len, kv_len)
    ]
    found = validation.ragged_violations(
        **calls.ragged(
            spec=calls.cache(num_pages=10, page_size=page_size, head_dim=1),
            q=np.zeros((len(slots), 4, 1), np.float32),
            kv_lens=int32(kv_lens),
            page_indices=int32(table),
            cu_q_lens=int32([sum(q_lens[:i]) for i in range(len(q_lens) + 1)]),
            num_seqs=int32([len(q_lens)]),
            k=np.zeros((len(slots), 2, 1), np.float32),
            v=np.zeros((len(slots), 2, 1), np.float32),
        )
    )
    assert found.count == len(slots) - len(set(slots))
