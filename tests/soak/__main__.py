"""Runs the long tests and prints one table: `python -m tests.soak [PART ...] [--share 0.1] [--seed 0]`."""

import argparse
import sys
import time
from collections.abc import Callable

from tests.soak import calls, crashes, cycles, damages, lossy, simulated
from tests.soak.report import Row, table

PARTS: dict[str, tuple[Callable[[int, int], list[Row]], int]] = {
    "simulated": (simulated.run, 1_000_000),
    "planted": (simulated.find, 20),
    "appends": (lossy.run, 10_000),
    "cycles": (cycles.run, 1_000_000),
    "calls": (calls.run, 100_000),
    "crashes": (crashes.run, 200),
    "damages": (damages.run, 200),
}
"""What to run, and how often to try in full."""


def main() -> int:
    """Runs the parts that are named, all if none is."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all by default")
    parser.add_argument("--share", type=float, default=1.0, help="share of the full figures (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all that is random (default: 0)")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    rows = []
    for name in arguments.parts or PARTS:
        run, count = PARTS[name]
        started = time.monotonic()
        rows += run(max(1, round(count * arguments.share)), arguments.seed)
        print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr)
    print(table(rows))
    return 1 if any(row.failures for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
