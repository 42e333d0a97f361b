"""What callers, operators and bad luck do to a simulated server: each operation is one request or one mishap."""

from attnd.service.encode import _spec as spec_message
from attnd.service.errors import NotFoundError
from attnd.v1 import cache_pb2
from tests.simulation.model import ViolationError, require
from tests.simulation.saves import SaveOperations
from tests.simulation.world import TENANTS, SimulatedWorld

CACHES_MAX = 3
PROBES = (
    ("fork_sequence", cache_pb2.ForkSequenceRequest, "sequence"),
    ("truncate_sequence", cache_pb2.TruncateSequenceRequest, "sequence"),
    ("release_sequences", cache_pb2.ReleaseSequencesRequest, "sequences"),
    ("keep_alive", cache_pb2.KeepAliveRequest, "sequences"),
)
FAULTS = ("clear", "clear", "copy", "read", "write", "before write", "before write", "after write")
WEIGHTS = {
    "attend": 32, "step": 8, "burst": 8, "repeat": 6, "create_sequences": 6, "fork": 9, "truncate": 8, "release": 6,
    "keep_alive": 2, "list_sequences": 1, "cancel": 6, "jump": 4, "sweep": 1, "create_cache": 1.5, "delete_cache": 1.2,
    "save": 2, "save_of_sharers": 6, "restore": 3, "damage": 2, "rewrite": 5, "speculate": 5, "probe": 1,
}  # fmt: skip


class Operations(SaveOperations):
    """Chooses and does operations, by the chance of a world.

    Args:
        world: The world.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__(world)
        rng = self.rng
        # Each world does some things often and some rarely, so that rare meetings happen in some world.
        weights = {name: weight * rng.choice([0.5, 1, 1, 3]) for name, weight in WEIGHTS.items()}
        self._names, self._weights = list(weights), list(weights.values())
        self.fault_rate = rng.choice([0, 0.08, 0.16])
        self._work_rate = rng.choice([0.4, 0.6, 0.75])

    def one(self) -> None:
        """Does one operation, and some of the work that is queued."""
        if not self.world.caches:
            self.create_cache()
            return
        (name,) = self.rng.choices(self._names, self._weights)
        if self.rng.random() < 0.2 and any(kept.save is not None for kept in self.world.caches):
            name = "rewrite"
        self.world.log.append(name)
        if self.rng.random() < self.fault_rate / 2:
            self.world.faults.arm(self.rng.choice(["take", "table"]))
        getattr(self, name)()
        self.world.loop.step(self.rng.choice([1, 2, 5, 2**31]))
        while self.rng.random() < self._work_rate:
            self.work()

    def work(self) -> None:
        """Lets the engine begin or end a job, which may fail."""
        if self.rng.random() < self.fault_rate:
            self.world.faults.arm(self.rng.choice(FAULTS), self.rng.choice([1, 1, 2, 3]))
        self.world.engine.step()
        self.world.loop.step(self.rng.choice([1, 2, 2**31, 2**31]))

    # Sequences.

    def create_sequences(self) -> None:
        """Creates sequences, some with a lease of their own."""
        lease_s = self.rng.choice([None, None, None, 5.0, 5.0, 100.0, 0.0])
        num_sequences = self.rng.choice([1, 1, 2, 3, 0])
        self.send("create_sequences", cache_pb2.CreateSequencesRequest, num_sequences=num_sequences, lease_s=lease_s)

    def fork(self) -> None:
        """Forks a sequence, and often goes on with it."""
        kept = self.cache()
        handle = self.handle(kept)
        self.send("fork_sequence", cache_pb2.ForkSequenceRequest, kept, sequence=handle)
        if self.rng.random() < 0.7:
            self._step(kept, [handle])

    def speculate(self) -> None:
        """Forks a sequence, and has the fork forget its last tokens before it goes on."""
        kept = self.cache()
        handle = self.handle(kept)
        pending = self.send("fork_sequence", cache_pb2.ForkSequenceRequest, kept, sequence=handle)

        def forked(response):
            child = kept.find(response.sequence)
            if child is not None:
                length = max(0, max(child.lens) - self.rng.randint(1, 3))
                fields = {"sequence": child.handle, "length": length}
                self.send("truncate_sequence", cache_pb2.TruncateSequenceRequest, kept, **fields)

        pending.then = forked

    def truncate(self) -> None:
        """Truncates a sequence."""
        kept = self.cache()
        handle = self.handle(kept)
        sequence = kept.find(handle)
        length = self.rng.randint(-1 if self.rng.random() < 0.05 else 0, max(sequence.lens if sequence else [0]) + 1)
        self.send("truncate_sequence", cache_pb2.TruncateSequenceRequest, kept, sequence=handle, length=length)

    def release(self) -> None:
        """Releases sequences."""
        kept = self.cache()
        handles = [self.handle(kept) for _ in range(self.rng.choice([1, 1, 1, 2]))]
        self.send("release_sequences", cache_pb2.ReleaseSequencesRequest, kept, sequences=handles)

    def keep_alive(self) -> None:
        """Renews leases."""
        kept = self.cache()
        handles = [self.handle(kept) for _ in range(self.rng.choice([1, 2, 3]))]
        self.send("keep_alive", cache_pb2.KeepAliveRequest, kept, sequences=handles)

    def list_sequences(self) -> None:
        """Lists the sequences of a cache."""
        kept = self.cache()
        pending = self.send("list_sequences", cache_pb2.ListSequencesRequest, kept)
        self.world.loop.step()
        require(pending.task.done(), "a list waited")
        if kept.deleted:
            return
        listed = [(each.sequence, each.length, each.complete_length) for each in pending.task.result().sequences]
        expected = [(each.handle, max(each.lens), min(each.lens)) for each in kept.live.values()]
        require(listed == expected, "listed %s, not %s", listed, expected)
        leases = [(each.expires_in_s, each.lease_s) for each in pending.task.result().sequences]
        require(all(0 <= left <= lease_s for left, lease_s in leases), "a lease is too long: %s", leases)

    # Time.

    def jump(self) -> None:
        """Lets time pass, rarely so much that most leases end."""
        self.world.clock += self.rng.choice([1.0, 1.0, 1.0, 3.0, 3.0, 6.0, 6.0, 25.0, 70.0])
        for kept in self.world.caches:
            kept.expire(self.world.clock)
        if self.rng.random() < 0.4:
            self.sweep()

    def sweep(self) -> None:
        """Does what the server does every few seconds."""
        self.world.registry.sweep()
        for kept in self.world.caches:
            require(kept.table._sequences.keys() == kept.live.keys(), "a sweep left a sequence whose lease is over")

    # Caches.

    def create_cache(self) -> None:
        """Creates a cache, rarely one whose pages the client manages, and waits for it."""
        world, rng = self.world, self.rng
        if len(world.caches) >= CACHES_MAX:
            return
        spec, tenant = world.spec(), rng.choice(TENANTS)
        by_client = rng.random() < 0.2
        request = cache_pb2.CreateCacheRequest(
            name=self.new_name(),
            spec=spec_message(spec),
            pages_by=cache_pb2.PAGES_BY_CLIENT if by_client else cache_pb2.PAGES_BY_SERVER,
        )

        pending = world.ask("create_cache", world.handlers.create_cache(request, world.caller(tenant)))
        if rng.random() < 0.1:
            world.loop.step(1)
            world.cancel(pending)
        self.finish(pending)

    def delete_cache(self) -> None:
        """Deletes a cache, whatever is at work on it, with or without its saves."""
        world, rng = self.world, self.rng
        cache = rng.choice(world.registry.all())
        kept = next((kept for kept in world.caches if kept.cache is cache), None)
        if kept is None:  # its client manages the pages
            world.registry.delete(cache.cache_id, cache.tenant)
        else:
            self.delete(kept, keep_saves=rng.random() < 0.5)

    def probe(self) -> None:
        """Asks for what is another tenant's, and for what never was: the answers are the same."""
        kept, rng = self.cache(), self.rng
        never_id, never, probe = rng.randbytes(16).hex(), rng.randbytes(16), rng.choice(PROBES)
        asked = [(cache_id, "stranger", never) for cache_id in (kept.cache.cache_id, never_id)]
        answers = [self._refusal(*probe, *each) for each in asked]
        require(answers[0] == answers[1], "a foreign cache is answered with %s", answers)
        others = [handle for other in self.world.caches if other is not kept for handle in other.by_handle]
        if others:
            handles = [rng.choice(others), rng.choice(others), never]
            answers = [self._refusal(*probe, kept.cache.cache_id, kept.tenant, handle) for handle in handles]
            require(answers[0] == answers[1] == answers[2], "a foreign handle is answered with %s", answers)

    def _refusal(self, method, request_class, field, cache_id, tenant, handle) -> str:
        request = request_class(cache_id=cache_id, **{field: [handle] if field == "sequences" else handle})
        coroutine = getattr(self.world.handlers, method)(request, self.world.caller(tenant))
        try:
            coroutine.send(None)
        except NotFoundError as error:
            return f"{error.reason} {error.message}".replace(cache_id, "").replace(handle.hex(), "")
        finally:
            coroutine.close()
        raise ViolationError(f"{method} of what is not the caller's was not refused")
