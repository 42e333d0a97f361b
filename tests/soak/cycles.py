"""Creates, extends, forks and releases sequences for ever: every page comes back, and memory stays as it is."""

import gc
from typing import Any

import numpy as np
import psutil

from attnd import client as sdk
from attnd.kernels.contract import Attended, AttentionOptions, CacheSpec, KernelHints, Layout
from attnd.kernels.reference import Reference
from attnd.service.attending import AttentionCall
from attnd.service.caches import CacheRegistry, PagesBy
from attnd.service.config import ServerConfig
from attnd.service.world import World
from tests.simulation.stepping import StepLoop, SteppedEngine
from tests.soak.report import Row
from tests.support.server import attnd_server

GROWTH_BYTES_MAX = 16 * 1024**2
WARM_UP_SHARE = 0.1
OVER_THE_WIRE_SHARE = 0.02
SPEC = CacheSpec(
    layout=Layout.INTERLEAVED, num_layers=1, num_pages=64, page_size=4, num_kv_heads=1, head_dim=1,
    dtype=np.dtype(np.float32),
)  # fmt: skip


class Appending(Reference):
    """Writes the tokens of a call, and leaves the attention to other tests."""

    def attend(self, pages: Any, layer: int, batch: Any, q: Any, *, k: Any = None, v: Any = None, **_: Any) -> Any:
        pages.append(layer, batch, k, v)
        return Attended(out=np.zeros(q.shape, q.dtype))


class Watcher:
    """What the stepped engine tells, for those who want to know."""

    def works(self, work: object) -> None:
        """Ignores it."""

    def worked(self, work: object, error: Exception | None) -> None:
        """Raises what went wrong."""
        if error is not None:
            raise error


def run(count: int, seed: int) -> list[Row]:
    """Goes through `count` cycles in this process, and through a share of them with a server."""
    return [_in_process(count, seed), _over_the_wire(max(20, round(count * OVER_THE_WIRE_SHARE)), seed)]


def _in_process(count: int, seed: int) -> Row:
    row = Row("create, extend, fork, extend, release: all pages come back and memory is flat", count)
    rng = np.random.default_rng(seed)
    loop = StepLoop()
    with loop.running():
        config = ServerConfig(implementation="reference", warm_up=False)
        engine = SteppedEngine(config, Watcher())
        registry = CacheRegistry(engine, config, platform="cpu", world=World())
        cache = _finished(loop, engine, registry.create("a", "tenant", SPEC, PagesBy.SERVER, None))
        object.__setattr__(cache, "implementation", Appending())
        table, free = cache.sequences, cache.sequences.num_free_pages
        lens = rng.integers(1, 20, (256, 2)).tolist()
        before = 0
        for i in range(count):
            length, more = lens[i % len(lens)]
            (parent,) = table.create(1)
            _finished(loop, engine, _extend(cache, engine, parent, length, length))
            child = table.fork(parent)
            _finished(loop, engine, _extend(cache, engine, child, more, length + more))
            table.release([parent, child] if i % 2 else [child, parent])
            _finished(loop, engine, engine.flush("tenant"))
            if table.num_free_pages != free or len(table):
                row.fail(f"{table.num_free_pages} of {free} pages are free after cycle {i}")
                break
            if i == round(count * WARM_UP_SHARE):
                before = _memory_bytes(psutil.Process())
            if i % 10_000 == 9_999:
                row.progress(i + 1)
        if any(bits.any() for bits in (each[1:] for each in cache.pages.bits)):
            row.fail("a free page is not zero")
        _judge_growth(row, before, _memory_bytes(psutil.Process()))
    return row


async def _extend(cache: Any, engine: SteppedEngine, handle: bytes, q_len: int, kv_len: int) -> None:
    lens = np.array([q_len], np.int32), np.array([kv_len], np.int32)
    reservation = await cache.sequences.reserve([handle], *lens, 0, append=True)
    tokens = np.ones((q_len, 1, 1), np.float32)
    call = AttentionCall(
        cache=cache,
        layer=0,
        batch=reservation.batch,
        q=tokens,
        k=tokens,
        v=tokens,
        options=AttentionOptions(),
        hints=KernelHints(),
        reservation=reservation,
    )
    await engine.run(call, lane="tenant", settle=call.settle)


def _finished(loop: StepLoop, engine: SteppedEngine, coroutine: Any) -> Any:
    task = loop.create_task(coroutine)
    while not task.done():
        loop.step()
        engine.step()
    return task.result()


def _over_the_wire(count: int, seed: int) -> Row:
    row = Row("the same through a client and a server", count)
    rng = np.random.default_rng(seed)
    sizes = {"num_layers": 1, "num_pages": 64, "page_size": 4, "num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    with attnd_server("--implementation", "reference") as server, sdk.Client(server.address) as client:
        cache = client.create_cache("a", **sizes, pages_by="server")
        process, before = psutil.Process(server.process.pid), 0
        for i in range(count):
            length, more = rng.integers(1, 20, 2).tolist()
            (parent,) = cache.create_sequences(1)
            _append_over_the_wire(cache, parent, 0, length)
            child = parent.fork()
            _append_over_the_wire(cache, child, length, length + more)
            cache.release_sequences([parent, child])
            if i % 100 == 0 and (free := client.get_cache("a").info.num_free_pages) != sizes["num_pages"]:
                row.fail(f"{free} of {sizes['num_pages']} pages are free after cycle {i}")
                break
            if i == round(count * WARM_UP_SHARE):
                before = _memory_bytes(process)
            if i % 1000 == 999:
                row.progress(i + 1)
        _judge_growth(row, before, _memory_bytes(process))
    return row


def _append_over_the_wire(cache: Any, sequence: Any, start: int, end: int) -> None:
    tokens = np.ones((end - start, 1, 8), np.float32)
    cache.step([sequence], q_lens=[end - start], kv_lens=[end]).attend(0, tokens, tokens, tokens)


def _memory_bytes(process: psutil.Process) -> int:
    gc.collect()
    return int(process.memory_info().rss)


def _judge_growth(row: Row, before: int, after: int) -> None:
    row.notes = f"resident memory {before / 2**20:.0f} MiB, then {after / 2**20:.0f} MiB"
    if after - before > GROWTH_BYTES_MAX:
        row.fail(f"memory grew from {before} to {after} bytes")
