"""What has gone wrong elsewhere with sequences and their pages, against a real server: it does not happen here."""

import asyncio
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from attnd import client as sdk
from tests.client.conftest import Driver
from tests.client.test_sequences import Text, append, num_free_pages
from tests.support.proxy import Losses, lossy_proxy
from tests.support.server import ServerProcess, attnd_server


@pytest.fixture(scope="module")
def checking_server() -> Iterator[ServerProcess]:
    """A server that checks that pages are clean."""
    with attnd_server("--debug-checks") as process:
        yield process


@pytest.fixture
def blocking(checking_server: ServerProcess) -> Iterator[sdk.Client]:
    with sdk.Client(checking_server.address, timeout_s=60.0) as client:
        yield client


def one_layer(client: sdk.Client, name: str, **changes: Any) -> Any:
    sizes = {"num_layers": 1, "num_pages": 16, "page_size": 8, "num_kv_heads": 1, "head_dim": 4, "dtype": "float32"}
    return client.create_cache(name, pages_by="server", **{**sizes, **changes})


def extend(cache: Any, sequence: Any, values: np.ndarray, start: int) -> np.ndarray:
    """Appends tokens whose keys and values are numbers; each answer is the mean of the numbers up to it."""
    tokens = np.repeat(np.float32(values)[:, np.newaxis, np.newaxis], 4, axis=2)
    step = cache.step([sequence], q_lens=[len(tokens)], kv_lens=[start + len(tokens)])
    return step.attend(0, tokens, tokens, tokens, sm_scale=0.0)[:, 0, 0]


def numbers_of(cache: Any, sequence: Any, length: int) -> np.ndarray:
    """Returns the numbers that a sequence holds."""
    q = np.zeros((length, 1, 4), np.float32)
    means = cache.step([sequence], q_lens=[length], kv_lens=[length]).attend(0, q, sm_scale=0.0)[:, 0, 0]
    return np.diff(means.astype(np.float64) * np.arange(1, length + 1), prepend=0.0)


def test_releasing_twice_frees_once_and_no_two_sequences_share_a_page(run: Driver, new_cache: Any, normal: Any):
    cache = new_cache(pages_by="server", num_pages=4)
    (a,) = run(cache.create_sequences(1))
    append(run, cache, a, Text(normal, 16), 0)
    run(a.release())
    with pytest.raises(sdk.NotFoundError):
        run(a.release())
    assert num_free_pages(run, cache) == 4
    both = run(cache.create_sequences(2))
    texts = [Text(normal, 16), Text(normal, 16)]
    for sequence, text in zip(both, texts, strict=True):
        append(run, cache, sequence, text, 0)
    for sequence, text in zip(both, texts, strict=True):
        append(run, cache, sequence, text, 15)  # the last token once more: all before it are as they were


def test_calls_given_up_at_any_moment_leave_no_page_behind(checking_server: ServerProcess):
    async def scenario():
        rng = random.Random(0)
        async with sdk.AsyncClient(checking_server.address, timeout_s=60.0) as client:
            cache = await client.create_cache(
                "given-up", num_layers=1, num_pages=256, page_size=8, num_kv_heads=1, head_dim=4, dtype="float32",
                pages_by="server",
            )  # fmt: skip
            tokens = np.ones((8, 1, 4), np.float32)
            for _ in range(100):
                (sequence,) = await cache.create_sequences(1)
                step = await cache.step([sequence], q_lens=[8], kv_lens=[8])
                call = asyncio.create_task(step.attend(0, tokens, tokens, tokens))
                await asyncio.sleep(rng.uniform(0, 0.05))
                call.cancel()
                await asyncio.wait([call])
                (held,) = await cache.list_sequences()
                assert held.length in {0, 8}  # never a part
                await sequence.release()
            assert (await client.get_cache("given-up")).info.num_free_pages == 256
            await cache.delete()

    asyncio.run(scenario())


def test_pages_of_a_client_that_was_killed_come_back_when_its_leases_end(
    blocking: sdk.Client, checking_server: ServerProcess
):
    cache = one_layer(blocking, "killed")
    program = f"""
import numpy as np
from attnd.client import Client
with Client({checking_server.address!r}) as client:
    cache = client.get_cache("killed")
    (sequence,) = cache.create_sequences(1, lease_s=1.0)
    tokens = np.ones((20, 1, 4), np.float32)
    cache.step([sequence], q_lens=[20], kv_lens=[20]).attend(0, tokens, tokens, tokens)
    print("ready", flush=True)
    import time; time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().strip() == "ready"
    assert blocking.get_cache("killed").info.num_free_pages == 16 - 3
    process.kill()
    process.wait()
    process.stdout.close()
    for _ in range(300):
        if blocking.get_cache("killed").info.num_free_pages == 16:
            break
        time.sleep(0.1)
    else:
        pytest.fail("no page came back")
    cache.delete()


def test_a_recycled_page_shows_nothing_of_who_had_it(blocking: sdk.Client):
    cache = one_layer(blocking, "recycled", num_pages=1)
    (a,) = cache.create_sequences(1)
    extend(cache, a, np.full(8, 777.0), 0)
    a.release()
    (b,) = cache.create_sequences(1)
    np.testing.assert_allclose(extend(cache, b, np.array([1.0]), 0), [1.0])
    np.testing.assert_allclose(numbers_of(cache, b, 1), [1.0])
    with pytest.raises(sdk.FailedPreconditionError) as caught:
        numbers_of(cache, b, 8)
    assert caught.value.reason == "SEQUENCE_HOLE"
    with pytest.raises(sdk.FailedPreconditionError):
        cache.read_pages(0, np.array([0], np.int32))
    cache.delete()


def test_a_sequence_released_during_its_call_does_not_touch_who_takes_its_pages(
    checking_server: ServerProcess, blocking: sdk.Client
):
    length = 1024
    cache = one_layer(blocking, "in-use", num_pages=length // 8)
    numbers = np.arange(1, length + 1)
    for _ in range(3):
        (a,) = cache.create_sequences(1)
        answers: list[Any] = []

        def slow(sequence=a, answers=answers):
            with sdk.Client(checking_server.address, timeout_s=60.0) as other:
                held = other.get_cache("in-use")
                try:
                    answers.append(extend(held, held.sequence(sequence.handle), numbers, 0))
                except (sdk.NotFoundError, sdk.FailedPreconditionError) as error:
                    answers.append(error)

        thread = threading.Thread(target=slow)
        thread.start()
        time.sleep(0.02)
        a.release()
        (b,) = cache.create_sequences(1)
        _retried(lambda b=b: extend(cache, b, -numbers, 0))
        thread.join()
        (answer,) = answers
        if not isinstance(answer, Exception):
            np.testing.assert_allclose(answer, (numbers + 1) / 2, rtol=1e-4)
        np.testing.assert_allclose(numbers_of(cache, b, 100), -numbers[:100], rtol=1e-3)
        b.release()
    cache.delete()


def _retried(call: Any) -> None:
    for _ in range(200):
        try:
            call()
        except sdk.ResourceExhaustedError:
            time.sleep(0.02)
        else:
            return
    pytest.fail("the pages never came back")


def test_two_clients_that_append_to_one_sequence_lose_and_double_nothing(
    checking_server: ServerProcess, blocking: sdk.Client
):
    cache = one_layer(blocking, "two-writers")
    (sequence,) = cache.create_sequences(1)

    def write(numbers: range) -> None:
        with sdk.Client(checking_server.address, timeout_s=60.0) as client:
            held = client.get_cache("two-writers")
            length = 0
            for number in numbers:
                while True:
                    try:
                        extend(held, held.sequence(sequence.handle), np.array([number]), length)
                    except sdk.FailedPreconditionError:  # the other was here first
                        (info,) = held.list_sequences()
                        length = info.length
                    else:
                        length += 1
                        break

    threads = [threading.Thread(target=write, args=(range(start, start + 50),)) for start in (1, 51)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (info,) = cache.list_sequences()
    assert info.length == 100
    assert sorted(np.rint(numbers_of(cache, sequence, 100)).astype(int).tolist()) == list(range(1, 101))
    cache.delete()


def test_a_released_handle_never_finds_a_later_sequence(run: Driver, new_cache: Any, normal: Any):
    cache = new_cache(pages_by="server")
    (a,) = run(cache.create_sequences(1))
    append(run, cache, a, Text(normal, 5), 0)
    run(a.release())
    (b,) = run(cache.create_sequences(1))
    with pytest.raises(sdk.NotFoundError):
        append(run, cache, a, Text(normal, 5), 0)
    assert a.handle != b.handle
    (info,) = run(cache.list_sequences())
    assert (info.handle, info.length) == (b.handle, 0)


@pytest.mark.parametrize(("num_pages", "held", "refused", "accepted"), [(2, 14, 4, 2), (2, 8, 20, 4), (1, 0, 9, 8)])
def test_an_append_that_finds_too_few_pages_changes_no_bit(
    run: Driver, new_cache: Any, normal: Any, num_pages: int, held: int, refused: int, accepted: int
):
    cache = new_cache(pages_by="server", num_pages=num_pages)
    (sequence,) = run(cache.create_sequences(1))
    text = Text(normal, held)
    if held:
        append(run, cache, sequence, text, 0)
    before = run(cache.list_sequences())[0].length, num_free_pages(run, cache)
    with pytest.raises(sdk.ResourceExhaustedError):
        append(run, cache, sequence, text.followed_by(Text(normal, refused), at=held), held)
    assert (run(cache.list_sequences())[0].length, num_free_pages(run, cache)) == before
    if held:
        append(run, cache, sequence, text, 0)  # is accepted only if each bit is as it was
    append(run, cache, sequence, text.followed_by(Text(normal, accepted), at=held), held)


def test_pages_follow_the_length_over_page_boundaries(run: Driver, new_cache: Any, normal: Any):
    cache, text = new_cache(pages_by="server"), Text(normal, 17)
    (sequence,) = run(cache.create_sequences(1))
    start = 0
    for length in (7, 8, 9, 15, 16, 17):
        append(run, cache, sequence, _first(text, length), start)
        (info,) = run(cache.list_sequences())
        assert (info.length, info.num_pages) == (length, -(-length // 8))
        if length in {8, 16}:
            fork = run(sequence.fork())
            append(run, cache, fork, _first(text, length).followed_by(Text(normal, 3), at=length), length)
            assert num_free_pages(run, cache) == 16 - length // 8 - 1  # full pages are shared, the tail is fresh
            run(fork.release())
        start = length


def _first(text: Text, length: int) -> Text:
    return text.followed_by(_nothing_of(text), at=length)


def _nothing_of(text: Text) -> Text:
    nothing = Text.__new__(Text)
    for name in ("q", "k", "v"):
        setattr(nothing, name, getattr(text, name)[:0])
    return nothing


def test_a_thousand_calls_some_of_them_refused_hold_nothing_in_the_end(blocking: sdk.Client):
    cache = one_layer(blocking, "pins")
    (sequence,) = cache.create_sequences(1)
    extend(cache, sequence, np.arange(20), 0)
    q = np.zeros((1, 1, 4), np.float32)
    for i in range(1000):
        if i % 20:
            cache.step([sequence], q_lens=[1], kv_lens=[20]).attend(0, q)
        else:
            with pytest.raises(sdk.InvalidArgumentError):
                cache.step([sequence], q_lens=[1], kv_lens=[20]).attend(0, q, sliding_window=-1)
    sequence.release()
    assert blocking.get_cache("pins").info.num_free_pages == 16
    cache.delete()


class Planned(Losses):
    """Loses what it is told to lose."""

    def __init__(self, *fates: str) -> None:
        super().__init__(random.Random(0), 0.0, 0.0)
        self._fates = list(fates)
        self.armed = False

    def decide(self) -> str:
        return self._fates.pop(0) if self.armed and self._fates else "pass"


@pytest.mark.parametrize("fates", [("lose",), ("cut",), ("lose", "lose"), ("lose", "cut", "lose")])
def test_an_append_whose_replies_are_lost_is_done_once(
    run: Driver, checking_server: ServerProcess, blocking: sdk.Client, fates: tuple[str, ...]
):
    cache = one_layer(blocking, "lost-replies")
    (sequence,) = cache.create_sequences(1)
    losses = Planned(*fates)
    with lossy_proxy(checking_server.address, losses) as address:
        client = run.client(address, timeout_s=60.0, local=False)
        held = run(client.get_cache("lost-replies"))
        losses.armed = True
        tokens = np.ones((3, 1, 4), np.float32)
        for _ in range(50):
            step = run(held.step([held.sequence(sequence.handle)], q_lens=[3], kv_lens=[3]))
            try:
                out = run(step.attend(0, tokens, tokens, tokens))
            except sdk.UnavailableError:
                time.sleep(0.05)
            else:
                break
        np.testing.assert_allclose(out, tokens)
        run(client.close())
    (info,) = cache.list_sequences()
    assert (info.length, info.num_pages) == (3, 1)
    np.testing.assert_allclose(numbers_of(cache, sequence, 3), 1.0)
    cache.delete()
