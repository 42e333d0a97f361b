"""Generates `proto/attnd/v1/*_pb2.py` and `.pyi` from the `.proto` files, or checks that they are fresh.

The code is made by the oldest supported protoc, kept in a virtual environment of its own, since generated code
refuses an older protobuf runtime than its compiler's but serves newer ones.
"""

import filecmp
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"
PROTOC_REQUIREMENT = "grpcio-tools==1.76.0"


def protoc_python() -> Path:
    """Returns the interpreter of an environment that has the pinned protoc, made at first use."""
    home = ROOT / "build" / f"protoc-{PROTOC_REQUIREMENT.partition('==')[2]}"
    python = home / "bin" / "python"
    marker = home / "ready"
    if not marker.exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PROTOC_REQUIREMENT], check=True)
        marker.touch()
    return python


def generate(out: Path) -> list[Path]:
    """Writes the generated files below `out` and returns them."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.glob("attnd/v1/*.proto"))
    command = [protoc_python(), "-m", "grpc_tools.protoc", f"-I{PROTO}", f"--python_out={out}", f"--pyi_out={out}"]
    subprocess.run([*command, *sources], check=True, cwd=PROTO, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    return sorted(out.glob("attnd/v1/*_pb2.py*"))


def check() -> int:
    """Returns 1 and names the files if the committed code differs from what the `.proto` files give."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {path.relative_to(folder): path for path in generate(Path(folder))}
        committed = {path.relative_to(PROTO) for path in PROTO.glob("attnd/v1/*_pb2.py*")}
        stale = [
            name
            for name in sorted(committed | set(fresh))
            if name not in fresh or name not in committed or not filecmp.cmp(fresh[name], PROTO / name, shallow=False)
        ]
    for name in stale:
        print(f"stale generated code: proto/{name}; run `make generate`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(check())
    for written in generate(PROTO):
        print(written.relative_to(ROOT))
