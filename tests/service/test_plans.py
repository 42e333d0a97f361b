"""Calls over sequences between their reservation and the engine."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from attnd.kernels.contract import AttentionOptions
from attnd.service import plans
from tests.service.test_sequences import extend, state, table_of


def call(table, handle, q_len, kv_len, **given):
    cache = SimpleNamespace(require_sequences=lambda: table)
    lens = SimpleNamespace(q_lens=np.array([q_len], np.int32), kv_lens=np.array([kv_len], np.int32))
    return asyncio.run(plans.sequence_call(cache, 0, [handle], lens, given, AttentionOptions()))


def tokens(count):
    return np.zeros((count, 1, 4), np.float32)


@pytest.mark.parametrize(("q_len", "kv_len", "copied"), [(2, 5, True), (3, 7, True), (2, 7, False)])
def test_tokens_that_are_written_again_cannot_be_changed_by_their_owner_any_more(q_len, kv_len, copied):
    table = table_of()
    (handle,) = table.create(1)
    extend(table, handle, 5, 5)
    k, v = tokens(q_len), tokens(q_len)
    made = call(table, handle, q_len, kv_len, q=tokens(q_len), k=k, v=v)
    assert [np.shares_memory(made.k, k), np.shares_memory(made.v, v)] == [not copied, not copied]


def test_a_call_that_cannot_be_made_leaves_its_sequences_as_they_were():
    table = table_of()
    (handle,) = table.create(1)
    extend(table, handle, 5, 5)
    before = state(table)
    with pytest.raises(KeyError):
        call(table, handle, 10, 15, k=tokens(10), v=tokens(10))
    assert state(table) == before
