"""The sequences of a cache at one moment: what a save keeps and a restore brings back."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from attnd.service.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SequenceState:
    """One sequence.

    Attributes:
        handle: Its handle.
        layer_lens: int32 [num_layers]. Tokens that each layer holds.
        pages: int32. Its pages, in order; what they hold beyond its tokens has no meaning. None if it is damaged.
        lease_s: Seconds that it lives without being used.
        damaged: Whether some of its tokens are lost.
    """

    handle: bytes
    layer_lens: Int32[np.ndarray, " num_layers"]
    pages: Int32[np.ndarray, " num_pages"]
    lease_s: float
    damaged: bool = False

    @classmethod
    def of(cls, sequence: Sequence, num_pages: int) -> "SequenceState":
        """Returns the state of a sequence whose tokens lie in its first `num_pages` pages."""
        return cls(
            handle=sequence.handle,
            layer_lens=sequence.layer_lens.copy(),
            pages=sequence.pages[:num_pages].copy(),
            lease_s=sequence.lease_s,
            damaged=sequence.damaged,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All sequences of a cache, oldest first. The tokens that they hold do not change while it lasts."""

    sequences: tuple[SequenceState, ...]

    @property
    def pages(self) -> Int32[np.ndarray, " num_pages"]:
        """int32, ascending. The pages of the sequences, each once."""
        held = [sequence.pages for sequence in self.sequences]
        distinct: np.ndarray = np.unique(np.concatenate([np.empty(0, np.int32), *held]))
        return distinct

    def page_lens(self, page_size: int) -> Int32[np.ndarray, " num_pages"]:
        """Returns how many tokens of each of `pages` the sequences hold: the longest, where several hold it."""
        pages = self.pages
        lens = np.zeros(len(pages), np.int32)
        for sequence in self.sequences:
            starts = np.arange(len(sequence.pages), dtype=np.int32) * page_size
            held = np.minimum(int(sequence.layer_lens.max()) - starts, page_size)
            places = np.searchsorted(pages, sequence.pages)
            lens[places] = np.maximum(lens[places], held)
        return lens
