"""The benchmark's ways to run torch's attention all answer right, so that it is not timed on wrong answers."""

import pytest

from benchmarks import attention, torch_sdpa, workloads

pytestmark = pytest.mark.peers

HEADS = workloads.Heads(num_q_heads=6, num_kv_heads=2, head_dim=16, page_size=4)
SHAPES = {
    "decode": ([1, 1, 1], [5, 8, 1]),
    "prefill": ([7], [7]),
    "chunk": ([3], [11]),
    "mixed": ([1, 5, 1], [4, 9, 6]),
}


@pytest.mark.parametrize("fetch", torch_sdpa.FETCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_is_right_in_every_variant(shape, fetch):
    torch = torch_sdpa.load()
    assert torch is not None, "`make test-peers` installs it"
    workload = workloads.make(shape, *SHAPES[shape], workloads.FLOAT32, HEADS)
    competitor = torch_sdpa.TorchSdpa(torch, workload)
    variant, call = attention.torch_call(competitor, fetch, workload, workloads.answer(workload))
    assert variant in competitor.variants(fetch)
    assert call() > 0
