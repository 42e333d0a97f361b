"""Which thread watches gRPC's sockets: each in a process of its own, since gRPC reads the setting once."""

import os
import subprocess
import sys

import grpc
import pytest

from attnd.v1 import polling

INSTALLED = tuple(map(int, grpc.__version__.split(".")[:2]))
tried = pytest.mark.skipif(
    not polling._VERSIONS_KNOWN[0] <= INSTALLED <= polling._VERSIONS_KNOWN[1],
    reason="a version of gRPC with which the pollers have not been tried is left as it is",
)

TELL = """
import os
{before}
from attnd.v1.polling import poll_in_waiting_threads
print(poll_in_waiting_threads(), os.environ.get("GRPC_EXPERIMENTS", ""))
import grpc
from concurrent import futures

server = grpc.server(futures.ThreadPoolExecutor(1))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    try:
        channel.unary_unary("/nobody/Asked")(b"", timeout=30)
    except grpc.RpcError as error:
        print(error.code().name)
server.stop(None)
"""


def told(before: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TELL.replace("{before}", before)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"GRPC_VERBOSITY": "ERROR"} | environment,
    )


@tried
def test_grpc_knows_the_pollers_and_calls_work_with_them():
    answer = told()
    assert answer.stdout.split() == ["True", "-event_engine_client,-event_engine_listener", "UNIMPLEMENTED"]
    assert "experiment" not in answer.stderr


@pytest.mark.parametrize(
    ("before", "environment"),
    [
        ("import grpc", {}),
        ("", {"GRPC_EXPERIMENTS": ""}),
        ("import importlib.metadata as found; found.version = lambda _: '1.99.0'", {}),
        ("import importlib.metadata as found; found.version = lambda _: 'unknown'", {}),
    ],
    ids=["grpc is there already", "the environment says otherwise", "a version not tried", "no version at all"],
)
def test_grpc_is_left_as_it_is(before, environment):
    assert told(before, **environment).stdout.split() == ["False", "UNIMPLEMENTED"]


@tried
def test_the_command_tells_grpc_before_it_imports_it():
    code = (
        "import sys; sys.argv = ['attnd', '--help']; from attnd.service.__main__ import main\n"
        "assert 'grpc' not in sys.modules\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "import os; print(os.environ['GRPC_EXPERIMENTS'])"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert answer.stdout.splitlines()[-1].startswith("-event_engine")
