"""Saving and restoring through both clients: what comes back, under which handles, and what damage does."""

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnd import client as sdk
from attnd.client import Client
from tests.client.conftest import Driver
from tests.support.server import ServerProcess, attnd_server

SIZES = {"num_layers": 2, "num_pages": 16, "page_size": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of `saving_server`."""
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def saving_server(saves: Path) -> Iterator[ServerProcess]:
    with attnd_server(*options(saves)) as process:
        yield process


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory for servers that end in the test."""
    return tmp_path / "data"


def options(folder: Path) -> list[str]:
    return ["--data-dir", str(folder), "--implementation", "reference"]


def kill(server: ServerProcess) -> None:
    server.process.kill()
    server.process.wait()


def tokens(seed: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rngs = np.random.default_rng(seed).spawn(3)
    return tuple(
        rng.standard_normal((length, heads, 16), np.float32) for rng, heads in zip(rngs, (4, 2, 2), strict=True)
    )


def append(run: Driver, cache: Any, sequence: Any, seed: int, length: int, held: int = 0) -> list[np.ndarray]:
    """Appends the tokens of a seed past the first `held`, or writes all again: a token that differs is refused."""
    step = run(cache.step([sequence], q_lens=[length - held], kv_lens=[length]))
    q, k, v = (each[held:] for each in tokens(seed, length))
    return [run(step.attend(layer, q, k, v)) for layer in range(SIZES["num_layers"])]


def test_sequences_come_back_under_new_handles_after_a_kill(run: Driver, data_dir: Path) -> None:
    with attnd_server(*options(data_dir)) as server:
        client = run.client(server.address, timeout_s=60.0)
        cache = run(client.create_cache("a", **SIZES, pages_by="server"))
        a, b = run(cache.create_sequences(2, lease_s=500.0))
        append(run, cache, a, 1, 11)
        c = run(a.fork())
        append(run, cache, c, 1, 20, held=11)
        told: list[tuple[int, int]] = []
        run(cache.save(on_progress=lambda done, total: told.append((done, total))))
        assert told[-1][0] == told[-1][1] == 2 * 4 * 8 * 2 * 2 * 16 * 4  # 4 pages: 2 of a and c, 1 of each alone
        append(run, cache, b, 2, 3)  # after the save: lost
        kill(server)
    with attnd_server(*options(data_dir)) as server:
        client = run.client(server.address, timeout_s=60.0)
        again = run(client.get_cache("a"))
        restored = {each.restored_from: each for each in run(again.list_sequences())}
        assert list(restored) == [a.handle, b.handle, c.handle]
        assert [each.length for each in restored.values()] == [11, 0, 20]
        assert [each.lease_s for each in restored.values()] == [500.0, 500.0, 500.0]
        for old, length in ((a, 11), (c, 20)):
            append(run, again, again.sequence(restored[old.handle].handle), 1, length)
        old_way = run.client(server.address)
        lost = type(cache)(old_way._executor, cache.info).sequence(a.handle)
        with pytest.raises(sdk.SessionLostError):
            run(lost.release())


def test_a_server_that_is_told_to_stop_saves_all_that_was_answered(run: Driver, data_dir: Path) -> None:
    with attnd_server(*options(data_dir)) as server:
        client = run.client(server.address, timeout_s=60.0)
        cache = run(client.create_cache("a", **SIZES, pages_by="server"))
        (a,) = run(cache.create_sequences(1))
        append(run, cache, a, 1, 9)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    with attnd_server(*options(data_dir)) as server:
        again = run(run.client(server.address, timeout_s=60.0).get_cache("a"))
        (info,) = run(again.list_sequences())
        assert info.restored_from == a.handle
        append(run, again, again.sequence(info.handle), 1, 9)


def test_a_server_that_cannot_save_at_its_end_says_so(data_dir: Path) -> None:
    with attnd_server(*options(data_dir)) as server, Client(server.address) as client:
        client.create_cache("a", **SIZES)
        (data_dir / "tenant-").write_text("in the way")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 1
        assert "attnd: Not saved, the log has why: a" in server.log()


def test_a_server_with_an_interval_saves_by_itself(data_dir: Path) -> None:
    with attnd_server(*options(data_dir), "--save-interval-s", "0.05") as server, Client(server.address) as client:
        client.create_cache("a", **SIZES)
        while not list(data_dir.glob("tenant-/a/0*/manifest.json")):
            assert server.process.poll() is None
        kill(server)
    with attnd_server(*options(data_dir)) as server, Client(server.address) as client:
        assert client.get_cache("a").info.num_pages == 16


def test_a_deleted_cache_comes_back_only_if_its_saves_are_kept(run: Driver, saving_server: ServerProcess) -> None:
    client = run.client(saving_server.address, timeout_s=60.0)
    cache = run(client.create_cache("a", **SIZES, pages_by="server"))
    (a,) = run(cache.create_sequences(1))
    append(run, cache, a, 1, 5)
    with pytest.raises(sdk.NotFoundError) as caught:
        run(client.restore_cache("never-saved"))
    assert caught.value.reason == "SAVE_NOT_FOUND"
    run(cache.save())
    with pytest.raises(sdk.AlreadyExistsError):
        run(client.restore_cache("a"))
    run(cache.delete(keep_saves=True))
    told: list[tuple[int, int]] = []
    again = run(client.restore_cache("a", on_progress=lambda *both: told.append(both)))
    assert told[-1] == (2 * 8 * 2 * 2 * 16 * 4,) * 2
    (info,) = run(again.list_sequences())
    append(run, again, again.sequence(info.handle), 1, 5)
    run(again.delete())
    with pytest.raises(sdk.NotFoundError):
        run(client.restore_cache("a"))
    with pytest.raises(sdk.NotFoundError):
        run(cache.save())


def test_what_a_listener_raises_reaches_the_caller_and_the_save_goes_on(
    run: Driver, saving_server: ServerProcess, saves: Path
) -> None:
    def fail(*_: int) -> None:
        raise LookupError("mine")

    client = run.client(saving_server.address, timeout_s=60.0)
    cache = run(client.create_cache("a", **SIZES))
    with pytest.raises(LookupError, match="mine"):
        run(cache.save(on_progress=fail))
    run(cache.save())
    assert len(list(saves.glob("tenant-/a/*"))) == 1
    run(cache.delete())


def test_a_server_without_a_data_directory_says_so(run: Driver, new_cache: Any) -> None:
    with pytest.raises(sdk.FailedPreconditionError, match="--data-dir") as caught:
        run(new_cache().save())
    assert caught.value.reason == "NO_DATA_DIR"


def test_two_servers_do_not_share_a_data_directory(saving_server: ServerProcess, saves: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="Another server uses the data directory"),
        attnd_server(*options(saves)),
    ):
        pass


@pytest.mark.parametrize("command", ["save", "restore"])
def test_the_command_line_saves_and_restores_for_a_tenant(saving_server: ServerProcess, command: str) -> None:
    def attnd(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "attnd.service", *arguments], check=False, capture_output=True, text=True
        )

    with Client(saving_server.address, tenant="acme") as client:
        cache = client.create_cache("a", **SIZES)
        if command == "restore":
            cache.save()
            cache.delete(keep_saves=True)
        done = attnd(command, saving_server.address, "a", "--tenant", "acme")
        assert done.returncode == 0, done.stderr
        assert done.stdout == {
            "save": "a is saved: 65,536 bytes of pages\n",
            "restore": "a is restored: 0 sequences\n",
        }[command]  # fmt: skip
        assert "100" in done.stderr or "65.5/65.5 kB" in done.stderr
        client.get_cache("a").delete()
    done = attnd(command, saving_server.address, "a")
    assert done.returncode == 1
    assert "named 'a'" in done.stderr


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def saved_damaged(run: Driver, client: Any, cache: Any, saves: Path, place: int | None) -> Any:
    """Saves a cache, flips a bit of its pages, and restores it."""
    run(cache.save())
    run(cache.delete(keep_saves=True))
    (file,) = saves.glob(f"tenant-/{cache.name}/*/*.safetensors")
    if place is not None:
        flip(file, file.stat().st_size - place)
    return run(client.restore_cache(cache.name))


def test_a_damaged_page_costs_the_sequences_that_hold_it_and_no_other(
    run: Driver, saving_server: ServerProcess, saves: Path
) -> None:
    client = run.client(saving_server.address, timeout_s=60.0)
    cache = run(client.create_cache("a", **SIZES, pages_by="server"))
    a, b = run(cache.create_sequences(2))
    append(run, cache, a, 1, 5)
    append(run, cache, b, 2, 5)
    run(a.fork())
    page_bytes = 2 * 8 * 2 * 2 * 16 * 4
    for place in (page_bytes + 1, None):  # the end of the first page's; the second time as it was saved damaged
        cache = saved_damaged(run, client, cache, saves, place)
        infos = run(cache.list_sequences())
        assert sorted(each.damaged for each in infos) == [False, True, True]
        for info in infos:
            sequence = cache.sequence(info.handle)
            if not info.damaged:
                append(run, cache, sequence, 2, 5)
                continue
            assert (info.length, info.num_pages) == (5, 0)
            for call in (sequence.fork, functools.partial(sequence.truncate, 0)):
                with pytest.raises(sdk.DataLossError) as caught:
                    run(call())
                assert caught.value.reason == "SEQUENCE_DAMAGED"
            with pytest.raises(sdk.DataLossError):
                append(run, cache, sequence, 1, 6, held=5)
        assert run(client.get_cache("a")).info.num_free_pages == 15
    run(cache.delete())


def test_a_damaged_page_of_the_clients_is_refused_until_it_is_written_again(
    run: Driver, saving_server: ServerProcess, saves: Path
) -> None:
    client = run.client(saving_server.address, timeout_s=60.0)
    cache = run(client.create_cache("a", **SIZES))
    content = np.arange(16 * 8 * 4 * 16, dtype=np.float32).reshape(16, 8, 4, 16)
    for layer in range(2):
        run(cache.write_pages(layer, np.arange(16), content))
    q, k, v = tokens(0, 1)
    row = {"q": q, "kv_lens": [9], "cu_q_lens": [0, 1], "num_seqs": [1]}
    # Of page 15: both layers, since they share a checksum. The second time as it was saved damaged.
    for place, damaged_layers in ((1, (0, 1)), (None, (1,))):
        cache = saved_damaged(run, client, cache, saves, place)
        attend = cache.ragged_paged_attention
        for layer in damaged_layers:
            for call in (
                functools.partial(cache.read_pages, layer, [3, 15]),
                functools.partial(attend, layer, page_indices=[[0, 15]], **row),
                functools.partial(attend, layer, page_indices=[[15, 0]], k=k, v=v, **row),
            ):
                with pytest.raises(sdk.DataLossError, match="page 15") as caught:
                    run(call())
                assert caught.value.reason == "PAGES_DAMAGED"
            run(attend(layer, page_indices=[[0, 1, 15]], **row))  # no token is in that slot
            np.testing.assert_array_equal(run(cache.read_pages(layer, np.arange(15))), content[:15])
        run(cache.write_pages(0, [15], content[15:]))
        np.testing.assert_array_equal(run(cache.read_pages(0, np.arange(16))), content)
        run(attend(0, page_indices=[[0, 15]], **row))
    run(cache.delete())


def test_a_damaged_manifest_is_data_loss_and_the_server_starts(run: Driver, data_dir: Path) -> None:
    with attnd_server(*options(data_dir)) as server, Client(server.address) as client:
        for name in ("bad", "good"):
            client.create_cache(name, **SIZES).save()
        kill(server)
    (manifest,) = data_dir.glob("tenant-/bad/*/manifest.json")
    flip(manifest, 100)
    with attnd_server(*options(data_dir)) as server:
        assert "is damaged" in server.log()
        client = run.client(server.address, timeout_s=60.0)
        assert [cache.name for cache in run(client.list_caches())] == ["good"]
        with pytest.raises(sdk.DataLossError) as caught:
            run(client.restore_cache("bad"))
        assert caught.value.reason == "SAVE_DAMAGED"
        run(run(client.create_cache("bad", **SIZES)).save())
        (manifest,) = data_dir.glob("tenant-/bad/*/manifest.json")
        assert json.loads(manifest.read_bytes())["manifest"]["number"] == 2
