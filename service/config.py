"""What an operator decides, with its defaults. The only place that looks at the machine."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

MEMORY_SHARE = 0.8
"""Share of the machine's memory that caches may take unless told otherwise."""

BUSY_POLL_MS_MAX = 1000.0


class ConfigError(ValueError):
    """A setting that no server can run with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """Files of a TLS server. Read anew for each connection, so that certificates can be rotated.

    Attributes:
        cert_file: PEM chain of the server.
        key_file: PEM key of the server.
        client_ca_file: PEM certificates that sign clients; with it, clients must present one.
    """

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None

    def __post_init__(self) -> None:
        for file in (self.cert_file, self.key_file, self.client_ca_file):
            if file is not None and not file.is_file():
                raise ConfigError(f"TLS file {file} does not exist.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How a server runs.

    Attributes:
        host: Address to listen on. Loopback by default: whoever reaches the port can read every cache.
        port: TCP port; 0 picks a free one.
        tls: TLS files; None serves plaintext.
        local_socket: Whether clients of the same user on this host may use a unix socket, which is faster. Clients that
            are told apart by certificates have none.
        local_socket_path: Where it is; None for a place of its own below the directory for temporary files.
        implementation: Name of the kernels' implementation, or "auto".
        warm_up: Whether the first call of a kind compiles every program that calls like it can need, so that no
            later one waits; otherwise each program is compiled when it is first needed.
        cache_bytes_max: Bytes that all caches together may take; None for `MEMORY_SHARE` of the machine's.
        queue_depth_max: Calls that may wait for the engine.
        batch_calls_max: Calls that may run as one; 1 runs each alone.
        busy_poll_ms: Milliseconds after a brief call in which the server looks for the next one without sleeping, which
            takes one core; 0 for never.
        metrics_port: TCP port of Prometheus' metrics, on `host`; None for none.
        lease_s: Seconds that a sequence lives without being used, unless it was created with a lease of its own.
        tenant_pages_max: Pages that all caches of one tenant may hold; None for no limit.
        tenant_sequences_max: Sequences that all caches of one tenant may hold; None for no limit.
        debug_checks: Whether calls check at run time what no caller can break, such as that pages are clean.
        grace_s: Seconds that calls in flight have to end after SIGTERM.
        data_dir: Where caches are saved to and restored from; None: they end with the server.
        save_interval_s: Seconds between saves of all caches; None: they are saved when asked for and at the end.

    Raises:
        ConfigError: A setting is out of range.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    tls: TlsConfig | None = None
    local_socket: bool = True
    local_socket_path: Path | None = None
    implementation: str = "auto"
    warm_up: bool = True
    cache_bytes_max: int | None = None
    queue_depth_max: int = 1024
    batch_calls_max: int = 64
    busy_poll_ms: float = 3.0
    metrics_port: int | None = None
    lease_s: float = 3600.0
    tenant_pages_max: int | None = None
    tenant_sequences_max: int | None = None
    debug_checks: bool = False
    grace_s: float = 10.0
    data_dir: Path | None = None
    save_interval_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be in [0, 65535].")
        if self.metrics_port is not None and not 1 <= self.metrics_port <= 65535:
            raise ConfigError(f"metrics_port={self.metrics_port} must be in [1, 65535].")
        for name in (
            "queue_depth_max",
            "batch_calls_max",
            "cache_bytes_max",
            "tenant_pages_max",
            "tenant_sequences_max",
        ):
            limit = getattr(self, name)
            if limit is not None and limit < 1:
                raise ConfigError(f"{name}={limit} must be positive.")
        if not 0 <= self.busy_poll_ms <= BUSY_POLL_MS_MAX:
            raise ConfigError(f"busy_poll_ms={self.busy_poll_ms} must be in [0, {BUSY_POLL_MS_MAX}].")
        if not self.lease_s > 0:
            raise ConfigError(f"lease_s={self.lease_s} must be positive.")
        if not self.grace_s >= 0:
            raise ConfigError(f"grace_s={self.grace_s} must not be negative.")
        if self.save_interval_s is not None and not self.save_interval_s > 0:
            raise ConfigError(f"save_interval_s={self.save_interval_s} must be positive.")
        if self.save_interval_s is not None and self.data_dir is None:
            raise ConfigError("save_interval_s needs data_dir: there is nowhere to save to.")

    @property
    def address(self) -> str:
        """Host and port as gRPC takes them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def busy_poll_ns(self) -> int:
        """`busy_poll_ms` in nanoseconds; 0 where there is one core alone, which is left to the callers."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return round(self.busy_poll_ms * 1e6) if cores > 1 else 0

    @property
    def temporary_directory(self) -> Path:
        """Where this machine keeps files that need not last."""
        return Path(tempfile.gettempdir())

    @property
    def cache_memory_bytes(self) -> int:
        """Bytes that all caches together may take."""
        if self.cache_bytes_max is not None:
            return self.cache_bytes_max
        return int(psutil.virtual_memory().total * MEMORY_SHARE)
