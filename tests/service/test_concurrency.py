"""Callers at the same time: each gets its own answer, and a failed call spoils nobody's."""

import threading

import numpy as np
import pytest

from attnd.client import Client, InvalidArgumentError
from tests.support.rpc import normal
from tests.support.server import attnd_server

SIZES = {"num_layers": 2, "num_pages": 64, "page_size": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


@pytest.fixture(scope="module")
def server():
    with attnd_server() as process:
        yield process


def dense(q, k, v):
    """Causal attention of the last len(q) of len(k) tokens, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q.astype(np.float64), k)
    last = np.arange(len(k) - len(q), len(k))
    scores = np.where(np.arange(len(k)) <= last[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)


def together(*tasks):
    failures = []

    def guarded(task):
        try:
            task()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_callers_at_the_same_time_get_their_own_answers(server):
    with Client(server.address) as client:
        cache = client.create_cache("own-answers", pages_by="server", **SIZES)

        def conversation(seed):
            (sequence,) = cache.create_sequences(1)
            q, k, v = normal(40, 4, 16, seed=seed), normal(40, 2, 16, seed=seed + 1), normal(40, 2, 16, seed=seed + 2)
            done = 0
            for q_len in (7, 1, 1, 8, 1, 22):
                step = cache.step([sequence], q_lens=[q_len], kv_lens=[done + q_len])
                rows = slice(done, done + q_len)
                for layer in (0, 1):
                    out = step.attend(layer, q[rows], k[rows] + layer, v[rows] - layer)
                    expected = dense(q[rows], k[: rows.stop] + layer, v[: rows.stop] - layer)
                    np.testing.assert_allclose(out, expected, atol=1e-5)
                done += q_len
            sequence.release()

        together(*(lambda seed=seed: conversation(seed) for seed in range(0, 40, 10)))
        assert client.get_cache("own-answers").info.num_free_pages == SIZES["num_pages"]
        cache.delete()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_sees_all_of_a_write_or_none_of_it(server):
    """One caller rewrites a page with a new constant, another reads it: no answer mixes two constants."""
    with Client(server.address) as client:
        cache = client.create_cache("torn", pages_by="client", **SIZES)
        shape = (1, SIZES["page_size"], 2 * SIZES["num_kv_heads"], SIZES["head_dim"])
        cache.write_pages(0, [3], np.zeros(shape, np.float32))
        q = normal(1, 4, 16)

        def writer():
            for constant in range(1, 201):
                cache.write_pages(0, [3], np.full(shape, constant, np.float32))

        def reader():
            for _ in range(200):
                out = cache.ragged_paged_attention(0, q, [8], [[3]], [0, 1], 1)
                assert np.ptp(out) < 1e-3
                assert abs(out.flat[0] - round(float(out.flat[0]))) < 1e-3

        together(writer, reader)
        cache.delete()


def test_an_append_that_fails_halfway_leaves_the_cache_usable(server):
    with Client(server.address) as client:
        cache = client.create_cache("failed-append", pages_by="server", **SIZES)
        (sequence,) = cache.create_sequences(1)
        q, k, v = normal(9, 4, 16), normal(9, 2, 16, seed=1), normal(9, 2, 16, seed=2)
        cache.step([sequence], q_lens=[8], kv_lens=[8]).attend(0, q[:8], k[:8], v[:8])
        step = cache.step([sequence], q_lens=[1], kv_lens=[9])
        for bad in (normal(1, 3, 16), normal(2, 2, 16), normal(1, 2, 8)):
            with pytest.raises(InvalidArgumentError) as caught:
                step.attend(0, q[8:], bad, bad)
            assert caught.value.violations[0].field.startswith("k.shape")
        np.testing.assert_allclose(step.attend(0, q[8:], k[8:], v[8:]), dense(q[8:], k, v), atol=1e-5)
        cache.delete()


def test_a_bad_call_does_not_spoil_the_next(server):
    with Client(server.address) as client:
        cache = client.create_cache("bad-then-good", pages_by="client", **SIZES)
        kv = normal(2, 8, 4, 16)
        cache.write_pages(1, [5, 2], kv)
        q = normal(3, 4, 16, seed=9)
        good = {"kv_lens": [9], "page_indices": [[5, 2]], "cu_q_lens": [0, 3], "num_seqs": 1}
        before = cache.ragged_paged_attention(1, q, **good)
        for page in (99, -1, 2**31 - 1):
            with pytest.raises(InvalidArgumentError, match=f"page_idx={page}"):
                cache.ragged_paged_attention(1, q, **{**good, "page_indices": [[5, page]]})
        np.testing.assert_array_equal(cache.ragged_paged_attention(1, q, **good), before)
        tokens = kv.reshape(16, 2, 2, 16)[:9]
        np.testing.assert_allclose(before, dense(q, tokens[:, :, 0], tokens[:, :, 1]), atol=1e-5)
        cache.delete()


def test_kernel_messages_reach_the_caller_word_for_word(server):
    with Client(server.address) as client:
        cache = client.create_cache("words", pages_by="client", **SIZES)
        q = normal(8, 4, 16)
        good = {"kv_lens": [9, 13], "page_indices": [[0, 1], [2, 3]], "cu_q_lens": [0, 3, 8], "num_seqs": 2}
        for change, text, field in [
            ({"num_seqs": [9]}, "num_seqs[0]=9 must be less or equal to max_num_seqs=2", "num_seqs[0]"),
            ({"kv_lens": [2, 13]}, "q_len=3 must be less or equal to kv_len=2 at sequence 0.", "kv_lens[0]"),
            ({"soft_cap": 0.0}, "soft_cap=0.0 must not be 0.0.", "soft_cap"),
            ({"sliding_window": 0}, "sliding_window=0 must be positive.", "sliding_window"),
        ]:
            with pytest.raises(ValueError, match="must") as caught:
                cache.ragged_paged_attention(0, q, **{**good, **change})
            assert str(caught.value) == text
            assert caught.value.violations[0].field == field
            assert issubclass(type(caught.value), InvalidArgumentError)
        cache.delete()
