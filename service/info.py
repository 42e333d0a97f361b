"""`attnd info`: asks a server what it is and prints a table."""

from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from attnd.v1 import cache_pb2, server_pb2

TIMEOUT_S: Final = 5.0

Response = TypeVar("Response", bound=Message)


def print_info(address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
    """Prints what the server at an address is, and its caches.

    Raises:
        grpc.RpcError: No server answers within `TIMEOUT_S`.
    """
    with _channel(address, credentials) as channel:
        info_request, caches_request = server_pb2.GetServerInfoRequest(), cache_pb2.ListCachesRequest()
        info = _call(channel, "ServerService/GetServerInfo", info_request, server_pb2.GetServerInfoResponse)
        caches = _call(channel, "CacheService/ListCaches", caches_request, cache_pb2.ListCachesResponse)
    console = Console()
    console.print(_server_table(address, info))
    console.print(_caches_table(caches) if caches.caches else "No caches.")


def _channel(address: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    return grpc.insecure_channel(address) if credentials is None else grpc.secure_channel(address, credentials)


def _call(channel: grpc.Channel, method: str, request: Message, response_class: type[Response]) -> Response:
    call: Any = channel.unary_unary(
        f"/attnd.v1.{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=response_class.FromString,
    )
    response: Response = call(request, timeout=TIMEOUT_S)
    return response


def _server_table(address: str, info: server_pb2.GetServerInfoResponse) -> Table:
    table = Table(title=f"attnd at {address}", show_header=False, title_justify="left")
    rows = {
        "version": f"{info.version} (jax {info.jax_version})",
        "platform": f"{info.platform}: {', '.join(device.kind for device in info.devices)}",
        "implementations": ", ".join(implementation.name for implementation in info.implementations),
        "up": f"{info.uptime_s:,.0f} s",
        "caches": f"{_size(info.caches_size_bytes)} of {_size(info.limits.caches_size_bytes_max)}",
        "resident": _size(info.resident_bytes),
        "compiled programs": str(info.num_compiled_programs),
        "queue": f"{info.queue_depth} of {info.limits.queue_depth_max}",
        "calls": f"{info.num_calls} in {info.num_batches} batches",
        "message limit": _size(info.limits.message_bytes_max),
        "incarnation": info.incarnation_id,
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _caches_table(response: cache_pb2.ListCachesResponse) -> Table:
    table = Table(title="Caches", title_justify="left")
    for header in ("name", "layout", "shape", "dtype", "pages by", "size", "free pages", "sequences", "implementation"):
        table.add_column(header)
    for cache in response.caches:
        spec = cache.spec
        table.add_row(
            cache.name,
            cache_pb2.Layout.Name(spec.layout).removeprefix("LAYOUT_KV_").lower(),
            f"{spec.num_layers} layers, {spec.num_pages} pages of {spec.page_size}, "
            f"{spec.num_kv_heads} heads of {spec.head_dim}",
            spec.dtype,
            cache_pb2.PagesBy.Name(cache.pages_by).removeprefix("PAGES_BY_").lower(),
            _size(cache.size_bytes),
            f"{cache.num_free_pages}/{spec.num_pages}",
            str(cache.num_sequences),
            cache.implementation,
        )
    return table


def _size(size_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:,.4g} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:,.4g} TiB"
