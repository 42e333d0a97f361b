"""Section "rpc": round trips of a real server and client beside a raw socket echo and a naive gRPC server."""

import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import processes
from benchmarks.native import compile_c
from benchmarks.processes import Driver, child, python, read_line
from benchmarks.report import Section, Target
from benchmarks.rpc_peers import Q_SHAPES
from benchmarks.timing import Call, Timing, interleave, ratio

PEERS: Final = "benchmarks.rpc_peers"
ATTND: Final = "attnd call, without its compute"
ATTND_WHOLE: Final = "attnd call, whole"
NAIVE: Final = "naive gRPC echo (protobuf bytes)"
# Calls of each competitor in one turn: enough to see a steady state, few enough to take turns.
CALLS: Final = {200: 40, 512 * 1024: 12, 16 * 1024**2: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Targets for one size: times of the raw echo at most, speed against the naive server at least."""

    echo_max: float | None = None
    naive_min: float | None = None


BOUNDS: Final = {
    200: Bounds(),
    512 * 1024: Bounds(echo_max=7.5, naive_min=2.4),
    16 * 1024**2: Bounds(echo_max=4.2, naive_min=4.5),
}


@dataclass(slots=True)
class AttndDriver:
    """Times attnd's calls; keeps whole and compute apart.

    Attributes:
        wholes: Seconds of the whole call, by size, in order of the turns.
        computes: Seconds of it that the server wrote, compiled and attended.
    """

    driver: Driver
    wholes: dict[int, list[float]] = field(default_factory=dict)
    computes: dict[int, list[float]] = field(default_factory=dict)

    def measure(self, size_bytes: int, calls: int) -> float:
        """Returns the median seconds of one call without its compute."""
        wholes = self.driver.measure(size_bytes, calls)
        computes = self.driver.measure_more()
        self.wholes.setdefault(size_bytes, []).append(statistics.median(wholes))
        self.computes.setdefault(size_bytes, []).append(statistics.median(computes))
        return statistics.median(whole - compute for whole, compute in zip(wholes, computes, strict=True))


def run(budget_s: float, sizes: dict[int, int] = CALLS) -> Section:
    """Measures round trips of each size.

    Args:
        budget_s: Seconds to measure.
        sizes: Calls in one turn, by bytes each way.
    """
    section = Section(name="rpc")
    with ExitStack() as stack:
        echo_name, echo = stack.enter_context(_echo())
        naive = stack.enter_context(_naive())
        attnd = stack.enter_context(_attnd())
        section.notes.append(
            "unary calls over loopback TCP, server and client each a process; ping-pong, so that pauses between calls, "
            "which cost wake-ups, do not show; compute is what the reply's timings say (write, compile, kernel)"
        )
        for size, count in sizes.items():
            _measure(section, {echo_name: echo, NAIVE: naive}, attnd, size, count, budget_s / len(sizes))
    return section


def _measure(
    section: Section, others: dict[str, Driver], attnd: AttndDriver, size: int, count: int, budget_s: float
) -> None:
    def other(driver: Driver) -> Call:
        return lambda: statistics.median(driver.measure(size, count))

    calls: dict[str, Call] = {name: other(driver) for name, driver in others.items()}
    calls[ATTND] = lambda: attnd.measure(size, count)
    # The calls of a turn report the time of one; the budget is for all of them.
    timings = interleave(calls, budget_s=budget_s / count, rounds_min=3, rounds_max=25)
    timed_rounds = len(timings[ATTND].rounds)
    wholes = dict(enumerate(attnd.wholes[size][-timed_rounds:]))
    shown = {**timings, ATTND_WHOLE: Timing(wholes)}
    echo_name = next(iter(others))
    shape = " x ".join(map(str, Q_SHAPES[size]))
    section.timings(
        f"{_size(size)} out and back (attnd: q {shape}, float32)",
        shown,
        lambda timing: f"{timing.median_s / timings[echo_name].median_s:.2f}",
        "times the echo",
    )
    bounds = BOUNDS[size]
    at_most = None if bounds.echo_max is None else Target(bound=bounds.echo_max, side="at most")
    at_least = None if bounds.naive_min is None else Target(bound=bounds.naive_min)
    section.ratio(
        f"{_size(size)}: {ATTND}, in times of the {echo_name}", ratio(timings[ATTND], timings[echo_name]), at_most
    )
    section.ratio(f"{_size(size)}: speed against the {NAIVE}", ratio(timings[NAIVE], timings[ATTND]), at_least)


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
    with child(python(PEERS, "naive-serve")) as server:
        address = read_line(server)
        with child(python(PEERS, "naive-drive", address)) as driver:
            yield Driver(driver)


@contextmanager
def _attnd() -> Iterator[AttndDriver]:
    # One program for each size is enough here.
    with (
        processes.attnd_server("--no-warm-up") as (address, _),
        child(python(PEERS, "attnd-drive", address)) as driver,
    ):
        yield AttndDriver(Driver(driver))


def _size(size_bytes: int) -> str:
    for unit, scale in (("MiB", 1024**2), ("KiB", 1024)):
        if size_bytes >= scale:
            return f"{size_bytes // scale} {unit}"
    return f"{size_bytes} B"
