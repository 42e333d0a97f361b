"""The suite's check refuses answers that are wrong in the ways attention goes wrong."""

import numpy as np
import pytest

from tests.support.cases import BY_NAME
from tests.support.checking import check_answer
from tests.support.dense import Mutation, dense_attention

MUTATIONS = {
    "mask one key late": ("page boundaries", Mutation(causal_shift=1)),
    "mask one key early": ("page boundaries", Mutation(causal_shift=-1)),
    "mask one key early, in a long row": ("chunk over a long context", Mutation(causal_shift=-1)),
    "window one key wide": ("window 4", Mutation(window_shift=1)),
    "window one key narrow": ("window 4", Mutation(window_shift=-1)),
    "window one key narrow, in a long row": ("window on a long row", Mutation(window_shift=-1)),
    "window dropped": ("window 8", Mutation(ignore=("sliding_window",))),
    "pages swapped": ("page boundaries", Mutation(page_rotation=1)),
    "last page dropped": ("page boundaries", Mutation(drop_last_page=True)),
    "last page dropped, in a long row": ("chunk over a long context", Mutation(drop_last_page=True)),
    "keys and values swapped": ("one token", Mutation(swap_k_and_v=True)),
    "kv heads rotated": ("14 query heads on 2", Mutation(heads_rotation=1)),
    "soft cap skipped": ("soft cap", Mutation(ignore=("soft_cap",))),
    "scale skipped": ("page boundaries", Mutation(ignore=("sm_scale",))),
    "k_scale skipped": ("k and v scales", Mutation(ignore=("k_scale",))),
    "v_scale skipped": ("k and v scales", Mutation(ignore=("v_scale",))),
    "k_scale skipped, int8": ("int8 interleaved", Mutation(ignore=("k_scale",))),
    "mask one key early, bfloat16": ("bfloat16 interleaved", Mutation(causal_shift=-1)),
    "last page dropped, bfloat16": ("bfloat16 split", Mutation(drop_last_page=True)),
}


def _padded(inputs, out, lse):
    padding = [(0, inputs.case.padding), (0, 0)]
    return (
        np.pad(out, [*padding, (0, 0)]).astype(inputs.q.dtype),
        np.pad(lse, padding, constant_values=-np.inf).astype(np.float32),
    )


@pytest.mark.parametrize("name", sorted({name for name, _ in MUTATIONS.values()}))
def test_right_answer_passes(name):
    inputs = BY_NAME[name].build()
    check_answer(inputs, *_padded(inputs, *dense_attention(inputs)))


@pytest.mark.parametrize(("name", "mutation"), MUTATIONS.values(), ids=MUTATIONS)
def test_wrong_answer_fails(name, mutation):
    inputs = BY_NAME[name].build()
    right_out, right_lse = _padded(inputs, *dense_attention(inputs))
    wrong_out, wrong_lse = _padded(inputs, *dense_attention(inputs, mutation))
    with pytest.raises(AssertionError, match=inputs.case.name):
        check_answer(inputs, wrong_out, right_lse)
    if mutation.swap_k_and_v or mutation.ignore != ("v_scale",):
        with pytest.raises(AssertionError, match=inputs.case.name):
            check_answer(inputs, right_out, wrong_lse)


def test_padding_that_is_not_zero_fails():
    inputs = BY_NAME["one token"].build()
    out, lse = _padded(inputs, *dense_attention(inputs))
    out[-1] = out[0]
    with pytest.raises(AssertionError):
        check_answer(inputs, out, lse)
