"""The rerun condition that is worked out in NumPy is the kernel's."""

import numpy as np
import pytest

from attnd.kernels.contract import AttentionOptions
from attnd.kernels.pallas_chunk_compute import TOTAL_MAX
from benchmarks import reruns
from tests.support.chunk_calls import Call, Shape


@pytest.mark.parametrize("q_factor", [1.0, 8.0, 40.0])
def test_counts_the_reruns_that_the_kernel_makes(q_factor: float) -> None:
    options = AttentionOptions(sm_scale=128**-0.5, return_lse=True)
    call = Call(shape=Shape(append=False), q_lens=[40], kv_lens=[112], options=options, q_factor=q_factor)
    config = call.shape.config()
    used = call.page_indices[0, : 112 // call.shape.page_size]
    k = np.concatenate(call.pool[used])[:, 0::2].astype(np.float32)
    totals = reruns.totals_of_tiles(
        call.q[:40].astype(np.float32), k, options.sm_scale, config.query_block, config.block_tokens
    )
    assert sum(total > TOTAL_MAX for total in totals) == call.run().counts["reruns"]
