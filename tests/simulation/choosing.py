"""What every kind of operation chooses from."""

from tests.simulation.model import KeptCache
from tests.simulation.world import Pending, SimulatedWorld


class Choosing:
    """Chooses caches and handles, by the chance of a world.

    Args:
        world: The world.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        self.world = world
        self.rng = world.rng
        self._num_names = 0

    def cache(self) -> KeptCache:
        """Returns a cache."""
        caches = self.world.caches
        saving = [kept for kept in caches if kept.save is not None]
        if saving and self.rng.random() < 0.5:
            return saving[0]
        alive = [kept for kept in caches if kept.live] if self.rng.random() > 0.1 else caches
        return self.rng.choice(alive or caches)

    def handle(self, kept: KeptCache) -> bytes:
        """Returns a handle, mostly one that is known."""
        chance = self.rng.random()
        if chance > 0.04 and kept.live:
            return self.rng.choice(list(kept.live))
        if chance > 0.015 and kept.by_handle:
            return self.rng.choice(list(kept.by_handle))
        return self.rng.choice(list(self.cache().by_handle) or [self.rng.randbytes(16)])

    def new_name(self) -> str:
        self._num_names += 1
        return f"cache-{self._num_names}"

    def send(self, method: str, request_class, kept: KeptCache | None = None, **fields) -> Pending:
        """Sends a request for a cache to the cache service."""
        kept = kept or self.cache()
        request = request_class(cache_id=kept.cache.cache_id, **fields)
        handler = getattr(self.world.handlers, method)
        return self.world.ask(method, handler(request, self.world.caller(kept.tenant)), kept=kept)

    def finish(self, pending: Pending) -> None:
        """Works until a request is answered."""
        while not pending.task.done():
            self.world.loop.step()
            self.world.engine.step()
        self.world.reap()
