"""Saves and restores under failures of files, memory and power: what was there before, or all of what comes after."""

import contextlib
import errno
import itertools
import random
import shutil

import pytest

from attnd.kernels.reference import Reference
from attnd.service.caches import PagesBy
from attnd.service.errors import DataLossError, NotFoundError, ResourceExhaustedError
from tests.support.saving import (
    FILE_BYTES,
    DiskFiles,
    FailingFiles,
    content_of_newest,
    first_state,
    house,
    restored_handles,
    run,
    second_state,
)


@pytest.mark.parametrize("how", ["before", "half", "after", "dead"])
def test_whichever_file_operation_of_a_save_fails_the_newest_save_is_the_old_one_or_the_new_one(kind, saved, how):
    async def scenario(folder, at) -> bool:
        before = await content_of_newest(folder)
        files = FailingFiles(at=1 << 60, how=how, code=random.Random(at).choice([errno.ENOSPC, errno.EIO]))
        async with house(folder, files, FILE_BYTES) as home:
            await home.persistence.restore_all()
            (cache,) = home.caches.all()
            await second_state(home, cache, kind)
            live, free = await home.content(cache), cache.sequences and cache.sequences.num_free_pages
            files.count, files.at = 0, at
            try:
                await home.save(cache)
                complete = True
            except (OSError, ResourceExhaustedError):
                complete = False
            files_failed, files.at, files.how = files.failed, 1 << 60, "before"
            # Whatever happened, the cache itself is as it was, and what a save held is given back.
            assert await home.content(cache) == live
            await home.engine.flush()
            assert (cache.sequences and cache.sequences.num_free_pages) == free
            copy = folder.with_name(f"{folder.name}-copy")
            shutil.copytree(folder, copy)
            found = await content_of_newest(copy)
            # Handles are new after each restore: what they were restored from tells them apart.
            after = {key: value for key, value in live.items() if kind is PagesBy.CLIENT}
            if kind is PagesBy.SERVER:
                handles = restored_handles(cache)
                after = {handles.get(key, key): value for key, value in live.items()}
            assert found == after or (found == before and not complete)
            await home.save(cache)
        assert await content_of_newest(folder) == after
        assert not list(folder.rglob(".*"))
        return files_failed

    for at in itertools.count():
        folder = saved.with_name(f"run-{at}")
        shutil.copytree(saved, folder)
        outcome = []

        async def one(folder=folder, at=at, outcome=outcome):
            outcome.append(await scenario(folder, at))

        run(one())
        if not outcome[0]:
            break
    assert at > 15


def test_whenever_the_power_is_cut_the_newest_save_is_the_old_one_or_the_new_one(kind):
    async def scenario(seed: int, operations: int) -> bool:
        files, rng = DiskFiles(), random.Random(seed)
        async with house(files.ROOT, files, FILE_BYTES) as home:
            await first_state(home, kind)
            (cache,) = home.caches.all()
            before = await home.content(cache)
            await home.save(cache)
            await second_state(home, cache, kind)
            after = await home.content(cache)
            files.operations_left = operations
            try:
                await home.save(cache)
                complete = True
            except OSError:
                complete = False
            finished = files.operations_left > 0
        files.cut_power(rng)
        found = await content_of_newest(files.ROOT, files)
        assert found == after or (found == before and not complete)
        # A second cut, in the middle of the start that removes leftovers, changes nothing.
        files.operations_left = rng.randrange(20)
        await content_of_newest_or_failure(files)
        files.cut_power(rng)
        assert await content_of_newest(files.ROOT, files) == found
        return finished

    async def all_of(seed: int):
        for operations in itertools.count():
            if await scenario(seed * 1000 + operations, operations):
                return

    for seed in range(2):
        run(all_of(seed))


async def content_of_newest_or_failure(files) -> None:
    with contextlib.suppress(OSError):
        await content_of_newest(files.ROOT, files)


@pytest.mark.parametrize("how", ["before", "dead"])
def test_whichever_file_operation_of_a_restore_fails_nothing_is_there_and_the_next_restore_is_complete(
    kind, saved, how
):
    async def scenario():
        expected = await content_of_newest(saved)
        for at in itertools.count():
            files = FailingFiles(at=at, how=how, code=errno.EMFILE)
            async with house(saved, files, tenant_pages_max=16) as home:
                try:
                    cache = await home.restore("a")
                except (OSError, NotFoundError):
                    assert not home.caches.all()
                    assert home.caches.size_bytes == 0
                    files.at, files.how = 1 << 60, "before"
                    cache = await home.restore("a")
                assert await home.content(cache) == expected
                if not files.failed:
                    return

    run(scenario())


@pytest.mark.parametrize("what", ["allocate", "write", "poison", "clear"])
def test_whichever_work_of_a_restore_on_the_engine_fails_nothing_is_left_of_it(kind, saved, what, monkeypatch):
    async def scenario():
        expected = await content_of_newest(saved)
        for at in itertools.count():
            calls = itertools.count()
            whole = getattr(Reference, what)

            def fail(*args, at=at, calls=calls, whole=whole, **kwargs):
                if next(calls) == at:
                    raise MemoryError
                return whole(*args, **kwargs)

            async with house(saved, tenant_pages_max=16) as home:
                with monkeypatch.context() as patch:
                    patch.setattr(Reference, what, fail)
                    try:
                        cache = await home.restore("a")
                    except MemoryError:
                        assert not home.caches.all()
                        assert home.caches.size_bytes == 0
                        cache = None
                if cache is None:
                    await home.engine.flush()
                    assert all(quota.is_idle for quota in home.caches._quotas.values())
                    cache = await home.restore("a")
                assert await home.content(cache) == expected
                if next(calls) <= at:
                    return

    run(scenario())


def test_whichever_read_of_a_save_fails_the_newest_save_is_the_old_one(kind, saved, monkeypatch):
    async def scenario():
        before = await content_of_newest(saved)
        for at in itertools.count():
            calls, whole = itertools.count(), Reference.read

            def fail(*args, at=at, calls=calls, whole=whole):
                if next(calls) == at:
                    raise MemoryError
                return whole(*args)

            async with house(saved, file_bytes=FILE_BYTES) as home:
                cache = await home.restore("a")
                await second_state(home, cache, kind)
                with monkeypatch.context() as patch:
                    patch.setattr(Reference, "read", fail)
                    try:
                        await home.save(cache)
                    except MemoryError:
                        assert await content_of_newest(saved) == before
                    else:
                        return

    run(scenario())


def test_a_restore_that_passes_a_quota_or_the_memory_leaves_nothing(kind, saved):
    async def scenario():
        for settings in ({"tenant_pages_max": 3}, {"tenant_sequences_max": 2}, {"cache_bytes_max": 1000}):
            if kind is PagesBy.CLIENT and "tenant_sequences_max" in settings:
                continue
            async with house(saved, **settings) as home:
                with pytest.raises(ResourceExhaustedError):
                    await home.restore("a")
                assert not home.caches.all()
                assert home.caches.size_bytes == 0
                await home.engine.flush()
                assert all(quota.is_idle for quota in home.caches._quotas.values())
                await home.persistence.restore_all()  # the log has why; the server would start

    run(scenario())


def test_a_save_whose_manifest_is_damaged_leaves_the_older_one_if_it_is_there_still(kind, saved):
    async def scenario():
        before = await content_of_newest(saved)
        (older,) = saved.glob("tenant-/a/*")
        shutil.copytree(older, saved / "kept")
        async with house(saved, file_bytes=FILE_BYTES) as home:
            cache = await home.restore("a")
            await second_state(home, cache, kind)
            await home.save(cache)
        (newer,) = saved.glob("tenant-/a/*")
        assert newer.name > older.name
        (saved / "kept").rename(older)
        manifest = newer / "manifest.json"
        whole = manifest.read_bytes()
        for damaged in (whole[:-1], b"", whole + b" ", whole.replace(b"1", b"2", 1), b"[" * 100_000):
            manifest.write_bytes(damaged)
            assert await content_of_newest(saved) == before
        # Nor is one believed that says that it is another save.
        manifest.write_bytes((older / "manifest.json").read_bytes())
        assert await content_of_newest(saved) == before
        shutil.rmtree(older)
        async with house(saved) as home:
            with pytest.raises(DataLossError) as caught:
                await home.restore("a")
            assert caught.value.reason == "SAVE_DAMAGED"

    run(scenario())
