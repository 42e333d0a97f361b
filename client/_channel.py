"""What a client is given, and how a gRPC channel is set up for it."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import grpc

from attnd.client._errors import InvalidArgumentError
from attnd.client._info import CallRecord
from attnd.v1.limits import KEEPALIVE_INTERVAL_MS, MESSAGE_BYTES_MAX, TENANT_KEY

# gRPC takes port 443 for an address without one, and "http" for the name of a host.
_ADDRESS: Final = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|xds):\S+|(\[[^\[\]\s]+\]|[^:/\s]+):\d{1,5}")
_LOCAL_ADDRESS: Final = re.compile(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\]):\d+|unix(-abstract)?:\S+")
_TENANT: Final = re.compile(r"[A-Za-z0-9._-]{0,128}")
_PING_TIMEOUT_MS: Final = 10_000

CHANNEL_OPTIONS: Final = (
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    # Only while calls wait: a server that vanished without a word is noticed after 40 s instead of never.
    ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", _PING_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", _PING_TIMEOUT_MS),
    # A restarted server is found again within half a second instead of up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Each client has its own connection: one that is closed, or misled by a dead server, never touches another's.
    ("grpc.use_local_subchannel_pool", 1),
)
"""Options of every channel. No retry policy: gRPC itself repeats only what no server has seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a client is given.

    Attributes:
        address: `HOST:PORT`, or a gRPC target such as `unix:/run/attnd.sock`.
        timeout_s: Seconds that a call may take when it does not say itself; None: as long as it takes.
        credentials: TLS credentials; None: plain text.
        metadata: Sent with every call.
        on_call: Told of every answered call.
        local: Whether the server's unix socket may be used.

    Raises:
        InvalidArgumentError: The address has no port, or the timeout is not a positive number.
    """

    address: str
    timeout_s: float | None
    credentials: grpc.ChannelCredentials | None
    metadata: tuple[tuple[str, str | bytes], ...]
    on_call: Callable[[CallRecord], object] | None
    local: bool

    def __post_init__(self) -> None:
        if not isinstance(self.address, str) or not _ADDRESS.fullmatch(self.address):
            raise InvalidArgumentError.of(
                "address", f"address={self.address!r} must be HOST:PORT, such as 127.0.0.1:50051."
            )
        check_timeout(self.timeout_s)

    @property
    def looks_for_local_socket(self) -> bool:
        """Whether to ask the server for its unix socket: its address can only be on this host."""
        return self.local and sys.platform == "linux" and _LOCAL_ADDRESS.fullmatch(self.address) is not None


def tenant_metadata(tenant: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that names a tenant.

    Raises:
        InvalidArgumentError: It is not a legal name.
    """
    if not isinstance(tenant, str) or not _TENANT.fullmatch(tenant):
        raise InvalidArgumentError.of("tenant", f"{tenant=} must be 0 to 128 of A-Z a-z 0-9 . _ -.")
    return ((TENANT_KEY, tenant),) if tenant else ()


def check_timeout(timeout_s: float | None) -> None:
    """Refuses a timeout that gRPC would take for something else.

    Raises:
        InvalidArgumentError: It is neither None nor a positive number of seconds.
    """
    if timeout_s is None:
        return
    # Infinity overflows in gRPC; a NaN passes no comparison.
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise InvalidArgumentError.of("timeout_s", f"{timeout_s=} must be a positive number of seconds, or None.")
