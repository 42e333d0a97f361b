"""A server that cannot start."""

import asyncio
import errno
import socket
import threading

import pytest

from attnd.service.config import ConfigError, ServerConfig
from attnd.service.files import FolderLock
from attnd.service.persistence import Persistence
from attnd.service.server import running


@pytest.mark.parametrize("refused", ["port", "metrics_port", "data_dir"])
def test_a_server_that_cannot_start_leaves_nothing_behind(tmp_path, monkeypatch, refused):
    async def unreadable(_):
        raise PermissionError(errno.EACCES, "Permission denied")

    async def start(config):
        async with running(config):
            pass

    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = {"port": 0, "metrics_port": free.getsockname()[1]}
        if refused == "data_dir":
            monkeypatch.setattr(Persistence, "restore_all", unreadable)
        else:
            ports[refused] = taken.getsockname()[1]
        free.close()
        path = tmp_path / "attnd.sock"
        config = ServerConfig(**ports, local_socket_path=path, data_dir=tmp_path)
        with pytest.raises(ConfigError, match=r"Cannot listen on 127|Cannot serve metrics|cannot be read"):
            asyncio.run(start(config))
    assert not path.exists()
    left = [thread.name for thread in threading.enumerate()]
    assert not [name for name in left if name == "attnd-engine" or "serve_forever" in name]
    FolderLock(tmp_path).release()
