"""Servers and drivers of the section "rpc", each run as a process: `python -m benchmarks.rpc_peers ROLE [ADDRESS]`.

A driver reads lines "SIZE CALLS" and prints CALLS durations in nanoseconds on one line.
"""

import asyncio
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
BARE_SERVICE: Final = "benchmarks.Bare"
# q is [rows, heads, head_dim] in float32: the bytes of each size, in the shapes of a decode where they allow it.
Q_SHAPES: Final = {200: (1, 1, 50), 512 * 1024: (32, 32, 128), 16 * 1024**2: (1024, 32, 128)}
# A step of a model: rows with tables of so many pages, and layers.
STEP_SHAPE: Final = (64, 128)
STEP_LAYERS: Final = 32


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

        def prepare(size: int) -> Callable[[], object]:
            q = np.ones(size // 4, np.float32)

            def echo() -> None:
                if naive_array(call(naive_message(q))).shape != q.shape:
                    raise AssertionError("the echo has another shape")

            return echo

        drive(prepare)


def naive_message(array: np.ndarray) -> tensor_pb2.Tensor:
    """Returns an array as a message."""
    return tensor_pb2.Tensor(dtype="float32", shape=array.shape, data=array.tobytes())


def naive_array(message: tensor_pb2.Tensor) -> np.ndarray:
    """Returns the array of a message."""
    return np.frombuffer(message.data, np.float32).reshape(tuple(message.shape))


def bare_serve() -> None:
    """Sends bytes back as attnd's server gets and sends them, and does nothing else: the floor of what gRPC costs."""
    from attnd.client import keep_freed_memory  # noqa: PLC0415 - the naive peers must not meet what it sets up

    async def call(message: bytes, _context: object) -> bytes:
        return message

    async def stream(_requests: object, context: Any) -> None:
        while isinstance(message := await context.read(), bytes):
            await context.write(message)

    async def serve() -> None:
        handlers: dict[str, Any] = {
            "unary": grpc.unary_unary_rpc_method_handler(call),
            "session": grpc.stream_stream_rpc_method_handler(stream),
        }
        server = grpc.aio.server(options=UNLIMITED)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(BARE_SERVICE, handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await server.wait_for_termination()

    keep_freed_memory()
    asyncio.run(serve())


def bare_drive(address: str, way: str) -> None:
    """Times bytes there and back.

    Args:
        address: The bare server.
        way: "session" for a stream as attnd's client has it, "unary" for calls of their own.
    """
    from attnd.client import keep_freed_memory  # noqa: PLC0415
    from attnd.client._pipe import open_pipe  # noqa: PLC0415

    keep_freed_memory()
    path = f"/{BARE_SERVICE}/{way}"
    with grpc.insecure_channel(address, UNLIMITED) as channel:
        call: Any = channel.unary_unary(path)
        pipe = open_pipe(channel, path, ()) if way == "session" else None

        def ask(message: bytes) -> bytes:
            if pipe is None:
                answer: bytes = call(message)
                return answer
            pipe.send(message)
            return pipe.receive()

        def prepare(size: int) -> Callable[[], object]:
            message = bytes(size)

            def echo() -> None:
                if len(ask(message)) != size:
                    raise AssertionError("the echo has another size")

            return echo

        drive(prepare)


def attnd_serve() -> None:
    """Serves attnd with attention that gives the queries back: all that a call costs, but for its compute."""
    from attnd.kernels.contract import Attended  # noqa: PLC0415 - the drivers need no server's packages
    from attnd.kernels.xla import Xla  # noqa: PLC0415
    from attnd.service import server  # noqa: PLC0415
    from attnd.service.config import ServerConfig  # noqa: PLC0415

    def attend(_self: Xla, _pages: Any, _layer: int, _batch: Any, q: np.ndarray, **_: Any) -> Attended:
        return Attended(out=q)

    Xla.attend = attend  # type: ignore[method-assign, assignment]
    asyncio.run(server.serve(ServerConfig(port=0, warm_up=False, implementation="xla")))


def attnd_drive(address: str, way: str) -> None:
    """Times attention calls whose answer is as large as the question.

    Args:
        address: The server.
        way: "session" for layers of a planned step, "local" for those over the local socket, "unary" for calls of
            their own.
    """
    from attnd.client import Client, keep_freed_memory  # noqa: PLC0415 - the naive peers must not meet what it sets up

    keep_freed_memory()
    with Client(address, timeout_s=300, local=way == "local") as client:

        def prepare(size: int) -> Callable[[], object]:
            rows, heads, head_dim = Q_SHAPES[size]
            cache = client.create_cache(
                f"rpc-{way}-{size}",
                num_layers=1,
                num_pages=rows,
                page_size=16,
                num_kv_heads=1,
                head_dim=head_dim,
                dtype="float32",
                pages_by="client",
            )
            metadata = (np.ones(rows, np.int32), np.arange(rows)[:, np.newaxis], np.arange(rows + 1), rows)
            q = np.ones((rows, heads, head_dim), np.float32)
            plan = cache.plan(*metadata)
            calls: dict[str, Callable[[], Any]] = {
                "session": lambda: plan.attend(0, q),
                "local": lambda: plan.attend(0, q),
                "unary": lambda: cache.ragged_paged_attention(0, q, *metadata),
            }
            if not np.array_equal(calls[way](), q):
                raise AssertionError("the answer is not the question")
            return calls[way]

        drive(prepare)


def step_drive(address: str, way: str) -> None:
    """Times whole steps of `STEP_LAYERS` layers; the size is that of q."""
    from attnd.client import Client, keep_freed_memory  # noqa: PLC0415

    keep_freed_memory()
    with Client(address, timeout_s=300, local=False) as client:

        def prepare(size: int) -> Callable[[], object]:
            rows, pages = STEP_SHAPE
            q = np.ones((rows, 1, size // 4 // rows), np.float32)
            cache = client.create_cache(
                f"step-{way}",
                num_layers=STEP_LAYERS,
                num_pages=rows * pages,
                page_size=1,
                num_kv_heads=1,
                head_dim=q.shape[2],
                dtype="float32",
                pages_by="client",
            )
            tables = np.random.default_rng(0).permutation(rows * pages).reshape(rows, pages).astype(np.int32)
            lens, bounds = np.full(rows, pages, np.int32), np.arange(rows + 1, dtype=np.int32)

            def planned() -> None:
                step = cache.plan(lens, tables, bounds, rows)
                for layer in range(STEP_LAYERS):
                    step.attend(layer, q)

            def whole() -> None:
                for layer in range(STEP_LAYERS):
                    cache.ragged_paged_attention(layer, q, lens, tables, bounds, rows)

            return planned if way == "session" else whole

        drive(prepare)


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

        def prepare(size: int) -> Callable[[], object]:
            payload = bytes(size)

            def echo() -> None:
                connection.sendall(size.to_bytes(8, "little"))
                connection.sendall(payload)
                receive(connection, size)

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


def drive(prepare: Callable[[int], Callable[[], object]]) -> None:
    """Answers the lines of stdin.

    Args:
        prepare: Returns the round trip for a size.
    """
    calls: dict[int, Callable[[], object]] = {}
    for size, count in requests():
        if size not in calls:
            calls[size] = prepare(size)
        totals = []
        for _ in range(count):
            start = time.perf_counter_ns()
            calls[size]()
            totals.append(time.perf_counter_ns() - start)
        print(*totals, flush=True)


def requests() -> Iterator[tuple[int, int]]:
    """Yields sizes and counts from stdin."""
    for line in sys.stdin:
        size, count = line.split()
        yield int(size), int(count)


ROLES: Final[dict[str, Callable[..., None]]] = {
    "naive-serve": naive_serve,
    "naive-drive": naive_drive,
    "bare-serve": bare_serve,
    "bare-drive": bare_drive,
    "attnd-serve": attnd_serve,
    "attnd-drive": attnd_drive,
    "step-drive": step_drive,
    "echo-serve": echo_serve,
    "echo-drive": echo_drive,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
