"""What is accepted and refused by the ragged call, one behaviour each."""

import json

import numpy as np
import pytest

from attnd.kernels import validation
from attnd.kernels.contract import AttentionOptions, RaggedBatch
from attnd.kernels.errors import VIOLATIONS_MAX, InvalidArgumentError
from tests.support import calls
from tests.support.calls import int32, ragged_refusal

DOCUMENTED = [
    ({"num_seqs": int32([2, 2])}, "num_seqs.shape", "num_seqs.shape=(2,) must be (1,)"),
    (
        {"q": np.zeros((8, 4, 64), np.float32)},
        "q.shape[2]",
        "Q head_dim 64 must be the same as that of K/V 128.",
    ),
    (
        {"kv_lens": int32([9, 13, 1])},
        "kv_lens.shape",
        "Expected kv_lens.shape=(3,) to be (2,) where `max_num_seqs` is `page_indices.shape[0]`.",
    ),
    (
        {"cu_q_lens": int32([0, 3])},
        "cu_q_lens.shape",
        "Expected cu_q_lens.shape=(2,) to be (3,)  where `max_num_seqs` is `page_indices.shape[0]`.",
    ),
    (
        {"page_indices": np.array([[0, 1], [2, 3]], np.int16)},
        "page_indices.dtype",
        (
            "The dtype of `kv_lens`, `page_indices`, and `cu_q_lens` must be int32. Got kv_lens.dtype=int32,"
            " page_indices.dtype=int16, cu_q_lens.dtype=int32."
        ),
    ),
    ({"q": np.zeros((8, 3, 128), np.float32)}, "q.shape[1]", "num_q_heads=3 must be divisible by num_kv_heads=2"),
    ({"sliding_window": 0}, "sliding_window", "sliding_window=0 must be positive."),
    ({"soft_cap": 0.0}, "soft_cap", "soft_cap=0.0 must not be 0.0."),
    ({"num_kv_pages_per_block": 3}, "num_kv_pages_per_block", "num_kv_pages_per_block=3 must be in range (0, 2]."),
    ({"num_queries_per_block": 0}, "num_queries_per_block", "num_queries_per_block=0 must be positive."),
    ({"vmem_limit_bytes": -1}, "vmem_limit_bytes", "vmem_limit_bytes=-1 must be positive."),
    ({"num_seqs": int32([9])}, "num_seqs[0]", "num_seqs[0]=9 must be less or equal to max_num_seqs=2"),
    (
        {"kv_lens": int32([9, 17])},
        "kv_lens[1]",
        "pages_per_seq=2 must be greater or equal to min_pages_per_seq=3 given max_kv_len=17 and page_size=8.",
    ),
    (
        {"cu_q_lens": int32([0, 3, 9])},
        "cu_q_lens[2]",
        "Total q tokens 9 must be less or equal to max_num_batched_tokens=8.",
    ),
    ({"kv_lens": int32([2, 13])}, "kv_lens[0]", "q_len=3 must be less or equal to kv_len=2 at sequence 0."),
]


@pytest.mark.parametrize(("changes", "field", "text"), DOCUMENTED, ids=[row[1] for row in DOCUMENTED])
def test_answers_with_the_documented_words(changes, field, text):
    error = ragged_refusal(**changes)
    assert error.violations[0] == (field, text)
    assert str(error) == text


def test_accepts_a_valid_batch_as_it_is():
    call = calls.ragged()
    batch = validation.ragged_batch(**call)
    np.testing.assert_array_equal(batch.kv_lens, call["kv_lens"])
    np.testing.assert_array_equal(batch.page_indices, call["page_indices"])
    np.testing.assert_array_equal(batch.cu_q_lens, call["cu_q_lens"])
    assert not validation.ragged_violations(**call)


def accepted(**changes) -> RaggedBatch:
    return validation.ragged_batch(**calls.ragged(**changes))


def test_reports_the_first_of_several_faults_and_names_all():
    error = ragged_refusal(sliding_window=-1, cu_q_lens=int32([1, 3, 9]), sm_scale=float("nan"))
    assert str(error) == "sliding_window=-1 must be positive."
    assert [violation.field for violation in error.violations] == [
        "sliding_window", "cu_q_lens[2]", "cu_q_lens[0]", "sm_scale",
    ]  # fmt: skip
    assert error.num_violations == 4


def test_rejects_page_index_past_pool():
    error = ragged_refusal(page_indices=int32([[0, 99], [2, 3]]))
    assert error.violations[0].field == "page_indices[0,1]"
    assert str(error).startswith("Require 0 <= page_idx=99 < total_num_pages=8 at sequence 0")


@pytest.mark.parametrize("page", [-1, 8, 2**31 - 1, -(2**31)])
def test_rejects_page_index_outside_of_pool(page):
    assert ragged_refusal(page_indices=int32([[0, 1], [page, 3]])).violations[0].field == "page_indices[1,0]"


def test_accepts_the_last_page():
    np.testing.assert_array_equal(accepted(page_indices=int32([[7, 0], [1, 7]])).page_indices, [[7, 0], [1, 7]])


def test_overwrites_junk_in_unused_table_slots():
    table = int32([[0, 1, 10**6, -7], [2, 3, -7, 8]])
    np.testing.assert_array_equal(accepted(page_indices=table).page_indices, [[0, 1, 0, 0], [2, 3, 0, 0]])


def test_accepts_a_page_twice_in_one_table_and_in_two():
    np.testing.assert_array_equal(accepted(page_indices=int32([[2, 2], [2, 0]])).page_indices, [[2, 2], [2, 0]])


def test_judges_only_rows_in_use():
    batch = accepted(
        kv_lens=int32([9, 13, 10**6, -5]),
        cu_q_lens=int32([0, 3, 8, 2, -1]),
        page_indices=int32([[0, 1], [2, 3], [99, -1], [-1, 99]]),
    )
    np.testing.assert_array_equal(batch.kv_lens, [9, 13])
    np.testing.assert_array_equal(batch.cu_q_lens, [0, 3, 8])
    assert batch.page_indices.shape == (2, 2)


@pytest.mark.parametrize("num_seqs", [-1, -3, -(2**31)])
def test_rejects_a_negative_num_seqs(num_seqs):
    assert str(ragged_refusal(num_seqs=int32([num_seqs]))) == f"num_seqs[0]={num_seqs} must be greater or equal to 0."


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float32, np.bool_, ">i4"])
def test_rejects_num_seqs_of_another_dtype(dtype):
    error = ragged_refusal(num_seqs=np.array([1], dtype), cu_q_lens=int32([0, 3, 3]))
    assert error.violations[0] == ("num_seqs.dtype", f"num_seqs.dtype={np.dtype(dtype)} must be int32.")


@pytest.mark.parametrize("dtype", [np.int64, np.int16, np.int8, np.uint8, np.uint32, np.float32, np.bool_, ">i4"])
@pytest.mark.parametrize("name", ["kv_lens", "page_indices", "cu_q_lens"])
def test_rejects_metadata_of_another_dtype(name, dtype):
    error = ragged_refusal(**{name: np.ones((2, 2) if name == "page_indices" else 2 + (name == "cu_q_lens"), dtype)})
    assert error.violations[0].field == f"{name}.dtype"
    assert f"{name}.dtype={np.dtype(dtype)}" in str(error)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_seqs": int32([0]), "cu_q_lens": int32([0, 0, 0]), "kv_lens": int32([0, 0])},
        {"num_seqs": int32([0])},
        {"num_seqs": int32([0]), "q": np.zeros((0, 4, 128), np.float32)},
        {"cu_q_lens": int32([0, 0, 0])},
        {"cu_q_lens": int32([0, 0, 0]), "kv_lens": int32([0, 0]), "q": np.zeros((0, 4, 128), np.float32)},
        {
            "num_seqs": int32([0]),
            "kv_lens": int32([]),
            "page_indices": np.zeros((0, 0), np.int32),
            "cu_q_lens": int32([0]),
        },
    ],
    ids=["no-sequences", "junk-past-none", "no-sequences-no-queries", "no-queries", "nothing-at-all", "no-table"],
)
def test_accepts_a_batch_of_nothing(changes):
    batch = accepted(**changes)
    assert batch.num_seqs == batch.num_tokens == 0
    assert batch.page_indices.shape[0] == 0


@pytest.mark.parametrize(
    ("cu_q_lens", "kv_lens", "kept"),
    [([0, 3, 3, 8], [9, 0, 13], [0, 2]), ([0, 0, 3, 8], [0, 9, 13], [1, 2]), ([0, 3, 8, 8], [9, 13, 5], [0, 1])],
    ids=["middle", "first", "last-with-tokens"],
)
def test_drops_rows_without_queries(cu_q_lens, kv_lens, kept):
    table = int32([[0, 1], [2, 3], [4, 5]])
    batch = accepted(kv_lens=int32(kv_lens), page_indices=table, cu_q_lens=int32(cu_q_lens), num_seqs=int32([3]))
    np.testing.assert_array_equal(batch.page_indices, table[kept])
    np.testing.assert_array_equal(batch.cu_q_lens, [0, 3, 8])
    np.testing.assert_array_equal(batch.kv_lens, [9, 13])


def test_accepts_query_rows_past_the_last_sequence():
    assert accepted(q=np.zeros((16, 4, 128), np.float32)).num_tokens == 8


def test_rejects_cu_q_lens_that_do_not_start_at_zero():
    assert ragged_refusal(cu_q_lens=int32([1, 3, 8])).violations[0] == ("cu_q_lens[0]", "cu_q_lens[0]=1 must be 0.")


def test_names_where_cu_q_lens_decreases():
    error = ragged_refusal(
        kv_lens=int32([9, 5, 13]),
        page_indices=int32([[0, 1], [2, 3], [4, 5]]),
        cu_q_lens=int32([0, 5, 3, 8]),
        num_seqs=int32([3]),
    )
    assert error.violations == (("cu_q_lens[2]", "cu_q_lens[2]=3 must be greater or equal to cu_q_lens[1]=5."),)


def test_rejects_a_negative_length_of_a_row_without_queries():
    error = ragged_refusal(kv_lens=int32([-1, 13]), cu_q_lens=int32([0, 0, 8]))
    assert str(error) == "q_len=0 must be less or equal to kv_len=-1 at sequence 0."
    assert error.violations[1] == ("kv_lens[0]", "kv_len=-1 must be greater or equal to 0 at sequence 0.")


def test_rejects_queries_of_an_empty_sequence():
    assert str(ragged_refusal(kv_lens=int32([0, 13]))) == "q_len=3 must be less or equal to kv_len=0 at sequence 0."


def test_names_every_sequence_with_more_queries_than_tokens():
    error = ragged_refusal(kv_lens=int32([2, 3]))
    assert [violation.field for violation in error.violations] == ["kv_lens[0]", "kv_lens[1]"]


def test_lengths_near_the_end_of_int32_do_not_wrap():
    error = ragged_refusal(kv_lens=int32([2**31 - 1, 13]))
    assert str(error) == (
        "pages_per_seq=2 must be greater or equal to min_pages_per_seq=268435456 given max_kv_len=2147483647 and"
        " page_size=8."
    )
    error = ragged_refusal(cu_q_lens=int32([2**31 - 1, -(2**31), 8]))
    assert "cu_q_lens[1]=-2147483648 must be greater or equal to cu_q_lens[0]=2147483647." in [
        violation.description for violation in error.violations
    ]


@pytest.mark.parametrize(
    ("name", "shape"), [("q", (8, 128)), ("q", (1, 8, 4, 128)), ("page_indices", (4,)), ("page_indices", (1, 2, 2))]
)
def test_rejects_other_ranks_by_name(name, shape):
    error = ragged_refusal(**{name: np.zeros(shape, np.float32 if name == "q" else np.int32)})
    assert error.violations[0].field == f"{name}.shape"
    assert str(error).startswith(f"{name}.shape={shape} must be [")


@pytest.mark.parametrize("dtype", ["float64", "int8", "int32", "bool", "complex64", "float8_e4m3fn"])
def test_rejects_q_of_another_dtype(dtype):
    error = ragged_refusal(q=validation.ArrayInfo((8, 4, 128), np.dtype(dtype)))
    assert str(error) == f"q.dtype={dtype} must be one of float32, bfloat16, float16."


@pytest.mark.parametrize(
    ("shape", "field"),
    [
        ((8, 0, 128), "q.shape[1]"),
        ((8, -4, 128), "q.shape[1]"),
        ((8, 4, 0), "q.shape[2]"),
        ((-1, 4, 128), "q.shape[0]"),
    ],
)
def test_rejects_axes_of_q_that_no_array_has(shape, field):
    error = ragged_refusal(q=validation.ArrayInfo(shape, np.dtype(np.float32)))
    assert field in [violation.field for violation in error.violations]


def test_spells_out_a_few_violations_and_counts_the_rest():
    table = np.full((1, 5000), -1, np.int32)
    error = ragged_refusal(
        spec=calls.cache(page_size=1),
        kv_lens=int32([5000]),
        page_indices=table,
        cu_q_lens=int32([0, 8]),
        num_seqs=int32([1]),
    )
    assert len(error.violations) == VIOLATIONS_MAX
    assert error.num_violations == 5000
    assert len(json.dumps(error.violations)) < 4096
    assert error.violations[-1].field == "page_indices[0,15]"


def test_takes_strided_read_only_tables():
    table = np.arange(8, dtype=np.int32).reshape(2, 4)[:, ::2]
    table.flags.writeable = False
    np.testing.assert_array_equal(accepted(page_indices=table).page_indices, [[0, 2], [4, 6]])


def test_batch_does_not_share_memory_with_the_call():
    call = calls.ragged()
    batch = validation.ragged_batch(**call)
    for name in ("kv_lens", "page_indices", "cu_q_lens"):
        assert not np.shares_memory(getattr(batch, name), call[name])
        assert getattr(batch, name).dtype == np.int32


def test_invalid_arguments_are_value_errors():
    with pytest.raises(ValueError, match=r"soft_cap=0\.0 must not be 0\.0"):
        validation.ragged_batch(**calls.ragged(soft_cap=0.0))
    assert issubclass(InvalidArgumentError, ValueError)


def test_converts_whole_numbers_and_numpy_scalars_to_floats():
    options = AttentionOptions(sm_scale=1, soft_cap=np.float32(30), k_scale=2, sliding_window=np.int64(4))
    converted = validation.plain_options(options)
    assert converted == AttentionOptions(sm_scale=1.0, soft_cap=30.0, k_scale=2.0, sliding_window=4)
    assert [type(converted.sm_scale), type(converted.soft_cap)] == [float, float]
    with pytest.raises(InvalidArgumentError, match="soft_cap must be a number, not str"):
        validation.plain_options(AttentionOptions(soft_cap="30"))
