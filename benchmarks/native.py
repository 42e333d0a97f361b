"""C baselines, compiled when the benchmarks run, if the machine has a compiler."""

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "benchmarks"


def compile_c(source: str, flags: Sequence[str] = ()) -> Path | None:
    """Compiles a C file of this directory.

    Args:
        source: Its name.
        flags: Flags beside the optimiser's.

    Returns:
        The program or library, built anew only when the source has changed; None without a compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    text = (HERE / source).read_bytes()
    digest = hashlib.sha256(text + " ".join(flags).encode()).hexdigest()[:16]
    target = BUILD / f"{Path(source).stem}-{digest}"
    if not target.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        command = [compiler, "-O3", "-march=native", "-Wall", "-Wextra", "-pthread", *flags]
        subprocess.run([*command, "-o", partial, HERE / source], check=True)
        partial.replace(target)
    return target


class PageReader:
    """Reads pages at memory speed: what an attention that did nothing but read its pages would need."""

    def __init__(self, num_threads: int) -> None:
        library = compile_c("stream.c", ("-shared", "-fPIC"))
        self.name = "C" if library else "NumPy"
        self._num_threads = num_threads
        self._read = ctypes.CDLL(str(library)).read_pages if library else None
        if self._read is not None:
            self._read.restype = ctypes.c_uint64

    def read(self, pool: np.ndarray, pages: np.ndarray) -> int:
        """Sums the pages as 64-bit words, modulo 2**64.

        Args:
            pool: uint64 [num_pages, words], C order.
            pages: int32, the pages to read, in order.
        """
        if self._read is None:
            return sum(int(pool[page].sum(dtype=np.uint64)) for page in pages) % 2**64
        return int(
            self._read(
                ctypes.c_void_p(pool.ctypes.data),
                ctypes.c_void_p(pages.ctypes.data),
                ctypes.c_size_t(len(pages)),
                ctypes.c_size_t(pool.shape[1]),
                ctypes.c_int(self._num_threads),
            )
        )
