"""Runs the benchmarks: `python -m benchmarks [attention append rpc demo batching memory] [--json FILE]`."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from attnd.v1.polling import poll_in_waiting_threads
from benchmarks import report

# Seconds of measuring for each section; set-up, compiling and checking come on top.
BUDGETS_S: Final = {"attention": 80.0, "append": 20.0, "rpc": 60.0, "demo": 40.0, "batching": 30.0, "memory": 120.0}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen sections, prints each as it ends, and writes what it is asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(BUDGETS_S)}; default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also put the figures into this page")
    parser.add_argument("--budget", type=float, default=1.0, metavar="X", help="multiply the measuring time; default 1")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.sections) - BUDGETS_S.keys()
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; choose from {', '.join(BUDGETS_S)}")
    console = report.make_console()
    facts = report.machine()
    report.show_machine(console, facts)
    sections = []
    for name in chosen.sections or BUDGETS_S:
        report.progress(name)
        section = importlib.import_module(f"benchmarks.{name}").run(BUDGETS_S[name] * chosen.budget)
        report.show_section(console, section)
        sections.append(section)
    if chosen.json is not None:
        report.write_json(chosen.json, facts, sections)
    if chosen.markdown is not None:
        report.write_markdown(chosen.markdown, facts, sections)


if __name__ == "__main__":
    poll_in_waiting_threads()  # inherited by the processes that it starts
    main()
