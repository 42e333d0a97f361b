"""The command `attnd`."""

import asyncio
import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import grpc
import typer

from attnd.kernels.errors import UnsupportedError
from attnd.service.config import ConfigError, ServerConfig, TlsConfig
from attnd.service.info import print_info
from attnd.service.transfers import CacheCaller

_DEFAULTS: Final = ServerConfig()

Address = Annotated[str, typer.Argument(help="HOST:PORT of the server.")]
CacheName = Annotated[str, typer.Argument(help="Name of the cache.")]
Tenant = Annotated[str, typer.Option(help="Whose cache it is, where clients present no certificate.")]
TlsCa = Annotated[Path | None, typer.Option(help="PEM authorities to trust; with it, TLS is used.")]

app = typer.Typer(
    name="attnd",
    help="Ragged and paged attention as a gRPC service.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def serve(
    host: Annotated[str, typer.Option(envvar="ATTND_HOST", help="Address to listen on.")] = _DEFAULTS.host,
    port: Annotated[int, typer.Option(envvar="ATTND_PORT", help="Port; 0 picks a free one.")] = _DEFAULTS.port,
    implementation: Annotated[
        str, typer.Option(envvar="ATTND_IMPLEMENTATION", help="Kernels: auto, or a name that `attnd info` lists.")
    ] = _DEFAULTS.implementation,
    warm_up: Annotated[
        bool, typer.Option(envvar="ATTND_WARM_UP", help="Compile all programs at the first call, not one by one.")
    ] = _DEFAULTS.warm_up,
    cache_bytes_max: Annotated[
        int | None,
        typer.Option(envvar="ATTND_CACHE_BYTES_MAX", help="Bytes of all caches. Default: 80 % of the memory."),
    ] = None,
    queue_depth_max: Annotated[
        int, typer.Option(envvar="ATTND_QUEUE_DEPTH_MAX", help="Calls that may wait.")
    ] = _DEFAULTS.queue_depth_max,
    batch_calls_max: Annotated[
        int, typer.Option(envvar="ATTND_BATCH_CALLS_MAX", help="Calls that may run as one.")
    ] = _DEFAULTS.batch_calls_max,
    busy_poll_ms: Annotated[
        float,
        typer.Option(
            envvar="ATTND_BUSY_POLL_MS", help="Milliseconds in which a brief call's successor finds it awake."
        ),
    ] = _DEFAULTS.busy_poll_ms,
    metrics_port: Annotated[
        int | None, typer.Option(envvar="ATTND_METRICS_PORT", help="Port of Prometheus' metrics; none if not given.")
    ] = None,
    lease_s: Annotated[
        float, typer.Option(envvar="ATTND_LEASE_S", help="Seconds that a sequence lives without being used.")
    ] = _DEFAULTS.lease_s,
    tenant_pages_max: Annotated[
        int | None, typer.Option(envvar="ATTND_TENANT_PAGES_MAX", help="Pages that one tenant may hold.")
    ] = None,
    tenant_sequences_max: Annotated[
        int | None, typer.Option(envvar="ATTND_TENANT_SEQUENCES_MAX", help="Sequences that one tenant may hold.")
    ] = None,
    debug_checks: Annotated[
        bool, typer.Option(envvar="ATTND_DEBUG_CHECKS", help="Check in each call that the pages it takes are clean.")
    ] = _DEFAULTS.debug_checks,
    grace_s: Annotated[
        float, typer.Option(envvar="ATTND_GRACE_S", help="Seconds for calls in flight after SIGTERM.")
    ] = _DEFAULTS.grace_s,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="ATTND_DATA_DIR", help="Where caches are saved and restored from.")
    ] = None,
    save_interval_s: Annotated[
        float | None, typer.Option(envvar="ATTND_SAVE_INTERVAL_S", help="Seconds between saves of all caches.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(envvar="ATTND_TLS_CERT", help="PEM chain of the server.")] = None,
    tls_key: Annotated[Path | None, typer.Option(envvar="ATTND_TLS_KEY", help="PEM key of the server.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(envvar="ATTND_TLS_CLIENT_CA", help="PEM authorities; clients need a certificate.")
    ] = None,
    local_socket_path: Annotated[
        Path | None,
        typer.Option("--local-socket", envvar="ATTND_LOCAL_SOCKET", help="Unix socket for clients on this host."),
    ] = None,
    no_local_socket: Annotated[
        bool, typer.Option("--no-local-socket", envvar="ATTND_NO_LOCAL_SOCKET", help="Serve over gRPC only.")
    ] = False,
    log_level: Annotated[str, typer.Option(envvar="ATTND_LOG_LEVEL", help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
) -> None:
    """Serves attention until SIGTERM or SIGINT.

    Prints `attnd serving on HOST:PORT` on stdout when ready; the log goes to stderr.
    """
    from attnd.service import server  # noqa: PLC0415 - imports jax, which `attnd --help` should not wait for

    try:
        logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        logging.getLogger("jax").setLevel(logging.WARNING)  # at INFO it names every backend that this machine lacks
        config = ServerConfig(
            host=host,
            port=port,
            tls=_tls(tls_cert, tls_key, tls_client_ca),
            local_socket=not no_local_socket,
            local_socket_path=local_socket_path,
            implementation=implementation,
            warm_up=warm_up,
            cache_bytes_max=cache_bytes_max,
            queue_depth_max=queue_depth_max,
            batch_calls_max=batch_calls_max,
            busy_poll_ms=busy_poll_ms,
            metrics_port=metrics_port,
            lease_s=lease_s,
            tenant_pages_max=tenant_pages_max,
            tenant_sequences_max=tenant_sequences_max,
            debug_checks=debug_checks,
            grace_s=grace_s,
            data_dir=data_dir,
            save_interval_s=save_interval_s,
        )
        asyncio.run(server.serve(config))
    except (ValueError, UnsupportedError, server.UnsavedError) as error:
        raise _failure(str(error)) from error


@app.command()
def info(
    address: Address = "127.0.0.1:50051",
    tls_ca: TlsCa = None,
) -> None:
    """Prints what a server is and which caches it holds."""
    try:
        print_info(address, _credentials(tls_ca))
    except grpc.RpcError as error:
        raise _failure(f"No attnd server answers at {address}: {error.details()}") from error


@app.command()
def save(address: Address, name: CacheName, tenant: Tenant = "", tls_ca: TlsCa = None) -> None:
    """Saves a cache to the server's data directory."""
    with _calling(address, tenant, tls_ca) as caller:
        size_bytes = caller.save(name)
    typer.echo(f"{name} is saved: {size_bytes:,} bytes of pages")


@app.command()
def restore(address: Address, name: CacheName, tenant: Tenant = "", tls_ca: TlsCa = None) -> None:
    """Restores a cache from its newest save in the server's data directory."""
    with _calling(address, tenant, tls_ca) as caller:
        cache = caller.restore(name)
    typer.echo(f"{name} is restored: {cache.num_sequences} sequences")


@app.command(name="compile")
def compile_programs(
    tpu: Annotated[str, typer.Option(help="Generation (v4, v5e, v5p, v6e, tpu7x) or topology (v6e:2x2).")],
    spec: Annotated[
        str,
        typer.Option(
            help='As create_cache takes it, with num_q_heads: \'{"num_pages": 1024, "page_size": 16, '
            '"num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "num_q_heads": 32}\'.'
        ),
    ],
    folder: Annotated[
        Path, typer.Option(envvar="JAX_COMPILATION_CACHE_DIR", help="Where JAX keeps compiled programs.")
    ],
) -> None:
    """Compiles a cache's programs for a TPU that need not be here, so that a server there starts sooner."""
    from attnd.service.compiling import compile_for_tpu  # noqa: PLC0415 - imports jax

    try:
        count = compile_for_tpu(tpu, spec, folder, lambda done, of: typer.echo(f"{done} of {of} programs", err=True))
    except (ValueError, UnsupportedError) as error:
        raise _failure(str(error)) from error
    typer.echo(f"{count} programs for {tpu} in {folder}")


def main() -> None:
    """Runs the command line."""
    for command in importlib.metadata.entry_points(group="attnd.commands"):
        app.command(command.name)(command.load())
    app()


@contextmanager
def _calling(address: str, tenant: str, tls_ca: Path | None) -> Iterator[CacheCaller]:
    try:
        with CacheCaller(address, _credentials(tls_ca), tenant) as caller:
            yield caller
    except grpc.RpcError as error:
        raise _failure(f"{address}: {error.details()}") from error


def _credentials(tls_ca: Path | None) -> grpc.ChannelCredentials | None:
    return None if tls_ca is None else grpc.ssl_channel_credentials(tls_ca.read_bytes())


def _tls(cert_file: Path | None, key_file: Path | None, client_ca_file: Path | None) -> TlsConfig | None:
    if cert_file is None and key_file is None and client_ca_file is None:
        return None
    if cert_file is None or key_file is None:
        raise ConfigError("TLS needs both --tls-cert and --tls-key.")
    return TlsConfig(cert_file=cert_file, key_file=key_file, client_ca_file=client_ca_file)


def _failure(message: str) -> typer.Exit:
    typer.echo(f"attnd: {message}", err=True)
    return typer.Exit(1)
