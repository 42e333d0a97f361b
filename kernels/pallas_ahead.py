"""Compiles the programs of our TPU kernels on a machine without a TPU, into JAX's persistent compilation cache."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import jax

from attnd.kernels.contract import CacheSpec
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.pallas import Pallas
from attnd.kernels.tpu_chips import CHIPS

# What hosts of one chip have. A larger one is named by the topology: "v6e:2x2".
_ONE_CHIP: Final = {"v4": "v4:1x1x1", "v5e": "v5e:1x1", "v5p": "v5p:1x1x1", "v6e": "v6e:1x1", "tpu7x": "tpu7x:1x1x1"}
# libtpu looks for its machine, and locks its device, unless told not to. To be set before JAX is used.
ENVIRONMENT: Final = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def compile_ahead(
    tpu: str,
    spec: CacheSpec,
    num_q_heads: int,
    folder: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Compiles all programs that `Pallas.warm_up` does; returns how many.

    A server finds them if it has the same jax and libtpu, this package at the same path (a kernel's source lines are
    part of its key), TPUs of the same topology, and JAX_COMPILATION_CACHE_DIR set to the folder. What it does not find
    it compiles.

    Args:
        tpu: A generation, for hosts of one chip, or a topology: "v6e", "v6e:2x2".
        spec: Shape of the cache.
        num_q_heads: Query heads.
        folder: Where JAX keeps compiled programs.
        on_progress: Told how many programs of how many are ready, after each.

    Raises:
        UnsupportedError: There is no such TPU, libtpu is not installed, or the TPU cannot serve the cache.
    """
    from jax.experimental import topologies  # noqa: PLC0415 - loads libtpu

    generation = tpu.partition(":")[0]
    if generation not in CHIPS:
        raise UnsupportedError(f"tpu={tpu!r} must be one of {', '.join(CHIPS)}, or a topology like v6e:2x2.")
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=_ONE_CHIP.get(tpu, tpu))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise UnsupportedError(f"libtpu knows no TPU {tpu!r} here: {str(error).splitlines()[0]}") from error
    jax.config.update("jax_compilation_cache_dir", str(folder))  # type: ignore[no-untyped-call]
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call]
    pallas = Pallas(device=topology.devices[0])
    reason = pallas.unsupported(spec)
    if reason is not None:
        raise UnsupportedError(reason)
    return pallas.warm_up(spec, num_q_heads, on_progress)
