"""What an operator watches: counters in Prometheus' form."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from attnd.service.caches import CacheRegistry
    from attnd.service.engine import Engine

_SECONDS: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_UNSEEN_MAX: Final = 1024
_CALLS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Metrics:
    """The counters of one server.

    Attributes:
        num_calls: Jobs that the engine has run.
        num_batches: Times that it ran one or several of them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.num_calls = 0
        self.num_batches = 0
        self._unseen: deque[tuple[Sequence[int], int]] = deque()
        self.registry.register(_Before(self._observe))
        self._queue = Histogram(
            "attnd_queue_seconds", "Time that a job waited for the engine.", buckets=_SECONDS, registry=self.registry
        )
        self._work = Histogram(
            "attnd_work_seconds", "Time that the engine worked on one batch.", buckets=_SECONDS, registry=self.registry
        )
        self._batch = Histogram(
            "attnd_batch_calls", "Jobs that the engine ran as one.", buckets=_CALLS, registry=self.registry
        )

    def ran(self, queue_ns: Sequence[int], work_ns: int) -> None:
        """Counts one batch. Called on the engine's thread.

        Args:
            queue_ns: Nanoseconds that each of its jobs waited; none if all were dropped.
            work_ns: Nanoseconds that the batch took.
        """
        if not queue_ns:
            return
        self.num_calls += len(queue_ns)
        self.num_batches += 1
        # Sorting into buckets takes a tenth of the server's time for a small call: it waits until somebody looks.
        self._unseen.append((queue_ns, work_ns))
        if len(self._unseen) >= _UNSEEN_MAX:
            self._observe()

    def _observe(self) -> None:
        # Called on the engine's thread and by whoever looks, perhaps at the same time: each batch is taken once.
        while True:
            try:
                queue_ns, work_ns = self._unseen.popleft()
            except IndexError:
                return
            self._batch.observe(len(queue_ns))
            self._work.observe(work_ns / 1e9)
            for waited_ns in queue_ns:
                self._queue.observe(waited_ns / 1e9)

    def watch(self, engine: "Engine", caches: "CacheRegistry") -> None:
        """Adds what is looked up when somebody asks: the depth of the queue, and what caches hold."""
        self.registry.register(_Holdings(engine, caches))

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Answers `GET /metrics` on a thread of its own; returns what ends it, and blocks for up to half a second."""
        server, thread = start_http_server(port, host, registry=self.registry)

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop


class _Before(Collector):
    """Does something before the collectors that are registered after it are asked."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def collect(self) -> Iterator[Metric]:
        self._action()
        return iter(())

    def describe(self) -> Iterator[Metric]:
        return iter(())  # or registering would call collect


class _Holdings(Collector):
    def __init__(self, engine: "Engine", caches: "CacheRegistry") -> None:
        self._engine = engine
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("attnd_queue_depth", "Jobs that wait or run.", value=self._engine.depth)
        free = GaugeMetricFamily("attnd_free_pages", "Pages that a sequence can take.", labels=["tenant", "cache"])
        held = GaugeMetricFamily("attnd_sequences", "Sequences of a cache.", labels=["tenant", "cache"])
        for cache in self._caches.all():
            if cache.sequences is not None:
                free.add_metric([cache.tenant, cache.name], cache.sequences.num_free_pages)
                held.add_metric([cache.tenant, cache.name], len(cache.sequences))
        yield from (free, held)
