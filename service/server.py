"""The server: its parts put together, started and stopped."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio
import jax
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from attnd.service import local_socket, tls
from attnd.service.attention_service import AttentionHandlers
from attnd.service.cache_service import CacheHandlers
from attnd.service.caches import CacheRegistry
from attnd.service.config import ConfigError, ServerConfig
from attnd.service.dispatch import Dispatcher
from attnd.service.engine import Engine
from attnd.service.files import Files, FolderLock
from attnd.service.local_connection import Services
from attnd.service.metrics import Metrics
from attnd.service.persistence import Persistence
from attnd.service.rpc import generic_handlers
from attnd.service.server_service import ServerHandlers
from attnd.service.world import World
from attnd.v1 import attention_pb2, cache_pb2, limits, server_pb2
from attnd.v1.allocator import keep_freed_memory

_OPTIONS: Final = [
    # Two servers on one port would each get some of the connections, and each know some of the caches.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
    # Clients ping while a call is out, so that a vanished host is noticed; by default a server cuts them off for it.
    ("grpc.http2.min_ping_interval_without_data_ms", limits.KEEPALIVE_INTERVAL_MS // 3),
    ("grpc.keepalive_permit_without_calls", 1),
]

_SWEEP_INTERVAL_S: Final = 5.0

_log = logging.getLogger(__name__)


class UnsavedError(Exception):
    """A server has ended without saving all of its caches."""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers calls.

    Attributes:
        host: The address that it listens on.
        port: The port that it listens on.
        unsaved: The names of caches that could not be saved when it stopped.
    """

    host: str
    port: int
    unsaved: list[str] = field(default_factory=list)


@asynccontextmanager
async def running(config: ServerConfig) -> AsyncIterator[RunningServer]:
    """Runs a server in this event loop until the context ends, then lets calls in flight end, then saves all caches.

    Raises:
        ConfigError: The address cannot be listened on, the implementation does not exist, or the data directory cannot
            be used.
    """
    # A program of XLA:CPU is run by the thread that calls it: handing it to another costs more than a small call.
    jax.config.update("jax_cpu_enable_async_dispatch", False)  # type: ignore[no-untyped-call]
    async with AsyncExitStack() as started:  # what is in it is ended, the last first, whatever fails
        if config.data_dir is not None:
            started.callback(FolderLock(config.data_dir).release)
        metrics, world = Metrics(), World()
        engine = Engine(
            queue_depth_max=config.queue_depth_max,
            batch_calls_max=config.batch_calls_max,
            metrics=metrics,
            busy_poll_ns=config.busy_poll_ns,
        )
        started.push_async_callback(engine.stop)
        caches = CacheRegistry(engine, config, platform=jax.default_backend(), world=world)
        persistence = None if config.data_dir is None else Persistence(config.data_dir, Files(), caches, engine, world)
        attention = AttentionHandlers(caches, engine)
        listener = local_socket.listen(config)
        if listener is not None:
            started.callback(listener.close)
        services = {
            attention_pb2.DESCRIPTOR.services_by_name["AttentionService"]: attention,
            cache_pb2.DESCRIPTOR.services_by_name["CacheService"]: CacheHandlers(caches, engine, world, persistence),
            server_pb2.DESCRIPTOR.services_by_name["ServerService"]: ServerHandlers(
                config, caches, engine, metrics, listener
            ),
        }
        dispatcher = Dispatcher(services)
        names = [service.full_name for service in services]
        server, health_servicer = _grpc_server(dispatcher, names)
        started.push_async_callback(server.stop, None)
        running_server = RunningServer(config.host, _listen(server, config))
        metrics.watch(engine, caches)
        if config.metrics_port is not None:
            started.push_async_callback(asyncio.to_thread, _serve_metrics(metrics, config.host, config.metrics_port))
        if persistence is not None:
            await _restore_all(persistence, config)
            started.push_async_callback(_save_all, persistence, running_server.unsaved)
            if config.save_interval_s is not None:
                started.callback(asyncio.create_task(persistence.save_every(config.save_interval_s)).cancel)
        started.callback(asyncio.create_task(_sweep(caches)).cancel)
        await server.start()
        front = _serve_locally(listener, dispatcher, attention)
        started.push_async_callback(_stop, [each for each in (server, front) if each is not None], config.grace_s)
        started.callback(attention.end_sessions)
        started.push_async_callback(health_servicer.enter_graceful_shutdown)
        for name in ("", *names):
            await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
        yield running_server


async def serve(config: ServerConfig) -> None:
    """Runs a server until SIGTERM or SIGINT, and says on stdout when it is ready.

    Raises:
        ConfigError: As `running`.
        UnsavedError: A cache could not be saved at the end.
    """
    keep_freed_memory()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with running(config) as server:
        print(f"attnd serving on {server.host}:{server.port}", flush=True)  # noqa: T201 - what callers wait for
        await stop.wait()
        _log.info("stopping: calls in flight have %s s to end", config.grace_s)
    if server.unsaved:
        raise UnsavedError(f"Not saved, the log has why: {', '.join(server.unsaved)}")


def _grpc_server(dispatcher: Dispatcher, names: list[str]) -> "tuple[grpc.aio.Server, health.aio.HealthServicer]":
    """Returns the gRPC front of the services of these names, and the health that it tells."""
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers(generic_handlers(dispatcher))
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    return server, health_servicer


async def _restore_all(persistence: Persistence, config: ServerConfig) -> None:
    try:
        await persistence.restore_all()
    except OSError as error:
        raise ConfigError(f"The data directory {config.data_dir} cannot be read: {error.strerror}.") from error


async def _save_all(persistence: Persistence, unsaved: list[str]) -> None:
    await persistence.finish()
    unsaved.extend(await persistence.save_all())


async def _stop(fronts: "Sequence[grpc.aio.Server | local_socket.LocalFront]", grace_s: float) -> None:
    await asyncio.gather(*[front.stop(grace_s) for front in fronts])


async def _sweep(caches: CacheRegistry) -> None:
    """Gives the pages of sequences back whose lease is over; they are answered as unknown from that moment on."""
    while True:
        await asyncio.sleep(_SWEEP_INTERVAL_S)
        try:
            caches.sweep()
        except Exception:
            _log.exception("a sweep failed; the next one tries again")


def _serve_locally(
    listener: local_socket.Listener | None, dispatcher: Dispatcher, attention: AttentionHandlers
) -> local_socket.LocalFront | None:
    if listener is None:
        return None
    services = Services(dispatcher=dispatcher, new_plans=attention.new_plans, token=listener.token)
    return local_socket.LocalFront(listener, services)


def _serve_metrics(metrics: Metrics, host: str, port: int) -> Callable[[], None]:
    try:
        return metrics.serve(host, port)
    except OSError as error:
        raise ConfigError(f"Cannot serve metrics on port {port}: {error.strerror}.") from error


def _listen(server: "grpc.aio.Server", config: ServerConfig) -> int:
    try:
        if config.tls is None:
            return server.add_insecure_port(config.address)
        return server.add_secure_port(config.address, tls.server_credentials(config.tls))
    except RuntimeError as error:
        message = f"Cannot listen on {config.address}: is another server there, or the address not this machine's?"
        raise ConfigError(message) from error
