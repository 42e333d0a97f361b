"""Sequences through both clients: forks, truncation, leases, and what one tenant can tell of another's."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attnd import client as sdk
from tests.client.conftest import Driver
from tests.support.server import ServerProcess, attnd_server

SIZES = {"num_layers": 2, "num_pages": 16, "page_size": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


@pytest.fixture(scope="module")
def strict_server() -> Iterator[ServerProcess]:
    """A server that checks that pages are clean, and that lets a tenant hold little."""
    with attnd_server("--debug-checks", "--tenant-pages-max", "40", "--tenant-sequences-max", "10") as process:
        yield process


class Text:
    """Tokens with keys and values of their own, and the attention over them."""

    def __init__(self, normal: Callable[..., np.ndarray], length: int) -> None:
        self.q, self.k, self.v = normal(length, 4, 16), normal(length, 2, 16), normal(length, 2, 16)

    def followed_by(self, other: "Text", at: int) -> "Text":
        both = Text.__new__(Text)
        for name in ("q", "k", "v"):
            setattr(both, name, np.concatenate([getattr(self, name)[:at], getattr(other, name)]))
        return both

    def expected(self, start: int) -> np.ndarray:
        k, v = np.repeat(self.k, 2, axis=1), np.repeat(self.v, 2, axis=1)
        scores = np.einsum("qhd,khd->hqk", self.q.astype(np.float64), k) * 0.25
        scores = np.where(np.tri(len(self.q), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)[start:]


def append(run: Driver, cache: Any, sequence: Any, text: Text, start: int) -> None:
    """Appends the tokens of a text from `start` on, and checks the answer in every layer."""
    end = len(text.q)
    step = cache.step([sequence], q_lens=[end - start], kv_lens=[end])
    step = run(step)
    for layer in range(SIZES["num_layers"]):
        out = run(step.attend(layer, text.q[start:], text.k[start:], text.v[start:], sm_scale=0.25))
        np.testing.assert_allclose(out, text.expected(start), atol=1e-5)


@pytest.mark.parametrize("length", [5, 8, 13, 16])
def test_a_fork_and_its_origin_go_their_own_ways(run: Driver, new_cache: Any, normal: Any, length: int) -> None:
    cache, common = new_cache(pages_by="server"), Text(normal, length)
    (a,) = run(cache.create_sequences(1))
    append(run, cache, a, common, 0)
    b = run(a.fork())
    pages = -(-length // 8)
    assert [each.num_pages for each in run(cache.list_sequences())] == [pages, pages]
    for sequence in (a, b, a, b):
        common_and_own = common.followed_by(Text(normal, 7), at=length)
        run(sequence.truncate(length))
        append(run, cache, sequence, common_and_own, length)
    assert num_free_pages(run, cache) == 16 - len({*range(length // 8)}) - 2 * (-(-(length + 7) // 8) - length // 8)
    run(cache.release_sequences([a, b]))
    assert num_free_pages(run, cache) == 16


def num_free_pages(run: Driver, cache: Any) -> int:
    """Returns the number of free pages of a cache."""
    client = run.client(cache._executor.core.settings.address)
    return run(client.get_cache(cache.name)).info.num_free_pages


@pytest.mark.parametrize("kept", [0, 3, 8, 12])
def test_a_truncated_sequence_takes_other_tokens(run: Driver, new_cache: Any, normal: Any, kept: int) -> None:
    cache, first, second = new_cache(pages_by="server"), Text(normal, 20), Text(normal, 9)
    (sequence,) = run(cache.create_sequences(1))
    append(run, cache, sequence, first, 0)
    with pytest.raises(sdk.FailedPreconditionError) as caught:
        append(run, cache, sequence, first.followed_by(second, at=kept), kept)
    assert caught.value.reason == "CONFLICTING_WRITE"
    run(sequence.truncate(kept))
    (info,) = run(cache.list_sequences())
    assert (info.length, info.complete_length, info.num_pages) == (kept, kept, -(-kept // 8))
    append(run, cache, sequence, first.followed_by(second, at=kept), kept)


def test_two_that_write_other_tokens_to_one_place_are_not_merged(run: Driver, new_cache: Any, normal: Any) -> None:
    cache, mine, theirs = new_cache(pages_by="server"), Text(normal, 5), Text(normal, 5)
    (sequence,) = run(cache.create_sequences(1))
    append(run, cache, sequence, mine, 0)
    append(run, cache, sequence, mine, 0)
    with pytest.raises(sdk.FailedPreconditionError) as caught:
        append(run, cache, sequence, theirs, 0)
    assert caught.value.reason == "CONFLICTING_WRITE"
    append(run, cache, sequence, mine, 0)


def test_a_sequence_lives_while_it_is_used_or_kept_alive(run: Driver, new_cache: Any, normal: Any) -> None:
    cache = new_cache(pages_by="server")
    (kept,) = run(cache.create_sequences(1, lease_s=1.5))
    (left,) = run(cache.create_sequences(1, lease_s=0.2))
    append(run, cache, kept, Text(normal, 5), 0)
    for _ in range(4):
        time.sleep(0.5)
        run(cache.keep_alive([kept]))
    (info,) = run(cache.list_sequences())
    assert (info.handle, info.lease_s, info.length) == (kept.handle, 1.5, 5)
    assert 0 < info.expires_in_s <= 1.5
    for call in (left.release, left.fork, lambda: left.truncate(0), lambda: cache.keep_alive([left])):
        with pytest.raises(sdk.NotFoundError):
            run(call())


def test_pages_of_an_expired_sequence_come_back_by_themselves(run: Driver, new_cache: Any, normal: Any) -> None:
    cache = new_cache(pages_by="server")
    (sequence,) = run(cache.create_sequences(1, lease_s=0.2))
    append(run, cache, sequence, Text(normal, 20), 0)
    for _ in range(100):
        if num_free_pages(run, cache) == 16:
            return
        time.sleep(0.1)
    pytest.fail("no sweep gave the pages back")


def test_what_a_tenant_has_is_nothing_to_another(run: Driver, strict_server: ServerProcess, normal: Any) -> None:
    mine = run.client(strict_server.address, tenant="mine")
    other = run.client(strict_server.address, tenant="other")
    cache = run(mine.create_cache("a", pages_by="server", **SIZES))
    (sequence,) = run(cache.create_sequences(1))
    append(run, cache, sequence, Text(normal, 5), 0)
    assert run(other.list_caches()) == []
    own = run(other.create_cache("a", pages_by="server", **SIZES))
    with pytest.raises(sdk.AlreadyExistsError):
        run(other.create_cache("a", pages_by="server", **SIZES))

    # The other tenant learnt id and handle somehow: they are answered like ones that never were.
    answers = {}
    for name, cache_id, handle in [
        ("foreign", cache.info.cache_id, sequence.handle),
        ("made up", "0" * 32, b"x" * 16),
        ("foreign handle", own.info.cache_id, sequence.handle),
        ("made up handle", own.info.cache_id, b"x" * 16),
    ]:
        held = type(own)(own._executor, replace(own.info, cache_id=cache_id)).sequence(handle)
        with pytest.raises(sdk.NotFoundError) as caught:
            run(held.fork())
        text = caught.value.message.replace(cache_id, "ID").replace(handle.hex(), "HANDLE")
        answers[name] = (caught.value.code, caught.value.reason, text)
    assert answers["foreign"] == answers["made up"]
    assert answers["foreign handle"] == answers["made up handle"]
    assert [each.length for each in run(cache.list_sequences())] == [5]
    run(cache.delete())
    run(own.delete())


def test_a_tenant_holds_no_more_than_its_quota(run: Driver, strict_server: ServerProcess, normal: Any) -> None:
    rich, poor = (run.client(strict_server.address, tenant=name) for name in ("rich", "poor"))
    caches = [run(rich.create_cache(f"q{i}", pages_by="server", **{**SIZES, "num_pages": 30})) for i in range(2)]
    a, b = (run(cache.create_sequences(1))[0] for cache in caches)
    append(run, caches[0], a, Text(normal, 200), 0)
    with pytest.raises(sdk.ResourceExhaustedError, match="quota of 40") as caught:
        append(run, caches[1], b, Text(normal, 121), 0)
    assert caught.value.reason == "TENANT_PAGES_EXHAUSTED"
    append(run, caches[1], b, Text(normal, 120), 0)
    with pytest.raises(sdk.ResourceExhaustedError, match="quota of 10") as caught:
        run(caches[0].create_sequences(9))
    assert caught.value.reason == "TENANT_SEQUENCES_EXHAUSTED"
    with pytest.raises(sdk.ResourceExhaustedError):
        run(rich.create_cache("pages", **SIZES))
    theirs = run(poor.create_cache("q0", **SIZES))
    for cache in (*caches, theirs):
        run(cache.delete())
    run(run(rich.create_cache("all", **{**SIZES, "num_pages": 40})).delete())


@pytest.mark.parametrize("tenant", ["a b", "ä", "x" * 129, "a/b"])
def test_refuses_a_tenant_that_is_no_name(run: Driver, strict_server: ServerProcess, tenant: str) -> None:
    with pytest.raises(sdk.InvalidArgumentError, match="tenant"):
        run.client(strict_server.address, tenant=tenant)
    if tenant.isascii():
        raw = run.client(strict_server.address, metadata=[("attnd-tenant", tenant)])
        with pytest.raises(sdk.InvalidArgumentError, match="attnd-tenant"):
            run(raw.list_caches())
