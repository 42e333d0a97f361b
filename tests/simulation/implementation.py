"""Real pages under an attention that looks at every token that it is led to, and that fails when it is told to."""

import jax
import numpy as np

from attnd.kernels.contract import Attended
from attnd.kernels.reference import Reference
from attnd.kernels.xla import Xla, XlaPages, alias_pages


class SimulatedFault(Exception):
    """What the simulation breaks work with."""


class Faults:
    """The step that fails next: "take", "table", "clear", "copy", "read", "write", "before write", "after write"."""

    def __init__(self):
        self.armed, self.times = None, 0

    def arm(self, step: str | None, times: int = 1) -> None:
        """Makes the next occurrences of a step fail, or none."""
        self.armed, self.times = step, times

    def strike(self, step: str, error: type[Exception] = SimulatedFault) -> None:
        """Raises an error if this step is to fail."""
        if self.armed == step and self.times:
            self.times -= 1
            raise error(step)


class SimulatedImplementation(Reference):
    """The oracle's pages; `attend` writes as every implementation on the host does and then compares with the model.

    Args:
        faults: What fails.
        model: Knows what each call should write and see: `calls_of`, `before_write`, `written`, `attended`.
        numbers: The implementation whose attention is computed now and then.
        every: Compute it once in so many calls.
    """

    name = "simulated"

    def __init__(self, faults, model, numbers, every):
        self._faults = faults
        self._model = model
        self._numbers = numbers
        self._every = every
        self._num_calls = 0

    def clear(self, pages, page_indices):
        self._faults.strike("clear")
        super().clear(pages, page_indices)

    def copy(self, pages, sources, targets):
        self._faults.strike("copy")
        super().copy(pages, sources, targets)

    def read(self, pages, layer, page_indices):
        self._faults.strike("read")
        return super().read(pages, layer, page_indices)

    def write(self, pages, layer, page_indices, kv_pages, scales=None):
        self._faults.strike("write")
        super().write(pages, layer, page_indices, kv_pages, scales)

    def attend(self, pages, layer, batch, q, *, k=None, v=None, options, hints):
        self._faults.strike("before write")
        calls = self._model.calls_of(layer, batch)
        self._num_calls += 1
        if self._num_calls % self._every == 0:
            attended = self._numbers.attend(pages, layer, batch, q, k=k, v=v, options=options, hints=hints)
            self._model.written(pages, calls, batch)
            self._model.attended(calls, attended.out)
            return attended
        if k is not None:
            pages.append(layer, batch, k, v)
        self._faults.strike("after write")
        self._model.written(pages, calls, batch)
        return Attended(out=np.zeros(q.shape, q.dtype))


class XlaNumbers:
    """The attention that serves on a CPU, over pages that the simulation looks at."""

    def __init__(self):
        self._xla = Xla()
        self._pages = {}

    def attend(self, pages, *args, **kwargs):
        if self._pages.get(id(pages), (None,))[0] is not pages:
            pools = alias_pages(pages, jax.devices("cpu")[0])
            self._pages[id(pages)] = pages, XlaPages(host=pages, pools=pools)
        return self._xla.attend(self._pages[id(pages)][1], *args, **kwargs)
