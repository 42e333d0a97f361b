"""What is accepted and refused when whole pages are written and read, and which layers there are."""

import ml_dtypes
import numpy as np
import pytest

from attnd.kernels import validation
from attnd.kernels.contract import Layout
from attnd.kernels.errors import VIOLATIONS_MAX, InvalidArgumentError
from tests.support import calls
from tests.support.calls import int32

FLOATS = [np.float32, np.float16, ml_dtypes.bfloat16]
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
QUANTIZED = calls.cache(layout=Layout.SPLIT, dtype=np.int8)


def pages(spec, n=2, dtype=np.float32) -> np.ndarray:
    return np.zeros(spec.pages_shape(n), dtype)


def scales(spec, n=2) -> np.ndarray:
    return np.ones(spec.scales_shape(n), np.float32)


def refused(spec, page_indices, kv_pages, scales=None) -> list[tuple[str, str]]:
    with pytest.raises(InvalidArgumentError) as caught:
        validation.page_writes(spec, page_indices, kv_pages, scales)
    return list(caught.value.violations)


@pytest.mark.parametrize("layout", Layout)
def test_accepts_distinct_pages_as_they_are(layout):
    spec = calls.cache(layout=layout)
    kv_pages = pages(spec)
    writes = validation.page_writes(spec, int32([7, 0]), kv_pages)
    assert writes.kv_pages is kv_pages
    assert writes.page_indices.tolist() == [7, 0]
    assert writes.scales is None


def test_accepts_no_pages():
    spec = calls.cache()
    assert len(validation.page_writes(spec, int32([]), pages(spec, 0)).page_indices) == 0
    assert len(validation.page_reads(spec, int32([]))) == 0


@pytest.mark.parametrize("page", [8, -1, 2**31 - 1, -(2**31)])
def test_rejects_page_index_past_pool(page):
    spec = calls.cache()
    expected = [("page_indices[1]", f"Require 0 <= page_idx={page} < total_num_pages=8.")]
    assert refused(spec, int32([0, page]), pages(spec)) == expected
    with pytest.raises(InvalidArgumentError) as caught:
        validation.page_reads(spec, int32([0, page]))
    assert list(caught.value.violations) == expected


def test_a_page_may_be_read_twice_but_written_once():
    spec = calls.cache()
    assert validation.page_reads(spec, int32([3, 3])).tolist() == [3, 3]
    assert refused(spec, int32([3, 1, 3]), pages(spec, 3)) == [("page_indices[2]", "page_idx=3 must be named once.")]


def test_spells_out_a_few_violations_and_counts_the_rest():
    with pytest.raises(InvalidArgumentError) as caught:
        validation.page_reads(calls.cache(), np.full(1000, 8, np.int32))
    assert caught.value.num_violations == 1000
    assert len(caught.value.violations) == VIOLATIONS_MAX


@pytest.mark.parametrize(
    ("page_indices", "field"),
    [
        (np.array([0, 1], np.int64), "page_indices.dtype"),
        (np.array([0.0, 1.0]), "page_indices.dtype"),
        (np.array([False, True]), "page_indices.dtype"),
        (int32(1), "page_indices.shape"),
        (int32([[0, 1]]), "page_indices.shape"),
    ],
)
def test_rejects_other_ids(page_indices, field):
    spec = calls.cache()
    assert refused(spec, page_indices, pages(spec))[0][0] == field


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("change", ["one-page-less", "transposed", "flat"])
def test_rejects_pages_of_another_shape(layout, change):
    spec = calls.cache(layout=layout)
    right = pages(spec)
    wrong = {"one-page-less": pages(spec, 1), "transposed": right.swapaxes(-1, -2), "flat": right.reshape(-1)}[change]
    assert refused(spec, int32([0, 1]), wrong) == [
        ("kv_pages.shape", f"kv_pages.shape={wrong.shape} must be {right.shape}.")
    ]


@pytest.mark.parametrize(
    ("layout", "cache_dtype", "takes"),
    [
        *((layout, dtype, FLOATS) for layout in Layout for dtype in FLOATS),
        *((layout, dtype, [*FLOATS, dtype]) for layout in Layout for dtype in (E4M3, E5M2)),
        (Layout.INTERLEAVED, np.int8, [np.int8]),
        (Layout.SPLIT, np.int8, FLOATS),
    ],
)
@pytest.mark.parametrize("dtype", [*FLOATS, E4M3, E5M2, np.int8, np.float64, np.int32, ">f4"])
def test_takes_pages_that_the_cache_can_stand_for(layout, cache_dtype, takes, dtype):
    spec = calls.cache(layout=layout, dtype=cache_dtype)
    kv_pages = pages(spec, 2, dtype)
    if dtype in takes:
        validation.page_writes(spec, int32([0, 1]), kv_pages)
    else:
        assert refused(spec, int32([0, 1]), kv_pages)[0][0] in ("kv_pages.dtype", "scales")


def test_int8_pages_come_with_their_scales():
    writes = validation.page_writes(QUANTIZED, int32([0, 1]), pages(QUANTIZED, 2, np.int8), scales(QUANTIZED))
    assert writes.scales is not None
    must_agree = [("scales", "scales must be set if and only if kv_pages.dtype={} is int8.")]
    for dtype, given in ((np.int8, None), (np.float32, scales(QUANTIZED))):
        found = refused(QUANTIZED, int32([0, 1]), pages(QUANTIZED, 2, dtype), given)
        assert found == [(name, text.format(np.dtype(dtype))) for name, text in must_agree]


@pytest.mark.parametrize("spec", [calls.cache(), calls.cache(dtype=np.int8), calls.cache(layout=Layout.SPLIT)])
def test_rejects_scales_where_no_token_has_one(spec):
    found = refused(spec, int32([0, 1]), pages(spec, 2, spec.dtype), scales(spec))
    assert found == [("scales", "scales must be unset: no token of the cache has its own.")]


@pytest.mark.parametrize("value", [-1.0, np.nan, np.inf])
def test_rejects_scales_that_are_none(value):
    broken = scales(QUANTIZED)
    broken[1, 0, 1, 7, 0] = value
    found = refused(QUANTIZED, int32([4, 5]), pages(QUANTIZED, 2, np.int8), broken)
    assert found == [("scales[:,:,1]", "scales must be finite and greater or equal to 0, at page_idx=5.")]


def test_accepts_scales_of_zero():
    validation.page_writes(QUANTIZED, int32([0, 1]), pages(QUANTIZED, 2, np.int8), 0 * scales(QUANTIZED))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (scales(QUANTIZED, 1), "scales.shape"),
        (scales(QUANTIZED)[..., 0], "scales.shape"),
        (scales(QUANTIZED).astype(np.float64), "scales.dtype"),
    ],
)
def test_rejects_other_scales(given, field):
    assert refused(QUANTIZED, int32([0, 1]), pages(QUANTIZED, 2, np.int8), given)[0][0] == field


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_rejects_pages_that_no_scale_can_stand_for(dtype, value):
    broken = pages(QUANTIZED, 2, dtype)
    broken[0, 1, 0, 3, 5] = value
    found = refused(QUANTIZED, int32([6, 2]), broken)
    assert [field for field, _ in found] == ["kv_pages[:,:,0]"]
    assert found[0][1].endswith("at page_idx=6.")


def test_float_pages_may_hold_anything():
    spec = calls.cache()
    validation.page_writes(spec, int32([0, 1]), np.full_like(pages(spec), np.nan))


@pytest.mark.parametrize("layer", [0, 2, np.int32(1), np.uint8(2)])
def test_accepts_layers_of_the_cache(layer):
    assert validation.layer_index(calls.cache(num_layers=3), layer) == int(layer)
    assert type(validation.layer_index(calls.cache(num_layers=3), layer)) is int


@pytest.mark.parametrize("layer", [-1, 3, 2**31, 10**5000, 1.0, "0", None], ids=lambda layer: str(type(layer)))
def test_rejects_other_layers(layer):
    with pytest.raises(InvalidArgumentError, match=r"^layer(=| must be an integer)") as caught:
        validation.layer_index(calls.cache(num_layers=3), layer)
    assert caught.value.violations[0].field == "layer"
