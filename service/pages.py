"""Who holds which page of a cache whose pages the server manages."""

from typing import Final

import numpy as np
from jaxtyping import Bool, Int32

from attnd.service.errors import ResourceExhaustedError
from attnd.service.quotas import Quota

RESERVED_PAGE: Final = 0
"""Holds no tokens ever: it lies behind the unused slots of every page table."""
RETURNING_RETRY_S: Final = 0.05

Pages = Int32[np.ndarray, " num_pages"]


class PagePool:
    """The pages 1 to `num_pages` of a cache. The last page given back is the first taken again.

    Invariant: every page is free, or held by as many as its count says, or on its way back.

    Args:
        num_pages: Pages besides the reserved one.
        quota: Counts the pages that are not free.
    """

    def __init__(self, num_pages: int, quota: Quota) -> None:
        self._free = np.arange(num_pages, 0, -1, dtype=np.int32)
        self._num_free = num_pages
        self._quota = quota
        self._holders = np.zeros(num_pages + 1, np.int32)
        self._sealed_lens = np.zeros(num_pages + 1, np.int32)

    @property
    def num_free(self) -> int:
        """Pages that can be taken now."""
        return self._num_free

    @property
    def num_returning(self) -> int:
        """Pages that nobody holds and that are not free yet."""
        return len(self._free) - self._num_free - int(np.count_nonzero(self._holders))

    def take(self, num_pages: int) -> Pages:
        """Returns distinct free pages, each with one holder now.

        Raises:
            ResourceExhaustedError: Fewer are free, or the tenant's quota is smaller; none is taken.
        """
        if num_pages > self._num_free:
            message = f"The call needs {num_pages} more pages, of {len(self._free)} are {self._num_free} free."
            returning = num_pages <= self._num_free + self.num_returning
            delay_s = RETURNING_RETRY_S if returning else None
            raise ResourceExhaustedError("PAGES_EXHAUSTED", message, retry_delay_s=delay_s)
        self._quota.take_pages(num_pages)
        self._num_free -= num_pages
        pages = self._free[self._num_free : self._num_free + num_pages][::-1].copy()
        self._holders[pages] = 1
        return pages

    def share(self, pages: Pages) -> None:
        """Counts one more holder of each of some distinct pages."""
        assert (self._holders[pages] > 0).all(), "a page that nobody holds was shared"
        self._holders[pages] += 1

    def drop(self, pages: Pages) -> Pages:
        """Counts one holder less of each of some distinct pages; returns those that nobody holds any more."""
        holders = self._holders[pages] - 1
        assert (holders >= 0).all(), "a page that nobody holds was dropped"
        self._holders[pages] = holders
        unheld: np.ndarray = pages[holders == 0]
        return unheld

    def give(self, pages: Pages) -> None:
        """Makes pages free that nobody holds and that are clean."""
        end = self._num_free + len(pages)
        assert end <= len(self._free), "more pages came back than were taken"
        assert not self._holders[pages].any(), "a page came back that somebody holds"
        self._free[self._num_free : end] = pages[::-1]
        self._num_free = end
        self._quota.give_pages(len(pages))

    def seal(self, pages: Pages, lens: Int32[np.ndarray, " num_pages"]) -> None:
        """Counts a save as a holder of distinct pages; until `unseal`, their first `lens` tokens do not change."""
        self.share(pages)
        self._sealed_lens[pages] = lens

    def unseal(self, pages: Pages) -> Pages:
        """Ends the hold of a save; returns the pages that nobody holds any more."""
        self._sealed_lens[pages] = 0
        return self.drop(pages)

    def is_shared(self, pages: Pages) -> Bool[np.ndarray, " num_pages"]:
        """Returns which pages more than one sequence holds."""
        shared: np.ndarray = self._holders[pages] - (self._sealed_lens[pages] > 0) > 1
        return shared

    def sealed_lens(self, pages: Pages) -> Int32[np.ndarray, " num_pages"]:
        """Returns how many tokens of each page a save reads."""
        lens: np.ndarray = self._sealed_lens[pages]
        return lens

    def holders(self) -> Int32[np.ndarray, " num_pages+1"]:
        """Returns how many hold each page."""
        return self._holders.copy()
