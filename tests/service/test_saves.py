"""Saves and restores: the moment that a save shows, what comes back, whose it is, and what deletes it."""

import asyncio
import errno
import itertools
import shutil
import threading

import numpy as np
import pytest

from attnd.kernels.contract import Layout
from attnd.service import manifest as module
from attnd.service.caches import PagesBy
from attnd.service.errors import AlreadyExistsError, NotFoundError, RefusedError
from attnd.service.files import Files
from attnd.service.page_files import page_bytes, parts
from attnd.service.world import World
from tests.support.saving import (
    FailingFiles,
    content_of_newest,
    first_state,
    house,
    restored_handles,
    run,
    second_state,
    spec_of,
)


class GatedFiles(Files):
    """Files of which a write waits until told to go on, so that something can happen in the middle of a save."""

    def __init__(self) -> None:
        self.waiting, self.go_on = threading.Event(), threading.Event()
        self.writes_before = 1

    def write(self, path, data):
        self.writes_before -= 1
        if self.writes_before < 0:
            self.waiting.set()
            assert self.go_on.wait(30)
        super().write(path, data)


@pytest.mark.parametrize("writes_before", [0, 1, 2, 3])
def test_a_save_shows_the_moment_at_which_it_began_whatever_calls_do_meanwhile(kind, tmp_path, writes_before):
    async def scenario():
        files = GatedFiles()
        files.writes_before = writes_before
        async with house(tmp_path, files, file_bytes=300) as home:
            await first_state(home, kind)
            (cache,) = home.caches.all()
            expected = await home.content(cache)
            saving = asyncio.create_task(home.save(cache))
            await asyncio.to_thread(files.waiting.wait, 30)
            await second_state(home, cache, kind)
            if kind is PagesBy.SERVER:
                first, *_ = [each.handle for each in cache.sequences]
                cache.sequences.release([first])
                await home.append(cache, cache.sequences.create(1)[0], 9, 12)
            else:
                for page in range(16):
                    await home.write(cache, 0, [page], 9)
            live = await home.content(cache)
            files.go_on.set()
            await saving
            assert await home.content(cache) == live
        assert await content_of_newest(tmp_path) == expected

    run(scenario())


def test_calls_that_write_wait_when_a_save_keeps_all_that_it_can(tmp_path, monkeypatch):
    async def scenario():
        monkeypatch.setattr("attnd.service.client_pages.KEPT_BYTES_MAX", 1000)
        files = GatedFiles()
        async with house(tmp_path, files, file_bytes=300) as home:
            cache = await home.create("a", PagesBy.CLIENT)
            expected = await home.content(cache)
            saving = asyncio.create_task(home.save(cache))
            await asyncio.to_thread(files.waiting.wait, 30)
            await home.write(cache, 1, list(range(8)), 1)
            late = asyncio.create_task(home.write(cache, 1, [12], 2))
            await asyncio.sleep(0.05)
            assert not late.done()
            files.go_on.set()
            await asyncio.gather(saving, late)
        assert await content_of_newest(tmp_path) == expected

    run(scenario())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_and_dtype_comes_back_bit_for_bit(tmp_path, layout, dtype):
    async def scenario():
        async with house(tmp_path, file_bytes=300) as home:
            cache = await home.create("a", PagesBy.CLIENT, layout=layout, dtype=np.dtype(dtype), num_kv_heads=2)
            rng, spec = np.random.default_rng(0), cache.spec
            for layer in range(spec.num_layers):
                shape = spec.pages_shape(16)
                bits = rng.integers(0, 256, (*shape, spec.dtype.itemsize), np.uint8).view(spec.dtype)[..., 0]
                scales = rng.random(spec.scales_shape(16), np.float32) if spec.quantized_per_token else None
                cache.implementation.write(cache.pages, layer, np.arange(16, dtype=np.int32), bits, scales)
            expected = await home.content(cache)
            await home.save(cache)
        assert await content_of_newest(tmp_path) == expected

    run(scenario())


def test_restored_sequences_have_new_handles_whole_leases_and_go_their_own_ways(tmp_path):
    async def scenario():
        async with house(tmp_path) as home:
            await first_state(home, PagesBy.SERVER)
            (cache,) = home.caches.all()
            old = [each.handle for each in cache.sequences]
            pages = [len(each.pages) for each in cache.sequences]
            await home.save(cache)
        async with house(tmp_path) as home:
            again = await home.restore("a")
            assert (again.name, again.spec) == (cache.name, cache.spec)
            assert again.cache_id != cache.cache_id
            assert again.incarnation_id != cache.incarnation_id
            assert [each.restored_from for each in again.sequences] == old
            assert not {each.handle for each in again.sequences} & set(old)
            assert [len(each.pages) for each in again.sequences] == pages
            assert again.sequences.num_free_pages == cache.sequences.num_free_pages
            assert [each.lease_s for each in again.sequences][:3] == [1000.0] * 3
            with pytest.raises(NotFoundError):
                again.sequences.keep_alive(old[:1])
            # A page that two hold is still one that neither may write to.
            handles = restored_handles(again)
            untouched = (await home.content(again))[old[3]]
            await home.append(again, handles[old[0]], 8, 12)
            assert (await home.content(again))[old[3]] == untouched
            with pytest.raises(AlreadyExistsError):
                await home.restore("a")

    run(scenario())


class SlowFiles(Files):
    """Files that take a minute to read."""

    def __init__(self) -> None:
        self.now = 0.0

    def read(self, path):
        self.now += 60.0
        return super().read(path)


def test_a_restore_that_takes_longer_than_a_lease_loses_no_sequence(tmp_path):
    async def scenario():
        async with house(tmp_path) as home:
            cache = await home.create("a")
            await home.append(cache, cache.sequences.create(2, lease_s=5.0)[0], 1, 5)
            await home.save(cache)
        files = SlowFiles()
        async with house(tmp_path, files, world=World(now=lambda: files.now)) as home:
            again = await home.restore("a")
            assert files.now >= 120.0
            assert [each.expires_at - files.now for each in again.sequences] == [5.0, 5.0]
            files.now += 5.0
            assert not list(again.sequences)

    run(scenario())


def test_deleting_a_cache_ends_its_save_and_removes_its_saves(tmp_path):
    async def scenario():
        files = GatedFiles()
        files.writes_before = 1 << 30
        async with house(tmp_path, files, file_bytes=300) as home:
            await first_state(home, PagesBy.CLIENT)
            (cache,) = home.caches.all()
            await home.save(cache)
            files.writes_before = 2
            saving = asyncio.create_task(home.save(cache))
            await asyncio.to_thread(files.waiting.wait, 30)
            deleting = asyncio.create_task(home.persistence.delete(cache))
            await asyncio.sleep(0)
            files.go_on.set()
            await deleting
            with pytest.raises(NotFoundError):
                await saving
            assert not home.caches.all()
            with pytest.raises(NotFoundError):
                await home.restore("a")
        assert await content_of_newest(tmp_path) is None

    run(scenario())


@pytest.mark.parametrize("how", ["before", "after", "dead"])
def test_a_deletion_whose_files_cannot_be_removed_leaves_the_cache(saved, how):
    async def scenario():
        for at in itertools.count():
            folder = saved.with_name(f"delete-{at}")
            shutil.copytree(saved, folder)
            files = FailingFiles(1 << 60, how, errno.EIO)
            async with house(folder, files) as home:
                cache = await home.restore("a")
                files.count, files.at = 0, at
                try:
                    await home.persistence.delete(cache)
                except OSError:
                    assert home.caches.all() == [cache]
                    files.at, files.how = 1 << 60, "before"
                    await home.persistence.delete(cache)
                assert not home.caches.all()
            assert await content_of_newest(folder) is None
            if not files.failed:
                return

    run(scenario())


def test_tenants_of_one_name_have_saves_of_their_own_whatever_they_are_called(tmp_path):
    tenants = ["", "a", "A", "../../etc", "tenant-a", "é" * 120, "..", "a/b", "." * 128]

    async def scenario():
        async with house(tmp_path) as home:
            for i, tenant in enumerate(tenants):
                cache = await home.create("same", PagesBy.CLIENT, tenant=tenant)
                await home.write(cache, 0, [i], i + 1)
            assert await home.persistence.save_all() == []
            expected = {cache.tenant: await home.content(cache) for cache in home.caches.all()}
        async with house(tmp_path) as home:
            await home.persistence.restore_all()
            assert {cache.tenant: await home.content(cache) for cache in home.caches.all()} == expected
            for name in ("../same", "", ".", "same/", "tenant-"):
                with pytest.raises(NotFoundError):
                    await home.restore(name)
            with pytest.raises(NotFoundError):
                await home.restore("same", "nobody")

    run(scenario())


def test_a_save_of_a_later_version_is_refused_and_left_alone(saved):
    async def scenario():
        async with house(saved) as home:
            with pytest.raises(RefusedError) as caught:
                await home.restore("a")
            assert caught.value.reason == "SAVE_FORMAT_UNKNOWN"

    path = next(saved.rglob("manifest.json"))
    body = module.json.loads(path.read_bytes())["manifest"] | {"format": 2}
    path.write_bytes(module._text({"checksum": module._checksum(module._text(body)), "manifest": body}))
    run(scenario())
    assert path.exists()


def test_parts_cover_every_page_of_every_layer_once():
    for spec in (
        spec_of(),
        spec_of(num_layers=7, num_pages=100),
        spec_of(layout=Layout.SPLIT, dtype=np.dtype(np.int8)),
    ):
        pages = np.arange(0, spec.num_pages, 2, dtype=np.int32)
        for file_bytes in (1, page_bytes(spec), 3 * page_bytes(spec), 10_000, 1 << 30):
            seen = [
                (layer, page)
                for part in parts(spec, pages, file_bytes)
                for layer in part.layers
                for page in part.pages.tolist()
            ]
            assert len(seen) == len(set(seen)) == spec.num_layers * len(pages)
