"""How tests run Pallas kernels in interpret mode."""

from collections.abc import Callable
from typing import Any

import jax


def jit_quickly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles without optimising: an interpreted kernel is large, runs once, and spends its time in compilation."""
    options: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    if jax.__version_info__ < (0, 11):  # XLA has lost the option since
        options["xla_cpu_use_fusion_emitters"] = False
    return jax.jit(function, compiler_options=options)
