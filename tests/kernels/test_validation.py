"""What is accepted and refused by the ragged call, one behaviour each."""

import numpy as np
import pytest

from attnd.kernels import validation
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
