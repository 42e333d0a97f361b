"""What is accepted and refused by the decode call, one behaviour each."""

import numpy as np
import pytest

from attnd.kernels import validation
from attnd.kernels.contract import Layout
from attnd.kernels.errors import InvalidArgumentError
from tests.support import calls
from tests.support.calls import decode_refusal, int32

DOCUMENTED = [
    (
        {"q": np.zeros((3, 7, 128), np.float32)},
        "q.shape[1]",
        "Number of Q heads must be divisible by number of KV heads. Got 7 and 2.",
    ),
    (
        {"q": np.zeros((3, 8, 64), np.float32)},
        "q.shape[2]",
        "head_dim of Q must be the same as that of K/V. Got 64 and 128.",
    ),
    (
        {"pages_per_compute_block": 3},
        "pages_per_compute_block",
        "pages_per_compute_block must be divisible by pages per sequence. Got 3 and 2.",
    ),
    ({"lengths": int32([1, 1])}, "lengths.shape", "`lengths` and `q` must have the same batch size"),
    (
        {"page_indices": int32([[0, 1], [2, 3]])},
        "page_indices.shape[0]",
        "`page_indices` and `q` must have the same batch size",
    ),
    (
        {"lengths": np.array([1, 1, 1], np.int64)},
        "lengths.dtype",
        "The dtype of `lengths` must be int32. Got int64",
    ),
    (
        {"megacore_mode": "kv_head", "spec": calls.cache(layout=Layout.SPLIT, num_kv_heads=1)},
        "megacore_mode",
        "number of KV heads must be even when megacore_mode is 'kv_head'",
    ),
    ({"megacore_mode": "batch"}, "megacore_mode", "batch size must be even when megacore_mode is 'batch'"),
    ({"megacore_mode": "all"}, "megacore_mode", "megacore_mode must be one of ['kv_head', 'batch', None]"),
]


def accepted(**changes) -> validation.DecodeBatch:
    return validation.decode_batch(**calls.decode(**changes))


@pytest.mark.parametrize(("changes", "field", "text"), DOCUMENTED, ids=[row[2][:30] for row in DOCUMENTED])
def test_answers_with_the_documented_words(changes, field, text):
    error = decode_refusal(**changes)
    assert error.violations[0] == (field, text)


def test_rejects_k_pages_and_v_pages_of_two_shapes():
    pages = np.zeros((2, 8, 8, 128), np.float32)
    validation.pages_shapes_match(pages, pages)
    with pytest.raises(InvalidArgumentError) as caught:
        validation.pages_shapes_match(pages, pages[:, :4])
    assert str(caught.value) == ("k_pages and v_pages must have the same shape. Got (2, 8, 8, 128) and (2, 4, 8, 128)")


def test_accepts_rows_of_one_query_each():
    call = calls.decode()
    decoded = validation.decode_batch(**call)
    np.testing.assert_array_equal(decoded.rows, [0, 1, 2])
    np.testing.assert_array_equal(decoded.batch.kv_lens, call["lengths"])
    np.testing.assert_array_equal(decoded.batch.cu_q_lens, [0, 1, 2, 3])
    assert decoded.rows.dtype == np.int32


def test_names_row_length_and_capacity_of_a_length_past_its_table():
    error = decode_refusal(lengths=int32([24, 13, 9]))
    assert error.violations[0].field == "lengths[0]"
    assert str(error).startswith("length=24 must be less or equal to capacity=16 at sequence 0")
    assert decode_refusal(lengths=int32([9, 16, 17])).violations[0].field == "lengths[2]"


def test_names_row_and_value_of_a_negative_length():
    error = decode_refusal(lengths=int32([-3, 9, -1]))
    assert [violation.field for violation in error.violations] == ["lengths[0]", "lengths[2]"]
    assert str(error) == "length=-3 must be greater or equal to 0 at sequence 0."


def test_leaves_out_rows_of_length_zero_with_their_tables():
    decoded = accepted(lengths=int32([0, 13, 0]), page_indices=int32([[99, -1], [2, 3], [10**6, -7]]))
    np.testing.assert_array_equal(decoded.rows, [1])
    np.testing.assert_array_equal(decoded.batch.page_indices, [[2, 3]])


@pytest.mark.parametrize("batch_size", [0, 2])
def test_accepts_a_batch_of_nothing(batch_size):
    decoded = accepted(
        q=np.zeros((batch_size, 8, 128), np.float32),
        lengths=np.zeros(batch_size, np.int32),
        page_indices=np.zeros((batch_size, 2), np.int32),
    )
    assert len(decoded.rows) == decoded.batch.num_seqs == 0


def test_rejects_page_index_past_pool():
    error = decode_refusal(page_indices=int32([[0, 1], [2, 8], [4, 5]]))
    assert error.violations[0].field == "page_indices[1,1]"
    assert str(error).startswith("Require 0 <= page_idx=8 < total_num_pages=8 at sequence 1")


def test_overwrites_junk_in_unused_table_slots():
    table = int32([[0, 1, 10**6, -7], [2, 3, -7, 99], [4, 5, 99, 99]])
    np.testing.assert_array_equal(
        accepted(page_indices=table, pages_per_compute_block=4).batch.page_indices,
        [[0, 1, 0, 0], [2, 3, 0, 0], [4, 5, 0, 0]],
    )


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int16, np.uint32, np.float32])
def test_rejects_page_indices_of_another_dtype(dtype):
    error = decode_refusal(page_indices=np.ones((3, 2), dtype))
    assert str(error) == f"page_indices.dtype={np.dtype(dtype)} must be int32."


@pytest.mark.parametrize("block", [0, -1, -2])
def test_rejects_blocks_without_pages(block):
    error = decode_refusal(pages_per_compute_block=block)
    assert error.violations == (("pages_per_compute_block", f"pages_per_compute_block={block} must be positive."),)


@pytest.mark.parametrize("block", [None, 1, 2])
def test_accepts_blocks_that_divide_the_table(block):
    assert accepted(pages_per_compute_block=block).batch.num_seqs == 3


@pytest.mark.parametrize("soft_cap", [0.0, -5.0, float("inf"), float("nan")])
def test_rejects_soft_caps_that_cap_nothing(soft_cap):
    error = decode_refusal(soft_cap=soft_cap)
    assert error.violations == (
        (
            "attn_logits_soft_cap",
            f"attn_logits_soft_cap={soft_cap} must be finite and greater than 0 in float32.",
        ),
    )


@pytest.mark.parametrize(
    ("name", "shape"), [("q", (3, 128)), ("q", (1, 3, 8, 128)), ("page_indices", (6,)), ("page_indices", (1, 3, 2))]
)
def test_rejects_other_ranks_by_name(name, shape):
    error = decode_refusal(**{name: np.zeros(shape, np.float32 if name == "q" else np.int32)})
    assert error.violations[0].field == f"{name}.shape"


def test_two_rows_may_not_write_one_slot():
    k = np.zeros((3, 2, 128), np.float32)
    table = int32([[0, 1], [0, 1], [4, 5]])
    error = decode_refusal(lengths=int32([9, 9, 9]), page_indices=table, k=k, v=k)
    assert error.violations == (
        (
            "page_indices[1,1]",
            "page_idx=1 must take one token in each slot: its slot 0 is written by sequence 0 and again by sequence 1.",
        ),
    )
    assert accepted(lengths=int32([9, 10, 0]), page_indices=table, k=k, v=k).batch.num_seqs == 2


def test_new_keys_of_rows_left_out_are_not_looked_at():
    spec = calls.cache(layout=Layout.SPLIT, dtype=np.int8)
    k = np.zeros((3, 2, 128), np.float32)
    k[1] = np.nan
    assert accepted(spec=spec, lengths=int32([16, 0, 9]), k=k, v=k).batch.num_seqs == 2
    error = decode_refusal(spec=spec, k=k, v=np.zeros_like(k))
    assert [violation.field for violation in error.violations] == ["k[1]"]
