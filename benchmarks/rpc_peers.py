"""Servers and drivers of the section "rpc", each run as a process: `python -m benchmarks.rpc_peers ROLE [ADDRESS]`.

A driver reads lines "SIZE CALLS" and prints CALLS durations in nanoseconds on one line; attnd's prints a second line,
the nanoseconds of those that the server spent on writing, compiling and attending.
"""

import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any, Final

import grpc
import numpy as np

from attnd.v1 import tensor_pb2

UNLIMITED: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
NAIVE_PATH: Final = "/benchmarks.Naive/Echo"
# q is [rows, heads, head_dim] in float32: the bytes of each size, in the shapes of a decode where they allow it.
Q_SHAPES: Final = {200: (1, 1, 50), 512 * 1024: (32, 32, 128), 16 * 1024**2: (1024, 32, 128)}


def naive_serve() -> None:
    """Echoes arrays as people first write it: protobuf bytes to array and back, all defaults."""

    def echo(request: tensor_pb2.Tensor, _context: grpc.ServicerContext) -> tensor_pb2.Tensor:
        return naive_message(naive_array(request))

    handler = grpc.unary_unary_rpc_method_handler(
        echo, tensor_pb2.Tensor.FromString, tensor_pb2.Tensor.SerializeToString
    )
    _, service, method = NAIVE_PATH.split("/")
    server = grpc.server(futures.ThreadPoolExecutor(4), options=UNLIMITED)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(f"127.0.0.1:{port}", flush=True)
    server.wait_for_termination()


def naive_drive(address: str) -> None:
    """Times the naive echo."""
    with grpc.insecure_channel(address, UNLIMITED) as channel:
        call: Any = channel.unary_unary(
            NAIVE_PATH,
            request_serializer=tensor_pb2.Tensor.SerializeToString,
            response_deserializer=tensor_pb2.Tensor.FromString,
        )

        def prepare(size: int) -> Callable[[], int]:
            q = np.ones(size // 4, np.float32)

            def echo() -> int:
                if naive_array(call(naive_message(q))).shape != q.shape:
                    raise AssertionError("the echo has another shape")
                return 0

            return echo

        drive(prepare)


def naive_message(array: np.ndarray) -> tensor_pb2.Tensor:
    """Returns an array as a message."""
    return tensor_pb2.Tensor(dtype="float32", shape=array.shape, data=array.tobytes())


def naive_array(message: tensor_pb2.Tensor) -> np.ndarray:
    """Returns the array of a message."""
    return np.frombuffer(message.data, np.float32).reshape(tuple(message.shape))


def attnd_drive(address: str) -> None:
    """Times attention calls that attend over one token a row, so that there is little but the round trip."""
    from attnd.client import CallRecord, Client  # noqa: PLC0415 - the naive peers must not meet what it sets up

    records: list[CallRecord] = []
    with Client(address, timeout_s=300, on_call=records.append) as client:

        def prepare(size: int) -> Callable[[], int]:
            rows, heads, head_dim = Q_SHAPES[size]
            cache = client.create_cache(
                f"rpc-{size}",
                num_layers=1,
                num_pages=rows,
                page_size=16,
                num_kv_heads=max(1, heads // 4),
                head_dim=head_dim,
                dtype="float32",
                pages_by="client",
            )
            plan = cache.plan(np.ones(rows, int), np.arange(rows)[:, np.newaxis], np.arange(rows + 1), rows)
            q = np.ones((rows, heads, head_dim), np.float32)
            kv = np.full((rows, max(1, heads // 4), head_dim), 3, np.float32)
            if not (plan.attend(0, q, kv, kv) == 3).all():
                raise AssertionError("one token a row must give its value back")

            def attend() -> int:
                plan.attend(0, q)
                timings = records.pop().timings
                return timings.write_ns + timings.compile_ns + timings.kernel_ns if timings is not None else 0

            return attend

        drive(prepare, with_compute=True)


def echo_serve(path: str) -> None:
    """Echoes over a unix socket, in the protocol of echo.c, for machines without a C compiler."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            with connection:
                while header := receive(connection, 8):
                    connection.sendall(receive(connection, int.from_bytes(header, "little")))


def echo_drive(path: str) -> None:
    """Times the echo."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)

        def prepare(size: int) -> Callable[[], int]:
            payload = bytes(size)

            def echo() -> int:
                connection.sendall(size.to_bytes(8, "little"))
                connection.sendall(payload)
                receive(connection, size)
                return 0

            return echo

        drive(prepare)


def receive(connection: socket.socket, size: int) -> bytearray:
    """Returns `size` bytes, or none at the end of the stream."""
    buffer = bytearray(size)
    view = memoryview(buffer)
    while view.nbytes:
        count = connection.recv_into(view)
        if not count:
            return bytearray()
        view = view[count:]
    return buffer


def drive(prepare: Callable[[int], Callable[[], int]], *, with_compute: bool = False) -> None:
    """Answers the lines of stdin.

    Args:
        prepare: Returns the round trip for a size, which returns the nanoseconds of compute in it.
        with_compute: Whether to print those on a second line.
    """
    calls: dict[int, Callable[[], int]] = {}
    for size, count in requests():
        if size not in calls:
            calls[size] = prepare(size)
        totals, computes = [], []
        for _ in range(count):
            start = time.perf_counter_ns()
            computes.append(calls[size]())
            totals.append(time.perf_counter_ns() - start)
        for line in (totals, computes) if with_compute else (totals,):
            print(*line, flush=True)


def requests() -> Iterator[tuple[int, int]]:
    """Yields sizes and counts from stdin."""
    for line in sys.stdin:
        size, count = line.split()
        yield int(size), int(count)


ROLES: Final[dict[str, Callable[..., None]]] = {
    "naive-serve": naive_serve,
    "naive-drive": naive_drive,
    "attnd-drive": attnd_drive,
    "echo-serve": echo_serve,
    "echo-drive": echo_drive,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
