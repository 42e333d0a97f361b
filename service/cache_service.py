"""CacheService: one handler for each RPC; errors meet the table in `status.py`."""

import math
from collections.abc import AsyncIterator
from typing import Protocol

import numpy as np

from attnd.kernels import validation
from attnd.kernels.stored import stored
from attnd.service import decode, encode
from attnd.service.caches import CacheRegistry
from attnd.service.dispatch import Caller, Reply
from attnd.service.engine import Engine
from attnd.service.errors import FailedPreconditionError, ResourceExhaustedError
from attnd.service.persistence import Persistence
from attnd.service.sequences import SequenceTable
from attnd.service.world import World
from attnd.v1 import cache_pb2 as pb
from attnd.v1 import limits


class _NamesACache(Protocol):
    @property
    def cache_id(self) -> str: ...


class CacheHandlers:
    """Handlers of attnd.v1.CacheService."""

    def __init__(
        self, caches: CacheRegistry, engine: Engine, world: World, persistence: Persistence | None = None
    ) -> None:
        self._caches = caches
        self._engine = engine
        self._world = world
        self._persistence = persistence

    async def create_cache(self, request: pb.CreateCacheRequest, caller: Caller) -> pb.CreateCacheResponse:
        """Creates a cache and compiles its kernels."""
        spec, pages_by = decode.cache_spec(request.spec), decode.pages_by(request.pages_by)
        num_q_heads = request.num_q_heads if request.HasField("num_q_heads") else None
        cache = await self._caches.create(request.name, caller.tenant, spec, pages_by, num_q_heads)
        return pb.CreateCacheResponse(cache=encode.cache(cache))

    async def get_cache(self, request: pb.GetCacheRequest, caller: Caller) -> pb.GetCacheResponse:
        """Returns a cache by name."""
        return pb.GetCacheResponse(cache=encode.cache(self._caches.by_name(request.name, caller.tenant)))

    async def list_caches(self, _request: pb.ListCachesRequest, caller: Caller) -> pb.ListCachesResponse:
        """Lists all caches."""
        return pb.ListCachesResponse(caches=[encode.cache(cache) for cache in self._caches.of(caller.tenant)])

    async def delete_cache(self, request: pb.DeleteCacheRequest, caller: Caller) -> pb.DeleteCacheResponse:
        """Deletes a cache, and its saves unless they are to stay."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        if self._persistence is None or request.keep_saves:
            self._caches.delete(cache.cache_id, caller.tenant)
        else:
            await self._persistence.delete(cache)
        await self._engine.flush(caller.tenant)  # its pages are free only once they are cleared
        return pb.DeleteCacheResponse()

    async def write_pages(self, request: pb.WritePagesRequest, caller: Caller) -> pb.WritePagesResponse:
        """Writes whole pages of one layer."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        client_pages = cache.require_client_pages()
        layer = validation.layer_index(cache.spec, request.layer)
        pages, scales = decode.array(caller.arrays, "kv_pages"), caller.arrays.get("scales")
        page_indices = decode.array(caller.arrays, "page_indices")
        validation.page_writes(cache.spec, page_indices, pages, scales)

        def write() -> None:
            client_pages.before_write(layer, page_indices)
            cache.implementation.write(cache.pages, layer, page_indices, *stored(cache.spec, pages, scales))
            client_pages.written(layer, page_indices)

        await client_pages.room()
        await self._engine.run(write, lane=caller.tenant, expires_at=caller.expires_at)
        return pb.WritePagesResponse()

    async def read_pages(self, request: pb.ReadPagesRequest, caller: Caller) -> Reply:
        """Reads whole pages of one layer."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        client_pages = cache.require_client_pages()
        layer = validation.layer_index(cache.spec, request.layer)
        page_indices = validation.page_reads(cache.spec, decode.array(caller.arrays, "page_indices"))
        size_bytes = math.prod(cache.spec.pages_shape(len(page_indices))) * cache.spec.dtype.itemsize
        _require_message_fits(size_bytes)

        def read() -> tuple[np.ndarray, np.ndarray | None]:
            client_pages.require_whole(layer, page_indices)
            return cache.implementation.read(cache.pages, layer, page_indices)

        return encode.pages(*(await self._engine.run(read, lane=caller.tenant, expires_at=caller.expires_at)).value)

    async def create_sequences(self, request: pb.CreateSequencesRequest, caller: Caller) -> pb.CreateSequencesResponse:
        """Creates empty sequences."""
        lease_s = request.lease_s if request.HasField("lease_s") else None
        handles = self._table(request, caller).create(request.num_sequences, lease_s)
        return pb.CreateSequencesResponse(sequences=handles)

    async def fork_sequence(self, request: pb.ForkSequenceRequest, caller: Caller) -> pb.ForkSequenceResponse:
        """Creates a sequence that holds another's tokens."""
        return pb.ForkSequenceResponse(sequence=self._table(request, caller).fork(request.sequence))

    async def truncate_sequence(
        self, request: pb.TruncateSequenceRequest, caller: Caller
    ) -> pb.TruncateSequenceResponse:
        """Shortens a sequence."""
        await self._table(request, caller).truncate(request.sequence, request.length)
        await self._engine.flush(caller.tenant)  # pages are free only once they are cleared
        return pb.TruncateSequenceResponse()

    async def release_sequences(
        self, request: pb.ReleaseSequencesRequest, caller: Caller
    ) -> pb.ReleaseSequencesResponse:
        """Releases sequences and their pages."""
        self._table(request, caller).release(request.sequences)
        await self._engine.flush(caller.tenant)
        return pb.ReleaseSequencesResponse()

    async def list_sequences(self, request: pb.ListSequencesRequest, caller: Caller) -> pb.ListSequencesResponse:
        """Lists the sequences of a cache."""
        now = self._world.now()
        sequences = [encode.sequence(sequence, now) for sequence in self._table(request, caller)]
        return pb.ListSequencesResponse(sequences=sequences)

    async def keep_alive(self, request: pb.KeepAliveRequest, caller: Caller) -> pb.KeepAliveResponse:
        """Renews the leases of sequences."""
        self._table(request, caller).keep_alive(request.sequences)
        return pb.KeepAliveResponse()

    async def save_cache(self, request: pb.SaveCacheRequest, caller: Caller) -> AsyncIterator[pb.SaveCacheResponse]:
        """Saves a cache and tells how far it is."""
        cache = self._caches.by_id(request.cache_id, caller.tenant)
        async for progress in self._require_persistence().save(cache):
            yield pb.SaveCacheResponse(saved_bytes=progress.done_bytes, total_bytes=progress.total_bytes)

    async def restore_cache(
        self, request: pb.RestoreCacheRequest, caller: Caller
    ) -> AsyncIterator[pb.RestoreCacheResponse]:
        """Restores a cache and tells how far it is."""
        async for progress in self._require_persistence().restore(caller.tenant, request.name):
            yield pb.RestoreCacheResponse(
                restored_bytes=progress.done_bytes,
                total_bytes=progress.total_bytes,
                cache=None if progress.cache is None else encode.cache(progress.cache),
            )

    def _require_persistence(self) -> Persistence:
        if self._persistence is None:
            message = "The server has no data directory: it was started without --data-dir."
            raise FailedPreconditionError("NO_DATA_DIR", message)
        return self._persistence

    def _table(self, request: _NamesACache, caller: Caller) -> SequenceTable:
        return self._caches.by_id(request.cache_id, caller.tenant).require_sequences()


def _require_message_fits(size_bytes: int) -> None:
    if size_bytes > limits.MESSAGE_BYTES_MAX:
        most = limits.MESSAGE_BYTES_MAX
        message = f"The pages take {size_bytes} bytes, a message holds at most {most}: read fewer at a time."
        raise ResourceExhaustedError("MESSAGE_TOO_LARGE", message)
