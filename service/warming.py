"""Compiling ahead: the first call of a kind waits for all programs of its kind, and no later call waits again."""

import logging
import time
from typing import Any

from attnd.kernels.contract import CacheSpec, Implementation

_log = logging.getLogger(__name__)


class WarmUp:
    """Which programs of one cache are compiled. Used on the engine's thread.

    Args:
        name: Name of the cache, for the log.
        spec: Its shape.
        implementation: What serves it.
    """

    def __init__(self, name: str, spec: CacheSpec, implementation: Implementation[Any]) -> None:
        self._name = name
        self._spec = spec
        self._implementation = implementation
        self._warm: set[int] = set()

    def run(self, num_q_heads: int) -> int:
        """Compiles what calls with `num_q_heads` can need; returns the nanoseconds that it took."""
        if num_q_heads in self._warm:
            return 0
        started_at_ns = time.monotonic_ns()
        num_compiled = self._implementation.warm_up(self._spec, num_q_heads, self._report)
        self._warm.add(num_q_heads)
        compile_ns = time.monotonic_ns() - started_at_ns
        _log.info(
            "cache %s: %d programs for %d query heads compiled in %.1f s",
            self._name,
            num_compiled,
            num_q_heads,
            compile_ns / 1e9,
        )
        return compile_ns

    def _report(self, num_done: int, num_programs: int) -> None:
        _log.info("cache %s: compiling, %d of %d programs ready", self._name, num_done, num_programs)
