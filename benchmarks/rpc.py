"""Section "rpc": round trips of a real server and client beside a raw socket echo and gRPC servers, naive and bare."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.native import compile_c
from benchmarks.processes import Driver, child, python, read_line
from benchmarks.report import Section, Target
from benchmarks.rpc_peers import Q_SHAPES, STEP_LAYERS, STEP_SHAPE
from benchmarks.timing import Call, Timing, interleave, ratio

PEERS: Final = "benchmarks.rpc_peers"
SESSION: Final = "attnd session"
UNARY: Final = "attnd unary call"
LOCAL: Final = "attnd local socket"
NAIVE: Final = "naive gRPC echo (protobuf bytes)"
BARE: Final = {SESSION: "bare gRPC stream", UNARY: "bare gRPC call"}
"""What gRPC itself costs, by the way of calling that is built on it."""
# Calls of each competitor in one turn: enough to see a steady state, few enough to take turns. The first half does not
# count: it finds the caches cold, and a server that was busy with another competitor a moment ago.
CALLS: Final = {200: 120, 512 * 1024: 40, 16 * 1024**2: 6}
SETTLE_S: Final = 0.005
STEP_Q_BYTES: Final = 16 * 1024
STEP_MAX: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Targets for one size.

    Attributes:
        echo_max: Times of the raw echo, at most, by way of calling.
        naive_min: Speed against the naive server, at least.
    """

    echo_max: Mapping[str, float]
    naive_min: float | None = None


BOUNDS: Final = {
    200: Bounds(echo_max={SESSION: 31}),
    512 * 1024: Bounds(echo_max={LOCAL: 2.5, SESSION: 6, UNARY: 7.5}, naive_min=2.4),
    16 * 1024**2: Bounds(echo_max={LOCAL: 1, SESSION: 4.2, UNARY: 4.2}, naive_min=4.5),
}


def run(budget_s: float, sizes: dict[int, int] = CALLS) -> Section:
    """Measures round trips of each size, and a whole step.

    Args:
        budget_s: Seconds to measure.
        sizes: Calls in one turn, by bytes each way.
    """
    section = Section(name="rpc")
    share_s = budget_s / (len(sizes) + 1)
    with ExitStack() as stack:
        echo_name, echo = stack.enter_context(_echo())
        naive = stack.enter_context(_naive())
        bare_address = read_line(stack.enter_context(child(python(PEERS, "bare-serve"))))
        bare = {
            BARE[name]: Driver(stack.enter_context(child(python(PEERS, "bare-drive", bare_address, way))))
            for name, way in ((SESSION, "session"), (UNARY, "unary"))
        }
        address = read_line(stack.enter_context(child(python(PEERS, "attnd-serve")))).rpartition(" ")[2]
        ways = {
            name: Driver(stack.enter_context(child(python(PEERS, "attnd-drive", address, way))))
            for name, way in ((LOCAL, "local"), (SESSION, "session"), (UNARY, "unary"))
        }
        section.notes.append(
            "over the local socket or loopback TCP, server and client each a process; attention gives q back, so that "
            "nothing is computed; ping-pong, so that pauses between calls, which cost wake-ups, do not show"
        )
        for size, count in sizes.items():
            _measure(section, {echo_name: echo, NAIVE: naive, **bare, **ways}, size, count, share_s)
        steps = {
            name: Driver(stack.enter_context(child(python(PEERS, "step-drive", address, way))))
            for name, way in ((SESSION, "session"), (UNARY, "unary"))
        }
        _measure_steps(section, steps, share_s)
    return section


def _measure(section: Section, drivers: Mapping[str, Driver], size: int, count: int, budget_s: float) -> None:
    timings = _turns(drivers, size, count, budget_s)
    echo_name = next(iter(drivers))
    shape = " x ".join(map(str, Q_SHAPES[size]))
    section.timings(
        f"{_size(size)} out and back (attnd: q {shape}, float32)",
        timings,
        lambda timing: f"{timing.median_s / timings[echo_name].median_s:.2f}",
        "times the echo",
    )
    bounds = BOUNDS[size]
    for way in (LOCAL, SESSION, UNARY):
        bound = bounds.echo_max.get(way)
        at_most = None if bound is None else Target(bound=bound, side="at most")
        label = f"{_size(size)}: {way}, in times of the {echo_name}"
        section.ratio(label, ratio(timings[way], timings[echo_name]), at_most)
    for way in (SESSION, UNARY):
        at_least = None if bounds.naive_min is None else Target(bound=bounds.naive_min)
        label = f"{_size(size)}: {way}, speed against the {NAIVE}"
        section.ratio(label, ratio(timings[NAIVE], timings[way]), at_least)
    for way, floor in BARE.items():
        section.ratio(f"{_size(size)}: {floor}, in times of the {echo_name}", ratio(timings[floor], timings[echo_name]))
        section.ratio(f"{_size(size)}: {way}, in times of the {floor}", ratio(timings[way], timings[floor]))


def _measure_steps(section: Section, drivers: Mapping[str, Driver], budget_s: float) -> None:
    timings = _turns(drivers, STEP_Q_BYTES, 1, budget_s)
    rows, pages = STEP_SHAPE
    section.timings(
        f"a step of {STEP_LAYERS} layers: {rows} sequences, tables of {pages} pages, q of {_size(STEP_Q_BYTES)}",
        timings,
        lambda timing: f"{timing.median_s / STEP_LAYERS * 1e3:.3g}",
        "ms a layer",
    )
    section.ratio(
        f"a step of {STEP_LAYERS} layers: planned in a session, relative to unary calls",
        ratio(timings[SESSION], timings[UNARY]),
        Target(bound=STEP_MAX, side="at most"),
    )


def _turns(drivers: Mapping[str, Driver], size: int, count: int, budget_s: float) -> dict[str, Timing]:
    def call(driver: Driver) -> Call:
        def turn() -> float:
            time.sleep(SETTLE_S)
            return statistics.median(driver.measure(size, count)[count // 2 :])

        return turn

    # The calls of a turn report the time of one; the budget is for all of them, and for nothing else.
    calls = {name: call(driver) for name, driver in drivers.items()}
    return interleave(calls, budget_s=budget_s / count, warmups=2, rounds_min=3, rounds_max=41, settle_s=0)


@contextmanager
def _echo() -> Iterator[tuple[str, Driver]]:
    program = compile_c("echo.c")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        path = str(Path(directory) / "echo")
        serve, drive = (
            [str(program), role, path] if program else python(PEERS, f"echo-{role}", path)
            for role in ("serve", "drive")
        )
        read_line(stack.enter_context(child(serve)))
        language = "C" if program else "Python (no C compiler here)"
        yield f"raw unix-socket echo in {language}", Driver(stack.enter_context(child(drive)))


@contextmanager
def _naive() -> Iterator[Driver]:
    # As gRPC is when nobody tells it anything.
    with child(python(PEERS, "naive-serve"), GRPC_EXPERIMENTS="") as server:
        address = read_line(server)
        with child(python(PEERS, "naive-drive", address), GRPC_EXPERIMENTS="") as driver:
            yield Driver(driver)


def _size(size_bytes: int) -> str:
    for unit, scale in (("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes >= scale:
            return f"{size_bytes // scale} {unit}"
    return f"{size_bytes} B"
