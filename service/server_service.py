"""ServerService: what the server is and can do."""

import importlib.metadata
import time

import jax
import psutil

from attnd.kernels import registry
from attnd.service.caches import CacheRegistry
from attnd.service.config import ServerConfig
from attnd.service.dispatch import Caller
from attnd.service.engine import Engine
from attnd.service.local_socket import Listener
from attnd.service.metrics import Metrics
from attnd.service.sequences import SEQUENCES_MAX
from attnd.v1 import limits
from attnd.v1 import server_pb2 as pb


class ServerHandlers:
    """Handlers of attnd.v1.ServerService."""

    def __init__(
        self,
        config: ServerConfig,
        caches: CacheRegistry,
        engine: Engine,
        metrics: Metrics,
        listener: Listener | None,
    ) -> None:
        self._config = config
        self._caches = caches
        self._engine = engine
        self._metrics = metrics
        self._local_socket = None if listener is None else listener.offer
        self._started_at = time.monotonic()
        self._process = psutil.Process()

    async def get_server_info(self, _request: pb.GetServerInfoRequest, _caller: Caller) -> pb.GetServerInfoResponse:
        """Describes the server."""
        return pb.GetServerInfoResponse(
            version=importlib.metadata.version("attnd"),
            jax_version=jax.__version__,
            incarnation_id=self._caches.incarnation_id,
            platform=jax.default_backend(),
            devices=[pb.Device(id=device.id, kind=device.device_kind) for device in jax.devices()],
            implementations=[pb.Implementation(name=name) for name in registry.names()],
            limits=pb.Limits(
                message_bytes_max=limits.MESSAGE_BYTES_MAX,
                queue_depth_max=self._config.queue_depth_max,
                caches_size_bytes_max=self._config.cache_memory_bytes,
                sequences_max=SEQUENCES_MAX,
                batch_calls_max=self._config.batch_calls_max,
                lease_s=self._config.lease_s,
            ),
            num_compiled_programs=self._caches.num_compiled_programs,
            caches_size_bytes=self._caches.size_bytes,
            resident_bytes=self._process.memory_info().rss,
            queue_depth=self._engine.depth,
            num_calls=self._metrics.num_calls,
            num_batches=self._metrics.num_batches,
            uptime_s=time.monotonic() - self._started_at,
            local_socket=self._local_socket,
        )
