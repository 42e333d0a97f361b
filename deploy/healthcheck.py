"""Asks a server's standard gRPC health service; exits with 0 if it is serving. The image's HEALTHCHECK."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 when serving, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("address", nargs="?", default=f"127.0.0.1:{os.environ.get('ATTND_PORT', '50051')}")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS")
    parser.add_argument("--tls-ca", type=Path, help="PEM authorities to trust; with it, TLS is used")
    parser.add_argument("--tls-cert", type=Path, help="PEM certificate of this client, if the server asks for one")
    parser.add_argument("--tls-key", type=Path, help="its key")
    options = parser.parse_args(arguments)
    try:
        with _channel(options) as channel:
            request = health_pb2.HealthCheckRequest()
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=options.timeout)
    except grpc.RpcError as error:
        print(f"{options.address}: {error.code().name}: {error.details()}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"{options.address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")  # noqa: T201
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


def _channel(options: argparse.Namespace) -> grpc.Channel:
    if options.tls_ca is None:
        return grpc.insecure_channel(options.address)
    read = {name: path and path.read_bytes() for name, path in vars(options).items() if name.startswith("tls_")}
    credentials = grpc.ssl_channel_credentials(read["tls_ca"], read["tls_key"], read["tls_cert"])
    return grpc.secure_channel(options.address, credentials)


if __name__ == "__main__":
    sys.exit(main())
