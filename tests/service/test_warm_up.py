"""After the first call of a kind, nothing is compiled any more."""

import time

import numpy as np
import pytest

from attnd.client import Client
from attnd.v1 import attention_pb2, cache_pb2, server_pb2, tensors
from tests.support.rpc import RawClient, attend_request, create_cache, create_sequences, ints, normal
from tests.support.server import attnd_server


@pytest.fixture(scope="module")
def server():
    with attnd_server(warm_up=True) as process:
        yield process


def num_compiled(client):
    return client("ServerService/GetServerInfo", server_pb2.GetServerInfoRequest()).num_compiled_programs


def random_call(rng, cache_id, i):
    """A legal call of a random number of rows, lengths and table width, with floats never seen before."""
    num_seqs = int(rng.integers(1, 7))
    q_lens = rng.integers(0, 30, num_seqs) * (rng.random(num_seqs) > 0.3)
    q_lens[0] = max(q_lens[0], 1)
    kv_lens = q_lens + rng.integers(0, 100, num_seqs)
    pages_per_seq = int(-(-kv_lens.max() // 8) + rng.integers(0, 4))
    tokens = int(q_lens.sum() + rng.integers(0, 5))
    options = attention_pb2.AttentionOptions(sm_scale=float(rng.uniform(0.01, 2)), return_lse=bool(i % 2))
    if i % 3 == 0:
        options.sliding_window = int(rng.integers(1, 200))
    if i % 5 == 0:
        options.soft_cap = float(rng.uniform(1, 50))
    if i % 7 == 0:
        options.k_scale, options.v_scale = rng.uniform(0.1, 2, 2)
    return attention_pb2.RaggedPagedAttentionRequest(
        cache_id=cache_id,
        layer=i % 2,
        options=options,
        kv_lens=tensors.to_tensor(kv_lens.astype(np.int32)),
        page_indices=tensors.to_tensor(rng.integers(0, 16, (num_seqs, pages_per_seq), dtype=np.int32)),
        cu_q_lens=tensors.to_tensor(np.cumsum([0, *q_lens], dtype=np.int32)),
        num_seqs=ints(num_seqs),
        q=tensors.to_tensor(normal(tokens, 4, 16, seed=i)),
    )


def test_a_thousand_random_legal_shapes_and_floats_compile_nothing_after_the_first_call(server):
    rng = np.random.default_rng(0)
    with RawClient(server.address) as client:
        cache_id = create_cache(client, "random-shapes", pages_by="CLIENT")
        first = client("AttentionService/RaggedPagedAttention", random_call(rng, cache_id, 0))
        assert first.timings.compile_ns > 0
        warm = num_compiled(client)
        assert warm > 0
        for i in range(1, 1001):
            response = client("AttentionService/RaggedPagedAttention", random_call(rng, cache_id, i))
            assert np.isfinite(tensors.from_tensor(response.out, "out")).all()
        assert num_compiled(client) == warm


def test_a_cache_created_for_its_query_heads_compiles_nothing_at_its_first_call(server):
    with Client(server.address) as client:
        cache = client.create_cache(
            "warm", num_layers=1, num_pages=16, page_size=8, num_kv_heads=2, head_dim=16, dtype="float32",
            pages_by="server", num_q_heads=4,
        )  # fmt: skip
        warm = client.server_info().num_compiled_programs
        (sequence,) = cache.create_sequences(1)
        q, kv = normal(5, 4, 16), normal(5, 2, 16)
        cache.step([sequence], q_lens=[5], kv_lens=[5]).attend(0, q, kv, kv)
        assert client.server_info().num_compiled_programs == warm


def test_progress_of_compiling_is_logged(server):
    with RawClient(server.address) as client:
        cache_id = create_cache(client, "logged", num_pages=17)
        (handle,) = create_sequences(client, cache_id, 1)
        client("AttentionService/Attend", attend_request(cache_id, [handle], [3], [3]))
        assert "cache logged: compiling, 1 of" in server.log()
        client("CacheService/DeleteCache", cache_pb2.DeleteCacheRequest(cache_id=cache_id))


def test_an_expired_call_is_not_begun_and_changes_nothing(server):
    with RawClient(server.address) as client:
        cache_id = create_cache(client, "expired", num_pages=18)
        a, b = create_sequences(client, cache_id, 2)
        # The first call compiles; those behind it expire in the queue or are cut off while they wait.
        path = "/attnd.v1.AttentionService/Attend"
        first = client.channel.unary_unary(path).future(
            attend_request(cache_id, [a], [3], [3]).SerializeToString(), timeout=120
        )
        time.sleep(0.05)
        late = [
            client.channel.unary_unary(path).future(
                attend_request(cache_id, [b], [8], [8]).SerializeToString(), timeout=0.05
            )
            for _ in range(20)
        ]
        codes = {call.exception(timeout=60).code().name for call in late}
        assert codes == {"DEADLINE_EXCEEDED"}
        first.result(timeout=120)
        while client("ServerService/GetServerInfo", server_pb2.GetServerInfoRequest()).queue_depth:
            time.sleep(0.01)  # the call behind it is dropped a moment after it has ended
        request = cache_pb2.ListSequencesRequest(cache_id=cache_id)
        sequences = client("CacheService/ListSequences", request).sequences
        assert [(sequence.length, sequence.num_pages) for sequence in sequences] == [(3, 1), (0, 0)]
