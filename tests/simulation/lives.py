"""Which caches there are and what of them is saved, told by what passes the registry and the store of saves."""

from dataclasses import replace
from types import SimpleNamespace

from attnd.service.errors import NotFoundError
from tests.simulation.model import KeptCache, Save, require
from tests.simulation.recorder import Recorder
from tests.simulation.tokens import Codec


class Lives:
    """Records each table from the moment that it is made: a cache that is being restored is not to be seen yet.

    Attributes:
        seen: The caches that callers can find.
        unseen: Caches that are being made.
        ghosts: Deleted caches that calls, or cleaning, may still use.
        quotas: By identity, each quota and the caches that it counts.
        published: The newest save of each tenant and name.
    """

    def __init__(self, world) -> None:
        self._world = world
        self.seen: list[KeptCache] = []
        self.unseen: list[KeptCache] = []
        self.ghosts: list[KeptCache] = []
        self.quotas = {}
        self.published: dict[tuple[str, str], Save] = {}
        self._sealed: dict[int, Save] = {}
        self._registry, self._store = world.registry, world.persistence._store
        self._make_table, self._restore = self._registry._sequences, self._registry.restore
        self._registry._sequences, self._registry.restore = self.make_table, self.restore
        self._publish, self._newest, self._remove = self._store.publish, self._store.newest, self._store.remove
        self._store.publish, self._store.newest, self._store.remove = self.publish, self.newest, self.remove

    # Caches.

    def make_table(self, tenant, memory, implementation, pages):
        table = self._make_table(tenant, memory, implementation, pages)
        spec, quota = replace(memory, num_pages=memory.num_pages - 1), table._quota
        kept = KeptCache(SimpleNamespace(spec=spec, pages=pages, quota=quota), table, tenant, Codec(spec))
        Recorder(kept, self._world)
        self.unseen.append(kept)
        self.quotas.setdefault(id(quota), (quota, []))[1].append(kept)
        return table

    async def restore(self, name, tenant, spec, pages_by, fill):
        async def filled(cache):
            kept = next(each for each in self.unseen if each.table is cache.sequences)
            kept.restored = self.published[tenant, name]
            await fill(cache)

        return await self._restore(name, tenant, spec, pages_by, filled)

    def update(self) -> None:
        """Sees what has come into being, and what is gone."""
        caches = {id(cache.sequences): cache for cache in self._registry._by_id.values()}
        for kept in [kept for kept in self.unseen if id(kept.table) in caches]:
            self.unseen.remove(kept)
            kept.cache = caches[id(kept.table)]
            kept.touched = True
            if not kept.deleted:
                self._see(kept)
        for lists in (self.seen, self.unseen):
            for kept in [kept for kept in lists if kept.deleted]:
                lists.remove(kept)
                self.ghosts.append(kept)

    def _see(self, kept: KeptCache) -> None:
        self.seen.append(kept)
        for sequence in kept.live.values():
            # The leases of what is restored begin when it can be seen.
            state, _ = kept.restored.by_handle[sequence.real.restored_from]
            require(sequence.real.lease_s == state.lease_s, "a lease of %s came back as another", state.lease_s)
            sequence.lease_s, sequence.renewed_at = state.lease_s, self._world.now()

    def forget_ghosts(self) -> None:
        """Forgets deleted caches; nothing uses them any more."""
        self.ghosts.clear()
        self.quotas = {
            key: (quota, [each for each in caches if not each.deleted]) for key, (quota, caches) in self.quotas.items()
        }

    # Saves.

    def sealed(self, save: Save) -> None:
        """Notes the beginning of a save."""
        self._sealed[id(save.snapshot.sequences)] = save

    def publish(self, draft, manifest):
        self._publish(draft, manifest)
        self.published[draft.id.tenant, draft.id.name] = self._sealed[id(manifest.sequences)]

    def newest(self, tenant, name):
        with self._world.noting():
            try:
                save = self._newest(tenant, name)
            except NotFoundError:
                require((tenant, name) not in self.published, "a save was not found")
                raise
            handles = [state.handle for state in save.manifest.sequences]
            require(handles == list(self.published[tenant, name].by_handle), "another save was found")
        return save

    def remove(self, tenant, name):
        self._remove(tenant, name)
        self.published.pop((tenant, name), None)
