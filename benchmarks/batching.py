"""Section "batching": what running waiting calls as one gives clients that call at the same time, and costs a lone one.

Run as `python -m benchmarks.batching serve CALLS` it is the server, `python -m benchmarks.batching drive ADDRESS` the
clients. The kernel takes 5 ms whatever it is given, as one on a device that is not full does.
"""

import asyncio
import functools
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from benchmarks.processes import Driver, child, python, read_line
from benchmarks.report import Section, Target
from benchmarks.timing import Call, interleave, ratio

KERNEL_S: Final = 0.005
CLIENTS: Final = (8, 1)
CALLS_EACH: Final = 40
THROUGHPUT_MIN: Final = 3.5
LONE_LOSS_MAX: Final = 1.05


def run(budget_s: float) -> Section:
    """Measures clients of a server that runs calls together beside those of one that does not."""
    section = Section(name="batching")
    section.notes.append(
        f"one decode row a call, a kernel of {KERNEL_S * 1e3:g} ms whatever it is given; clients are threads of one "
        f"process, each with a connection and a sequence of its own, {CALLS_EACH} calls in a turn"
    )
    with ExitStack() as stack:
        drivers = {}
        for name, calls in (("together", 64), ("each alone", 1)):
            server = stack.enter_context(child(python("benchmarks.batching", "serve", str(calls))))
            address = read_line(server).rpartition(" ")[2]
            drivers[name] = Driver(stack.enter_context(child(python("benchmarks.batching", "drive", address))))
        for clients in CLIENTS:
            calls_by_name = {name: _turn(driver, clients) for name, driver in drivers.items()}
            timings = interleave(calls_by_name, budget_s=budget_s / len(CLIENTS), rounds_min=3, rounds_max=15)
            who = f"{clients} clients" if clients > 1 else "a lone client"
            section.timings(
                f"{who}: time per call of all",
                timings,
                lambda timing: f"{1 / timing.median_s:.0f}",
                "calls a second",
            )
            alone, together = timings["each alone"], timings["together"]
            if clients > 1:
                section.ratio(
                    f"{who}: throughput of calls that run together, relative to each alone",
                    ratio(alone, together),
                    Target(bound=THROUGHPUT_MIN),
                )
            else:
                section.ratio(
                    f"{who}: time of a call where calls may run together, relative to each alone",
                    ratio(together, alone),
                    Target(bound=LONE_LOSS_MAX, side="at most"),
                )
    return section


def _turn(driver: Driver, clients: int) -> Call:
    return lambda: statistics.median(driver.measure(clients, CALLS_EACH))


def serve(batch_calls_max: str) -> None:
    """Serves with a kernel that only takes time."""
    from attnd.kernels import registry  # noqa: PLC0415 - the driver needs no server's packages
    from attnd.kernels.contract import Attended, RaggedBatch  # noqa: PLC0415
    from attnd.kernels.reference import Reference  # noqa: PLC0415
    from attnd.service import server  # noqa: PLC0415
    from attnd.service.config import ServerConfig  # noqa: PLC0415

    class Slow(Reference):
        def attend(self, pages: Any, layer: int, batch: RaggedBatch, q: np.ndarray, **_: Any) -> Attended:  # noqa: ARG002
            time.sleep(KERNEL_S)
            return Attended(out=q.copy())

    slow = Slow()
    setattr(registry, "choose", lambda *_: slow)  # noqa: B010 - a kernel that no server should be asked for by name
    asyncio.run(server.serve(ServerConfig(port=0, batch_calls_max=int(batch_calls_max))))


def drive(address: str) -> None:
    """Answers lines "CLIENTS CALLS" with the nanoseconds per call that so many clients at once needed."""
    from attnd.client import Client  # noqa: PLC0415 - the server must not meet what it sets up

    q, kv = np.ones((1, 4, 64), np.float32), np.ones((1, 1, 64), np.float32)
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(address, timeout_s=60)) for _ in range(max(CLIENTS))]
        clients[0].create_cache(
            "batching", num_layers=1, num_pages=64, page_size=16, num_kv_heads=1, head_dim=64, dtype="float32",
            pages_by="server",
        )  # fmt: skip
        caches = [client.get_cache("batching") for client in clients]
        steps: list[Callable[[], Any]] = []
        for cache in caches:
            step = cache.step(cache.create_sequences(1), q_lens=[1], kv_lens=[1])
            step.attend(0, q, kv, kv)
            steps.append(functools.partial(step.attend, 0, q))
        for line in sys.stdin:
            count, calls = map(int, line.split())
            print(_time_per_call_ns(steps[:count], calls), flush=True)


def _time_per_call_ns(steps: list[Callable[[], Any]], calls: int) -> int:
    barrier = threading.Barrier(len(steps) + 1)

    def client(attend: Callable[[], Any]) -> None:
        barrier.wait()
        for _ in range(calls):
            attend()

    threads = [threading.Thread(target=client, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    barrier.wait()
    started_ns = time.perf_counter_ns()
    for thread in threads:
        thread.join()
    return (time.perf_counter_ns() - started_ns) // (len(steps) * calls)


if __name__ == "__main__":
    {"serve": serve, "drive": drive}[sys.argv[1]](sys.argv[2])
