"""What is accepted and refused of a step over sequences whose pages the server manages."""

import numpy as np
import pytest

from attnd.kernels import validation
from attnd.kernels.contract import Layout
from attnd.kernels.errors import InvalidArgumentError
from tests.support import calls
from tests.support.calls import int32


def refused(**changes) -> InvalidArgumentError:
    error = calls.refusal(validation.step_lens, calls.step(**changes))
    assert error is not None
    return error


def test_returns_the_lengths_of_each_sequence():
    lens = validation.step_lens(**calls.step())
    assert lens.q_lens.tolist() == [7, 0, 1]
    assert lens.kv_lens.tolist() == [7, 0, 20]


@pytest.mark.parametrize("kv_lens", [[7, 0, 1], [7, 9, 1], [2**31 - 1, 2**31 - 1, 2**31 - 1]])
def test_accepts_sequences_without_queries_and_of_any_length(kv_lens):
    assert validation.step_lens(**calls.step(kv_lens=int32(kv_lens))).kv_lens.tolist() == kv_lens


def test_accepts_a_step_of_no_sequences():
    call = calls.step(q=np.zeros((0, 4, 128), np.float32), q_lens=int32([]), kv_lens=int32([]), num_sequences=0)
    assert len(validation.step_lens(**call).q_lens) == 0


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"q": np.zeros((8, 512), np.float32)}, "q.shape", "q.shape=(8, 512) must be [tokens, num_q_heads, head_dim]."),
        ({"q": np.zeros((8, 3, 128), np.float32)}, "q.shape[1]", "num_q_heads=3 must be divisible by num_kv_heads=2"),
        (
            {"q": np.zeros((8, 4, 64), np.float32)},
            "q.shape[2]",
            "Q head_dim 64 must be the same as that of K/V 128.",
        ),
        ({"q": np.zeros((8, 0, 128), np.float32)}, "q.shape[1]", "num_q_heads=0 must be greater than 0."),
        ({"q": np.zeros((8, 4, 128))}, "q.dtype", "q.dtype=float64 must be one of float32, bfloat16, float16."),
        ({"q_lens": int32([7, 1])}, "q_lens.shape", "q_lens.shape=(2,) must be (3,): one for each sequence."),
        ({"kv_lens": int32([[7, 0, 1]])}, "kv_lens.shape", "kv_lens.shape=(1, 3) must be (3,): one for each sequence."),
        ({"q_lens": np.array([7, 0, 1])}, "q_lens.dtype", "q_lens.dtype=int64 must be int32."),
        ({"kv_lens": np.array([7, 0, 1.0])}, "kv_lens.dtype", "kv_lens.dtype=float64 must be int32."),
        ({"q_lens": int32([7, 0, 2])}, "q_lens", "Total q tokens 9 must be equal to q.shape[0]=8."),
        ({"q_lens": int32([7, -1, 2])}, "q_lens[1]", "q_len=-1 must be greater or equal to 0 at sequence 1."),
        (
            {"kv_lens": int32([7, 0, 0])},
            "kv_lens[2]",
            "q_len=1 must be less or equal to kv_len=0 at sequence 2.",
        ),
        (
            {"kv_lens": int32([7, -1, 20])},
            "kv_lens[1]",
            "q_len=0 must be less or equal to kv_len=-1 at sequence 1.",
        ),
        ({"sliding_window": 0}, "sliding_window", "sliding_window=0 must be positive."),
        ({"soft_cap": 0.0}, "soft_cap", "soft_cap=0.0 must not be 0.0."),
        ({"sm_scale": float("inf")}, "sm_scale", "sm_scale=inf must be finite in float32."),
        ({"sm_scale": "x"}, "sm_scale", "sm_scale must be a number, not str."),
        ({"k": np.zeros((8, 2, 128), np.float32)}, "v", "v must be given too: k and v go together."),
    ],
)
def test_names_what_is_wrong(changes, field, text):
    assert refused(**changes).violations == ((field, text),)


def test_lengths_do_not_wrap_when_summed():
    error = refused(q_lens=int32([2**31 - 1, 2**31 - 1, 10]), kv_lens=int32([2**31 - 1] * 3))
    assert str(error) == "Total q tokens 4294967304 must be equal to q.shape[0]=8."


def test_new_tokens_must_be_finite_where_each_has_its_own_scale():
    k = np.zeros((8, 2, 128), np.float32)
    spec = calls.cache(layout=Layout.SPLIT, dtype=np.int8)
    assert calls.refusal(validation.step_lens, calls.step(spec=spec, k=k, v=k)) is None
    assert refused(spec=spec, k=k, v=k + np.inf).num_violations == 8
