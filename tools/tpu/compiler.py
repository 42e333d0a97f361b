"""Compiles programs for TPUs ahead of time, each under a time limit, and collects libtpu's schedules."""

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tools.tpu.schedule import Schedule, read_schedules

ROOT: Final = Path(__file__).resolve().parents[2]
START_TIMEOUT_S: Final = 180.0
# libtpu asks a metadata server for its machine, and locks its device, unless told not to.
_ENVIRONMENT: Final = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "PYTHONWARNINGS": "ignore",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What became of a program.

    Attributes:
        error: The compiler's refusal, or that time ran out; None if it compiled.
        seconds: Time to trace, lower and compile.
        alias_bytes: Bytes of the arguments that results take over.
        collectives: Kinds of communication between devices in the program.
        schedules: The Pallas kernels in it, largest first; empty unless asked for.
    """

    error: str | None
    seconds: float
    code_bytes: int = 0
    temp_bytes: int = 0
    alias_bytes: int = 0
    collectives: tuple[str, ...] = ()
    schedules: tuple[Schedule, ...] = field(default=(), repr=False)

    def copy_of_pool(self, pool_bytes: int, *, donated: bool = True) -> str | None:
        """Returns how it copies a pool of this size where it should take it over, or read it; None if it does not."""
        if self.error is None and (self.temp_bytes >= pool_bytes or (donated and self.alias_bytes < pool_bytes)):
            return f"the pool is copied: {self.alias_bytes} bytes aliased, {self.temp_bytes} bytes more in use"
        return None


class Compiler:
    """Compiles for one generation, in a child process that is replaced when a program takes too long."""

    def __init__(self, generation: str, *, with_schedules: bool = False) -> None:
        self.generation = generation
        self._with_schedules = with_schedules
        self._folder = Path(tempfile.mkdtemp(prefix=f"attnd-{generation}-"))
        self._child: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def compile(self, program: str, arguments: dict[str, Any], *, timeout_s: float = 300.0) -> Compiled:
        """Compiles one program.

        Args:
            program: "module:function"; the function takes the topology's devices and `arguments` and returns what
                `jax.jit(...).lower(...)` returns.
            arguments: Keyword arguments, as JSON can carry them.
            timeout_s: When to give up.
        """
        try:
            child = self._started()
            assert child.stdin is not None
            child.stdin.write(json.dumps({"program": program, "arguments": arguments}) + "\n")
            child.stdin.flush()
            answer = json.loads(self._line(timeout_s))
        except (BrokenPipeError, EOFError):
            self._stop()
            return Compiled(error="the compiler crashed", seconds=0.0)
        except TimeoutError:
            self._stop()
            return Compiled(error=f"no answer within {timeout_s:g} s", seconds=timeout_s)
        answer["collectives"] = tuple(answer.get("collectives", ()))
        schedules = tuple(read_schedules(self._folder)) if self._with_schedules and answer["error"] is None else ()
        for path in self._folder.iterdir():
            path.unlink()
        return Compiled(**answer, schedules=schedules)

    def _started(self) -> subprocess.Popen[str]:
        """Returns the child that serves now."""
        if self._child is not None:
            return self._child
        options = f"--xla_jf_dump_to={self._folder} --xla_jf_dump_llo_text=true" if self._with_schedules else ""
        path = [str(ROOT), *([previous] if (previous := os.environ.get("PYTHONPATH")) else [])]
        self._child = child = subprocess.Popen(
            [sys.executable, "-m", "tools.tpu.child", self.generation],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
            env=os.environ | _ENVIRONMENT | {"LIBTPU_INIT_ARGS": options, "PYTHONPATH": os.pathsep.join(path)},
        )  # fmt: skip
        self._lines = queue.Queue()
        threading.Thread(target=_forward, args=(child, self._lines), daemon=True).start()
        self._line(START_TIMEOUT_S)
        return child

    def _line(self, timeout_s: float) -> str:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            raise EOFError
        return line

    def _stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


def _forward(child: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    """Hands on the child's lines; an empty one is its end."""
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put("")
