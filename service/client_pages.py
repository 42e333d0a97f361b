"""The pages of a cache that its client manages: what a save in progress must still see, and what a restore lost."""

import asyncio
from typing import Any, Final

import numpy as np
from jaxtyping import Int32

from attnd.kernels.contract import CacheSpec, Implementation, RaggedBatch
from attnd.service.errors import DataLossError
from attnd.service.page_files import LayerPages, Part, put, select

KEPT_BYTES_MAX: Final = 256 << 20
"""Bytes of overwritten pages that a save keeps before calls that write have to wait for its end."""


class ClientPages:
    """Keeps the cache as it was when a save began, though calls go on to write, and refuses what was lost.

    A call that is about to write to a page that the save has not read yet leaves it a copy of what the page held. So
    the save is the cache at one moment: with all that calls had written that ended before, and nothing of the others.

    All methods but `room` are called from the engine's thread.

    Args:
        spec: Shape of the cache.
        implementation: What serves it.
        pages: Its pages.
    """

    def __init__(self, spec: CacheSpec, implementation: Implementation[Any], pages: Any) -> None:
        self._spec = spec
        self._implementation = implementation
        self._pages = pages
        self._damaged: set[tuple[int, int]] = set()
        self._unsaved: np.ndarray | None = None
        self._kept: dict[tuple[int, int], LayerPages] = {}
        self._kept_bytes = 0
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._room.set()

    async def room(self) -> None:
        """Returns when calls may write. Called from the event loop's thread."""
        await self._room.wait()

    # Saves.

    def begin_save(self) -> tuple[tuple[int, int], ...]:
        """Takes the moment that a save shows; returns the layers and pages that are damaged then."""
        self._unsaved = np.ones((self._spec.num_layers, self._spec.num_pages), bool)
        return tuple(sorted(self._damaged))

    def before_write(self, layer: int, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Keeps what pages hold that are about to be written, if a save still needs it."""
        if self._unsaved is None:
            return
        pages = np.unique(page_indices)
        pages = pages[self._unsaved[layer, pages]]
        pages = pages[[(layer, page) not in self._kept for page in pages.tolist()]]
        if not len(pages):
            return
        held = self._read(layer, pages)
        for i, page in enumerate(pages.tolist()):
            kept = select(self._spec, held, np.arange(len(pages)) == i)
            self._kept[layer, page] = kept
            self._kept_bytes += kept.size_bytes
        if self._kept_bytes > KEPT_BYTES_MAX:
            self._loop.call_soon_threadsafe(self._set_room)

    def read_for_save(self, part: Part) -> list[LayerPages]:
        """Returns what pages held when the save began, for each layer of the part. Each page is asked for once."""
        assert self._unsaved is not None, "no save has begun"
        layers = []
        for layer in part.layers:
            held = self._read(layer, part.pages)
            for i, page in enumerate(part.pages.tolist()):
                if (kept := self._kept.pop((layer, page), None)) is not None:
                    put(self._spec, held, i, kept)
                    self._kept_bytes -= kept.size_bytes
            self._unsaved[layer, part.pages] = False
            layers.append(held)
        self._loop.call_soon_threadsafe(self._set_room)
        return layers

    def end_save(self) -> None:
        """Ends a save, whether it is complete or not."""
        self._unsaved = None
        self._kept.clear()
        self._kept_bytes = 0
        self._loop.call_soon_threadsafe(self._set_room)

    # Damage.

    def lose(self, layer: int, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Marks pages whose content was lost."""
        self._damaged.update((layer, page) for page in page_indices.tolist())

    def written(self, layer: int, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Marks pages that hold what a client wrote as whole."""
        if self._damaged:
            self._damaged.difference_update((layer, page) for page in page_indices.tolist())

    def require_whole(self, layer: int, page_indices: Int32[np.ndarray, " n"]) -> None:
        """Raises DataLossError if the content of one of the pages was lost."""
        if not self._damaged:
            return
        lost = [page for page in np.unique(page_indices).tolist() if (layer, page) in self._damaged]
        if lost:
            message = (
                f"What page {lost[0]} held in layer {layer} was lost: its save is damaged ({len(lost)} of the call's "
                "pages are). WritePages makes a page whole again."
            )
            raise DataLossError("PAGES_DAMAGED", message)

    def require_whole_batch(self, layer: int, batch: RaggedBatch) -> None:
        """Raises DataLossError if the content of one of the pages that a call reads was lost."""
        if self._damaged:
            used_slots = -(-batch.kv_lens.astype(np.int64) // self._spec.page_size)
            used = np.arange(batch.page_indices.shape[1]) < used_slots[:, np.newaxis]
            self.require_whole(layer, batch.page_indices[used])

    def _read(self, layer: int, page_indices: Int32[np.ndarray, " n"]) -> LayerPages:
        kv_pages, scales = self._implementation.read(self._pages, layer, page_indices)
        return LayerPages(kv_pages=kv_pages, scales=scales)

    def _set_room(self) -> None:
        if self._kept_bytes > KEPT_BYTES_MAX:
            self._room.clear()
        else:
            self._room.set()
