"""The local front: a unix socket for clients on the same host, and who is let in."""

import asyncio
import errno
import logging
import os
import secrets
import socket
import stat
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from attnd.service.config import ConfigError, ServerConfig
from attnd.service.local_connection import Connection, Services
from attnd.v1 import local, server_pb2

CONNECTIONS_MAX: Final = 128
"""Connections at a time. Each may share `local.SEGMENT_BYTES` of address space; what it touches takes memory."""

_PATH_BYTES_MAX: Final = 107
_TEMPORARY_PREFIX: Final = ".attnd-"
_TEMPORARY_AGE_S_MAX: Final = 60.0
_POLL_S: Final = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A socket that listens already, and whose connections wait.

    Attributes:
        listening: The socket.
        path: Where it is.
        identity: The device and number of its file.
        token: What clients must say first.
    """

    listening: socket.socket
    path: Path
    identity: tuple[int, int] | None
    token: bytes

    @property
    def offer(self) -> server_pb2.LocalSocket:
        """What clients are told of it."""
        return server_pb2.LocalSocket(path=str(self.path), token=self.token)

    def close(self) -> None:
        """Lets no one in any more, and removes the file."""
        if self.listening.fileno() < 0:
            return
        self.listening.close()
        if _identity(self.path) == self.identity:  # or another server has taken the place
            self.path.unlink(missing_ok=True)


def listen(config: ServerConfig) -> Listener | None:
    """Returns the socket that a server is to have; None if it is to have none.

    Raises:
        ConfigError: It was asked for at a certain place, and cannot be there.
    """
    if not config.local_socket:
        return None
    try:
        _require_possible(config)
        path = config.local_socket_path or _default_path(config.temporary_directory)
        return Listener(
            listening=_listen(path),
            path=path,
            identity=_identity(path),
            token=secrets.token_bytes(local.TOKEN_BYTES),
        )
    except ConfigError as error:
        if config.local_socket_path is not None:
            raise
        _log.info("no local socket: %s", error)
        return None


class LocalFront:
    """Serves whoever of the same user connects to a unix socket.

    Args:
        listener: The socket.
        services: What it gives access to.
    """

    def __init__(self, listener: Listener, services: Services) -> None:
        self._services = services
        self._connections: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._listening = listener.listening
        self._loop.add_reader(self._listening.fileno(), self._accept)

    @property
    def num_connections(self) -> int:
        """Connections that are open."""
        return len(self._connections)

    async def stop(self, grace_s: float) -> None:
        """Lets no one in any more, ends what is idle, and what is not when its call has ended or time is up."""
        self._loop.remove_reader(self._listening.fileno())
        self._listener.close()
        ends_at = self._loop.time() + grace_s
        while self._connections:
            for connection in list(self._connections):
                if not connection.busy or self._loop.time() >= ends_at:
                    connection.close()
            await asyncio.sleep(_POLL_S if self._connections else 0)

    def _accept(self) -> None:
        try:
            connected, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:  # no descriptors are left: the one that waits would wake us again at once
            _log.warning("no local connection can be accepted: %s", error.strerror)
            self._loop.remove_reader(self._listening.fileno())
            self._loop.call_later(1.0, self._accept_again)
            return
        if not _is_own(connected) or len(self._connections) >= CONNECTIONS_MAX:
            connected.close()
            return
        self._connections.add(Connection(connected, self._services, self._connections.discard))

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening.fileno(), self._accept)


def _require_possible(config: ServerConfig) -> None:
    if not hasattr(os, "memfd_create"):
        raise ConfigError("Local sockets need Linux.")
    if config.tls is not None and config.tls.client_ca_file is not None:
        raise ConfigError("A local socket does not ask for the certificates that tell this server's clients apart.")


def _default_path(directory: Path) -> Path:
    """Returns where a server listens by default: below a directory for temporary files, in one that is the user's own.

    Sockets that servers left behind there are removed.

    Raises:
        ConfigError: The directory cannot be made, or belongs to somebody else.
    """
    own = directory / f"attnd-{os.geteuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError as error:
        raise ConfigError(f"Cannot make {own} for local sockets: {error.strerror}.") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(f"{own} is not a directory that only this user can enter: no local socket is made there.")
    for left in own.glob("*.sock"):
        if _is_stale(left):
            left.unlink(missing_ok=True)
    return own / f"{secrets.token_hex(8)}.sock"


def _listen(path: Path) -> socket.socket:
    # Before it listens, a socket looks like one that was left behind: it gets its name, which other servers look at,
    # when it does.
    temporary = path.parent / f"{_TEMPORARY_PREFIX}{secrets.token_hex(4)}"
    for each in (path, temporary):
        if len(os.fsencode(each)) > _PATH_BYTES_MAX:
            raise ConfigError(f"The path of a local socket has at most {_PATH_BYTES_MAX} bytes: {each} is too long.")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        try:
            listener.bind(str(temporary))
            temporary.chmod(0o600)  # before it listens: nobody has been let in by then
            listener.listen(CONNECTIONS_MAX)
            _remove_temporary(path.parent)
            if _is_stale(path):
                path.unlink(missing_ok=True)
            os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        listener.close()
        taken = error.errno == errno.EEXIST
        why = "another server listens there, or it is no socket" if taken else error.strerror
        raise ConfigError(f"Cannot listen on {path}: {why}.") from error
    return listener


def _remove_temporary(folder: Path) -> None:
    """Removes what servers left behind that were killed before they listened: what refuses and is no longer new."""
    for left in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        with suppress(OSError):  # it is gone, or another user's
            if time.time() - left.lstat().st_mtime > _TEMPORARY_AGE_S_MAX and _is_stale(left):
                left.unlink()


def _is_stale(path: Path) -> bool:
    """Whether there is a socket that nobody listens on."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)
            probe.connect(str(path))
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _is_own(connected: socket.socket) -> bool:
    """Whether the other end belongs to the user whom this process runs as."""
    layout = struct.Struct("3i")  # pid, uid, gid
    _, uid, _ = layout.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    return bool(uid == os.geteuid())


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
