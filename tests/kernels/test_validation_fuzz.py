"""Nothing that a caller can send does anything but pass or raise InvalidArgumentError."""

import math

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from attnd.kernels import validation
from attnd.kernels.contract import Layout
from attnd.kernels.errors import VIOLATIONS_MAX
from tests.support import calls

DTYPES = [
    np.int32, np.int32, np.int32, np.int64, np.uint64, np.int8, np.bool_, np.float16, np.float32, np.float64,
    np.complex64, np.object_, "S3", "U2", "V4", "M8[s]", ">i4", "i4,f4", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2,
    ml_dtypes.int4,
]  # fmt: skip
SPECS = [
    calls.cache(page_size=1, num_pages=3, num_kv_heads=1, head_dim=2),
    calls.cache(layout=Layout.SPLIT, dtype=np.int8, page_size=2, num_pages=3, num_kv_heads=1, head_dim=2),
    calls.cache(dtype=ml_dtypes.float8_e4m3fn, page_size=2, num_pages=2**31 - 1, num_kv_heads=1, head_dim=2),
]
SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)
VALUES = st.sampled_from([-(2**31), -1, 0, 1, 2, 3, 2**31 - 1])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(["", "batch", "kv_head", 10**5000, -(10**5000), 1j, np.float32("nan"), np.int8(-1), [], math.pi]),
)


@st.composite
def arrays(draw, shape=SHAPES):
    size = draw(shape)
    values = draw(st.lists(VALUES, min_size=math.prod(size), max_size=math.prod(size)))
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    array = np.array(values, np.int64).reshape(size)
    if dtype.kind in "SUVM" or dtype.names:
        return np.zeros(size, dtype)
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def shaped(*sizes):
    """Returns arrays of one shape mostly, of any otherwise."""
    return arrays(st.one_of(st.just(sizes), st.just(sizes), SHAPES))


def queries():
    sizes = st.lists(st.sampled_from([-(2**62), -1, 0, 1, 2, 2**31, 2**62]), max_size=4).map(tuple)
    infos = st.builds(validation.ArrayInfo, st.one_of(st.just((2, 1, 2)), sizes), st.sampled_from(DTYPES).map(np.dtype))
    return st.one_of(shaped(2, 1, 2), infos)


def scalars(names):
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, SCALARS))


TOKENS = st.one_of(st.none(), shaped(2, 1, 2))
OPTIONS = scalars(["sm_scale", "sliding_window", "soft_cap", "k_scale", "v_scale"])


def assert_passes_or_refuses(judge, call) -> None:
    error = calls.refusal(judge, call)
    if error is not None:
        assert 1 <= len(error.violations) <= VIOLATIONS_MAX
        assert error.num_violations >= len(error.violations)
        assert all(field and text and len(text) < 400 for field, text in error.violations)
        assert not any(word in str(error.violations) for word in ("np.", "array(", "dtype("))


@settings(max_examples=700, deadline=None)
@given(
    st.sampled_from(SPECS),
    queries(),
    shaped(2),
    shaped(2, 2),
    shaped(3),
    shaped(1),
    TOKENS,
    TOKENS,
    OPTIONS,
    scalars(["num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes"]),
)
def test_any_ragged_call(spec, q, kv_lens, page_indices, cu_q_lens, num_seqs, k, v, options, hints):
    arrays = {"kv_lens": kv_lens, "page_indices": page_indices, "cu_q_lens": cu_q_lens, "num_seqs": num_seqs}
    call = calls.ragged(spec=spec, q=q, **arrays, k=k, v=v, **options, **hints)
    assert_passes_or_refuses(validation.ragged_batch, call)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(SPECS),
    queries(),
    shaped(2),
    shaped(2, 2),
    TOKENS,
    TOKENS,
    OPTIONS,
    scalars(["pages_per_compute_block", "megacore_mode", "inline_seq_dim"]),
)
def test_any_decode_call(spec, q, lengths, page_indices, k, v, options, hints):
    call = calls.decode(spec=spec, q=q, lengths=lengths, page_indices=page_indices, k=k, v=v, **options, **hints)
    assert_passes_or_refuses(validation.decode_batch, call)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SPECS), queries(), shaped(2), shaped(2), st.integers(0, 3), TOKENS, TOKENS, OPTIONS)
def test_any_step(spec, q, q_lens, kv_lens, num_sequences, k, v, options):
    lens = {"q_lens": q_lens, "kv_lens": kv_lens, "num_sequences": num_sequences}
    assert_passes_or_refuses(validation.step_lens, calls.step(spec=spec, q=q, **lens, k=k, v=v, **options))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_pages(data):
    spec = data.draw(st.sampled_from(SPECS))
    call = {
        "spec": spec,
        "page_indices": data.draw(shaped(1)),
        "kv_pages": data.draw(shaped(*spec.pages_shape(1))),
        "scales": data.draw(st.one_of(st.none(), shaped(*spec.scales_shape(1)))),
    }
    assert_passes_or_refuses(validation.page_writes, call)
    assert_passes_or_refuses(validation.page_reads, {name: call[name] for name in ("spec", "page_indices")})
