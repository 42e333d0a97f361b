"""The image and the manifests agree with each other and with the server."""

import importlib.util
import json
import re
from concurrent import futures
from pathlib import Path

import grpc
import pytest
import typer
import yaml
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from attnd.service.cli import app
from tests.support.server import attnd_server

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
KUBERNETES = list(yaml.safe_load_all((ROOT / "deploy" / "kubernetes.yaml").read_text()))
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
CONTAINER = KUBERNETES[0]["spec"]["template"]["spec"]["containers"][0]


def load_healthcheck():
    spec = importlib.util.spec_from_file_location("healthcheck", ROOT / "deploy" / "healthcheck.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


healthcheck = load_healthcheck()


def exec_form(instruction):
    """The JSON array of the last `instruction` in the Dockerfile."""
    return json.loads(re.findall(rf"^{instruction} (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])


@pytest.fixture
def health_server():
    with futures.ThreadPoolExecutor(1) as pool:
        server = grpc.server(pool)
        servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield servicer, f"127.0.0.1:{port}"
        server.stop(None).wait()


def test_image_runs_the_server_as_process_one_without_a_shell():
    assert exec_form("ENTRYPOINT") == ["attnd", "serve", "--host", "0.0.0.0"]  # noqa: S104 - inside a container
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE


def test_image_is_pinned_not_root_and_has_a_health_check():
    bases = re.findall(r"^FROM (\S+)", DOCKERFILE, re.MULTILINE)
    assert len(bases) == 2
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base) for base in bases)
    assert re.search(r"^USER \d+:\d+$", DOCKERFILE, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK ", DOCKERFILE, re.MULTILINE)


def test_everything_that_the_image_copies_is_let_through_by_dockerignore():
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        line.split()[1:-1] for line in DOCKERFILE.splitlines() if line.startswith("COPY ") and "--from" not in line
    ]
    assert {source for sources in copied for source in sources} == allowed
    assert all((ROOT / path).exists() for path in allowed)


def test_variants_are_extras_of_the_package():
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{variant} = \[", pyproject, re.MULTILINE) for variant in ("cpu", "tpu"))


def test_manifests_use_the_image_s_user_port_and_health_service():
    port = int(exec_form("CMD")[exec_form("CMD").index("--port") + 1])
    user = int(re.search(r"^USER (\d+)", DOCKERFILE, re.MULTILINE)[1])
    pod = KUBERNETES[0]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == user
    assert CONTAINER["ports"][0]["containerPort"] == port
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["grpc"] == {"port": port}
    assert KUBERNETES[1]["spec"]["selector"] == KUBERNETES[0]["spec"]["selector"]["matchLabels"]
    assert COMPOSE["services"]["attnd"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_server_takes_the_arguments_of_the_manifest_and_the_check_sees_it(capsys):
    arguments = CONTAINER["args"]
    assert arguments[:2] == exec_form("CMD")
    with attnd_server(*arguments[2:]) as server:
        assert healthcheck.main([server.address]) == 0
    assert "SERVING" in capsys.readouterr().out
    assert healthcheck.main([server.address, "--timeout", "1"]) == 1


def test_health_check_fails_while_the_server_drains(health_server, capsys):
    servicer, address = health_server
    servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert healthcheck.main([address]) == 1
    assert "NOT_SERVING" in capsys.readouterr().out


def test_health_check_takes_the_port_of_the_server_s_environment(health_server, monkeypatch):
    _, address = health_server
    monkeypatch.setenv("ATTND_PORT", address.rpartition(":")[2])
    assert healthcheck.main([]) == 0


def test_every_option_that_the_page_on_deployment_names_exists():
    page = (ROOT / "docs" / "deploy.md").read_text()
    options = {name for command in typer.main.get_command(app).commands.values() for name in option_names(command)}
    checks = set(re.findall(r"--[a-z-]+", (ROOT / "deploy" / "healthcheck.py").read_text()))
    others = {"--build-arg", "--rm", "--stop-timeout", "--help"}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) <= options | checks | others


def option_names(command):
    return {name for parameter in command.params for name in parameter.opts}
