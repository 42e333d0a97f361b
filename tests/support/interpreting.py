"""How tests run Pallas kernels in interpret mode, and count what they do."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.pallas import Pallas
from attnd.kernels.pallas_programs import Program, Programs, interpreter_options

DMA_MODES = ("on_wait", "eager")


def jit_quickly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles without optimising: an interpreted kernel is large, runs once, and spends its time in compilation."""
    return jax.jit(function, compiler_options=interpreter_options())


def strict_pallas(dma_mode: str) -> Pallas:
    """Returns our kernels over memory that begins as NaN; a launch with a race fails.

    Args:
        dma_mode: When copies happen: "on_wait" as late, "eager" as early as they can.
    """
    params = pltpu.InterpretParams(dma_execution_mode=dma_mode, detect_races=True, uninitialized_memory="nan")
    implementation = Pallas(interpret=params)
    implementation._programs = _WithoutRaces(jax.devices("cpu")[0], interpret=params)
    return implementation


class RaceDetected(AssertionError):
    """An interpreted kernel read what a copy may still be writing, or wrote what one may still be reading."""


@contextmanager
def without_races() -> Iterator[None]:
    """Raises RaceDetected if a launch inside has a race. What is launched must have ended before the block does."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:  # Newer versions of jax stop at the race, older ones note it.
        if "RACE DETECTED" in str(error):
            raise RaceDetected from error
        raise
    assert interpret_pallas_call.races is not None
    if interpret_pallas_call.races.races_found:
        raise RaceDetected


class _WithoutRaces(Programs):
    def run(self, program: Program, pool: Any, arguments: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        with without_races():
            return jax.block_until_ready(super().run(program, pool, arguments))


@contextmanager
def counted_copies(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Counts the copies that interpreted kernels start: the list gets an entry for each. For programs traced inside."""
    started: list[int] = []
    original = interpret_pallas_call.dma_start

    def counting(*args: Any, **kwargs: Any) -> Any:
        started.append(1)
        return original(*args, **kwargs)

    with patch.context() as inner:
        inner.setattr(interpret_pallas_call, "dma_start", counting)
        yield started
