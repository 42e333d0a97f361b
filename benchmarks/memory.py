"""Section "memory": what a server holds beside its caches, and what importing the client costs."""

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Final, Literal

import ml_dtypes
import numpy as np
import psutil

from attnd.client import Cache, Client
from benchmarks import processes
from benchmarks.processes import child, read_line
from benchmarks.report import Section, Table, Target, progress

MIB: Final = 2**20
CHECKPOINTS: Final = (1_000, 10_000, 12_000)
BEYOND_CACHES_MAX_MIB: Final = 700
IMPORT_MAX_MIB: Final = 70
IMPORT_MAX_S: Final = 0.4
IMPORT_RUNS: Final = 5
# Prints seconds and bytes; psutil is imported after the measurement.
IMPORT_PROGRAM: Final = """
import time
start = time.perf_counter()
{imports}
seconds = time.perf_counter() - start
import psutil
print(seconds, psutil.Process().memory_info().rss)
"""
IMPORTS: Final = {"attnd.client": "import attnd.client", "grpcio and NumPy alone": "import grpc, numpy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """A server's memory at one moment, in bytes.

    Attributes:
        calls: Calls answered before.
        resident: Resident size of its process, as the system says.
        caches: Bytes of its caches, as the server says.
        programs: Programs compiled so far.
    """

    calls: int
    resident: int
    caches: int
    programs: int

    @property
    def beyond_caches_mib(self) -> float:
        """MiB beside the caches."""
        return (self.resident - self.caches) / MIB


def run(budget_s: float, checkpoints: Sequence[int] = CHECKPOINTS, server_options: Sequence[str] = ()) -> Section:
    """Measures a server under mixed calls, then the client's import.

    Args:
        budget_s: Seconds for the calls; when they are over, the next checkpoint is taken early, as the table says.
        checkpoints: Numbers of calls after which to look.
        server_options: More options of `attnd serve`.
    """
    section = Section(name="memory")
    usages = server_usages(budget_s, checkpoints, server_options)
    table = Table(
        title="resident memory of attnd serve, calls of every kind in turn",
        columns=["calls", "resident MiB", "caches MiB", "beyond caches MiB", "compiled programs"],
    )
    for usage in usages:
        sizes = (usage.resident / MIB, usage.caches / MIB, usage.beyond_caches_mib)
        table.rows.append([f"{usage.calls:,}", *(f"{size:.0f}" for size in sizes), str(usage.programs)])
    section.tables.append(table)
    # The last two checkpoints show whether it is flat.
    before, last = usages[-2], usages[-1]
    section.value(
        f"server beyond its caches after {before.calls:,} mixed calls",
        before.beyond_caches_mib,
        "MiB",
        Target(bound=BEYOND_CACHES_MAX_MIB, side="at most"),
    )
    growth = (last.beyond_caches_mib - before.beyond_caches_mib) * 1000 / max(last.calls - before.calls, 1)
    section.value(
        f"growth from there to {last.calls:,} calls, per 1,000 calls", growth, "MiB", Target(bound=1, side="at most")
    )
    _imports(section)
    return section


def server_usages(budget_s: float, checkpoints: Sequence[int], server_options: Sequence[str]) -> list[Usage]:
    """Returns the memory of a server when it is ready, after the first call of each kind, and at the checkpoints."""
    with processes.attnd_server(*server_options) as (address, pid), Client(address, timeout_s=300) as client:
        process = psutil.Process(pid)

        def look(calls: int) -> Usage:
            info = client.server_info()
            return Usage(
                calls=calls,
                resident=process.memory_info().rss,
                caches=info.caches_size_bytes,
                programs=info.num_compiled_programs,
            )

        usages = [look(0)]
        kinds = list(mixed_calls(client))
        for call in kinds:
            call()
        usages.append(look(len(kinds)))
        done, deadline = len(kinds), time.monotonic() + budget_s
        calls = cycle(kinds)
        for index, checkpoint in enumerate(checkpoints):
            # Each checkpoint is due by its share of the time.
            due = deadline - budget_s * (1 - checkpoint / checkpoints[-1])
            while done < checkpoint and (time.monotonic() < due or index == 0):
                next(calls)()
                done += 1
            usages.append(look(done))
            progress(f"memory after {done:,} calls")
        return usages


def mixed_calls(client: Client) -> Iterator[Callable[[], object]]:
    """Creates caches and yields calls of every kind: each has new shapes, lengths and floats whenever it runs."""
    rng = np.random.default_rng(0)
    for dtype in ("bfloat16", "float32"):
        yield _ragged_call(client, dtype, rng)
        yield _decode_call(client, dtype, rng)
        yield _sequences_call(client, dtype, rng)


def _cache(
    client: Client,
    kind: str,
    dtype: str,
    pages_by: Literal["client", "server"],
    layout: Literal["interleaved", "split"],
) -> Cache:
    return client.create_cache(
        f"{kind}-{dtype}",
        num_layers=2,
        num_pages=256,
        page_size=16,
        num_kv_heads=4,
        head_dim=64,
        dtype=dtype,
        pages_by=pages_by,
        layout=layout,
    )


def _normal(rng: np.random.Generator, tokens: int, heads: int, dtype: str) -> np.ndarray:
    numbers = rng.standard_normal((tokens, heads, 64), np.float32)
    return numbers.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def _ragged_call(client: Client, dtype: str, rng: np.random.Generator) -> Callable[[], object]:
    cache = _cache(client, "ragged", dtype, "client", "interleaved")

    def call() -> object:
        rows = int(rng.integers(1, 9))
        q_lens = rng.integers(1, 17, rows)
        kv_lens = q_lens + rng.integers(0, 200, rows)
        tokens = int(q_lens.sum())
        table = rng.permutation(256)[: rows * 16].reshape(rows, 16)
        return cache.ragged_paged_attention(
            int(rng.integers(2)),
            _normal(rng, tokens, 8, dtype),
            kv_lens,
            table,
            np.cumsum([0, *q_lens]),
            rows,
            k=_normal(rng, tokens, 4, dtype),
            v=_normal(rng, tokens, 4, dtype),
            sm_scale=float(rng.uniform(0.1, 1)),
            sliding_window=int(rng.integers(1, 300)) if rng.random() < 0.3 else None,
            soft_cap=float(rng.uniform(1, 50)) if rng.random() < 0.3 else None,
            return_lse=bool(rng.random() < 0.3),
        )

    return call


def _decode_call(client: Client, dtype: str, rng: np.random.Generator) -> Callable[[], object]:
    cache = _cache(client, "decode", dtype, "client", "split")

    def call() -> object:
        rows = int(rng.integers(1, 17))
        table = rng.permutation(256)[: rows * 16].reshape(rows, 16)
        return cache.paged_attention(
            int(rng.integers(2)),
            _normal(rng, rows, 8, dtype),
            rng.integers(1, 257, rows),
            table,
            pages_per_compute_block=4,
            k=_normal(rng, rows, 4, dtype),
            v=_normal(rng, rows, 4, dtype),
        )

    return call


def _sequences_call(client: Client, dtype: str, rng: np.random.Generator) -> Callable[[], object]:
    cache = _cache(client, "sequences", dtype, "server", "interleaved")

    def call() -> object:
        sequences = cache.create_sequences(2)
        lens = rng.integers(1, 33, 2)
        step = cache.step(sequences, q_lens=lens, kv_lens=lens)
        tokens = int(lens.sum())
        out = step.attend(
            0, _normal(rng, tokens, 8, dtype), _normal(rng, tokens, 4, dtype), _normal(rng, tokens, 4, dtype)
        )
        cache.release_sequences(sequences)
        return out

    return call


def _imports(section: Section) -> None:
    """Adds the cost of the client's import beside that of what it cannot do without."""
    figures: dict[str, list[tuple[float, float]]] = {name: [] for name in IMPORTS}
    for turn in range(IMPORT_RUNS + 1):
        for name, imports in IMPORTS.items():
            measured = import_cost(imports)
            if turn:  # the first run compiles and fills the page cache
                figures[name].append(measured)
    table = Table(title="importing in a fresh interpreter, medians", columns=["", "ms", "resident MiB"])
    medians = {
        name: (statistics.median(s for s, _ in costs), statistics.median(mib for _, mib in costs))
        for name, costs in figures.items()
    }
    for name, (seconds, mib) in medians.items():
        table.rows.append([name, f"{seconds * 1e3:.0f}", f"{mib:.1f}"])
    section.tables.append(table)
    seconds, mib = medians["attnd.client"]
    section.value("import attnd.client: resident", mib, "MiB", Target(bound=IMPORT_MAX_MIB, side="at most"))
    section.value("import attnd.client: time", seconds, "s", Target(bound=IMPORT_MAX_S, side="at most"))


def import_cost(imports: str) -> tuple[float, float]:
    """Returns the seconds of an import in a fresh interpreter and its resident MiB afterwards."""
    with child([sys.executable, "-c", IMPORT_PROGRAM.format(imports=imports)]) as process:
        seconds, resident = read_line(process).split()
    return float(seconds), int(resident) / MIB
