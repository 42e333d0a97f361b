"""Which implementations exist, and which one serves a cache."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from attnd.kernels.contract import CacheSpec, Implementation
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.numba import Numba
from attnd.kernels.reference import Reference
from attnd.kernels.xla import Xla

AUTO: Final = "auto"
# What "auto" tries on a platform, in this order; on any other platform, plain JAX on the host.
_PREFERRED: Final[Mapping[str, tuple[str, ...]]] = {"cpu": ("numba", "xla"), "tpu": ("pallas", "jax_ops", "xla")}


def _pallas(*, interpret: bool) -> Implementation[Any]:
    from attnd.kernels.pallas import Pallas  # noqa: PLC0415 - Pallas takes a second to load, for those who want it

    return Pallas(interpret=interpret)


def _jax_ops() -> Implementation[Any]:
    from attnd.kernels.jax_ops import JaxOps  # noqa: PLC0415 - as above

    return JaxOps()


_IMPLEMENTATIONS: Final[Mapping[str, Callable[[], Implementation[Any]]]] = {
    "reference": Reference,
    "xla": Xla,
    "numba": Numba,
    "pallas": partial(_pallas, interpret=False),
    "pallas_interpret": partial(_pallas, interpret=True),
    "jax_ops": _jax_ops,
}


def names() -> tuple[str, ...]:
    """Returns the names that `create` knows."""
    return tuple(_IMPLEMENTATIONS)


def create(name: str) -> Implementation[Any]:
    """Returns a new implementation, with programs of its own.

    Raises:
        UnsupportedError: There is no implementation of that name.
    """
    if name not in _IMPLEMENTATIONS:
        raise UnsupportedError(f"implementation={name!r} must be one of {', '.join((AUTO, *names()))}.")
    return _IMPLEMENTATIONS[name]()


def choose(spec: CacheSpec, platform: str, name: str = AUTO) -> Implementation[Any]:
    """Returns the implementation that serves caches of a shape.

    Args:
        spec: Shape of the cache.
        platform: JAX's name of the backend: "cpu", "tpu", "gpu".
        name: An implementation, or "auto" for the first that supports the shape.

    Raises:
        UnsupportedError: The named implementation does not exist or cannot serve the shape, or none can.
    """
    reasons = []
    for candidate in _PREFERRED.get(platform, ("xla",)) if name == AUTO else (name,):
        implementation = create(candidate)
        reason = implementation.unsupported(spec)
        if reason is None:
            return implementation
        reasons.append(f"{candidate}: {reason}")
    raise UnsupportedError("; ".join(reasons))
