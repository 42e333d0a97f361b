"""The TPU kernels behind a real server: from the wire to the kernel, in JAX's TPU interpreter, and back."""

import numpy as np

from attnd.client import Client
from tests.service.test_concurrency import dense
from tests.support.rpc import normal
from tests.support.server import attnd_server


def test_a_prompt_and_two_steps_are_answered_by_our_tpu_kernels():
    shape = {"num_layers": 1, "num_pages": 8, "page_size": 16, "num_kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    with (
        attnd_server("--implementation", "pallas_interpret") as server,
        Client(server.address, timeout_s=280) as client,
    ):
        cache = client.create_cache("interpreted", pages_by="server", **shape)
        assert cache.info.implementation == "pallas_interpret"
        (sequence,) = cache.create_sequences(1)
        q, k, v = normal(19, 4, 64), normal(19, 2, 64, seed=1), normal(19, 2, 64, seed=2)
        done = 0
        for q_len in (17, 1, 1):
            rows = slice(done, done + q_len)
            step = cache.step([sequence], q_lens=[q_len], kv_lens=[rows.stop])
            out, lse = step.attend(0, q[rows], k[rows], v[rows], sm_scale=0.125, return_lse=True)
            np.testing.assert_allclose(out, dense(q[rows] * 0.125, k[: rows.stop], v[: rows.stop]), atol=1e-5)
            assert np.isfinite(lse).all()
            done += q_len
