"""What the server says about itself, its caches and its calls, as frozen values that outlive the connection."""

from dataclasses import dataclass
from typing import Final, Literal

from attnd.client._errors import InvalidArgumentError
from attnd.v1 import attention_pb2, cache_pb2, server_pb2

Layout = Literal["interleaved", "split"]
PagesBy = Literal["client", "server"]

_LAYOUTS: Final[dict[Layout, cache_pb2.Layout]] = {
    "interleaved": cache_pb2.LAYOUT_KV_INTERLEAVED,
    "split": cache_pb2.LAYOUT_KV_SPLIT,
}
_PAGES_BY: Final[dict[PagesBy, cache_pb2.PagesBy]] = {
    "client": cache_pb2.PAGES_BY_CLIENT,
    "server": cache_pb2.PAGES_BY_SERVER,
}
_LAYOUT_NAMES: Final = {number: name for name, number in _LAYOUTS.items()}
_PAGES_BY_NAMES: Final = {number: name for name, number in _PAGES_BY.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """One device of the server.

    Attributes:
        id: Its number.
        kind: Its kind, as JAX names it: `cpu`, `TPU v6 lite`.
    """

    id: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplementationInfo:
    """One implementation of the kernels that the server has.

    Attributes:
        name: Its name.
    """

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a call may ask for at most.

    Attributes:
        message_bytes_max: Bytes of one message, either way.
        queue_depth_max: Calls that may wait for the device.
        caches_size_bytes_max: Bytes of all caches together.
        sequences_max: Sequences of one cache.
        batch_calls_max: Calls that may run as one.
        lease_s: Seconds that a sequence lives without being used, unless it was created with a lease of its own.
    """

    message_bytes_max: int
    queue_depth_max: int
    caches_size_bytes_max: int
    sequences_max: int
    batch_calls_max: int
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """A server, as it was when asked.

    Attributes:
        version: Version of attnd.
        jax_version: Version of jax.
        incarnation_id: Id of this run; a new one means that caches created before are gone.
        platform: `cpu` or `tpu`.
        devices: The devices.
        implementations: The implementations of the kernels.
        limits: What a call may ask for at most.
        num_compiled_programs: Programs compiled since the start; it stands still once the shapes in use are warm.
        caches_size_bytes: Bytes of all caches.
        resident_bytes: Resident memory of the server process.
        queue_depth: Calls waiting for the device.
        uptime_s: Seconds since the start.
        num_calls: Jobs that the device has run: calls, and what the server does of its own.
        num_batches: Times that it ran one or several of them at once.
    """

    version: str
    jax_version: str
    incarnation_id: str
    platform: str
    devices: tuple[DeviceInfo, ...]
    implementations: tuple[ImplementationInfo, ...]
    limits: ServerLimits
    num_compiled_programs: int
    caches_size_bytes: int
    resident_bytes: int
    queue_depth: int
    uptime_s: float
    num_calls: int
    num_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheInfo:
    """A cache, as it was when asked.

    Attributes:
        cache_id: Its id, new at each creation.
        name: Its name.
        num_layers: Layers.
        num_pages: Pages of each layer.
        page_size: Tokens of a page.
        num_kv_heads: Heads of keys, and of values.
        head_dim: Elements of a head.
        dtype: NumPy name of the element type.
        pages_by: Who manages its pages: `client` or `server`.
        layout: How a page lies in memory: `interleaved` or `split`.
        size_bytes: Bytes of its pages, over all layers.
        num_free_pages: Pages that no sequence holds; num_pages when the client manages them.
        num_sequences: Sequences that it holds.
        implementation: Name of the implementation that serves it.
        incarnation_id: Id of the run of the server that holds it, as in `ServerInfo`.
    """

    cache_id: str
    name: str
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    pages_by: PagesBy
    layout: Layout
    size_bytes: int
    num_free_pages: int
    num_sequences: int
    implementation: str
    incarnation_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceInfo:
    """A sequence whose pages the server manages, as it was when asked.

    Attributes:
        handle: Its 16 bytes; `cache.sequence(handle)` gives the sequence.
        length: Tokens that it holds in the layer that holds most.
        complete_length: Tokens that every layer holds: the length of the last step that all layers have seen.
        num_pages: Pages that it holds, in each layer; those that it shares with forks included.
        lease_s: Seconds that it lives without being used.
        expires_in_s: Seconds until it is gone if it is not used.
        restored_from: The handle that it had before the server restarted; empty if it was created since.
        damaged: Whether tokens of it were lost, so that it can only be released.
    """

    handle: bytes
    length: int
    complete_length: int
    num_pages: int
    lease_s: float
    expires_in_s: float
    restored_from: bytes
    damaged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Where an attention call's time on the server went, in nanoseconds.

    Attributes:
        queue_ns: Waiting for the device.
        validate_ns: Reading the message and checking it.
        write_ns: Writing keys and values to the pages.
        compile_ns: Compiling; 0 once the shapes are warm.
        kernel_ns: The attention kernel.
        encode_ns: Building the answer.
    """

    queue_ns: int
    validate_ns: int
    write_ns: int
    compile_ns: int
    kernel_ns: int
    encode_ns: int

    @property
    def total_ns(self) -> int:
        """All of it."""
        return self.queue_ns + self.validate_ns + self.write_ns + self.compile_ns + self.kernel_ns + self.encode_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One answered call, as `on_call` is told of it.

    Attributes:
        method: Name of the rpc: `Attend`, `ReadPages`.
        total_ns: From the call to its result, converting arrays on both sides included.
        request_bytes: Bytes of the message sent.
        response_bytes: Bytes of the message received.
        timings: The server's share; None for calls that do not attend.
        implementation: Name of the implementation that answered; empty for calls that do not attend.
    """

    method: str
    total_ns: int
    request_bytes: int
    response_bytes: int
    timings: Timings | None
    implementation: str

    @property
    def wire_ns(self) -> int:
        """What the server does not account for: messages, sockets and hand-overs between threads, on both sides."""
        return self.total_ns - (self.timings.total_ns if self.timings is not None else 0)


def server_info(message: server_pb2.GetServerInfoResponse) -> ServerInfo:
    """Returns the description of a server."""
    limits = message.limits
    return ServerInfo(
        version=message.version,
        jax_version=message.jax_version,
        incarnation_id=message.incarnation_id,
        platform=message.platform,
        devices=tuple(DeviceInfo(id=device.id, kind=device.kind) for device in message.devices),
        implementations=tuple(ImplementationInfo(name=each.name) for each in message.implementations),
        limits=ServerLimits(
            message_bytes_max=limits.message_bytes_max,
            queue_depth_max=limits.queue_depth_max,
            caches_size_bytes_max=limits.caches_size_bytes_max,
            sequences_max=limits.sequences_max,
            batch_calls_max=limits.batch_calls_max,
            lease_s=limits.lease_s,
        ),
        num_compiled_programs=message.num_compiled_programs,
        caches_size_bytes=message.caches_size_bytes,
        resident_bytes=message.resident_bytes,
        queue_depth=message.queue_depth,
        uptime_s=message.uptime_s,
        num_calls=message.num_calls,
        num_batches=message.num_batches,
    )


def cache_info(message: cache_pb2.Cache) -> CacheInfo:
    """Returns the description of a cache."""
    spec = message.spec
    return CacheInfo(
        cache_id=message.cache_id,
        name=message.name,
        num_layers=spec.num_layers,
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        pages_by=_PAGES_BY_NAMES[message.pages_by],
        layout=_LAYOUT_NAMES[spec.layout],
        size_bytes=message.size_bytes,
        num_free_pages=message.num_free_pages,
        num_sequences=message.num_sequences,
        implementation=message.implementation,
        incarnation_id=message.incarnation_id,
    )


def sequence_info(message: cache_pb2.Sequence) -> SequenceInfo:
    """Returns the description of a sequence."""
    return SequenceInfo(
        handle=message.sequence,
        length=message.length,
        complete_length=message.complete_length,
        num_pages=message.num_pages,
        lease_s=message.lease_s,
        expires_in_s=message.expires_in_s,
        restored_from=message.restored_from,
        damaged=message.damaged,
    )


def timings(message: attention_pb2.Timings) -> Timings:
    """Returns where a call's time on the server went."""
    return Timings(
        queue_ns=message.queue_ns,
        validate_ns=message.validate_ns,
        write_ns=message.write_ns,
        compile_ns=message.compile_ns,
        kernel_ns=message.kernel_ns,
        encode_ns=message.encode_ns,
    )


def layout_number(layout: str) -> cache_pb2.Layout:
    """Returns the enum value of a layout's name.

    Raises:
        InvalidArgumentError: There is no such layout.
    """
    for name, number in _LAYOUTS.items():
        if name == layout:
            return number
    raise InvalidArgumentError.of("layout", f"{layout=} must be one of {', '.join(_LAYOUTS)}.")


def pages_by_number(pages_by: str) -> cache_pb2.PagesBy:
    """Returns the enum value of the side that manages pages.

    Raises:
        InvalidArgumentError: There is no such side.
    """
    for name, number in _PAGES_BY.items():
        if name == pages_by:
            return number
    raise InvalidArgumentError.of("pages_by", f"{pages_by=} must be one of {', '.join(_PAGES_BY)}.")
