"""Generated calls through a real server: the verdict, words and fields of `kernels.validation`, as a status."""

import dataclasses
import random

import grpc
import numpy as np
import pytest

from attnd.kernels import validation
from attnd.kernels.contract import AttentionOptions
from attnd.kernels.errors import InvalidArgumentError
from attnd.v1 import attention_pb2, cache_pb2, envelope
from tests.support import metadata
from tests.support.rpc import RawClient, Refused
from tests.support.server import attnd_server

CALLS = 1_500
METADATA = {
    "RaggedPagedAttention": ("kv_lens", "page_indices", "cu_q_lens", "num_seqs"),
    "PagedAttention": ("lengths", "page_indices"),
}


@pytest.fixture(scope="module")
def client():
    # The reference compiles nothing, so that hundreds of accepted shapes cost little.
    with attnd_server("--implementation", "reference") as server, RawClient(server.address) as raw:
        yield raw


class Caches:
    """One cache for each shape."""

    def __init__(self, client):
        self._client = client
        self._ids = {}

    def id_of(self, spec):
        if spec not in self._ids:
            sizes = {
                name: getattr(spec, name)
                for name in ("num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim")
            }
            request = cache_pb2.CreateCacheRequest(
                name=f"{spec.layout}-{len(self._ids)}",
                spec=cache_pb2.CacheSpec(layout=f"LAYOUT_KV_{spec.layout.name}", dtype=spec.dtype.name, **sizes),
                pages_by="PAGES_BY_CLIENT",
            )
            self._ids[spec] = self._client("CacheService/CreateCache", request).cache.cache_id
        return self._ids[spec]


def given(**values):
    return {name: value for name, value in values.items() if value is not None}


def message_of(method, cache_id, call):
    """The call as a message, or None for what no message can say: negative sizes, other byte orders, huge integers."""
    options, hints, q = call["options"], call["hints"], call["q"]
    arrays = {name: call[name] for name in METADATA[method]}
    if any(size < 0 for size in q.shape) or any(array.dtype.byteorder == ">" for array in arrays.values()):
        return None
    try:
        if method == "RaggedPagedAttention":
            scalars = given(**dataclasses.asdict(options))
            sizes = ("num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes")
            header = attention_pb2.RaggedPagedAttentionRequest(
                cache_id=cache_id,
                options=attention_pb2.AttentionOptions(**scalars),
                block_sizes=attention_pb2.RaggedBlockSizes(**given(**{name: getattr(hints, name) for name in sizes})),
            )
        elif dataclasses.replace(options, soft_cap=None) != AttentionOptions():
            return None  # JAX's decode kernel has no other option
        else:
            header = attention_pb2.PagedAttentionRequest(
                cache_id=cache_id,
                **given(
                    pages_per_compute_block=hints.pages_per_compute_block,
                    attn_logits_soft_cap=options.soft_cap,
                    megacore_mode=hints.megacore_mode,
                ),
            )
    except (TypeError, ValueError):
        return None
    return envelope.pack(header, {**arrays, "q": np.zeros(q.shape, q.dtype)})


@pytest.mark.parametrize("method", METADATA)
def test_a_refusal_is_invalid_argument_with_the_same_words_and_fields(client, method):
    rng = random.Random(7)
    caches = Caches(client)
    generate, judge = {
        "RaggedPagedAttention": (metadata.ragged, validation.ragged_batch),
        "PagedAttention": (metadata.decode, validation.decode_batch),
    }[method]
    verdicts = {"accepted": 0, "refused": 0}
    while sum(verdicts.values()) < CALLS:
        call = generate(rng)
        message = message_of(method, caches.id_of(call["spec"]), call)
        if message is None:
            continue
        arrays = [call[name] for name in METADATA[method]]
        options = validation.plain_options(call["options"])
        try:
            judge(call["spec"], call["q"], *arrays, options=options, hints=call["hints"])
            expected = None
        except InvalidArgumentError as error:
            expected = error
        verdicts["accepted" if expected is None else "refused"] += 1
        if expected is None:
            check_accepted(client, method, message, call)
        else:
            check_refused(client, method, message, expected)
    assert min(verdicts.values()) > CALLS // 20


def check_accepted(client, method, message, call):
    if call["hints"].megacore_mode is not None:
        with pytest.raises(Refused) as caught:
            client(f"AttentionService/{method}", message)
        assert caught.value.reason == "MEGACORE_UNAVAILABLE"
        return
    response = client(f"AttentionService/{method}", message)
    assert tuple(response.out.shape) == call["q"].shape


def check_refused(client, method, message, expected):
    with pytest.raises(Refused) as caught:
        client(f"AttentionService/{method}", message)
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.message == str(expected)
    assert caught.value.fields == [field for field, _ in expected.violations]
