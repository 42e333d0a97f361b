"""Writing one save: the cache at one moment, read a few pages at a time while calls go on."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np
from jaxtyping import Int32

from attnd.service.caches import Cache
from attnd.service.engine import Engine
from attnd.service.errors import ResourceExhaustedError
from attnd.service.manifest import Manifest, PageFile
from attnd.service.page_files import LayerPages, Part, encode, page_bytes, parts
from attnd.service.save_store import Draft, SaveStore
from attnd.service.snapshots import SequenceState

_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(slots=True)
class Progress:
    """How far a save or restore is.

    Attributes:
        done_bytes: Bytes of pages that are written, or read.
        total_bytes: Bytes of pages in all.
        cache: The cache, once it is restored.
        changed: Set when one of them has changed, and at the end.
    """

    done_bytes: int = 0
    total_bytes: int = 0
    cache: Cache | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, total_bytes: int) -> None:
        """Says how many bytes there are."""
        self.total_bytes = total_bytes
        self.changed.set()

    def advance(self, size_bytes: int) -> None:
        """Says that some more are done."""
        self.done_bytes += size_bytes
        self.changed.set()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Moment:
    """A cache as it is while it is saved.

    Attributes:
        sequences: Its sequences.
        pages: int32. The pages to save.
        damaged_pages: Layers and pages whose content was lost before.
        read: Returns the pages of a part, for each of its layers. Called on the engine's thread.
    """

    sequences: tuple[SequenceState, ...]
    pages: Int32[np.ndarray, " n"]
    damaged_pages: tuple[tuple[int, int], ...]
    read: Callable[[Part], list[LayerPages]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saving:
    """One save.

    Attributes:
        cache: The cache.
        progress: Told how far it is.
        store: Where saves lie.
        engine: The thread that reads the pages.
        check: Raises what ends the save: it is not wanted any more.
        file_bytes: About how large a file of pages is.
    """

    cache: Cache
    progress: Progress
    store: SaveStore
    engine: Engine
    check: Callable[[], None]
    file_bytes: int

    async def run(self, save_id: str) -> None:
        """Saves the cache, whole or not at all.

        Raises:
            ResourceExhaustedError: The disk is full.
            OSError: A file cannot be written.
            Exception: What `check` raises.
        """
        cache = self.cache
        try:
            draft = await asyncio.to_thread(self.store.begin, cache.tenant, cache.name, cache.cache_id, save_id)
            try:
                manifest = await self._write(draft)
                self.check()
                await asyncio.to_thread(self.store.publish, draft, manifest)
            except BaseException:
                await asyncio.to_thread(self.store.abandon, draft)
                raise
        except OSError as error:
            if error.errno in _DISK_FULL:
                message = f"There is no room to save cache {cache.name!r}."
                raise ResourceExhaustedError("DISK_FULL", message) from error
            raise

    async def _write(self, draft: Draft) -> Manifest:
        async with self._moment() as moment:
            files = [file async for file in self._files(draft, moment)]
        return Manifest(
            id=draft.id,
            spec=self.cache.spec,
            pages_by=self.cache.pages_by.value,
            sequences=moment.sequences,
            damaged_pages=moment.damaged_pages,
            files=tuple(files),
        )

    async def _files(self, draft: Draft, moment: _Moment) -> AsyncIterator[PageFile]:
        spec, lane = self.cache.spec, self.cache.tenant
        self.progress.begin(page_bytes(spec) * spec.num_layers * len(moment.pages))
        for i, part in enumerate(parts(spec, moment.pages, self.file_bytes)):
            self.check()
            layers = await self.engine.run_own(partial(moment.read, part), lane=lane)
            yield await asyncio.to_thread(self._write_file, draft, f"pages-{i:06d}.safetensors", part, layers)
            self.progress.advance(page_bytes(spec) * len(part.layers) * len(part.pages))

    def _write_file(self, draft: Draft, name: str, part: Part, layers: list[LayerPages]) -> PageFile:
        data, file = encode(draft.id, self.cache.spec, name, part, layers)
        self.store.add(draft, name, data)
        return file

    @asynccontextmanager
    async def _moment(self) -> AsyncIterator[_Moment]:
        """Holds the cache's content as it is now until the context ends. Calls go on meanwhile."""
        cache = self.cache
        if cache.sequences is not None:
            snapshot = cache.sequences.seal()
            try:
                yield _Moment(
                    sequences=snapshot.sequences, pages=snapshot.pages, damaged_pages=(), read=self._read_sealed
                )
            finally:
                cache.sequences.unseal(snapshot)
        else:
            client_pages = cache.require_client_pages()
            try:
                damaged_pages = await self.engine.run_own(client_pages.begin_save, lane=cache.tenant)
                yield _Moment(
                    sequences=(),
                    pages=np.arange(cache.spec.num_pages, dtype=np.int32),
                    damaged_pages=damaged_pages,
                    read=client_pages.read_for_save,
                )
            finally:
                await self.engine.run_own(client_pages.end_save, lane=cache.tenant)

    def _read_sealed(self, part: Part) -> list[LayerPages]:
        cache = self.cache
        return [LayerPages(*cache.implementation.read(cache.pages, layer, part.pages)) for layer in part.layers]
