"""Saves and restores by the server's own code, over a disk in memory, while calls go on."""

from attnd.v1 import cache_pb2
from tests.simulation.calls import CallOperations
from tests.simulation.model import KeptCache
from tests.simulation.world import Pending

CACHES_MAX = 5


class SaveOperations(CallOperations):
    """Saves and restores."""

    def save(self) -> None:
        """Begins to save a cache, and often changes what is being saved."""
        kept = self.cache()
        self._save(kept)
        if self.rng.random() < 0.6:
            self.rewrite()

    def _save(self, kept: KeptCache) -> None:
        request = cache_pb2.SaveCacheRequest(cache_id=kept.cache.cache_id)
        answers = self.world.handlers.save_cache(request, self.world.caller(kept.tenant))
        self.world.ask("save", _last(answers), kept=kept)
        self.world.loop.step()

    def save_of_sharers(self) -> None:
        """Saves while a fork holds fewer tokens of a page than its origin; then the origin goes, the fork goes on."""
        kept = self.cache()
        origin = kept.find(self.handle(kept))
        if origin is None or kept.save is not None:
            return
        fork = self.send("fork_sequence", cache_pb2.ForkSequenceRequest, kept, sequence=origin.handle)
        self.finish(fork)
        child = None if _failed(fork) else kept.find(fork.task.result().sequence)
        if child is None or kept.deleted:
            return
        length = max(0, max(child.lens) - self.rng.randint(1, 3))
        fields = {"sequence": child.handle, "length": length}
        self.finish(self.send("truncate_sequence", cache_pb2.TruncateSequenceRequest, kept, **fields))
        self._save(kept)
        self.send("release_sequences", cache_pb2.ReleaseSequencesRequest, kept, sequences=[origin.handle])
        self.world.loop.step()
        self._step(kept, [child.handle])

    def restore(self) -> None:
        """Brings a save back; if its cache is there still, deletes that first, most of the times."""
        if self.world.lives.published and len(self.world.caches) + len(self.world.lives.unseen) <= CACHES_MAX:
            self._restore(*self.rng.choice(list(self.world.lives.published)))

    def _restore(self, tenant: str, name: str) -> None:
        world, rng = self.world, self.rng
        kept = next((each for each in world.caches if (each.tenant, each.cache.name) == (tenant, name)), None)
        if kept is not None and rng.random() < 0.9:
            self.delete(kept, keep_saves=True)
            world.loop.step()
        request = cache_pb2.RestoreCacheRequest(name=name)
        world.ask("restore", _last(world.handlers.restore_cache(request, world.caller(tenant))))

    def delete(self, kept: KeptCache, *, keep_saves: bool) -> None:
        """Deletes a cache, whatever is at work on it."""
        kept.deleting = True
        request = cache_pb2.DeleteCacheRequest(cache_id=kept.cache.cache_id, keep_saves=keep_saves)
        handler = self.world.handlers.delete_cache(request, self.world.caller(kept.tenant))
        self.world.ask("delete_cache", handler, kept=kept)

    def damage(self) -> None:
        """Turns a bit of a save on the disk, and often brings it back."""
        world, rng = self.world, self.rng
        if not world.lives.published:
            return
        tenant, name = rng.choice(list(world.lives.published))
        folder = world.persistence._store._cache(tenant, name)
        saves = [each for each in world.files.names(folder) if not each.startswith(".")]
        files = sorted(each for save in saves for each in world.files.names(folder / save) if each.startswith("pages"))
        if len(saves) != 1 or not files:
            return
        file = world.files._find(folder / saves[0] / rng.choice(files))
        data = bytearray(file.data)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        file.data = file.synced = bytes(data)
        world.lives.published[tenant, name].hit = True
        if rng.random() < 0.7:
            self._restore(tenant, name)


async def _last(answers):
    return [answer async for answer in answers][-1]


def _failed(pending: Pending) -> bool:
    return pending.task.cancelled() or pending.task.exception() is not None
