"""The answer of one call, collected from its programs."""

import numpy as np
from jaxtyping import Float, Float32, Shaped

from attnd.kernels.xla_work import Call


def by_head(rows: Shaped[np.ndarray, "length num_q_heads *rest"], num_kv_heads: int) -> Shaped[np.ndarray, "..."]:
    """Returns a view of contiguous rows as programs order them: [num_kv_heads, length, group, *rest]."""
    length, num_q_heads, *rest = rows.shape
    return rows.reshape(length, num_kv_heads, num_q_heads // num_kv_heads, *rest).swapaxes(0, 1)


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
        out: Float32[np.ndarray, "items num_kv_heads queries group head_dim"],
        lse: Float32[np.ndarray, "items num_kv_heads queries group"],
    ) -> None:
        """Takes the results of a program."""
        if self._merges:
            self._parts.append((call, out, lse))
            return
        if call.bucket.queries == 1:
            count = len(call.tokens)
            self.out[call.tokens] = (out[:count] * self._v_scale).reshape(count, *self.out.shape[1:])
            self.lse[call.tokens] = lse[:count].reshape(count, -1)
            return
        for i, (token, length) in enumerate(zip(call.tokens, call.lengths, strict=True)):
            rows = slice(token, token + length)
            mine = by_head(self.out[rows], len(out[i]))
            np.multiply(out[i, :, :length], self._v_scale, out=mine, casting="same_kind")
            by_head(self.lse[rows], len(out[i]))[:] = lse[i, :, :length]

    def merge(self) -> None:
        """Combines results for different keys of the same queries: each weighs exp(lse)."""
        if not self._merges:
            return
        total = np.zeros(self.out.shape, np.float32)
        for call, out, lse in self._parts:
            for i, (token, length) in enumerate(zip(call.tokens, call.lengths, strict=True)):
                rows = slice(token, token + length)
                known, part = by_head(self.lse[rows], len(out[i])), lse[i, :, :length]
                merged = np.logaddexp(known, part)
                with np.errstate(invalid="ignore"):  # -inf - -inf: nothing seen yet, and nothing here
                    kept, added = (np.nan_to_num(np.exp(x - merged))[..., None] for x in (known, part))
                sums = by_head(total[rows], len(out[i]))
                sums[:] = sums * kept + out[i, :, :length] * added
                known[:] = merged
        with np.errstate(over="ignore"):  # what a dtype cannot hold is infinite
            np.multiply(total, self._v_scale, out=self.out, casting="same_kind")
