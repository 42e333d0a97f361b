"""One simulated server: the service's own registry, tables, engine and handlers, over a clock and chance of a seed."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np

from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, Layout
from attnd.kernels.errors import InvalidArgumentError
from attnd.service.attention_service import AttentionHandlers
from attnd.service.cache_service import CacheHandlers
from attnd.service.caches import CacheRegistry
from attnd.service.config import ServerConfig
from attnd.service.dispatch import Caller
from attnd.service.errors import DeadlineExceededError, FailedPreconditionError, NotFoundError, RefusedError
from attnd.service.persistence import Persistence
from attnd.service.world import World
from tests.simulation import checks
from tests.simulation.implementation import Faults, SimulatedFault, SimulatedImplementation
from tests.simulation.lives import Lives
from tests.simulation.model import Call, KeptCache, ViolationError, require
from tests.simulation.stepping import StepLoop, SteppedEngine
from tests.support.saving import DiskFiles

PAGE_SIZE = 4
TENANTS = ("a", "b")
ABANDONING_STEPS = 200
KINDS = [
    (Layout.INTERLEAVED, "float32", 1),
    (Layout.INTERLEAVED, "bfloat16", 3),
    (Layout.SPLIT, "float32", 1),
    (Layout.SPLIT, "int8", 1),
]


@dataclass(slots=True, eq=False)
class Pending:
    """A request that has not been answered.

    Attributes:
        task: Its handler.
        what: What it is, for the log.
        call: The model's side of it, if it is an Attend.
        kept: The cache that it names.
        cancelled: Whether its caller went.
        then: Called with its answer.
    """

    task: asyncio.Task
    what: str
    call: Call | None = None
    kept: KeptCache | None = None
    cancelled: bool = False
    then: object = None


class SimulatedWorld:
    """The service, stepped. Everything that happens follows from the seed.

    Attributes:
        rng: Chance.
        lives: Which caches there are, and what of them is saved.
        pending: Requests without an answer yet.
        log: What was done and how it ended, newest last.
        outcomes: How often a kind of request ended how.

    Args:
        seed: What everything follows from.
        numbers: The implementation whose attention is computed now and then.
        every: How rarely.
    """

    def __init__(self, seed: str, numbers, every: int) -> None:
        self.rng = random.Random(seed)
        self.clock = 1000.0
        self.log: list[str] = []
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.pending: list[Pending] = []
        self.handles: set[bytes] = set()
        self.next_id = 1
        self.violations: list[ViolationError] = []
        self._working: list[Call] = []
        self._calls = {}
        self._tasks = {}
        self.loop = StepLoop()
        rng = self.rng
        self.config = ServerConfig(
            queue_depth_max=rng.choice([3, 6, 40]),
            batch_calls_max=rng.choice([1, 3, 64, 64]),
            lease_s=rng.choice([15.0, 60.0]),
            tenant_pages_max=rng.choice([None, None, 16, 30]),
            tenant_sequences_max=rng.choice([None, 3, 4, 8]),
            debug_checks=rng.random() < 0.3,
            warm_up=False,
        )
        self.faults = Faults()
        self.implementation = SimulatedImplementation(self.faults, self, numbers, every)
        self.world = World(now=self.now, token=rng.randbytes)
        with self.loop.running():
            self.engine = SteppedEngine(self.config, self)
        self.registry = CacheRegistry(self.engine, self.config, platform="cpu", world=self.world)
        self.attention = AttentionHandlers(self.registry, self.engine)
        self.files = DiskFiles()
        self.persistence = Persistence(
            self.files.ROOT, self.files, self.registry, self.engine, self.world, file_bytes=rng.choice([1, 100, 1000])
        )
        self.handlers = CacheHandlers(self.registry, self.engine, self.world, self.persistence)
        self.lives = Lives(self)

    @property
    def caches(self) -> list[KeptCache]:
        """The caches that callers can find."""
        return self.lives.seen

    def now(self) -> float:
        """Returns the simulated time, in seconds."""
        return self.clock

    # Requests.

    def ask(self, what, coroutine, *, call=None, kept=None, then=None) -> Pending:
        """Sends a request; it begins at the loop's next steps."""
        task = self.loop.create_task(coroutine)
        pending = Pending(task, what, call, kept, then=then)
        self.pending.append(pending)
        if call is not None:
            self._tasks[task] = call
        return pending

    def caller(self, tenant, arrays=None, *, late=False) -> Caller:
        """Returns what comes with a request of a tenant."""
        expires_at = 0.0 if late else float("inf")
        return Caller(arrays=arrays or {}, expires_at=expires_at, received_at_ns=0, tenant=tenant)

    def cancel(self, pending: Pending) -> None:
        """Makes the caller of a request go away."""
        pending.cancelled = True
        if pending.call is not None and not pending.call.settled:
            pending.call.cancelled = True
        pending.task.cancel()

    def reap(self) -> None:
        """Looks at the answers that have come."""
        self.lives.update()
        done = [pending for pending in self.pending if pending.task.done()]
        if done:
            self.pending = [pending for pending in self.pending if not pending.task.done()]
        for pending in done:
            self._tasks.pop(pending.task, None)
            self._judge(pending)
        if self.violations:
            raise self.violations[0]
        require(not self.loop.problems, "the loop was told of %s", self.loop.problems)

    def _judge(self, pending: Pending) -> None:
        outcome = _outcome(pending.task)
        self.outcomes[pending.what, outcome] += 1
        self.log.append(f"({pending.what}: {outcome})")
        if pending.task.cancelled():
            require(pending.cancelled, "%s was cancelled by nobody", pending.what)
            return
        error, call = pending.task.exception(), pending.call
        if error is None:
            require(call is None or (call.settled and not call.late), "%s was answered and not done", pending.what)
            if pending.then is not None:
                pending.then(pending.task.result())
        elif isinstance(error, ViolationError | AssertionError):
            raise error
        elif isinstance(error, DeadlineExceededError):
            require(call is not None and (call.late or call.cancelled), "%s had time", pending.what)
        elif isinstance(error, NotFoundError) and error.reason == "CACHE_NOT_FOUND":
            kept = pending.kept
            require(kept is not None and (kept.deleted or kept.deleting), "a cache was not found")
        elif isinstance(error, InvalidArgumentError):
            duplicates = call is not None and len(set(call.handles)) < len(call.handles)
            require(call is None or duplicates, "a legal call was refused: %s", error)
        elif not isinstance(error, RefusedError):
            require(self.is_injected(error), "%s failed with %r", pending.what, error)

    @staticmethod
    def is_injected(error: Exception) -> bool:
        """Whether the simulation itself made a failure."""
        return isinstance(error, SimulatedFault | MemoryError)

    # What the recorder and the implementation ask.

    def call_of_task(self) -> Call:
        """Returns the Attend that the running task serves."""
        return self._tasks[asyncio.current_task()]

    def admitted(self, call: Call) -> None:
        """Makes an admitted call known by its hold."""
        self._calls[id(call.reservation)] = call

    def call_of(self, reservation) -> Call:
        """Returns the call of a hold."""
        return self._calls[id(reservation)]

    def room_for_pages(self, kept: KeptCache) -> float:
        """Returns how many more pages the tenant may hold."""
        most = self.config.tenant_pages_max
        return float("inf") if most is None else most - kept.cache.quota.num_pages

    def room_for_sequences(self, kept: KeptCache) -> float:
        """Returns how many more sequences the tenant may hold."""
        most = self.config.tenant_sequences_max
        return float("inf") if most is None else most - kept.cache.quota.num_sequences

    def caches_of(self, quota) -> list[KeptCache]:
        """Returns the caches of a tenant that callers can find."""
        return [kept for kept in self.caches if kept.cache.quota is quota]

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Notes a violation in work whose failure might reach nobody."""
        try:
            yield
        except ViolationError as error:
            self.violations.append(error)
            raise

    def works(self, work) -> None:
        """Notes the calls that the engine works on now."""
        self._working = [self.call_of(each.reservation) for each in work]

    def worked(self, work, error) -> None:
        """Judges what came of a call's work."""
        self.faults.arm(None)
        call = self.call_of(work.reservation)
        if isinstance(error, FailedPreconditionError):
            require(call.conflicts(), "a call was refused for a conflict that is none: %s", error)
        elif error is None:
            require(not call.conflicts(), "a conflict was accepted")
            require(not (call.cancelled or call.late), "a call whose caller is gone was carried out")

    def calls_of(self, layer, batch) -> list[Call]:
        """Returns the calls whose rows a batch has, in its order."""
        calls, row = [], 0
        for call in self._working:
            if call.conflicts():
                continue  # refused before the launch: if its tokens are written nevertheless, they are of no call
            mine = call.reservation.batch
            rows = slice(row, row + mine.num_seqs)
            width = mine.page_indices.shape[1]
            if np.array_equal(batch.kv_lens[rows], mine.kv_lens) and np.array_equal(
                batch.page_indices[rows, :width], mine.page_indices
            ):
                self._require(layer == call.layer, "a call for layer %d came to layer %d", call.layer, layer)
                calls.append(call)
                row += mine.num_seqs
        self._require(row == batch.num_seqs, "a batch has rows of no call: %s of %s", calls, self._working)
        return calls

    def written(self, pages, calls, batch) -> None:
        """Follows the page table of a batch: it must lead to just the tokens that its calls mean."""
        row = 0
        for call in calls:
            for kept, start, end, ids in call.rows():
                table = batch.page_indices[row]
                used = -(-end // PAGE_SIZE)
                self._require(not table[used:].any(), "an unused slot of a table leads to a page with tokens")
                found = call.cache.codec.held(pages, call.layer, table[:used]).reshape(-1, 2)[:end]
                try:
                    checks.require_tokens(call.cache, call.layer, found, call.expected(kept, start, end, ids))
                except ViolationError as error:
                    self.violations.append(error)
                    raise
                row += 1

    def attended(self, calls, out) -> None:
        """Compares attention in which all scores are equal: the mean over the values of the tokens before."""
        row = 0
        for call in calls:
            spec = call.cache.spec
            for kept, start, end, ids in call.rows():
                tokens = call.expected(kept, start, end, ids)
                values = call.cache.codec.values(tokens, call.layer)[1][:, 0].astype(np.float64)
                if spec.quantized_per_token:
                    values *= 127 / 127.5
                means = (np.cumsum(values, axis=0) / np.arange(1, end + 1)[:, np.newaxis])[start:]
                found = out[row : row + end - start, 0]
                self._require(np.allclose(found, means, rtol=1e-5), "attention is %s, not %s", found, means)
                row += end - start

    def _require(self, condition, message, *values) -> None:
        # What is raised in a call's work is that call's failure to the service, which may try it again.
        if not condition:
            self.violations.append(ViolationError(message % values))
            raise self.violations[-1]

    # Caches.

    def spec(self) -> CacheSpec:
        """Returns the shape of a new cache, by chance."""
        layout, dtype, head_dim = self.rng.choice(KINDS)
        return CacheSpec(
            layout=layout,
            num_layers=self.rng.choice([1, 2, 2, 3]),
            num_pages=self.rng.choice([6, 12, 20]),
            page_size=PAGE_SIZE,
            num_kv_heads=1,
            head_dim=head_dim,
            dtype=CACHE_DTYPES[dtype],
        )

    def new_ids(self, count: int) -> list[int]:
        """Returns tokens that never were before."""
        self.next_id += count
        return list(range(self.next_id - count, self.next_id))

    # Invariants.

    def check(self, *, deep: bool) -> None:
        """Raises ViolationError if something is not as it must be."""
        for kept in (*self.caches, *self.lives.unseen, *self.lives.ghosts):
            if kept.touched or deep:
                kept.touched = False
                checks.check_books(kept, self.clock)
                if deep and kept in self.caches:
                    checks.check_content(kept)
                checks.check_quota(*self.lives.quotas[id(kept.cache.quota)], self.client_pages_of(kept.cache.quota))

    def settle_work(self) -> None:
        """Works until the queue is empty."""
        self.loop.step()
        while not self.engine.is_idle:
            self.engine.step()
            self.loop.step()

    def settle(self) -> None:
        """Lets everything in flight end: then no request waits, and nothing is on its way back."""
        self.faults.arm(None)
        for _ in range(2):  # an answer may have another request follow
            self.settle_work()
            self.reap()
        require(not self.pending, "%s waits for nothing", [pending.what for pending in self.pending])
        require(not (self.persistence._tasks or self.lives.unseen), "a save or a restore waits for nothing")
        for kept in (*self.caches, *self.lives.ghosts):
            require(not kept.calls, "a hold outlives its call")
            require(not kept.returning, "pages are on their way back for ever")
        for ghost in self.lives.ghosts:
            require(ghost.table.num_free_pages == len(ghost.table.pool._free), "a deleted cache holds pages")
        self.lives.forget_ghosts()
        self.check(deep=True)

    def end(self) -> None:
        """Releases everything: all pages are free, and no quota counts anything."""
        self.settle()
        for kept in self.caches:
            kept.table.sweep()
            if kept.live:
                kept.table.release(list(kept.live))
        self.settle()
        for kept in self.caches:
            kept.table.sweep()
        self.settle()
        for kept in self.caches:
            require(kept.table.num_free_pages == kept.spec.num_pages, "pages are lost")
        for cache in self.registry.all():
            self.registry.delete(cache.cache_id, cache.tenant)
        for quota, _ in self.lives.quotas.values():
            require(quota.is_idle, "a quota counts what is gone")

    def client_pages_of(self, quota) -> int:
        """Returns the pages of a tenant's caches whose pages the client manages."""
        return sum(
            each.spec.num_pages
            for each in self.registry._by_id.values()
            if each.quota is quota and each.sequences is None
        )

    def abandon(self) -> None:
        """Ends what is in flight in a broken world, whatever it says to that."""
        tasks = [*(pending.task for pending in self.pending), *self.persistence._tasks]
        with self.loop.running():
            for task in tasks:
                task.cancel()
            for _ in range(ABANDONING_STEPS):
                with suppress(Exception):
                    self.loop.step()
                    self.engine.step()


def _outcome(task: asyncio.Task) -> str:
    if task.cancelled():
        return "cancelled"
    error = task.exception()
    return "ok" if error is None else getattr(error, "reason", type(error).__name__)
