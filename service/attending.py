"""One attention call between its admission and its answer: what runs on the engine's thread."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int32, Shaped

from attnd.kernels.contract import Attended, AttentionOptions, KernelHints, RaggedBatch
from attnd.kernels.launch import launch
from attnd.kernels.stored import first_difference
from attnd.service.caches import Cache
from attnd.service.errors import FailedPreconditionError
from attnd.service.sequence import Reservation


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionCall:
    """A validated call.

    Attributes:
        cache: The cache.
        layer: The layer.
        batch: The metadata that the kernel works on.
        q: Queries.
        k: New keys, of any dtype that may be cast to the cache's.
        v: New values.
        options: Scalars.
        hints: How the kernel should work.
        rows: Rows of q that `batch` covers; None if they are the first ones.
        reservation: The hold on the sequences, if the server manages the pages.
    """

    cache: Cache
    layer: int
    batch: RaggedBatch
    q: Float[np.ndarray, "tokens num_q_heads head_dim"]
    k: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None
    v: Shaped[np.ndarray, "tokens num_kv_heads head_dim"] | None
    options: AttentionOptions
    hints: KernelHints
    rows: Int32[np.ndarray, " num_rows"] | None = None
    reservation: Reservation | None = None

    def run(self) -> Attended:
        """Writes and attends. On the engine's thread.

        Raises:
            FailedPreconditionError: The call brings other tokens than the sequence holds at their positions.
        """
        self._require_clean_pages()
        self._copy_shared_pages()
        self._require_same_tokens()
        warm_up = self.cache.warm_up
        warm_up_ns = 0 if warm_up is None or not self.batch.num_seqs else warm_up.run(self.q.shape[1])
        attended = launch(
            self.cache.implementation,
            self.cache.pages,
            self.layer,
            self.batch,
            self.q,
            rows=self.rows,
            k=self.k,
            v=self.v,
            options=self.options,
            hints=self.hints,
        )
        attended.timings.compile_ns += warm_up_ns
        return attended

    def _require_clean_pages(self) -> None:
        if not self.cache.debug_checks or self.reservation is None or not len(self.reservation.fresh):
            return
        for layer in range(self.cache.spec.num_layers):
            held = self.cache.implementation.read(self.cache.pages, layer, self.reservation.fresh)
            assert not any(np.any(each) for each in held if each is not None), "a page was free and not clean"

    def _copy_shared_pages(self) -> None:
        if self.reservation is None or not self.reservation.copies:
            return
        sources, targets = zip(*((each.sources, each.targets) for each in self.reservation.copies), strict=True)
        self.cache.implementation.copy(self.cache.pages, np.concatenate(sources), np.concatenate(targets))

    def _require_same_tokens(self) -> None:
        if self.reservation is None or self.k is None or self.v is None:
            return
        # Rows of the reservation that have no tokens in this call are not in the batch; theirs need no check.
        held_lens = self.reservation.held_lens[self.reservation.q_lens > 0]
        rewritten = self.batch.token_positions < held_lens[self.batch.token_seqs]
        if not rewritten.any():
            return
        differing = first_difference(
            self.cache.implementation,
            self.cache.pages,
            self.layer,
            self.batch,
            np.flatnonzero(rewritten),
            self.k,
            self.v,
        )
        if differing is not None:
            message = (
                f"Token {differing} of the call differs from the one that its sequence holds at position "
                f"{self.batch.token_positions[differing]} of layer {self.layer}: truncate the sequence first."
            )
            raise FailedPreconditionError("CONFLICTING_WRITE", message)
