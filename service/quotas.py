"""What one tenant may hold, over all its caches."""

import math
from collections.abc import Callable

from attnd.service.errors import ResourceExhaustedError


class Quota:
    """The pages and sequences of one tenant. Used from the event loop's thread.

    Attributes:
        sweep: Releases the tenant's sequences whose lease is over, in all its caches: they count until then.

    Args:
        pages_max: Pages that it may hold; None: any number.
        sequences_max: Sequences that it may hold; None: any number.
        sweep: See above; by default there is nothing to release.
    """

    def __init__(
        self,
        *,
        pages_max: int | None = None,
        sequences_max: int | None = None,
        sweep: Callable[[], None] = lambda: None,
    ) -> None:
        self.sweep = sweep
        self._pages_max = pages_max
        self._sequences_max = sequences_max
        self._num_pages = 0
        self._num_sequences = 0

    @property
    def num_pages(self) -> int:
        """Pages that it holds, those on their way back included."""
        return self._num_pages

    @property
    def num_sequences(self) -> int:
        """Sequences that it holds."""
        return self._num_sequences

    @property
    def num_sequences_left(self) -> float:
        """Sequences that it may create; infinite if any number."""
        return math.inf if self._sequences_max is None else self._sequences_max - self._num_sequences

    @property
    def is_idle(self) -> bool:
        """Whether the tenant holds nothing."""
        return not (self._num_pages or self._num_sequences)

    def take_pages(self, num_pages: int) -> None:
        """Counts pages that the tenant takes.

        Raises:
            ResourceExhaustedError: They are too many; none is counted.
        """
        _require(self._num_pages, num_pages, self._pages_max, "pages", "TENANT_PAGES_EXHAUSTED")
        self._num_pages += num_pages

    def give_pages(self, num_pages: int) -> None:
        """Counts pages that the tenant gives back."""
        assert num_pages <= self._num_pages, "more pages came back than were taken"
        self._num_pages -= num_pages

    def take_sequences(self, num_sequences: int) -> None:
        """Counts sequences that the tenant creates.

        Raises:
            ResourceExhaustedError: They are too many; none is counted.
        """
        _require(self._num_sequences, num_sequences, self._sequences_max, "sequences", "TENANT_SEQUENCES_EXHAUSTED")
        self._num_sequences += num_sequences

    def give_sequences(self, num_sequences: int) -> None:
        """Counts sequences that are gone."""
        assert num_sequences <= self._num_sequences, "more sequences went than were created"
        self._num_sequences -= num_sequences


def _require(held: int, more: int, most: int | None, what: str, reason: str) -> None:
    if most is not None and held + more > most:
        message = f"The tenant holds {held} {what}; {more} more pass its quota of {most}."
        raise ResourceExhaustedError(reason, message)
