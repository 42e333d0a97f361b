"""Saves and restores as the server sees them: one at a time for each cache, at work to the end whoever asked."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from attnd.kernels.errors import UnsupportedError
from attnd.service.caches import Cache, CacheRegistry, is_legal_name
from attnd.service.engine import Engine
from attnd.service.errors import NotFoundError, RefusedError
from attnd.service.files import Files
from attnd.service.page_files import FILE_BYTES
from attnd.service.restoring import Restorer
from attnd.service.save_store import SaveStore
from attnd.service.saving import Progress, Saving
from attnd.service.world import World

_log = logging.getLogger(__name__)


class Persistence:
    """Saves caches to a data directory and restores them from it. Used from the event loop's thread.

    Args:
        folder: The data directory.
        files: How files are read and written.
        caches: The caches.
        engine: The thread that touches their pages.
        world: Time and chance.
        file_bytes: About how large a file of pages is.
    """

    def __init__(
        self,
        folder: Path,
        files: Files,
        caches: CacheRegistry,
        engine: Engine,
        world: World,
        *,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._store = SaveStore(folder, files)
        self._caches = caches
        self._engine = engine
        self._world = world
        self._file_bytes = file_bytes
        self._restorer = Restorer(caches, self._store, engine, world)
        self._turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._deleting: set[str] = set()

    async def save(self, cache: Cache) -> AsyncIterator[Progress]:
        """Saves a cache as it is when its turn comes, and says how far it is. It goes on if nobody listens any more.

        Raises:
            NotFoundError: The cache is deleted meanwhile.
            ResourceExhaustedError: The disk is full.
            OSError: A file cannot be written.
        """

        def check() -> None:
            if cache.cache_id in self._deleting or not self._caches.holds(cache):
                raise NotFoundError("CACHE_NOT_FOUND", f"Cache {cache.name!r} was deleted while it was saved.")

        async def work(progress: Progress) -> None:
            check()
            saving = Saving(
                cache=cache,
                progress=progress,
                store=self._store,
                engine=self._engine,
                check=check,
                file_bytes=self._file_bytes,
            )
            await saving.run(self._world.token(16).hex())

        async for progress in self._follow((cache.tenant, cache.name), work):
            yield progress

    async def restore(self, tenant: str, name: str) -> AsyncIterator[Progress]:
        """Restores the newest save of a cache, and says how far it is; the last time, with the cache.

        Raises:
            NotFoundError: There is none.
            Exception: As `Restorer.restore`.
        """
        if not is_legal_name(name):
            raise NotFoundError("SAVE_NOT_FOUND", f"There is no save of a cache named {name[:128]!r}.")

        async def work(progress: Progress) -> None:
            progress.cache = await self._restorer.restore(tenant, name, progress)

        async for progress in self._follow((tenant, name), work):
            yield progress

    async def delete(self, cache: Cache) -> None:
        """Deletes a cache and its saves. It goes on if the caller is gone.

        Raises:
            NotFoundError: It was deleted meanwhile.
            OSError: The saves cannot be removed; the cache is there still.
        """

        async def work(_: Progress) -> None:
            self._caches.by_id(cache.cache_id, cache.tenant)
            await asyncio.to_thread(self._store.remove, cache.tenant, cache.name)
            self._caches.delete(cache.cache_id, cache.tenant)

        self._deleting.add(cache.cache_id)
        try:
            async for _ in self._follow((cache.tenant, cache.name), work):
                pass
        finally:
            self._deleting.discard(cache.cache_id)

    async def save_all(self) -> list[str]:
        """Saves every cache; returns the names of those that could not be saved, the log has why."""
        unsaved = []
        for cache in self._caches.all():
            try:
                async for _ in self.save(cache):
                    pass
            except NotFoundError:
                pass  # it was deleted
            except Exception:
                _log.exception("cache %r of tenant %r could not be saved", cache.name, cache.tenant)
                unsaved.append(cache.name)
            else:
                _log.info("cache %r of tenant %r is saved", cache.name, cache.tenant)
        return unsaved

    async def save_every(self, interval_s: float) -> None:
        """Saves every cache again and again."""
        while True:
            await asyncio.sleep(interval_s)
            await self.save_all()

    async def restore_all(self) -> None:
        """Removes leftovers and restores every cache that has a save. The log has what cannot be restored."""
        await asyncio.to_thread(self._store.sweep)
        for each in await asyncio.to_thread(self._store.caches):
            try:
                async for _ in self.restore(each.tenant, each.name):
                    pass
            except (RefusedError, UnsupportedError) as error:
                _log.error("cache %r of tenant %r is not restored: %s", each.name, each.tenant, error)
            except Exception:
                _log.exception("cache %r of tenant %r is not restored", each.name, each.tenant)
            else:
                _log.info("cache %r of tenant %r is restored", each.name, each.tenant)

    async def finish(self) -> None:
        """Returns when what is at work has ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _follow(
        self, turn: tuple[str, str], work: Callable[[Progress], Coroutine[Any, Any, None]]
    ) -> AsyncIterator[Progress]:
        lock = self._turns.get(turn)
        if lock is None:
            lock = self._turns[turn] = asyncio.Lock()
        await lock.acquire()
        progress = Progress()

        async def carry_out() -> None:
            try:
                await work(progress)
            finally:
                lock.release()
                progress.changed.set()

        # A task of its own: a caller that is gone in the middle must not leave half of it.
        task = asyncio.create_task(carry_out())
        self._tasks.add(task)
        task.add_done_callback(self._done)
        while not task.done():
            await progress.changed.wait()
            progress.changed.clear()
            if not task.done():
                yield progress
        await task
        yield progress

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("a save or restore failed: %r", error)
