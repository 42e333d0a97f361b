"""A server that cannot start, or not stop as it should."""

import asyncio
import errno
import socket
import threading

import pytest

from attnd.service.attention_service import AttentionHandlers
from attnd.service.config import ConfigError, ServerConfig
from attnd.service.files import FolderLock
from attnd.service.persistence import Persistence
from attnd.service.server import running


async def start(config):
    async with running(config):
        pass


def require_nothing_left(folder, socket_path):
    assert not socket_path.exists()
    left = [thread.name for thread in threading.enumerate()]
    assert not [name for name in left if name == "attnd-engine" or "serve_forever" in name]
    FolderLock(folder).release()


@pytest.mark.parametrize("refused", ["port", "metrics_port", "data_dir"])
def test_a_server_that_cannot_start_leaves_nothing_behind(tmp_path, monkeypatch, refused):
    async def unreadable(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = {"port": 0, "metrics_port": free.getsockname()[1]}
        if refused == "data_dir":
            monkeypatch.setattr(Persistence, "restore_all", unreadable)
        else:
            ports[refused] = taken.getsockname()[1]
        free.close()
        config = ServerConfig(**ports, local_socket_path=tmp_path / "attnd.sock", data_dir=tmp_path)
        with pytest.raises(ConfigError, match=r"Cannot listen on 127|Cannot serve metrics|cannot be read"):
            asyncio.run(start(config))
    require_nothing_left(tmp_path, config.local_socket_path)


def test_what_fails_while_a_server_stops_keeps_nothing_else_from_being_stopped_and_saved(tmp_path, monkeypatch):
    saved = []

    def fails(_):
        raise ZeroDivisionError

    async def save_all(_):
        saved.append("all")
        return []

    monkeypatch.setattr(AttentionHandlers, "end_sessions", fails)
    monkeypatch.setattr(Persistence, "save_all", save_all)
    config = ServerConfig(port=0, local_socket_path=tmp_path / "attnd.sock", data_dir=tmp_path)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(start(config))
    assert saved == ["all"]
    require_nothing_left(tmp_path, config.local_socket_path)
