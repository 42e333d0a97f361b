"""`attnd save` and `attnd restore`: ask a server, and show how far it is."""

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from attnd.v1 import cache_pb2
from attnd.v1.limits import TENANT_KEY


class CacheCaller:
    """Calls CacheService for one tenant.

    Args:
        address: HOST:PORT of the server.
        credentials: TLS credentials; None: plain text.
        tenant: Whose caches.
    """

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None, tenant: str) -> None:
        # The stubs cannot type calls without serializers.
        self._channel: Any = (
            grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)
        )
        self._metadata = ((TENANT_KEY, tenant),) if tenant else ()

    def __enter__(self) -> "CacheCaller":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def save(self, name: str) -> int:
        """Saves a cache, shows how far it is, and returns the bytes of its pages.

        Raises:
            grpc.RpcError: The server refuses, or none answers.
        """
        cache: Any = next(self._call("GetCache", cache_pb2.GetCacheRequest(name=name), cache_pb2.GetCacheResponse))
        request = cache_pb2.SaveCacheRequest(cache_id=cache.cache.cache_id)
        last = cache_pb2.SaveCacheResponse()
        with _bar(f"saving {name}") as bar:
            for last in self._call("SaveCache", request, cache_pb2.SaveCacheResponse, streamed=True):
                _show(bar, last.saved_bytes, last.total_bytes)
        return last.saved_bytes

    def restore(self, name: str) -> cache_pb2.Cache:
        """Restores a cache, shows how far it is, and returns its description.

        Raises:
            grpc.RpcError: The server refuses, or none answers.
        """
        request = cache_pb2.RestoreCacheRequest(name=name)
        last = cache_pb2.RestoreCacheResponse()
        with _bar(f"restoring {name}") as bar:
            for last in self._call("RestoreCache", request, cache_pb2.RestoreCacheResponse, streamed=True):
                _show(bar, last.restored_bytes, last.total_bytes)
        return last.cache

    def _call(
        self, method: str, request: Message, response_class: type[Message], *, streamed: bool = False
    ) -> Iterator[Any]:
        path = f"/attnd.v1.CacheService/{method}"
        data = request.SerializeToString()
        if streamed:
            responses = self._channel.unary_stream(path)(data, metadata=self._metadata)
        else:
            responses = [self._channel.unary_unary(path)(data, metadata=self._metadata, timeout=30.0)]
        return (response_class.FromString(response) for response in responses)


def _bar(title: str) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))
    progress.add_task(title, total=None)
    return progress


def _show(bar: Progress, done_bytes: int, total_bytes: int) -> None:
    bar.update(bar.task_ids[0], completed=done_bytes, total=total_bytes)
