"""The report: tables and ratios, for readers and as JSON."""

import json
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

import jax
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.timing import Ratio, Timing

WIDTH_MIN = 128
MARKS = ("<!-- figures -->", "<!-- end of figures -->")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A bound that a figure is to meet."""

    bound: float
    side: Literal["at least", "at most"] = "at least"

    def met(self, value: float) -> bool:
        """Tells whether `value` keeps the bound."""
        return value >= self.bound if self.side == "at least" else value <= self.bound


@dataclass(slots=True, kw_only=True)
class Figure:
    """One line of results: a value, its unit, its spread and its target, if it has one."""

    label: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    target: Target | None = None

    def text(self) -> str:
        """Returns the value with its spread."""
        spread = "" if self.low is None or self.high is None else f"  ({self.low:.3g} to {self.high:.3g})"
        return f"{self.value:.3g} {self.unit}{spread}"

    def verdict(self) -> str:
        """Returns the target and whether it was met."""
        if self.target is None:
            return ""
        met = "met" if self.target.met(self.value) else "MISSED"
        return f"{self.target.side} {self.target.bound:g}: {met}"


@dataclass(slots=True, kw_only=True)
class Table:
    """Rows of text under a title that names shapes and bytes."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Section:
    """The results of one part of the run."""

    name: str
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def timings(self, title: str, timings: dict[str, Timing], extra: Callable[[Timing], str], extra_name: str) -> None:
        """Adds a table of timings, with one column computed from each."""
        table = Table(title=title, columns=["", "median ms", "quartiles ms", "rounds", extra_name])
        for name, timing in timings.items():
            low, high = timing.quartiles_s
            quartiles = f"{low * 1e3:.3g} to {high * 1e3:.3g}"
            table.rows.append([name, f"{timing.median_s * 1e3:.4g}", quartiles, str(len(timing.rounds)), extra(timing)])
        self.tables.append(table)

    def ratio(self, label: str, ratio: Ratio, target: Target | None = None) -> None:
        """Adds a line for a ratio of times."""
        self.figures.append(
            Figure(label=label, value=ratio.value, unit="x", low=ratio.low, high=ratio.high, target=target)
        )

    def value(self, label: str, value: float, unit: str, target: Target | None = None) -> None:
        """Adds a line for a single figure."""
        self.figures.append(Figure(label=label, value=value, unit=unit, target=target))


def machine() -> dict[str, str]:
    """Returns what the figures depend on: processor, memory, device and versions. Never the name of the host."""
    load = os.getloadavg()[0]
    facts = {
        "processor": f"{_cpu_model()}, {os.cpu_count()} cores, {platform.machine()}{_vector_units()}",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "load": f"{load:.1f} runnable threads before the run"
        + (" (busy: figures will be noisy)" if load > 0.5 * (os.cpu_count() or 1) else ""),
        "device": f"{jax.devices()[0].platform}: {jax.devices()[0].device_kind} x {len(jax.devices())}",
        "python": platform.python_version(),
    }
    for name in ("numpy", "jax", "numba", "torch", "grpcio", "protobuf"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


def show_machine(console: Console, facts: dict[str, str]) -> None:
    """Prints what the figures depend on."""
    for name, fact in facts.items():
        console.print(f"{name:>10}  {fact}", highlight=False)


def show_section(console: Console, section: Section) -> None:
    """Prints one part of the run."""
    console.rule(section.name)
    for table in section.tables:
        grid = RichTable(title=table.title, title_justify="left", title_style="bold", expand=False)
        for index, column in enumerate(table.columns):
            grid.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
        for row in table.rows:
            grid.add_row(*row)
        console.print(grid)
    for note in section.notes:
        console.print(f"note: {note}", highlight=False)
    for figure in section.figures:
        line = f"{figure.label:<84} {figure.text():<26} {figure.verdict()}"
        console.print(line.rstrip(), highlight=False, soft_wrap=True)
    console.print()


def make_console() -> Console:
    """Returns a console that is wide enough for the tables when the output is not a terminal."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=WIDTH_MIN)


def progress(what: str) -> None:
    """Says on stderr what is being measured: minutes pass before a section's tables."""
    print(f"measuring {what}", file=sys.stderr, flush=True)


def write_json(path: Path, facts: dict[str, str], sections: list[Section]) -> None:
    """Writes the whole report."""
    report = {"machine": facts, "sections": [asdict(section) for section in sections]}
    path.write_text(json.dumps(report, indent=2) + "\n")


def write_markdown(path: Path, facts: dict[str, str], sections: list[Section]) -> None:
    """Replaces the figures in a page, between the lines `MARKS`, by those of this run.

    Raises:
        ValueError: The page has no such lines.
    """
    before, begin, rest = path.read_text().partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (begin and end):
        raise ValueError(f"{path} has no lines {MARKS[0]!r} and {MARKS[1]!r}")
    lines = [f"Measured on: {facts['processor']}; {facts['load']}; jax {facts['jax']}, torch {facts['torch']}.", ""]
    lines += ["| figure | value (quartiles) | target |", "|---|---|---|"]
    lines += [
        f"| {figure.label} | {figure.text()} | {figure.verdict()} |"
        for section in sections
        for figure in section.figures
    ]
    path.write_text("\n".join([before + begin, "", *lines, "", end + after]))


def _cpu_model() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown processor"


def _vector_units() -> str:
    flags = next((line.split() for line in _cpuinfo() if line.startswith("flags")), [])
    return "".join(f", {unit}" for unit in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if unit in flags)


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
