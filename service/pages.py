"""Who holds which page of a cache whose pages the server manages."""

import numpy as np
from jaxtyping import Int32

from attnd.service.errors import ResourceExhaustedError


class PagePool:
    """The free pages of a cache. The last page given back is the first taken again.

    Invariant: every page is free, or held by exactly one sequence, or on its way back.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._num_free = num_pages

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return self._num_free

    def take(self, num_pages: int) -> Int32[np.ndarray, " num_pages"]:
        """Returns distinct free pages, now the caller's.

        Raises:
            ResourceExhaustedError: Fewer are free; none is taken.
        """
        if num_pages > self._num_free:
            message = f"The call needs {num_pages} more pages, of {len(self._free)} are {self._num_free} free."
            raise ResourceExhaustedError("PAGES_EXHAUSTED", message)
        self._num_free -= num_pages
        return self._free[self._num_free : self._num_free + num_pages][::-1].copy()

    def give(self, pages: Int32[np.ndarray, " num_pages"]) -> None:
        """Takes pages back."""
        end = self._num_free + len(pages)
        assert end <= len(self._free), "more pages came back than were taken"
        self._free[self._num_free : end] = pages[::-1]
        self._num_free = end
