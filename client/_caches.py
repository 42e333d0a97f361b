"""The calls about the server, its caches, their pages and their sequences.

Each function is a public method of the clients, its first argument the object that it is a method of; `_sync.py` and
`_aio.py` only run what it returns.
"""

from __future__ import annotations  # help() shows names, not what ArrayLike stands for

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, SupportsFloat, SupportsIndex

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from attnd.client import _info, _messages
from attnd.client._calls import CacheHandle, Call, SequenceHandle, handles_of
from attnd.client._errors import InvalidArgumentError
from attnd.client._info import CacheInfo, Layout, PagesBy, SequenceInfo, ServerInfo
from attnd.v1 import cache_pb2, server_pb2

# JAX's int8 quantization maps the largest magnitude of a token and head to this.
_INT8_SCALE: Final = np.float32(127.5)

OnProgress = Callable[[int, int], object]


def server_info(client: object) -> Call[ServerInfo]:  # noqa: ARG001 (a method of the clients)
    """Returns what the server says about itself: version, devices, limits, counters."""
    return Call(method="GetServerInfo", request=server_pb2.GetServerInfoRequest(), read=_server)


def create_cache(
    client: object,  # noqa: ARG001
    name: str,
    *,
    num_layers: SupportsIndex,
    num_pages: SupportsIndex,
    page_size: SupportsIndex,
    num_kv_heads: SupportsIndex,
    head_dim: SupportsIndex,
    dtype: npt.DTypeLike,
    pages_by: PagesBy = "client",
    layout: Layout = "interleaved",
    num_q_heads: SupportsIndex | None = None,
    timeout_s: float | None = None,
) -> Call[CacheInfo]:
    """Creates a cache: zeroed pages for all layers of one model, isolated from every other cache.

    Args:
        client: This client.
        name: Unique on the server: 1 to 128 characters of [A-Za-z0-9._-], beginning with a letter or digit.
        num_layers: Layers.
        num_pages: Pages of each layer.
        page_size: Tokens of a page.
        num_kv_heads: Heads of keys, and of values.
        head_dim: Elements of a head.
        dtype: float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, by name or as a dtype.
        pages_by: `client`: calls carry page tables. `server`: the server gives pages to sequences.
        layout: `interleaved`: [num_pages, page_size, 2 * num_kv_heads, head_dim], keys at even and values at odd
            head index, for `ragged_paged_attention`. `split`: keys and values apart, each
            [num_kv_heads, num_pages, page_size, head_dim], for `paged_attention`.
        num_q_heads: Query heads of the calls to come, whose kernels are then compiled now. None: at the first call.
        timeout_s: Seconds to wait for the server, which may have to compile. None: the client's.

    Raises:
        InvalidArgumentError: A size, name or dtype that no server accepts.
        AlreadyExistsError: The name is taken.
        ResourceExhaustedError: The pages do not fit into the server's limit.
        UnimplementedError: No implementation of the server can serve the shape.
    """
    spec = cache_pb2.CacheSpec(
        layout=_info.layout_number(layout),
        num_layers=_messages.integer(num_layers, "num_layers"),
        num_pages=_messages.integer(num_pages, "num_pages"),
        page_size=_messages.integer(page_size, "page_size"),
        num_kv_heads=_messages.integer(num_kv_heads, "num_kv_heads"),
        head_dim=_messages.integer(head_dim, "head_dim"),
        dtype=_messages.dtype_name(dtype),
    )
    request = cache_pb2.CreateCacheRequest(
        name=_messages.text(name, "name"),
        spec=spec,
        pages_by=_info.pages_by_number(pages_by),
        num_q_heads=_messages.optional_integer(num_q_heads, "num_q_heads", bits=32),
    )
    return Call(method="CreateCache", request=request, read=_cache, timeout_s=timeout_s)


def get_cache(client: object, name: str) -> Call[CacheInfo]:  # noqa: ARG001
    """Returns a cache by name.

    Raises:
        NotFoundError: There is none.
    """
    request = cache_pb2.GetCacheRequest(name=_messages.text(name, "name"))
    return Call(method="GetCache", request=request, read=_cache)


def list_caches(client: object) -> Call[list[CacheInfo]]:  # noqa: ARG001
    """Returns all caches of the tenant, ordered by name."""
    return Call(
        method="ListCaches",
        request=cache_pb2.ListCachesRequest(),
        read=lambda response, _: [_info.cache_info(each) for each in response.caches],
    )


def restore_cache(
    client: object,  # noqa: ARG001
    name: str,
    *,
    on_progress: OnProgress | None = None,
    timeout_s: float | None = None,
) -> Call[CacheInfo]:
    """Restores a cache from its newest save in the server's data directory, as a server does at its start.

    The cache and its sequences have new handles: `{each.restored_from: each for each in cache.list_sequences()}`.

    Args:
        client: This client.
        name: Its name.
        on_progress: Told how many bytes of pages, of how many, are read.
        timeout_s: Seconds to wait for the end; the restore goes on without its caller. None: the client's.

    Raises:
        NotFoundError: There is no save of it.
        DataLossError: Nothing of its save can be read.
        AlreadyExistsError: There is a cache of this name.
        ResourceExhaustedError: The pages do not fit into the server's limit, or pass the tenant's quota.
        FailedPreconditionError: The server has no data directory.
    """
    return Call(
        method="RestoreCache",
        request=cache_pb2.RestoreCacheRequest(name=_messages.text(name, "name")),
        read=_cache,
        timeout_s=timeout_s,
        on_answer=None if on_progress is None else lambda each: on_progress(each.restored_bytes, each.total_bytes),
    )


def save(cache: CacheHandle, *, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Call[None]:
    """Saves the cache to the server's data directory, as it is at one moment. When it returns, the save is on disk.

    Args:
        cache: This cache.
        on_progress: Told how many bytes of pages, of how many, are written.
        timeout_s: Seconds to wait for the end; the save goes on without its caller. None: the client's.

    Raises:
        NotFoundError: The cache is gone.
        FailedPreconditionError: The server has no data directory.
        ResourceExhaustedError: The disk is full.
    """
    return Call(
        method="SaveCache",
        request=cache_pb2.SaveCacheRequest(cache_id=cache.info.cache_id),
        read=_nothing,
        timeout_s=timeout_s,
        incarnation_id=cache.incarnation_id,
        on_answer=None if on_progress is None else lambda each: on_progress(each.saved_bytes, each.total_bytes),
    )


def delete_cache(cache: CacheHandle, *, keep_saves: bool = False) -> Call[None]:
    """Deletes the cache, its pages and its sequences, once the calls that use it have ended, and its saves.

    Args:
        cache: This cache.
        keep_saves: Whether its saves stay, so that `restore_cache`, or the server's next start, brings it back.

    Raises:
        NotFoundError: It is gone already.
    """
    request = cache_pb2.DeleteCacheRequest(
        cache_id=cache.info.cache_id, keep_saves=_messages.flag(keep_saves, "keep_saves")
    )
    return Call(method="DeleteCache", request=request, read=_nothing, incarnation_id=cache.incarnation_id)


def write_pages(
    cache: CacheHandle,
    layer: SupportsIndex,
    page_indices: npt.ArrayLike,
    kv_pages: npt.ArrayLike,
    scales: npt.ArrayLike | None = None,
) -> Call[None]:
    """Writes whole pages of one layer. A repeated call writes the same bytes to the same place.

    Args:
        cache: This cache.
        layer: Layer, in [0, num_layers).
        page_indices: int32 [n]. Page ids, in [0, num_pages), each at most once.
        kv_pages: Interleaved caches: [n, page_size, 2 * num_kv_heads, head_dim], keys at even and values at odd head
            index. Split caches: [2, num_kv_heads, n, page_size, head_dim], keys, then values. Cast to the cache's
            dtype; an int8 split cache quantizes finite floats per token and head, or takes int8 with `scales`.
        scales: float32 [2, num_kv_heads, n, page_size, 1], with int8 pages of a split cache only:
            value = int8 * scale / 127.5.

    Raises:
        InvalidArgumentError: A page id, shape or dtype is wrong, or a number is not finite where it must be.
        FailedPreconditionError: The server manages the cache's pages.
    """
    arrays = {
        "page_indices": _messages.integers_array(page_indices, "page_indices"),
        "kv_pages": _messages.values_array(kv_pages, "kv_pages"),
    }
    if scales is not None:
        arrays["scales"] = _messages.values_array(scales, "scales")
    request = cache_pb2.WritePagesRequest(cache_id=cache.info.cache_id, layer=_messages.integer(layer, "layer"))
    return Call(method="WritePages", request=request, arrays=arrays, read=_nothing, incarnation_id=cache.incarnation_id)


def read_pages(
    cache: CacheHandle, layer: SupportsIndex, page_indices: npt.ArrayLike, return_scales: bool = False
) -> Call[np.ndarray | Any]:
    """Reads whole pages of one layer.

    Args:
        cache: This cache.
        layer: Layer, in [0, num_layers).
        page_indices: int32 [n]. Page ids, in [0, num_pages).
        return_scales: For an int8 split cache, whether to return what it holds rather than what it stands for.

    Returns:
        The pages in the cache's dtype, shaped as `write_pages` takes them. Of an int8 split cache: float32, the int8
        times their scales / 127.5; or, with `return_scales`, the int8 and their float32 scales
        [2, num_kv_heads, n, page_size, 1].

    Raises:
        InvalidArgumentError: A page id is out of range, or `return_scales` for a cache that has none.
        DataLossError: A page was lost in a save.
        FailedPreconditionError: The server manages the cache's pages.
    """
    scaled = cache.info.layout == "split" and cache.info.dtype == "int8"
    raw = _messages.flag(return_scales, "return_scales")
    if raw and not scaled:
        raise InvalidArgumentError.of("return_scales", "return_scales=True is only for int8 caches of layout split.")

    def read(_: Message, arrays: Mapping[str, np.ndarray]) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        kv_pages = _messages.owned(arrays, "kv_pages")
        if not scaled:
            return kv_pages
        scales = _messages.owned(arrays, "scales")
        return (kv_pages, scales) if raw else kv_pages * (scales / _INT8_SCALE)

    return Call(
        method="ReadPages",
        request=cache_pb2.ReadPagesRequest(cache_id=cache.info.cache_id, layer=_messages.integer(layer, "layer")),
        arrays={"page_indices": _messages.integers_array(page_indices, "page_indices")},
        read=read,
        incarnation_id=cache.incarnation_id,
    )


def create_sequences(
    cache: CacheHandle, num_sequences: SupportsIndex, *, lease_s: SupportsFloat | None = None
) -> Call[list[bytes]]:
    """Creates empty sequences in a cache whose pages the server manages.

    Args:
        cache: This cache.
        num_sequences: How many, in [1, 65536].
        lease_s: Seconds that each lives without being used, > 0. None: the server's default.

    Raises:
        InvalidArgumentError: The number or the lease is out of range.
        FailedPreconditionError: The client manages the cache's pages.
        ResourceExhaustedError: The cache holds its limit of sequences, or the tenant its quota.
    """
    request = cache_pb2.CreateSequencesRequest(
        cache_id=cache.info.cache_id,
        num_sequences=_messages.integer(num_sequences, "num_sequences"),
        lease_s=_messages.real(lease_s, "lease_s"),
    )
    return Call(
        method="CreateSequences",
        request=request,
        read=lambda response, _: list(response.sequences),
        incarnation_id=cache.incarnation_id,
    )


def list_sequences(cache: CacheHandle) -> Call[list[SequenceInfo]]:
    """Returns the sequences of the cache, oldest first, with their lengths.

    Raises:
        FailedPreconditionError: The client manages the cache's pages.
    """
    return Call(
        method="ListSequences",
        request=cache_pb2.ListSequencesRequest(cache_id=cache.info.cache_id),
        read=lambda response, _: [_info.sequence_info(each) for each in response.sequences],
        incarnation_id=cache.incarnation_id,
    )


def release_sequences(cache: CacheHandle, sequences: Iterable[SequenceHandle]) -> Call[None]:
    """Releases sequences and their pages, all or none; a running call's pages are freed when it ends.

    Raises:
        InvalidArgumentError: One of them is not a sequence of this cache, or stands there twice.
        NotFoundError: One of them is gone already.
    """
    request = cache_pb2.ReleaseSequencesRequest(cache_id=cache.info.cache_id, sequences=handles_of(cache, sequences))
    return Call(method="ReleaseSequences", request=request, read=_nothing, incarnation_id=cache.incarnation_id)


def keep_alive(cache: CacheHandle, sequences: Iterable[SequenceHandle]) -> Call[None]:
    """Renews the leases of sequences, all or none. Every other use renews them, too; listing does not.

    Raises:
        InvalidArgumentError: One of them is not a sequence of this cache, or stands there twice.
        NotFoundError: One of them is gone.
    """
    request = cache_pb2.KeepAliveRequest(cache_id=cache.info.cache_id, sequences=handles_of(cache, sequences))
    return Call(method="KeepAlive", request=request, read=_nothing, incarnation_id=cache.incarnation_id)


def fork(sequence: SequenceHandle) -> Call[bytes]:
    """Creates a sequence that holds this one's tokens, by holding the same pages; what either appends is its own.

    Raises:
        NotFoundError: The sequence is gone.
        DataLossError: Tokens of it were lost.
        ResourceExhaustedError: The cache holds its limit of sequences, or the tenant its quota.
    """
    return Call(
        method="ForkSequence",
        request=cache_pb2.ForkSequenceRequest(cache_id=sequence.cache_id, sequence=sequence.handle),
        read=lambda response, _: response.sequence,
        incarnation_id=sequence.incarnation_id,
    )


def truncate(sequence: SequenceHandle, length: SupportsIndex) -> Call[None]:
    """Shortens the sequence to its first `length` tokens. What is appended then may differ from what was.

    Raises:
        InvalidArgumentError: `length` is negative or beyond the sequence's.
        DataLossError: Tokens of the sequence were lost.
        NotFoundError: The sequence is gone.
    """
    request = cache_pb2.TruncateSequenceRequest(
        cache_id=sequence.cache_id, sequence=sequence.handle, length=_messages.integer(length, "length")
    )
    return Call(method="TruncateSequence", request=request, read=_nothing, incarnation_id=sequence.incarnation_id)


def release(sequence: SequenceHandle) -> Call[None]:
    """Releases the sequence and its pages; a running call's pages are freed when it ends.

    Raises:
        NotFoundError: It is gone already.
    """
    request = cache_pb2.ReleaseSequencesRequest(cache_id=sequence.cache_id, sequences=[sequence.handle])
    return Call(method="ReleaseSequences", request=request, read=_nothing, incarnation_id=sequence.incarnation_id)


def _server(response: Any, _: Mapping[str, np.ndarray]) -> ServerInfo:
    return _info.server_info(response)


def _cache(response: Any, _: Mapping[str, np.ndarray]) -> CacheInfo:
    return _info.cache_info(response.cache)


def _nothing(_: Message, __: Mapping[str, np.ndarray]) -> None:
    return None
