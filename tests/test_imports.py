"""Who imports whom, and how much memory the client takes: each in a fresh interpreter."""

import json
import subprocess
import sys

import pytest

# What each package must leave alone; the rest of the table in docs/architecture.md follows from it.
FORBIDDEN = {
    "attnd.v1": ["attnd.kernels", "attnd.service", "attnd.client", "grpc", "jax"],
    "attnd.kernels": ["attnd.v1", "attnd.service", "attnd.client", "grpc", "google.protobuf"],
    "attnd.service": ["attnd.client"],
    "attnd.client": ["attnd.kernels", "attnd.service", "jax", "jaxlib", "numba"],
}
IMPORT_ALL = """
import importlib, json, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(json.dumps(sorted(sys.modules)))
"""
MEMORY = "import attnd.client, psutil; print(psutil.Process().memory_info().rss / 2**20)"


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_package_imports_what_it_must_not(package):
    loaded = json.loads(run(IMPORT_ALL, package))
    wrong = [name for name in loaded for root in FORBIDDEN[package] if name == root or name.startswith(f"{root}.")]
    assert wrong == []


def test_the_client_is_light():
    # Its time is told by `make bench`: on a busy machine a test of it would fail for no fault of the client's.
    assert float(run(MEMORY)) <= 70
