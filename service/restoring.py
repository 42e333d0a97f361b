"""Bringing one save back: its pages into a cache that nobody sees yet, damage told apart from what is whole."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from jaxtyping import Int32

from attnd.service.caches import Cache, CacheRegistry, PagesBy
from attnd.service.engine import Engine
from attnd.service.manifest import PageFile
from attnd.service.page_files import LayerPages, decode, page_bytes, select
from attnd.service.save_store import Save, SaveStore
from attnd.service.saving import Progress
from attnd.service.sequences import LEASE_S_MAX, SequenceTable
from attnd.service.snapshots import SequenceState, Snapshot
from attnd.service.world import World

Pages = Int32[np.ndarray, " n"]

_log = logging.getLogger(__name__)


class Restorer:
    """Restores caches, each whole or not at all.

    Args:
        caches: Where restored caches go.
        store: Where saves lie.
        engine: The thread that writes the pages.
        world: Time.
    """

    def __init__(self, caches: CacheRegistry, store: SaveStore, engine: Engine, world: World) -> None:
        self._caches = caches
        self._store = store
        self._engine = engine
        self._world = world

    async def restore(self, tenant: str, name: str, progress: Progress) -> Cache:
        """Restores the newest save of a cache.

        Raises:
            NotFoundError: There is none.
            DataLossError: Nothing of it can be read.
            AlreadyExistsError: The tenant has a cache of this name.
            ResourceExhaustedError: The pages do not fit, or pass the tenant's quota.
            UnsupportedError: No implementation serves the shape.
            FailedPreconditionError: Another version of attnd wrote it, in a way that this one does not know.
            OSError: A file cannot be read now.
        """
        self._caches.require_free_name(name, tenant)
        save = await asyncio.to_thread(self._store.newest, tenant, name)
        manifest = save.manifest
        spec_bytes = page_bytes(manifest.spec)
        progress.begin(
            sum(spec_bytes * (file.end_layer - file.first_layer) * len(file.pages) for file in manifest.files)
        )

        async def fill(cache: Cache) -> None:
            if cache.sequences is None:
                await self._fill_client_pages(cache, save, progress)
            else:
                await self._fill_sequences(cache, cache.sequences, save, progress)

        return await self._caches.restore(name, tenant, manifest.spec, PagesBy(manifest.pages_by), fill)

    async def _fill_client_pages(self, cache: Cache, save: Save, progress: Progress) -> None:
        client_pages = cache.require_client_pages()
        for layer, page in save.manifest.damaged_pages:
            client_pages.lose(layer, np.array([page], np.int32))
        num_lost = 0
        for file in save.manifest.files:
            lost = await self._load(cache, save, file, lambda pages: pages)
            for layer in range(file.first_layer, file.end_layer):
                client_pages.lose(layer, lost)
            num_lost += len(lost)
            progress.advance(_size_bytes(cache, file))
        if num_lost:
            _log.error("%s is damaged: %d pages of cache %r are lost", save.folder, num_lost, cache.name)

    async def _fill_sequences(self, cache: Cache, table: SequenceTable, save: Save, progress: Progress) -> None:
        states = save.manifest.sequences
        try:
            # Their leases begin when the cache is there for its clients, however long it takes until then.
            snapshot = Snapshot(tuple(replace(state, lease_s=LEASE_S_MAX) for state in states))
            old, new = snapshot.pages, table.adopt(snapshot)
            lost: list[Pages] = []
            for file in save.manifest.files:
                lost.append(await self._load(cache, save, file, lambda pages: new[np.searchsorted(old, pages)]))
                progress.advance(_size_bytes(cache, file))
            num_damaged = _damage(table, states, np.concatenate([np.empty(0, np.int32), *lost]))
            if num_damaged:
                _log.error("%s is damaged: %d sequences of cache %r are lost", save.folder, num_damaged, cache.name)
            # Pages are free, and count as such for the tenant, only when they are cleared.
            await self._engine.flush(cache.tenant)
        except BaseException:
            table.close()
            await self._engine.flush(cache.tenant)
            raise
        leases = {state.handle: state.lease_s for state in states}
        for sequence in table:
            sequence.lease_s = leases[sequence.restored_from]
            sequence.expires_at = self._world.now() + sequence.lease_s

    async def _load(self, cache: Cache, save: Save, file: PageFile, place: Callable[[Pages], Pages]) -> Pages:
        """Writes the pages of a file that are whole to their places in the cache; returns the others' ids."""
        spec, saved = cache.spec, np.array(file.pages, np.int32)

        def read() -> tuple[list[LayerPages], np.ndarray]:
            return decode(save.manifest.id, spec, file, self._store.read(save, file))

        layers, whole = await asyncio.to_thread(read)
        targets = place(saved[whole])

        def write() -> None:
            for layer, held in enumerate(layers, file.first_layer):
                pages = select(spec, held, whole)
                cache.implementation.write(cache.pages, layer, targets, pages.kv_pages, pages.scales)

        if whole.any():
            await self._engine.run_own(write, lane=cache.tenant)
        lost: Pages = saved[~whole]
        return lost


def _damage(table: SequenceTable, states: tuple[SequenceState, ...], lost: Pages) -> int:
    """Puts sequences without pages in the place of those that held lost pages; returns how many there are."""
    handles = {sequence.restored_from: sequence.handle for sequence in table}
    hit = [state for state in states if np.isin(state.pages, lost).any()]
    table.release([handles[state.handle] for state in hit])
    no_pages = np.empty(0, np.int32)
    table.adopt(Snapshot(tuple(replace(state, pages=no_pages, damaged=True, lease_s=LEASE_S_MAX) for state in hit)))
    return len(hit)


def _size_bytes(cache: Cache, file: PageFile) -> int:
    return page_bytes(cache.spec) * (file.end_layer - file.first_layer) * len(file.pages)
