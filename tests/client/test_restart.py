"""A server that ends and comes back: what a client that had caches there is told."""

import time

import numpy as np
import pytest

from attnd import client as sdk
from tests.client.conftest import Driver
from tests.support.server import attnd_server

SIZES = {"num_layers": 1, "num_pages": 4, "page_size": 8, "num_kv_heads": 1, "head_dim": 16, "dtype": "float32"}


def test_handles_of_an_earlier_run_are_a_lost_session(run: Driver):
    q = np.ones((1, 2, 16), np.float32)
    k = q[:, :1]
    with attnd_server() as server:
        address = server.address
        client = run.client(address, timeout_s=60.0)
        cache = run(client.create_cache("a", **SIZES, pages_by="server"))
        (sequence,) = run(cache.create_sequences(1))
        step = run(cache.step([sequence], q_lens=[1], kv_lens=[1]))
        np.testing.assert_allclose(run(step.attend(0, q, k, k)), q)
        server.process.kill()
        server.process.wait()
        with pytest.raises(sdk.UnavailableError, match=f"no attnd server answers at {address}"):
            run(step.attend(0, q, k, k))
    with attnd_server(port=int(address.rpartition(":")[2])) as server:
        # Someone else is quicker to create a cache of the same name: it must not be taken for the lost one.
        with sdk.Client(address) as other:
            other.create_cache("a", **SIZES, pages_by="server")
        for lost in (
            lambda: step.attend(0, q, k, k),
            lambda: cache.create_sequences(1),
            sequence.release,
            cache.delete,
        ):
            with pytest.raises(sdk.SessionLostError, match="has restarted since") as caught:
                _until_reconnected(run, lost)
            assert isinstance(caught.value, sdk.NotFoundError)
            assert caught.value.reason == "SERVER_RESTARTED"
        again = run(client.get_cache("a"))
        assert again.incarnation_id != cache.incarnation_id
        (sequence,) = run(again.create_sequences(1))
        run(sequence.release())
        with pytest.raises(sdk.NotFoundError) as caught:
            run(sequence.release())
        assert type(caught.value) is sdk.NotFoundError


def _until_reconnected(run: Driver, call) -> None:
    # Calls go on failing until gRPC has tried the address again, which it does twice a second.
    for _ in range(100):
        try:
            run(call())
        except sdk.UnavailableError:
            time.sleep(0.05)
        else:
            return
