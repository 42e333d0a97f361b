"""A server for the module, and both clients behind one face."""

import asyncio
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from attnd.client import AsyncClient, Client
from tests.support.server import ServerProcess, attnd_server

NAMES = itertools.count()


class Driver:
    """Makes clients of one kind, and finishes their calls: `run(client.server_info())` is the answer of either."""

    def __init__(self, kind: type[Client] | type[AsyncClient], runner: asyncio.Runner, *, local: bool) -> None:
        self.kind = kind
        self.local = local
        self._runner = runner
        self._clients: list[Client | AsyncClient] = []

    def client(self, address: str, **options: Any) -> Any:
        self._clients.append(self.kind(address, **{"local": self.local, **options}))
        return self._clients[-1]

    def __call__(self, answer: Any) -> Any:
        if not inspect.iscoroutine(answer):
            return answer
        return self._runner.run(answer)

    def close(self) -> None:
        for client in self._clients:
            self(client.close())


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with attnd_server() as process:
        yield process


KINDS = {"blocking": (Client, False), "awaiting": (AsyncClient, False)}
LOCAL_KINDS = {"blocking-local": (Client, True), "awaiting-local": (AsyncClient, True)}


@contextmanager
def driving(kind: type[Client] | type[AsyncClient], local: bool) -> Iterator[Driver]:
    """Makes the driver of one kind of clients, and closes them afterwards."""
    with asyncio.Runner() as runner:
        driver = Driver(kind, runner, local=local)
        yield driver
        driver.close()


@pytest.fixture(params=(KINDS | LOCAL_KINDS).values(), ids=KINDS | LOCAL_KINDS)
def run(request: pytest.FixtureRequest) -> Iterator[Driver]:
    """Both clients over gRPC, and both over the local socket."""
    with driving(*request.param) as driver:
        yield driver


@pytest.fixture
def client(run: Driver, server: ServerProcess) -> Any:
    return run.client(server.address, timeout_s=60.0)


@pytest.fixture
def new_cache(run: Driver, client: Any) -> Iterator[Callable[..., Any]]:
    """Makes caches of 2 layers of 16 pages of 8 tokens, 2 kv heads of 16, float32, unless told otherwise."""
    made = []

    def make(**changes: Any) -> Any:
        sizes = {"num_layers": 2, "num_pages": 16, "page_size": 8, "num_kv_heads": 2, "head_dim": 16}
        made.append(run(client.create_cache(f"cache-{next(NAMES)}", **{**sizes, "dtype": "float32", **changes})))
        return made[-1]

    yield make
    for cache in made:
        run(cache.delete())


@pytest.fixture
def normal() -> Callable[..., np.ndarray]:
    """Makes float32 arrays of standard normal numbers, new ones each time."""
    rng = np.random.default_rng(0)
    return lambda *shape: rng.standard_normal(shape, np.float32)
