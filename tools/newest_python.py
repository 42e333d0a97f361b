"""Prints the newest Python from 3.12 on that runs here, or the running one: some peers need it."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MINORS = range(20, 11, -1)


def candidates() -> Iterator[str]:
    """Yields interpreters that may exist, newest first."""
    versions = Path.home() / ".pyenv" / "versions"
    for minor in MINORS:
        if found := shutil.which(f"python3.{minor}"):
            yield found
        yield from map(str, sorted(versions.glob(f"3.{minor}.*/bin/python3"), reverse=True))


def runs(python: str) -> bool:
    """Returns whether an interpreter runs and can make virtual environments."""
    result = subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, check=False)
    return result.returncode == 0


if __name__ == "__main__":
    print(next(filter(runs, candidates()), sys.executable))
