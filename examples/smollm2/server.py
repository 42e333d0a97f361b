"""A server of our own for the time of the demonstration: a child process, started with it and stopped with it."""

import os
import shutil
import subprocess
import sysconfig
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Self

from threadpoolctl import threadpool_limits

_READY = "attnd serving on "
_STOP_TIMEOUT_S = 10.0
LOOPBACK = "127.0.0.1:0"
_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}


class ServerError(Exception):
    """The server did not start."""


class OwnServer:
    """`attnd serve` on a free port of this machine. Its messages go to our stderr.

    It starts when it is constructed; `address` waits until it is ready, so there is time to read the model meanwhile.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - a fixed command of our own package
            [_command(), "serve", "--host", "127.0.0.1", "--port", "0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # so that Ctrl-C reaches us alone, and we stop the server once we have let go of it
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def address(self) -> str:
        """Waits until the server is ready and returns its HOST:PORT.

        Raises:
            ServerError: It ended instead.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(_READY):
                return line.removeprefix(_READY).strip()
        raise ServerError(f"`attnd serve` ended with status {self._process.wait()}; its messages are above")

    def stop(self) -> None:
        """Stops the server: politely, then not."""
        self._process.terminate()
        try:
            self._process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def share_cores(address: str) -> AbstractContextManager[object]:
    """Limits NumPy to half of the cores, until the returned context ends, if the server runs on the same ones.

    Between two products OpenBLAS's threads spin. On the server's cores that costs more than the threads ever bring.
    """
    if address.rpartition(":")[0] not in _LOOPBACK:
        return nullcontext()
    limits: AbstractContextManager[object] = threadpool_limits(max(1, (os.cpu_count() or 1) // 2), user_api="blas")
    return limits


def _command() -> str:
    """Returns the path of the `attnd` command that belongs to this interpreter, or else the one on the PATH."""
    beside = Path(sysconfig.get_path("scripts"))
    command = shutil.which("attnd", path=str(beside)) or shutil.which("attnd")
    if command is None:
        raise ServerError(f"there is no `attnd` command in {beside}: run `pip install -e '.[example]'`")
    return command
