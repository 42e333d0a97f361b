"""Attention calls, right and wrong."""

import numpy as np

from attnd.v1 import attention_pb2, cache_pb2
from tests.simulation.choosing import Choosing
from tests.simulation.model import Call, KeptCache
from tests.simulation.world import SimulatedWorld


class CallOperations(Choosing):
    """Appends, reads and rewrites.

    Args:
        world: The world.
    """

    def __init__(self, world: SimulatedWorld) -> None:
        super().__init__(world)
        self._recent: list[Call] = []

    def attend(self) -> None:
        """Appends to sequences, or reads or rewrites them, rightly or not."""
        rng, kept = self.rng, self.cache()
        if not kept.live:
            self.create_sequences()
        elif kept.table.num_free_pages < 2 and rng.random() < 0.7:
            rng.choice([self.release, self.truncate])()
        handles = [self.handle(kept) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
        if rng.random() > 0.02:
            handles = list(dict.fromkeys(handles))
        layer, append = rng.randrange(kept.spec.num_layers), rng.random() > 0.1
        rows = [self._row(kept, handle, layer, append=append) for handle in handles]
        kv_lens, ids = [kv_len for kv_len, _ in rows], [ids for _, ids in rows]
        call = Call(kept, handles, layer, [len(each) for each in ids], kv_lens, ids, append, late=rng.random() < 0.03)
        self._ask(call)

    def repeat(self) -> None:
        """Sends a recent request again, in whatever order."""
        if self._recent:
            old = self.rng.choice(self._recent[-self.rng.choice([1, 3, 20]) :])
            self._ask(Call(old.cache, old.handles, old.layer, old.q_lens, old.kv_lens, old.ids, old.append))

    def step(self) -> None:
        """Sends the same new tokens of one or two sequences to every layer, without waiting in between."""
        kept = self.cache()
        self._step(kept, [self.handle(kept), self.handle(kept)])

    def _step(self, kept: KeptCache, handles: list[bytes]) -> None:
        handles = [handle for handle in dict.fromkeys(handles) if handle in kept.live]
        ids = [self.world.new_ids(self.rng.choice([1, 1, 3])) for _ in handles]
        q_lens = [len(row) for row in ids]
        kv_lens = [max(kept.live[handle].lens) + len(row) for handle, row in zip(handles, ids, strict=True)]
        for layer in range(kept.spec.num_layers if handles else 0):
            held = [len(kept.live[handle].layers[layer]) for handle in handles]
            if self.rng.random() < 0.3:  # a reader among the writers
                self._ask(
                    Call(kept, handles, layer, [min(1, each) for each in held], held, [[0]] * len(held), append=False)
                )
            else:
                self._ask(Call(kept, handles, layer, q_lens, kv_lens, ids, append=True))

    def burst(self) -> None:
        """Sends a token each of several sequences to one layer, in calls of their own, which may run as one."""
        kept = self.cache()
        fails = self.rng.random() < 0.2  # what runs as one may fail as one
        if fails:
            self.world.settle_work()
        layer = self.rng.randrange(kept.spec.num_layers)
        for handle in list(kept.live)[-self.rng.choice([2, 4]) :]:
            ids = self.world.new_ids(1)
            self._ask(Call(kept, [handle], layer, [1], [len(kept.live[handle].layers[layer]) + 1], [ids], append=True))
        if fails:
            self.world.loop.step()
            self.world.faults.arm("before write")
            self.world.engine.step()

    def rewrite(self) -> None:
        """Truncates a sequence and sends other tokens for its end, with or without waiting between the two."""
        kept = self.cache()
        sequence = kept.find(self.handle(kept))
        if sequence is None or not max(sequence.lens) or sequence.damaged:
            return
        length = self.rng.randrange(max(sequence.lens))
        handle, layer = sequence.handle, self.rng.randrange(kept.spec.num_layers)
        pending = self.send(
            "truncate_sequence", cache_pb2.TruncateSequenceRequest, kept, sequence=handle, length=length
        )
        ids = self.world.new_ids(self.rng.randint(1, 5))
        kv_len = min(length, sequence.lens[layer]) + len(ids)
        call = Call(kept, [handle], layer, [len(ids)], [kv_len], [ids], append=True)
        if self.rng.random() < 0.5:
            self._ask(call)
        else:
            pending.then = lambda _answer: self._ask(call)

    def _row(self, kept: KeptCache, handle: bytes, layer: int, *, append: bool) -> tuple[int, list[int]]:
        """Returns a length after the call, and the tokens before it that the call brings."""
        rng, sequence = self.rng, kept.find(handle)
        if sequence is None:
            ids = self.world.new_ids(rng.randint(1, 4))
            return len(ids), ids
        held = sequence.layers[layer]
        coming = [call for call in self._recent if handle in call.handles and not call.settled and call.append]
        if coming and rng.random() < 0.3:  # go on after a call that has not been answered
            call = rng.choice(coming)
            i = call.handles.index(handle)
            held = (held + [0] * 99)[: call.kv_lens[i] - call.q_lens[i]] + call.ids[i]
        kind = rng.random()
        if not append:
            kv_len = max(0, len(held) + (rng.random() < 0.1) - rng.choice([0, 0, 1, 3]))
            return kv_len, ([0] * kv_len)[: rng.randint(0, 3)]
        back = rng.randint(1, 6) if kind < 0.25 else 0
        start = max(0, len(held) - back)
        longest = max(sequence.layers, key=len)
        count = rng.choice([0, 1, 1, 2, 4, 5, 9])
        wanted = held[start:] + longest[len(held) : len(held) + count]
        ids = wanted + self.world.new_ids(max(0, back + count - len(wanted)) if kind > 0.05 else 0)
        if 0.2 < kind < 0.25 and ids:
            ids[rng.randrange(len(ids))] = self.world.new_ids(1)[0]
        if kind > 0.95:
            start += rng.randint(1, 3)
        return start + len(ids), ids

    def _ask(self, call: Call) -> None:
        world, kept = self.world, call.cache
        ids = [each for row in call.ids for each in row]
        arrays = {
            "q": np.zeros((sum(call.q_lens), 1, kept.spec.head_dim), np.float32),
            "q_lens": np.array(call.q_lens, np.int32),
            "kv_lens": np.array(call.kv_lens, np.int32),
        }
        if call.append:
            arrays["k"], arrays["v"] = kept.codec.values(ids, call.layer)
        options = attention_pb2.AttentionOptions(sm_scale=0.0)
        request = attention_pb2.AttendRequest(
            cache_id=kept.cache.cache_id, sequences=call.handles, layer=call.layer, options=options
        )
        caller = world.caller(kept.tenant, arrays, late=call.late)
        world.ask("attend", world.attention.attend(request, caller), call=call, kept=kept)
        self._recent = [*self._recent[-19:], call]

    def cancel(self) -> None:
        """Makes a caller go away, before, while or after its work is done."""
        if self.world.pending:
            self.world.cancel(self.rng.choice(self.world.pending))
