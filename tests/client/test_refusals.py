"""What both clients are refused by a real server, or refuse themselves."""

import pickle

import numpy as np
import pytest

from attnd import client as sdk
from tests.client.batches import CU_Q_LENS, KV_LENS, NUM_SEQS, PAGE_INDICES, ragged

METADATA_DTYPES = "The dtype of `kv_lens`, `page_indices`, and `cu_q_lens` must be int32."


def test_names_are_taken_once_and_unknown_ones_not_found(run, client, new_cache):
    cache = new_cache()
    sizes = {"num_layers": 1, "num_pages": 1, "page_size": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": "float32"}
    with pytest.raises(sdk.AlreadyExistsError):
        run(client.create_cache(cache.name, **sizes))
    with pytest.raises(sdk.NotFoundError) as caught:
        run(client.get_cache("no-such-cache"))
    assert not isinstance(caught.value, sdk.SessionLostError)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"layout": "diagonal"}, "layout"),
        ({"pages_by": "nobody"}, "pages_by"),
        ({"num_pages": 2**31}, "num_pages"),
        ({"num_pages": 16.0}, "num_pages"),
        ({"dtype": None}, "dtype"),
        ({"dtype": "V2"}, "spec.dtype"),
        ({"num_kv_heads": 0}, "spec.num_kv_heads"),
    ],
)
def test_impossible_caches_are_refused_by_field(new_cache, changes, field):
    with pytest.raises(sdk.InvalidArgumentError) as caught:
        new_cache(**changes)
    assert caught.value.violations[0].field == field


def test_sequences_of_another_cache_are_refused(run, new_cache):
    one, other = new_cache(pages_by="server"), new_cache(pages_by="server")
    (sequence,) = run(one.create_sequences(1))
    for wrong in (sequence, sequence.handle, None):
        with pytest.raises(sdk.InvalidArgumentError) as caught:
            run(other.step([wrong], q_lens=[1], kv_lens=[1]))
        assert caught.value.violations[0].field == "sequences[0]"


def test_scales_are_only_for_int8_split_caches(run, new_cache):
    with pytest.raises(sdk.InvalidArgumentError, match="return_scales"):
        run(new_cache().read_pages(0, [0], return_scales=True))


@pytest.mark.parametrize("dtype", ["int8", "int16", "uint8", "uint16", "uint32", "float32", "float64"])
def test_metadata_of_another_dtype_gets_the_documented_message(run, new_cache, normal, dtype):
    with pytest.raises(sdk.InvalidArgumentError) as caught:
        ragged(run, new_cache(), normal(8, 4, 16), page_indices=np.array(PAGE_INDICES, dtype))
    got = f"kv_lens.dtype=int32, page_indices.dtype={dtype}, cu_q_lens.dtype=int32"
    assert str(caught.value) == f"{METADATA_DTYPES} Got {got}."
    assert caught.value.code.name == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("changes", "message", "field"),
    [
        ({"soft_cap": 0.0}, "soft_cap=0.0 must not be 0.0.", "soft_cap"),
        ({"sliding_window": 0}, "sliding_window=0 must be positive.", "sliding_window"),
        ({"k_scale": 0.0}, "k_scale=0.0 must", "k_scale"),
        ({"v_scale": np.float32(-1)}, "v_scale=-1.0 must", "v_scale"),
        ({"num_seqs": 9}, "num_seqs[0]=9 must be less or equal to max_num_seqs=2", "num_seqs"),
        ({"num_queries_per_block": 0}, "num_queries_per_block=0 must be positive.", "num_queries_per_block"),
        ({"kv_lens": [2, 13]}, "q_len=3 must be less or equal to kv_len=2 at sequence 0.", "kv_lens"),
        ({"page_indices": [[3, 99], [5, 2]]}, "", "page_indices[0,1]"),
    ],
)
def test_refusals_carry_the_servers_message_and_field(run, new_cache, normal, changes, message, field):
    cache, q = new_cache(), normal(8, 4, 16)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        ragged(run, cache, q, **changes)
    assert isinstance(caught.value, sdk.InvalidArgumentError)
    assert str(caught.value).startswith(message)
    assert caught.value.violations[0].field.startswith(field)
    call = {"kv_lens": KV_LENS, "page_indices": PAGE_INDICES, "cu_q_lens": CU_Q_LENS, "num_seqs": NUM_SEQS, **changes}
    assert tuple(run(cache.validate_batch(q.shape, **call))) == caught.value.violations


def test_a_valid_batch_has_no_violations(run, new_cache):
    assert run(new_cache().validate_batch((8, 4, 16), KV_LENS, PAGE_INDICES, CU_Q_LENS, NUM_SEQS)) == []


def test_lossy_inputs_are_refused_before_anything_is_sent(run, new_cache, normal):
    cache = new_cache()
    for changes, field in (
        ({"q": np.ones((8, 4, 16))}, "q"),
        ({"q": np.ones((8, 4, 16), bool)}, "q"),
        ({"page_indices": np.array([[3, 2**32 + 1], [5, 2]])}, "page_indices[0,1]"),
        ({"kv_lens": np.array([9, 2**63], np.uint64)}, "kv_lens[1]"),
        ({"page_indices": [[3.0, 7.0], [5.0, 2.0]]}, "page_indices[0,0]"),
    ):
        with pytest.raises(sdk.InvalidArgumentError) as caught:
            ragged(run, cache, **{"q": normal(8, 4, 16), **changes})
        assert caught.value.violations[0].field == field
        assert caught.value.__cause__ is None


def test_calls_of_the_other_kind_of_cache_are_failed_preconditions(run, new_cache, normal):
    with pytest.raises(sdk.FailedPreconditionError):
        ragged(run, new_cache(pages_by="server"), normal(8, 4, 16))
    with pytest.raises(sdk.FailedPreconditionError):
        run(new_cache().create_sequences(1))


def test_a_message_beyond_the_limit_names_it_and_is_not_sent(run, new_cache, monkeypatch, normal):
    cache = new_cache()
    with pytest.raises(sdk.ResourceExhaustedError, match=f"at most {1 << 30}"):
        ragged(run, cache, np.broadcast_to(np.float32(0), (1 << 20, 4, 128)))
    monkeypatch.setattr("attnd.client._core.MESSAGE_BYTES_MAX", 1000)
    with pytest.raises(sdk.ResourceExhaustedError, match="at most 1000") as caught:
        ragged(run, cache, normal(8, 4, 16))
    assert caught.value.reason == "MESSAGE_TOO_LARGE"


def test_errors_of_the_server_survive_pickling(run, new_cache, normal):
    with pytest.raises(sdk.InvalidArgumentError) as caught:
        ragged(run, new_cache(), normal(8, 4, 16), soft_cap=0.0)
    again = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 (its own bytes)
    assert (str(again), again.violations, again.reason) == (
        str(caught.value),
        caught.value.violations,
        caught.value.reason,
    )
    assert caught.value.__cause__ is not None
