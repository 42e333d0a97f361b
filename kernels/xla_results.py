"""The answer of one call, collected from its programs."""

import numpy as np
from jaxtyping import Float, Float32

from attnd.kernels.xla_work import Call


class Results:
    """Takes the results of programs; threads may add different calls at the same time.

    Attributes:
        out: q's dtype and shape; zero where nothing was added.
        lse: Natural log-sum-exp; -inf where nothing was added.
    """

    def __init__(
        self, q: Float[np.ndarray, "tokens num_q_heads head_dim"], *, num_tokens: int, v_scale: float, merges: bool
    ) -> None:
        self.out = np.empty(q.shape, q.dtype)
        self.out[num_tokens:] = 0
        self.lse = np.full(q.shape[:2], -np.inf, np.float32)
        self._v_scale = np.float32(v_scale)
        self._merges = merges
        self._parts: list[tuple[Call, np.ndarray, np.ndarray]] = []

    def add(
        self,
        call: Call,
        out: Float32[np.ndarray, "items queries num_q_heads head_dim"],
        lse: Float32[np.ndarray, "items queries num_q_heads"],
    ) -> None:
        """Takes the results of a program."""
        if self._merges:
            self._parts.append((call, out, lse))
            return
        for i, (token, length) in enumerate(zip(call.tokens, call.lengths, strict=True)):
            rows = slice(token, token + length)
            np.multiply(out[i, :length], self._v_scale, out=self.out[rows], casting="same_kind")
            self.lse[rows] = lse[i, :length]

    def merge(self) -> None:
        """Combines results for different keys of the same queries: each weighs exp(lse)."""
        if not self._merges:
            return
        total = np.zeros(self.out.shape, np.float32)
        for call, out, lse in self._parts:
            for i, (token, length) in enumerate(zip(call.tokens, call.lengths, strict=True)):
                rows = slice(token, token + length)
                part = lse[i, :length]
                merged = np.logaddexp(self.lse[rows], part)
                with np.errstate(invalid="ignore"):  # -inf - -inf: nothing seen yet, and nothing here
                    kept, added = (np.nan_to_num(np.exp(x - merged))[:, :, None] for x in (self.lse[rows], part))
                total[rows] = total[rows] * kept + out[i, :length] * added
                self.lse[rows] = merged
        np.multiply(total, self._v_scale, out=self.out, casting="same_kind")
