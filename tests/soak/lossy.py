"""Appends through a proxy that loses replies and cuts connections: every token is there once, and in its place."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnd import client as sdk
from tests.soak.report import Row
from tests.support.proxy import Losses, lossy_proxy
from tests.support.server import attnd_server

LOST = 0.2
CUT = 0.1
LENGTH_MAX = 250
HEAD_DIM = 8
PAGE_SIZE = 16
TRIES_MAX = 200


@dataclass
class Text:
    """The tokens of one sequence, as they were sent.

    Attributes:
        handle: The sequence.
        q: Queries.
        k: Keys.
        v: Values.
    """

    handle: bytes
    q: list[np.ndarray] = field(default_factory=list)
    k: list[np.ndarray] = field(default_factory=list)
    v: list[np.ndarray] = field(default_factory=list)

    def attention(self) -> np.ndarray:
        """Returns the attention of every token over those up to itself, [tokens, 1, head_dim]."""
        q, k, v = (np.stack(rows)[:, 0].astype(np.float64) for rows in (self.q, self.k, self.v))
        scores = np.where(np.tri(len(q), dtype=bool), q @ k.T, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return (weights / weights.sum(-1, keepdims=True) @ v)[:, np.newaxis]


class Appender:
    """A caller that repeats an append, as it was, until it is answered.

    Args:
        address: Of the proxy.
        seed: What the losses, too, follow from.
    """

    def __init__(self, address: str, cache_name: str, seed: int) -> None:
        self._address = address
        self._cache_name = cache_name
        self._rng = random.Random(seed)
        self._client: sdk.Client | None = None
        self._cache: Any = None
        self.num_repeated = 0

    def append(self, text: Text, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Appends a token to a sequence; returns its attention.

        Raises:
            AttndError: The server refused it.
        """
        for _ in range(TRIES_MAX):
            try:
                if self._cache is None:
                    self._client = sdk.Client(self._address, timeout_s=60.0, local=False)
                    self._cache = self._client.get_cache(self._cache_name)
                step = self._cache.step([self._cache.sequence(text.handle)], q_lens=[1], kv_lens=[len(text.q) + 1])
                out = step.attend(0, q[np.newaxis], k[np.newaxis], v[np.newaxis])
            except (sdk.UnavailableError, sdk.CallCancelledError):
                self.num_repeated += 1
                # A new connection is quicker than one that waits before it tries again; both have to be right.
                if self._cache is None or self._rng.random() < 0.9:
                    self.close()
            else:
                for rows, row in ((text.q, q), (text.k, k), (text.v, v)):
                    rows.append(row)
                return out[0]
        raise TimeoutError(f"no answer in {TRIES_MAX} tries")

    def close(self) -> None:
        """Closes the connection."""
        if self._client is not None:
            self._client.close()
        self._client = self._cache = None


def run(count: int, seed: int) -> list[Row]:
    """Appends `count` tokens and looks for each of them."""
    row = Row("an append is done once, in place, however often its reply is lost or its connection cut", count)
    rng = np.random.default_rng(seed)
    num_sequences = -(-count // LENGTH_MAX)
    num_pages = num_sequences * -(-LENGTH_MAX // PAGE_SIZE)
    sizes = {"num_layers": 1, "num_pages": num_pages, "page_size": PAGE_SIZE, "num_kv_heads": 1, "head_dim": HEAD_DIM}
    losses = Losses(random.Random(seed), LOST, CUT)
    with attnd_server() as server, sdk.Client(server.address, timeout_s=60.0) as direct:
        cache = direct.create_cache("a", **sizes, dtype="float32", pages_by="server")
        texts = [Text(sequence.handle) for sequence in cache.create_sequences(num_sequences)]
        with lossy_proxy(server.address, losses) as address:
            appender = Appender(address, cache.name, seed)
            for i in range(count):
                text = texts[int(rng.integers(num_sequences))] if i >= num_sequences else texts[i]
                text = min(texts, key=lambda each: len(each.q)) if len(text.q) >= LENGTH_MAX else text
                appender.append(text, *rng.standard_normal((3, 1, HEAD_DIM), np.float32))
                if i % 100 == 99:
                    row.progress(i + 1)
            appender.close()
        _verify(row, cache, texts)
    row.notes = (
        f"{losses.num_lost:,} replies lost and {losses.num_cut:,} connections cut of {losses.num_requests:,} requests"
    )
    return [row]


def _verify(row: Row, cache: Any, texts: list[Text]) -> None:
    listed = {each.handle: each for each in cache.list_sequences()}
    for i, text in enumerate(texts):
        held, length = listed[text.handle], len(text.q)
        if (held.length, held.num_pages) != (length, -(-length // PAGE_SIZE)):
            row.fail(f"sequence {i} has {held.length} tokens on {held.num_pages} pages instead of {length} tokens")
            continue
        step = cache.step([cache.sequence(text.handle)], q_lens=[length], kv_lens=[length])
        out = step.attend(0, np.stack(text.q))
        for position in np.flatnonzero(~np.isclose(out, text.attention(), atol=1e-4).all(axis=(1, 2))):
            row.fail(f"sequence {i} has another token at position {position}")
