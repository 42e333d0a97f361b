"""A server of our own for the time of the demonstration: a child process, started with it and stopped with it."""

import shutil
import subprocess
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Self

_READY = "attnd serving on "
_STOP_TIMEOUT_S = 10.0


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


def _command() -> str:
    """Returns the path of the `attnd` command that belongs to this interpreter, or else the one on the PATH."""
    beside = Path(sysconfig.get_path("scripts"))
    command = shutil.which("attnd", path=str(beside)) or shutil.which("attnd")
    if command is None:
        raise ServerError(f"there is no `attnd` command in {beside}: run `pip install -e '.[example]'`")
    return command
