"""Calls that leave the queue before earlier ones, as part of a batch: each finds what it would find in order."""

import asyncio
import threading

import numpy as np
import pytest

from attnd.kernels.contract import CacheSpec, Layout
from attnd.service.attention_service import AttentionHandlers
from attnd.service.caches import CacheRegistry, PagesBy
from attnd.service.config import ServerConfig
from attnd.service.dispatch import Caller
from attnd.service.engine import Engine
from attnd.service.metrics import Metrics
from attnd.service.world import World
from attnd.v1 import attention_pb2

SPEC = CacheSpec(
    layout=Layout.INTERLEAVED, num_layers=2, num_pages=8, page_size=4, num_kv_heads=1, head_dim=4,
    dtype=np.dtype(np.float32),
)  # fmt: skip


@pytest.mark.parametrize("debug_checks", [False, True])
def test_a_later_layer_that_overtakes_the_first_does_not_make_its_fresh_pages_look_unclean(debug_checks: bool):
    async def scenario():
        config = ServerConfig(implementation="reference", debug_checks=debug_checks, warm_up=False)
        engine = Engine(queue_depth_max=100, batch_calls_max=8, metrics=Metrics())
        registry = CacheRegistry(engine, config, platform="cpu", world=World())
        cache = await registry.create("a", "tenant", SPEC, PagesBy.SERVER, None)
        handlers = AttentionHandlers(registry, engine)
        gate = threading.Event()
        held = asyncio.create_task(engine.run(gate.wait, lane="tenant"))
        other, mine = cache.sequences.create(2)

        def attend(handle, layer):
            request = attention_pb2.AttendRequest(cache_id=cache.cache_id, layer=layer, sequences=[handle])
            tokens = np.ones((5, 1, 4), np.float32)
            lens = np.array([5], np.int32)
            arrays = {"q": tokens, "k": tokens, "v": tokens, "q_lens": lens, "kv_lens": lens}
            caller = Caller(arrays=arrays, expires_at=float("inf"), received_at_ns=0, tenant="tenant")
            return asyncio.create_task(handlers.attend(request, caller))

        calls = [attend(other, 1), attend(mine, 0), attend(mine, 1)]  # the third joins the first
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(held, *calls)
        assert [sequence.layer_lens.tolist() for sequence in cache.sequences] == [[0, 5], [5, 5]]
        await engine.stop()

    asyncio.run(asyncio.wait_for(scenario(), 30))
