"""Compaction of a batch, against one row after the other."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnd.kernels.contract import RaggedBatch
from tests.support.calls import int32


@st.composite
def rows(draw):
    page_size, width = draw(st.integers(1, 9)), draw(st.integers(1, 5))
    kv_lens = draw(st.lists(st.integers(0, page_size * width), max_size=6))
    q_lens = [draw(st.integers(0, kv_len)) for kv_len in kv_lens]
    junk = st.integers(-(2**31), 2**31 - 1)
    table = [draw(st.lists(junk, min_size=width, max_size=width)) for _ in kv_lens]
    return kv_lens, int32(table).reshape(len(kv_lens), width), q_lens, page_size


@given(rows())
def test_compaction_keeps_rows_with_queries_and_clears_unused_slots(call):
    kv_lens, table, q_lens, page_size = call
    batch = RaggedBatch.compact(int32(kv_lens), table, int32(q_lens), page_size)
    kept = [i for i, q_len in enumerate(q_lens) if q_len]
    assert batch.num_seqs == len(kept)
    assert batch.num_tokens == sum(q_lens)
    assert batch.q_lens.tolist() == [q_lens[i] for i in kept]
    assert batch.kv_lens.tolist() == [kv_lens[i] for i in kept]
    for row, i in enumerate(kept):
        for slot in range(table.shape[1]):
            used = slot * page_size < kv_lens[i]
            assert batch.page_indices[row, slot] == (table[i, slot] if used else 0)
    assert {array.dtype.name for array in (batch.kv_lens, batch.page_indices, batch.cu_q_lens)} == {"int32"}


@given(rows())
def test_compaction_of_a_compact_batch_changes_nothing(call):
    kv_lens, table, q_lens, page_size = call
    once = RaggedBatch.compact(int32(kv_lens), table, int32(q_lens), page_size)
    twice = RaggedBatch.compact(once.kv_lens, once.page_indices, once.q_lens, page_size)
    for name in ("kv_lens", "page_indices", "cu_q_lens"):
        np.testing.assert_array_equal(getattr(once, name), getattr(twice, name))


@given(rows())
def test_each_token_has_the_slot_of_its_position(call):
    kv_lens, table, q_lens, page_size = call
    batch = RaggedBatch.compact(int32(kv_lens), table, int32(q_lens), page_size)
    pages, offsets = batch.token_slots(page_size)
    expected = [
        (int(table[i, position // page_size]), position % page_size)
        for i, (kv_len, q_len) in enumerate(zip(kv_lens, q_lens, strict=True))
        for position in range(kv_len - q_len, kv_len)
    ]
    assert list(zip(pages.tolist(), offsets.tolist(), strict=True)) == expected


@pytest.mark.parametrize("kv_len", [2**31 - 1, 2**31 - 9])
def test_compaction_rounds_long_sequences_up_without_wrapping(kv_len):
    batch = RaggedBatch.compact(int32([kv_len]), int32([[5, 6]]), int32([1]), 2**30)
    assert batch.page_indices.tolist() == [[5, 6]]
