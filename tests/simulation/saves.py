"""Saves and restores, as the server does them: page by page, while calls go on."""

from dataclasses import replace

import numpy as np

from attnd.service.caches import PagesBy
from attnd.service.errors import ResourceExhaustedError
from attnd.service.snapshots import Snapshot
from attnd.v1 import cache_pb2
from tests.simulation.calls import CallOperations
from tests.simulation.model import KeptCache, Save, require
from tests.simulation.world import TENANTS, Pending

CACHES_MAX = 5


class SaveOperations(CallOperations):
    """Saves and restores."""

    def save(self) -> None:
        """Begins to save a cache, and often changes what is being saved."""
        kept = self.cache()
        if kept.save is None and not kept.unwritten:
            self.world.ask("save", self._saving(kept), kept=kept)
            self.world.loop.step()
        if self.rng.random() < 0.6:
            self.rewrite()

    def save_of_sharers(self) -> None:
        """Saves while a fork holds fewer tokens of a page than its origin; then the origin goes, the fork goes on."""
        kept = self.cache()
        origin = kept.find(self.handle(kept))
        if origin is None or kept.save is not None or kept.unwritten:
            return
        fork = self.send("fork_sequence", cache_pb2.ForkSequenceRequest, kept, sequence=origin.handle)
        self.finish(fork)
        child = None if _failed(fork) else kept.find(fork.task.result().sequence)
        if child is None or kept.deleted:
            return
        length = max(0, max(child.lens) - self.rng.randint(1, 3))
        fields = {"sequence": child.handle, "length": length}
        self.finish(self.send("truncate_sequence", cache_pb2.TruncateSequenceRequest, kept, **fields))
        self.world.ask("save", self._saving(kept), kept=kept)
        self.world.loop.step()
        self.send("release_sequences", cache_pb2.ReleaseSequencesRequest, kept, sequences=[origin.handle])
        self.world.loop.step()
        self._step(kept, [child.handle])

    async def _saving(self, kept: KeptCache) -> None:
        if kept.save is not None or kept.deleted:
            return
        cache = kept.cache
        snapshot = kept.table.seal()
        save = kept.save
        try:
            for page in snapshot.pages[:, np.newaxis]:
                ran = await self.world.engine.run(
                    lambda page=page: [
                        cache.implementation.read(cache.pages, layer, page) for layer in range(cache.spec.num_layers)
                    ]
                )
                save.pages.append(ran.value)
            for _ in range(self.rng.choice([0, 5, 20, 40])):
                await self.world.engine.flush(kept.tenant)
        finally:
            kept.table.unseal(snapshot)
        save.spec = cache.spec
        self.world.saves = [*self.world.saves[-3:], save]

    def restore(self) -> None:
        """Brings a save back, in a cache of its own; some of its sequences may have been damaged."""
        if self.world.saves and len(self.world.caches) < CACHES_MAX:
            self.finish(self.world.ask("restore", self._restoring(self.rng.choice(self.world.saves))))

    async def _restoring(self, save: Save) -> None:
        world, rng = self.world, self.rng
        tenant = rng.choice(TENANTS)
        spec = replace(save.spec, num_pages=max(1, save.spec.num_pages + rng.choice([0, 0, 5, -5])))
        cache = await world.registry.create(self.new_name(), tenant, spec, PagesBy.SERVER, None)
        kept = world.opened(cache, tenant, spec.num_pages)
        states = [self._perhaps_damaged(state) for state in save.snapshot.sequences]
        snapshot = Snapshot(tuple(states))
        pages = dict(zip(save.snapshot.pages.tolist(), save.pages, strict=True))
        world.saves = [*world.saves, Save(snapshot, save.layers)]
        try:
            new = kept.table.adopt(snapshot)
        except (ResourceExhaustedError, MemoryError) as error:
            room = min(kept.table.num_free_pages, world.room_for_pages(kept))
            fits = len(snapshot.pages) <= room and len(states) <= world.room_for_sequences(kept)
            require(not fits or isinstance(error, MemoryError), "a restore was refused that fits")
            require(not len(kept.table), "a restore that failed left sequences behind")
            world.registry.delete(cache.cache_id, tenant)
            world.closed(kept)
            raise
        finally:
            world.saves.pop()
        kept.unwritten = True

        def write():
            for old, page in zip(snapshot.pages.tolist(), new[:, np.newaxis], strict=True):
                for layer, content in enumerate(pages[old]):
                    cache.implementation.write(cache.pages, layer, page, *content)

        def written(done):
            kept.unwritten = not done

        world.engine.post(write, written, lane=tenant)

    def _perhaps_damaged(self, state):
        if self.rng.random() > 0.1:
            return state
        return replace(state, pages=state.pages[:0], damaged=True)


def _failed(pending: Pending) -> bool:
    return pending.task.cancelled() or pending.task.exception() is not None
