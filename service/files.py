"""The file operations of saves: one seam, so that tests can fail each of them in turn."""

import fcntl
import os
import shutil
from pathlib import Path

from attnd.service.config import ConfigError


class Files:
    """A file system. Every method may raise OSError, and blocks: it is not for the event loop's thread."""

    def make_folder(self, path: Path) -> None:
        """Makes a folder that does not exist."""
        path.mkdir(mode=0o700)

    def names(self, folder: Path) -> list[str]:
        """Returns the names of what lies in a folder, none if there is no such folder."""
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []

    def read(self, path: Path) -> bytes:
        """Returns what a file holds."""
        return path.read_bytes()

    def write(self, path: Path, data: bytes) -> None:
        """Makes a file that does not exist. It may be lost, or be there in part, until it and its folder are synced."""
        with path.open("xb") as file:
            file.write(data)

    def sync(self, path: Path) -> None:
        """Returns when what a file holds, or which names a folder has, is on disk."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, to: Path) -> None:
        """Gives a folder another name: at every moment there is one of them."""
        path.rename(to)

    def remove(self, folder: Path) -> None:
        """Removes a folder and all that lies in it. A failure may leave a part of it."""
        shutil.rmtree(folder)


class FolderLock:
    """Keeps a second server away from a data directory: it would take the first one's saves for leftovers.

    It ends with the process, whatever ends that.

    Args:
        folder: The data directory; made if it does not exist.

    Raises:
        ConfigError: The folder cannot be written to, or another server has it.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"The data directory {folder} cannot be used: {error.strerror}.") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            raise ConfigError(f"Another server uses the data directory {folder}.") from error

    def release(self) -> None:
        """Lets another server have the folder."""
        os.close(self._descriptor)
