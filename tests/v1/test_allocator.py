"""What becomes of freed memory: each in a process of its own, since it cannot be undone."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
from attnd.v1.allocator import keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "kept":
    assert keep_freed_memory()
bytes(bytearray(16 << 20))
before = faults()
for _ in range(10):
    bytes(bytearray(16 << 20))
print(faults() - before)
"""


def faults(how: str) -> int:
    command = [sys.executable, "-c", FAULTS, how]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_memory_that_is_kept_is_not_faulted_in_again():
    assert faults("kept") < 1000 < faults("as it is")


@pytest.mark.parametrize("answer", [None, "musl 1.2", OSError()])
def test_other_c_libraries_are_left_alone(monkeypatch, answer):
    from attnd.v1 import allocator

    def confstr(_):
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(allocator.os, "confstr", confstr)
    assert allocator.keep_freed_memory() is False
