"""Child processes: servers that say when they are ready, and drivers that time calls on request.

Each client runs in a process of its own, because what one does to the allocator would help or hurt the others.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
STOP_TIMEOUT_S = 20


def python(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


@contextmanager
def child(command: Sequence[str | Path], **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """Runs a command with pipes for its input and output, and ends it, kindly first.

    Args:
        command: The command.
        variables: What its environment has beyond ours, or other than it.
    """
    # The path makes `benchmarks` importable wherever the run was started.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path} | variables
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, env=environment
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def read_line(process: "subprocess.Popen[str]") -> str:
    """Returns the next line that a child prints.

    Raises:
        RuntimeError: It ended instead.
    """
    line = _pipe(process.stdout).readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with code {process.wait()} before it answered")
    return line.strip()


@contextmanager
def attnd_server(*options: str) -> Iterator[tuple[str, int]]:
    """Runs `attnd serve` on a free port of loopback; gives its address and process id."""
    command = python("attnd.service", "serve", "--port", "0", "--log-level", "WARNING", *options)
    with child(command) as process:
        yield read_line(process).rpartition(" ")[2], process.pid


class Driver:
    """A child that times round trips when it is asked to."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def measure(self, size_bytes: int, calls: int) -> list[float]:
        """Returns the seconds of each of `calls` round trips with that many bytes each way."""
        print(size_bytes, calls, file=_pipe(self._process.stdin), flush=True)
        return self.measure_more()

    def measure_more(self) -> list[float]:
        """Returns the seconds of the next line of figures that the driver prints."""
        return [int(word) / 1e9 for word in read_line(self._process).split()]


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("the child was started without pipes")
    return pipe
