"""Kills a real server under load again and again: after each restart it holds its last completed save, or a newer one.

Two caches are changed all the time, one whose pages the server manages and one whose pages this program manages, and
saved all the time. Each has one thread that changes it, so that its states have an order: `History`. A save that was
answered shows a state no older than the last one that had been answered when the save was asked for. After a kill what
the server holds must be one of the states from there on, exactly: nothing that is between two of them, or of both.
"""

import random
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from attnd import client as sdk
from attnd.client import Cache, Client
from tests.soak.report import Row
from tests.support.server import attnd_server

LOAD_S_MAX = 1.5
START_S_MAX = 4.0
KILLS_DURING_START = 0.15
"""Share of kills that hit a server while it restores."""


class Mixture(Exception):
    """A restarted server holds what it never held."""


class History:
    """The states of a cache, in order: up to `answered` the server has said so, beyond it may have reached them.

    Args:
        first: The state that a server starts with.
        restored: The same as the newest save has it, under the handles that sequences had then; None if there is none.
    """

    def __init__(self, first: Any, restored: Any = None) -> None:
        self.states = [first]
        self.answered = 0
        self.restored = restored
        self.saved: int | None = None

    def begin(self, state: Any) -> None:
        self.states.append(state)

    def end(self) -> None:
        self.answered = len(self.states) - 1

    def possible(self) -> list[Any]:
        """Returns the states that the newest save may show, the newest first."""
        if self.saved is not None:
            return self.states[self.saved :][::-1]
        # A save that was not answered may be there all the same.
        return self.states[::-1] if self.restored is None else [*self.states[::-1], self.restored]

    @property
    def must_be_there(self) -> bool:
        """Whether there is a complete save."""
        return self.saved is not None or self.restored is not None


class Load:
    """A cache that is changed and saved until its server is gone."""

    name: str
    shape: ClassVar[dict]

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.history: History | None = None
        self.num_saves = self.num_changes = 0
        self.errors: list[str] = []

    def token(self) -> int:
        self.num_changes += 1
        return self.num_changes

    def repeat(self, act: Callable[[Cache], None], address: str) -> None:
        """Acts on the cache until the server is gone."""
        try:
            with Client(address) as client:
                cache = client.get_cache(self.name)
                while True:
                    act(cache)
        except sdk.UnavailableError:
            pass
        except Exception as error:
            self.errors.append(f"{self.name}: {error!r}")

    def save(self, cache: Cache) -> None:
        begun = self.history.answered
        cache.save()
        self.history.saved = begun
        self.num_saves += 1

    def resume(self, client: Client) -> None:
        """Checks what a restarted server holds, and goes on from there.

        Raises:
            Mixture: It is none of the states that may be.
        """
        possible = [] if self.history is None else self.history.possible()
        try:
            cache = client.get_cache(self.name)
        except sdk.NotFoundError as error:
            if self.history is not None and self.history.must_be_there:
                raise Mixture(f"{self.name}: a completed save is lost") from error
            client.create_cache(self.name, **self.shape)
            self.history = History(self.empty())
            return
        for state in possible:
            if (again := self.matched(cache, state)) is not None:
                self.history = History(*again)
                return
        raise Mixture(f"{self.name}: what is there was never there ({len(possible)} states were possible)")

    def empty(self) -> Any:
        raise NotImplementedError

    def change(self, cache: Cache) -> None:
        raise NotImplementedError

    def matched(self, cache: Cache, state: Any) -> tuple[Any, Any] | None:
        """Returns the state with the handles of this server, and of its save, if the cache is in it; None if not."""
        raise NotImplementedError


class Sequences(Load):
    """Sequences that are created, forked, lengthened layer by layer, truncated and released.

    A state has, for each handle, the sequence's tokens and how many of them each layer holds. The handle of a sequence
    that is being made is not known yet: it is empty.
    """

    name = "sequences"
    shape: ClassVar = {"num_layers": 2, "num_pages": 400, "page_size": 16, "num_kv_heads": 4, "head_dim": 64,
             "dtype": "float32", "pages_by": "server"}  # fmt: skip
    num_sequences_max = 20
    length_max = 200

    def empty(self) -> dict:
        return {}

    def change(self, cache: Cache) -> None:
        state, rng = self.history.states[-1], self.rng
        behind = [handle for handle, (_, lens) in state.items() if lens[1] < lens[0]]
        if behind:  # so that not every sequence is behind in the second layer
            return self._append(cache, behind[0], 1, 0)
        kind = rng.choice(["create", "fork", "release", "truncate", *["append"] * 8])
        if not state or (kind == "create" and len(state) < self.num_sequences_max):
            return self._new(([], (0, 0)), lambda: cache.create_sequences(1)[0])
        handle = rng.choice(list(state))
        tokens, lens = state[handle]
        sequence = cache.sequence(handle)
        if kind == "fork" and len(state) < self.num_sequences_max:
            return self._new((tokens, lens), sequence.fork)
        if kind == "release" or lens[0] > self.length_max:
            return self._do({key: value for key, value in state.items() if key != handle}, sequence.release)
        if kind == "truncate":
            kept = rng.randint(0, lens[0])
            shorter = (tokens[:kept], tuple(min(each, kept) for each in lens))
            return self._do({**state, handle: shorter}, lambda: sequence.truncate(kept))
        return self._append(cache, handle, 0, rng.randint(1, 40))

    def _append(self, cache: Cache, handle: bytes, layer: int, more: int) -> None:
        state = self.history.states[-1]
        tokens, lens = state[handle]
        if layer == 0:
            tokens = tokens + [self.token() for _ in range(more)]
        lens_after = (len(tokens), lens[1] if layer == 0 else len(tokens))
        self._do(
            {**state, handle: (tokens, lens_after)},
            lambda: self._attend(cache, handle, layer, tokens, lens[layer], lens_after[layer]),
        )

    def _new(self, state_of_new: Any, make: Any) -> None:
        before = self.history.states[-1]
        self.history.begin({**before, b"": state_of_new})
        handle = make().handle
        # The state as it was is not changed: a thread that saves may look at it.
        self.history.states[-1] = {**before, handle: state_of_new}
        self.history.end()

    def _do(self, after: dict, act: Any) -> None:
        self.history.begin(after)
        act()
        self.history.end()

    @staticmethod
    def _attend(cache: Cache, handle: bytes, layer: int, tokens: list[int], start: int, end: int) -> None:
        """Writes tokens, or the same ones again; one that differs from what the server holds is refused."""
        k, v = values(np.array(tokens[start:end]), layer, (4, 64))
        step = cache.step([cache.sequence(handle)], q_lens=[end - start], kv_lens=[end])
        out = step.attend(layer, k, k, v, sm_scale=0.01)
        all_k, all_v = values(np.array(tokens[:end]), layer, (4, 64))
        weights = np.exp(np.einsum("hd,khd->hk", k[-1], all_k) * 0.01)
        expected = np.einsum("hk,khd->hd", weights / weights.sum(1, keepdims=True), all_v)
        if not np.allclose(out[-1], expected, atol=1e-4):
            raise Mixture(f"sequences: attention over {end} tokens of layer {layer} is wrong")

    def matched(self, cache: Cache, state: dict) -> tuple[dict, dict] | None:
        infos = {info.restored_from: info for info in cache.list_sequences()}
        unknown = [handle for handle in infos if handle not in state]
        if b"" in state and len(unknown) == 1:
            state = {unknown[0] if handle == b"" else handle: each for handle, each in state.items()}
        lens = {handle: (info.length, info.complete_length) for handle, info in infos.items()}
        if lens != {handle: held for handle, (_, held) in state.items()} or any(i.damaged for i in infos.values()):
            return None
        for handle, (tokens, held) in state.items():
            for layer, end in enumerate(held):
                if not end:
                    continue
                try:
                    self._attend(cache, infos[handle].handle, layer, tokens, 0, end)
                except sdk.FailedPreconditionError:
                    return None
        return {infos[handle].handle: each for handle, each in state.items()}, state


class ClientPages(Load):
    """Pages that this program writes: whole ones, and the first token of one by attending.

    A state has, for each layer and page, what was written to the page and to its first token.
    """

    name = "pages"
    shape: ClassVar = {"num_layers": 2, "num_pages": 96, "page_size": 64, "num_kv_heads": 4, "head_dim": 64,
             "dtype": "float32", "pages_by": "client"}  # fmt: skip

    def empty(self) -> np.ndarray:
        return np.zeros((2, 96, 2), np.int64)

    def change(self, cache: Cache) -> None:
        after, layer, token = self.history.states[-1].copy(), self.rng.randrange(2), self.token()
        pages = np.array(self.rng.sample(range(96), self.rng.randint(1, 6)), np.int32)
        if self.rng.random() < 0.5:
            after[layer, pages] = token
            self.history.begin(after)
            cache.write_pages(layer, pages, np.full((len(pages), 64, 8, 64), token, np.float32))
        else:
            after[layer, pages, 1] = token
            self.history.begin(after)
            k, n = np.full((len(pages), 4, 64), token, np.float32), len(pages)
            ones = np.ones(n, np.int32)
            cache.ragged_paged_attention(layer, k, ones, pages[:, None], np.arange(n + 1), [n], k=k, v=k)
        self.history.end()

    def matched(self, cache: Cache, state: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        for layer in range(2):
            for half in np.split(np.arange(96, dtype=np.int32), 4):
                expected = np.empty((len(half), 64, 8, 64), np.float32)
                expected[:] = state[layer, half, 0][:, None, None, None]
                expected[:, 0] = state[layer, half, 1][:, None, None]
                if not np.array_equal(cache.read_pages(layer, half), expected):
                    return None
        return state, state


def values(tokens: np.ndarray, layer: int, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and values of tokens, float32 [tokens, *shape], no two alike."""
    elements = np.arange(shape[0] * shape[1]) * 0.618
    seeds = tokens[:, None] * 31.7 + layer * 1000.3 + elements
    return tuple(np.sin(seeds + offset).astype(np.float32).reshape(-1, *shape) for offset in (0.0, 0.5))


def run(count: int, seed: int) -> list[Row]:
    """Kills and restarts a server `count` times."""
    rng = random.Random(seed)
    row = Row("a killed server restarts with its last completed save, or a newer one", count)
    loads: list[Load] = [Sequences(random.Random(seed + 1)), ClientPages(random.Random(seed + 2))]
    num_during_save = num_during_start = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(count):
            try:
                num_during_start += _round(folder, loads, rng)
            except Mixture as error:
                row.fail(f"kill {i} of seed {seed}: {error}")
                loads = [Sequences(random.Random(seed + 3 + i)), ClientPages(random.Random(seed + 4 + i))]
                folder = Path(tempfile.mkdtemp(dir=name))
            for load in loads:
                for error in load.errors:
                    row.fail(f"kill {i} of seed {seed}: {error}")
                load.errors.clear()
            num_during_save += bool(list(folder.glob("tenant-/*/.*")))
            row.progress(i + 1)
        print(file=sys.stderr)
        _verify(folder, loads, row)
    saves, changes = sum(each.num_saves for each in loads), sum(each.num_changes for each in loads)
    row.notes = (
        f"{saves:,} saves completed, {changes:,} tokens and pages written; {num_during_save} kills cut a save, "
        f"{num_during_start} a start"
    )
    return [row]


def _options(folder: Path) -> list[str]:
    return ["--data-dir", str(folder), "--implementation", "reference"]


def _round(folder: Path, loads: list[Load], rng: random.Random) -> bool:
    """Checks what the last round left, loads the server and kills it; returns whether one was killed in its start."""
    if rng.random() < KILLS_DURING_START:
        _kill_a_start(folder, rng)
        return True
    with attnd_server(*_options(folder)) as server:
        with Client(server.address, timeout_s=60.0) as client:
            for load in loads:
                load.resume(client)
        threads = [
            threading.Thread(target=load.repeat, args=(act, server.address))
            for load in loads
            for act in (load.change, load.save)
        ]
        for thread in threads:
            thread.start()
        threading.Event().wait(rng.uniform(0.0, LOAD_S_MAX))
        server.process.kill()
        server.process.wait()
        for thread in threads:
            thread.join()
    return False


def _kill_a_start(folder: Path, rng: random.Random) -> None:
    """Kills a server before or shortly after it is ready."""
    command = [sys.executable, "-m", "attnd.service", "serve", "--port", "0", *_options(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        threading.Event().wait(rng.uniform(0.0, START_S_MAX))
        process.kill()


def _verify(folder: Path, loads: list[Load], row: Row) -> None:
    with attnd_server(*_options(folder)) as server, Client(server.address, timeout_s=60.0) as client:
        for load in loads:
            try:
                load.resume(client)
            except Mixture as error:
                row.fail(f"after the last kill: {error}")


if __name__ == "__main__":
    from tests.soak.report import table

    print(table(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
