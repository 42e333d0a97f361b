"""Real servers for tests: child processes on loopback, on ports that the system picks."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

READY = re.compile(r"attnd serving on (127\.0\.0\.1:\d+)")


@dataclass
class ServerProcess:
    """A server in a process of its own."""

    address: str
    process: subprocess.Popen
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text()


@contextmanager
def attnd_server(*options: str, port: int = 0, warm_up: bool = False) -> Iterator[ServerProcess]:
    """Starts `attnd serve`, waits until it is ready, and ends it with SIGTERM.

    Args:
        options: More options of the command line.
        port: The port; 0 picks a free one.
        warm_up: Whether the first call of a kind compiles all programs.

    Raises:
        RuntimeError: The server ended before it was ready; the text is its log.
    """
    command = [sys.executable, "-m", "attnd.service", "serve", "--port", str(port), "--grace-s", "2"]
    # Most tests make many small caches and few calls of each: they need few of the programs.
    command += ["--warm-up" if warm_up else "--no-warm-up", *options]
    with tempfile.NamedTemporaryFile("w+", suffix=".log") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ.copy())
        try:
            line = process.stdout.readline()
            if (ready := READY.search(line)) is None:
                process.wait(10)
                raise RuntimeError(f"attnd serve did not start:\n{Path(log.name).read_text()}")
            yield ServerProcess(ready[1], process, Path(log.name))
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
