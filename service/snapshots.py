"""The sequences of a cache at one moment: what a save keeps and a restore brings back."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32


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
