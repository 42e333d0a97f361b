"""Load on a server: what `attnd bench` sends, and what it makes of the answers."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

import ml_dtypes  # noqa: F401 - makes bfloat16 and float8 known to NumPy
import numpy as np

from attnd.client._info import CallRecord
from attnd.client._sync import Cache, Client

Kind = Literal["decode", "prefill", "mixed"]

WARM_UP_CALLS: Final = 3
_WRITE_BYTES: Final = 32 << 20
_PERCENTILES: Final = (50.0, 90.0, 99.0, 100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What clients send: one ragged batch each, over and over, layer by layer.

    Attributes:
        kind: "decode": one new token in each row; "prefill": `chunk` new tokens in each; "mixed": one row of `chunk`
            new tokens beside decode rows.
        num_rows: Rows of a batch.
        kv_len: Tokens that each row attends over.
        chunk: New tokens of a prefill row, <= kv_len.
        num_q_heads: Query heads.
        num_kv_heads: Heads of keys, and of values.
        head_dim: Elements of a head.
        page_size: Tokens of a page.
        num_layers: Layers of the cache.
        dtype: Element type of the cache, and of the queries where they may have it.
        num_clients: Clients at the same time, each with a connection and rows of its own.
        duration_s: Seconds to measure.
    """

    kind: Kind = "decode"
    num_rows: int = 16
    kv_len: int = 1024
    chunk: int = 256
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    num_layers: int = 4
    dtype: str = "bfloat16"
    num_clients: int = 1
    duration_s: float = 10.0

    @property
    def q_lens(self) -> np.ndarray:
        """int32 [num_rows]. New tokens of each row."""
        chunk = min(self.chunk, self.kv_len)
        lens = np.full(self.num_rows, chunk if self.kind == "prefill" else 1, np.int32)
        if self.kind == "mixed":
            lens[0] = chunk
        return lens

    @property
    def pages_per_row(self) -> int:
        """Pages of each row."""
        return -(-self.kv_len // self.page_size)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that one call attends over."""
        return self.num_rows * self.kv_len * 2 * self.num_kv_heads * self.head_dim * np.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of one call's two matrix products, of what queries see only."""
        seen: int = sum(q * self.kv_len - q * (q - 1) // 2 for q in self.q_lens.tolist())
        return 4 * seen * self.num_q_heads * self.head_dim


@dataclass(slots=True)
class Measured:
    """What came back.

    Attributes:
        seconds: From the first call to the end of the last.
        latencies_s: Seconds of each call.
        records: What the client was told of each.
    """

    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    records: list[CallRecord] = field(default_factory=list)

    def percentiles_ms(self) -> dict[str, float]:
        """Returns milliseconds of a call by name of the percentile."""
        values = np.percentile(self.latencies_s, _PERCENTILES) * 1e3
        names = [f"p{percentile:g}" for percentile in _PERCENTILES[:-1]]
        return dict(zip([*names, "max"], values.tolist(), strict=True))

    def median_ms(self, part: Callable[[CallRecord], float]) -> float:
        """Returns the median over the calls of nanoseconds, in milliseconds."""
        return float(np.median([part(record) for record in self.records])) / 1e6


def measure(address: str, load: Load, on_progress: Callable[[float], None]) -> Measured:
    """Puts a load on a server, in a cache of its own that is gone afterwards.

    Args:
        address: Of the server.
        load: What to send.
        on_progress: Told the share that is done, in [0, 1], now and then.

    Raises:
        AttndError: A call failed.
    """
    with Client(address, timeout_s=600.0) as owner:
        cache = owner.create_cache(
            f"bench-{time.time_ns()}",
            num_layers=load.num_layers,
            num_pages=load.num_clients * load.num_rows * load.pages_per_row,
            page_size=load.page_size,
            num_kv_heads=load.num_kv_heads,
            head_dim=load.head_dim,
            dtype=load.dtype,
            num_q_heads=load.num_q_heads,
        )
        try:
            _fill(cache, load)
            return _measure(address, cache.name, load, on_progress)
        finally:
            cache.delete()


def _fill(cache: Cache, load: Load) -> None:
    """Writes normal numbers to all pages: attention over zeros would be over too early."""
    rng = np.random.default_rng(0)
    shape = (load.page_size, 2 * load.num_kv_heads, load.head_dim)
    count = min(cache.info.num_pages, max(1, _WRITE_BYTES // (4 * int(np.prod(shape)))))
    pages = rng.standard_normal((count, *shape), np.float32)
    for layer in range(load.num_layers):
        for start in range(0, cache.info.num_pages, count):
            indices = np.arange(start, min(start + count, cache.info.num_pages))
            cache.write_pages(layer, indices, pages[: len(indices)])


def _measure(address: str, name: str, load: Load, on_progress: Callable[[float], None]) -> Measured:
    measured = Measured()
    failures: list[BaseException] = []
    ready = threading.Barrier(load.num_clients + 1)
    ending = threading.Event()

    def client(number: int) -> None:
        try:
            _send(address, name, load, number, ready, ending, measured)
        except BaseException as error:
            failures.append(error)
            ending.set()
            ready.abort()

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(load.num_clients)]
    for thread in threads:
        thread.start()
    try:
        ready.wait()
        started = time.perf_counter()
        while not ending.is_set() and (elapsed := time.perf_counter() - started) < load.duration_s:
            on_progress(elapsed / load.duration_s)
            ending.wait(0.1)
    except threading.BrokenBarrierError:
        started = time.perf_counter()
    ending.set()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    measured.seconds = time.perf_counter() - started
    on_progress(1.0)
    return measured


def _send(
    address: str,
    name: str,
    load: Load,
    number: int,
    ready: threading.Barrier,
    ending: threading.Event,
    measured: Measured,
) -> None:
    records: list[CallRecord] = []
    rng = np.random.default_rng(number)
    q_lens = load.q_lens
    tokens = int(q_lens.sum())
    q_dtype = load.dtype if load.dtype in ("float32", "float16", "bfloat16") else "float32"
    q = rng.standard_normal((tokens, load.num_q_heads, load.head_dim), np.float32).astype(q_dtype)
    k, v = rng.standard_normal((2, tokens, load.num_kv_heads, load.head_dim), np.float32).astype(q_dtype)
    num_pages = load.num_rows * load.pages_per_row
    pages = number * num_pages + rng.permutation(num_pages).reshape(load.num_rows, -1)
    kv_lens, cu_q_lens = np.full(load.num_rows, load.kv_len), np.concatenate([[0], np.cumsum(q_lens)])
    with Client(address, timeout_s=600.0, on_call=records.append) as client:
        cache = client.get_cache(name)

        def step() -> list[float]:
            plan = cache.plan(kv_lens, pages, cu_q_lens, load.num_rows)
            latencies = []
            for layer in range(load.num_layers):
                started = time.perf_counter()
                plan.attend(layer, q, k, v, sm_scale=load.head_dim**-0.5)
                latencies.append(time.perf_counter() - started)
            return latencies

        for _ in range(WARM_UP_CALLS):
            step()
        records.clear()
        ready.wait()
        latencies: list[float] = []
        while not ending.is_set():
            latencies += step()
        # One append of each list, so that threads do not mix their calls up.
        measured.latencies_s.extend(latencies)
        measured.records.extend(record for record in records if record.timings is not None)
