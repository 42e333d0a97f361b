"""Calls of mixed sizes by every way to a server, and streams that are cancelled: nothing is left of them."""

import os
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from attnd import client as sdk
from attnd.v1 import attention_pb2 as pb
from attnd.v1 import tensors
from tests.soak.report import Row
from tests.support.rpc import RawClient, ints
from tests.support.server import ServerProcess, attnd_server
from tests.support.usage import MIB, Usage, growth

WAYS = ("local socket", "session", "unary")
GROWTH_BYTES_MAX = 8 * MIB
WARM_UP_SHARE = 0.2
LOOKS = 10
CANCELLED_SHARE = 0.1
ROWS = (1, 1, 1, 1, 1, 8, 8, 64, 64, 256)
MANY_ROWS = 2048
"""Rows of one call in 200: 8 MiB of queries."""
PATH = "/attnd.v1.AttentionService/Session"


def run(count: int, seed: int) -> list[Row]:
    """Makes `count` calls in all, and cancels a tenth as many streams."""
    rows = [_calls(way, max(50, count // len(WAYS)), seed) for way in WAYS]
    return [*rows, _cancelled(max(50, round(count * CANCELLED_SHARE)))]


def _calls(way: str, count: int, seed: int) -> Row:
    row = Row(f"calls of mixed sizes leave nothing behind: {way}", count)
    rng = np.random.default_rng(seed)
    with attnd_server() as server, sdk.Client(server.address, timeout_s=120, local=way == WAYS[0]) as client:
        cache = client.create_cache(
            "mixed", num_layers=1, num_pages=MANY_ROWS, page_size=1, num_kv_heads=2, head_dim=64, dtype="float32"
        )
        calls = {num_rows: _call(cache, way, num_rows) for num_rows in {*ROWS, MANY_ROWS}}
        held: list[np.ndarray] = []

        def make(numbers: range) -> None:
            for i in numbers:
                out = calls[MANY_ROWS if rng.random() < 0.005 else int(rng.choice(ROWS))](i % 100)
                if not (out == i % 100).all():
                    row.fail(f"call {i} was answered with something else")
                held.append(out)
                if len(held) > 5:
                    held.pop(int(rng.integers(5)))
                if i % 1000 == 999:
                    row.progress(i + 1)

        _watched(row, server, make)
    return row


def _call(cache: Any, way: str, num_rows: int) -> Callable[[int], np.ndarray]:
    """Returns a call of rows of one token each, which attend over that token alone: the answer is its value."""
    table = np.arange(num_rows, dtype=np.int32)[:, np.newaxis]
    metadata = np.ones(num_rows, np.int32), table, np.arange(num_rows + 1, dtype=np.int32), num_rows
    q = np.ones((num_rows, 16, 64), np.float32)
    plan = cache.plan(*metadata)

    def attend(value: int) -> np.ndarray:
        kv = np.full((num_rows, 2, 64), value, np.float32)
        out: np.ndarray = (
            cache.ragged_paged_attention(0, q, *metadata, kv, kv) if way == "unary" else plan.attend(0, q, kv, kv)
        )
        return out

    return attend


def _cancelled(count: int) -> Row:
    row = Row("streams that are cancelled with calls on them leave nothing behind", count)
    with attnd_server() as server, RawClient(server.address) as client, sdk.Client(server.address) as sdk_client:
        cache = sdk_client.create_cache(
            "cancelled", num_layers=1, num_pages=8, page_size=1, num_kv_heads=1, head_dim=128, dtype="float32"
        )
        request = pb.RaggedPagedAttentionRequest(
            cache_id=cache.info.cache_id,
            q=tensors.to_tensor(np.ones((32, 4, 128), np.float32)),
            kv_lens=ints(1),
            page_indices=tensors.to_tensor(np.zeros((1, 1), np.int32)),
            cu_q_lens=ints(0, 1),
            num_seqs=ints(1),
        )
        message = pb.SessionRequest(ragged_paged_attention=request).SerializeToString()

        def cancel(numbers: range) -> None:
            for i in numbers:
                call = client.channel.stream_stream(PATH)(iter([message] * 3))
                if not pb.SessionResponse.FromString(next(call)).HasField("ragged_paged_attention"):
                    row.fail(f"the call of stream {i} was refused")
                call.cancel()
                if i % 1000 == 999:
                    row.progress(i + 1)

        def cancel_and_wait(numbers: range) -> None:
            cancel(numbers)
            while sdk_client.server_info().queue_depth:
                time.sleep(0.05)

        _watched(row, server, cancel_and_wait)
    return row


def _watched(row: Row, server: ServerProcess, make: Callable[[range], None]) -> None:
    """Makes a row's calls, the first of them unwatched, and looks between the others."""
    watch = _Watch(server)
    bounds = np.linspace(round(row.count * WARM_UP_SHARE), row.count, LOOKS).astype(int).tolist()
    make(range(bounds[0]))
    watch.look()
    for start, end in pairwise(bounds):
        make(range(start, end))
        watch.look()
    watch.judge(row)


class _Watch:
    """Looks at this process and the server from time to time."""

    def __init__(self, server: ServerProcess) -> None:
        self._pids = {"client": os.getpid(), "server": server.process.pid}
        self._looks: dict[str, list[Usage]] = {name: [] for name in self._pids}

    def look(self) -> None:
        """Looks once."""
        for name, pid in self._pids.items():
            self._looks[name].append(Usage.of(pid))

    def judge(self, row: Row) -> None:
        """Fails a row if one of them holds more and more."""
        notes = []
        for name, looks in self._looks.items():
            for grown in growth(looks, resident_bytes_max=GROWTH_BYTES_MAX):
                row.fail(f"{name}: {grown}")
            first, last = looks[0], looks[-1]
            notes.append(
                f"{name} {first.resident_bytes / MIB:.0f}, then {last.resident_bytes / MIB:.0f} MiB, {last.threads} "
                f"threads, {last.descriptors} descriptors"
            )
        row.notes = "; ".join(notes)
