"""Compiles programs for a TPU that is not there: the child process, which serves one generation.

libtpu takes its options once per process and may hang or crash while it compiles, so its users are children that can
be given up. Jobs come in as JSON, one a line, and each is answered with one line.
"""

import importlib
import json
import os
import sys
import time
from typing import Any, Final

TOPOLOGIES: Final = {
    "v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1",
}  # fmt: skip
COLLECTIVES: Final = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute")
_ERROR_CHARS_MAX: Final = 2000


def main() -> None:
    """Serves jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libtpu prints is no answer
    devices = _devices(sys.argv[1])
    print(json.dumps({"device_kind": devices[0].device_kind}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_answer(devices, json.loads(line))), file=answers)


def _devices(generation: str) -> Any:
    from jax.experimental import topologies  # noqa: PLC0415 - libtpu reads its options when it is loaded

    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation])
    return topology.devices


def _answer(devices: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Returns what became of one program."""
    module, _, name = job["program"].partition(":")
    started = time.monotonic()
    try:
        lowered = getattr(importlib.import_module(module), name)(devices, **job["arguments"])
        compiled = lowered.compile()
    except Exception as error:  # whatever the compiler raises is its verdict
        return {"error": f"{type(error).__name__}: {error}"[:_ERROR_CHARS_MAX], "seconds": time.monotonic() - started}
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    return {
        "error": None,
        "seconds": time.monotonic() - started,
        "code_bytes": memory.generated_code_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "collectives": [name for name in COLLECTIVES if f" {name}" in text],
    }


if __name__ == "__main__":
    main()
