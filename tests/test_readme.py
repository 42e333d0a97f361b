"""What README.md shows runs as written."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from attnd.service.cli import app
from attnd.v1 import attention_pb2, cache_pb2, server_pb2
from tests.support.server import attnd_server

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_sdk_example_runs_as_written():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with attnd_server() as server:
        code = example.replace("127.0.0.1:50051", server.address)
        command = [sys.executable, "-W", "error", "-c", code]
        ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("(8, 9, 64)")


def test_the_table_names_every_rpc():
    for file in (attention_pb2, cache_pb2, server_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                assert f"`{method.name}`" in README


def test_every_link_leads_somewhere():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_make_target_and_command_it_shows_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    commands |= {command.name for command in entry_points(group="attnd.commands")}
    assert set(re.findall(r"^attnd (\w+)", README, re.MULTILINE)) <= commands
