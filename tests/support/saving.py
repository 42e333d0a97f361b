"""The server's parts without a network, over files that fail: what saves and restores are tested with."""

import asyncio
import errno
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, Layout
from attnd.service.attending import AttentionCall
from attnd.service.caches import Cache, CacheRegistry, PagesBy
from attnd.service.config import ServerConfig
from attnd.service.engine import Engine
from attnd.service.files import Files
from attnd.service.metrics import Metrics
from attnd.service.persistence import Persistence
from attnd.service.world import World


def spec_of(**changes) -> CacheSpec:
    sizes = {"num_layers": 2, "num_pages": 16, "page_size": 4, "num_kv_heads": 1, "head_dim": 8}
    return CacheSpec(**{"layout": Layout.INTERLEAVED, "dtype": np.dtype(np.float32), **sizes, **changes})


def tokens(content: int, layer: int, positions: np.ndarray, spec: CacheSpec) -> tuple[np.ndarray, np.ndarray]:
    """Returns keys and values, float32 [tokens, num_kv_heads, head_dim], no two of them alike."""
    elements = np.arange(spec.num_kv_heads * spec.head_dim)
    seeds = content * 7919 + layer * 104729 + positions[:, np.newaxis] * 31 + elements * 0.618
    k, v = (np.sin(seeds + offset).astype(np.float32) for offset in (0.0, 0.5))
    shape = (len(positions), spec.num_kv_heads, spec.head_dim)
    return k.reshape(shape), v.reshape(shape)


@dataclass
class House:
    """A server without a network."""

    engine: Engine
    caches: CacheRegistry
    persistence: Persistence

    async def create(self, name: str, pages_by: PagesBy = PagesBy.SERVER, tenant: str = "", **changes) -> Cache:
        return await self.caches.create(name, tenant, spec_of(**changes), pages_by, None)

    async def append(self, cache: Cache, handle: bytes, content: int, end: int, layers=None) -> None:
        """Lengthens a sequence to `end` tokens of some content in some layers, all if none is named."""
        for layer in range(cache.spec.num_layers) if layers is None else layers:
            state = next(each for each in cache.sequences if each.handle == handle)
            start = int(state.layer_lens[layer])
            lens = (np.array([end - start], np.int32), np.array([end], np.int32))
            k, v = tokens(content, layer, np.arange(start, end), cache.spec)
            reservation = await cache.sequences.reserve([handle], *lens, layer, append=True)
            call = AttentionCall(
                cache=cache, layer=layer, batch=reservation.batch, q=k, k=k, v=v, options=AttentionOptions(),
                hints=KernelHints(), reservation=reservation,
            )  # fmt: skip
            await self.engine.run(call, settle=lambda done, held=reservation: cache.sequences.settle(held, commit=done))

    async def write(self, cache: Cache, layer: int, pages: list[int], content: int) -> None:
        """Writes pages of some content, as WritePages does."""
        indices = np.array(pages, np.int32)
        values = np.full(cache.spec.pages_shape(len(pages)), content, cache.spec.dtype)
        scales = np.ones(cache.spec.scales_shape(len(pages)), np.float32) if cache.spec.quantized_per_token else None

        def write() -> None:
            cache.client_pages.before_write(layer, indices)
            cache.implementation.write(cache.pages, layer, indices, values, scales)
            cache.client_pages.written(layer, indices)

        await cache.client_pages.room()
        await self.engine.run(write)

    async def save(self, cache: Cache) -> None:
        async for _ in self.persistence.save(cache):
            pass

    async def restore(self, name: str, tenant: str = "") -> Cache:
        async for progress in self.persistence.restore(tenant, name):
            last = progress
        return last.cache

    async def content(self, cache: Cache) -> dict:
        """Returns what a cache holds, bit for bit: by sequence (its older handle, if it was restored), or by layer."""

        def read() -> dict:
            implementation, spec = cache.implementation, cache.spec
            if cache.sequences is None:
                every = np.arange(spec.num_pages, dtype=np.int32)
                layers = [implementation.read(cache.pages, layer, every) for layer in range(spec.num_layers)]
                return {i: tuple(each.tobytes() for each in held if each is not None) for i, held in enumerate(layers)}
            found = {}
            for each in cache.sequences:
                held = None
                if not each.damaged:
                    held = tuple(
                        flat(spec, implementation.read(cache.pages, layer, each.pages)[0])[: each.layer_lens[layer]]
                        .tobytes()
                        for layer in range(spec.num_layers)
                    )  # fmt: skip
                found[each.restored_from or each.handle] = (each.layer_lens.tolist(), held)
            return found

        return (await self.engine.run(read)).value


def flat(spec: CacheSpec, kv_pages: np.ndarray) -> np.ndarray:
    """Returns pages as tokens, [tokens, elements]."""
    if spec.layout is Layout.SPLIT:
        kv_pages = np.moveaxis(kv_pages, (2, 3), (0, 1))
    return kv_pages.reshape(kv_pages.shape[0] * spec.page_size, 2 * spec.num_kv_heads * spec.head_dim)


@asynccontextmanager
async def house(
    folder: Path, files: Files | None = None, file_bytes: int = 1 << 20, world: World | None = None, **config
) -> AsyncIterator[House]:
    """Runs a server's parts over a data directory."""
    engine, world = Engine(queue_depth_max=1024, batch_calls_max=1, metrics=Metrics()), world or World()
    settings = ServerConfig(**{"implementation": "reference", "cache_bytes_max": 1 << 30, **config})
    caches = CacheRegistry(engine, settings, platform="cpu", world=world)
    persistence = Persistence(folder, files or Files(), caches, engine, world, file_bytes=file_bytes)
    try:
        yield House(engine, caches, persistence)
    finally:
        await persistence.finish()
        await engine.stop()


FILE_BYTES = 2000
"""Of these caches' files: several for a save."""


async def first_state(home: House, kind: PagesBy) -> None:
    """A cache with shared pages, layers of different lengths and an empty sequence, saved."""
    cache = await home.create("a", kind)
    if kind is PagesBy.CLIENT:
        await home.write(cache, 0, [1, 3, 15], 1)
        await home.write(cache, 1, [0], 2)
        return
    a, b, _ = cache.sequences.create(3, lease_s=1000.0)
    await home.append(cache, a, 1, 10)
    c = cache.sequences.fork(a)
    await home.append(cache, b, 2, 3)
    await home.append(cache, c, 3, 13, layers=[0])


async def second_state(home: House, cache, kind: PagesBy) -> None:
    if kind is PagesBy.CLIENT:
        await home.write(cache, 0, [1, 2], 7)
        await home.write(cache, 1, [0, 9], 8)
        return
    a, b, *_ = [each.handle for each in cache.sequences]
    await home.append(cache, a, 4, 17)
    await cache.sequences.truncate(b, 1)
    await home.append(cache, cache.sequences.create(1)[0], 5, 9)


async def content_of_newest(folder, files=None) -> dict | None:
    async with house(folder, files) as home:
        await home.persistence.restore_all()
        caches = home.caches.all()
        return await home.content(caches[0]) if caches else None


def restored_handles(cache) -> dict[bytes, bytes]:
    return {each.restored_from: each.handle for each in cache.sequences}


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario, 120))


class FailingFiles(Files):
    """Files of which one operation fails.

    Args:
        at: Which operation fails, the first being 0.
        how: `before` it does anything; `half` of a write is done; `after` it is done; `dead`: it and all later ones.
        code: The error.
    """

    def __init__(self, at: int, how: str, code: int = errno.ENOSPC) -> None:
        self.at, self.how, self.code = at, how, code
        self.count = 0

    @property
    def failed(self) -> bool:
        return self.count > self.at

    def _do(self, name: str, *arguments):
        number, self.count = self.count, self.count + 1
        fails = number == self.at or (number > self.at and self.how == "dead")
        if fails and name == "write" and self.how == "half":
            path, data = arguments
            super().write(path, data[: len(data) // 2])
        if fails and self.how != "after":
            raise OSError(self.code, "injected")
        result = getattr(super(), name)(*arguments)
        if fails:
            raise OSError(self.code, "injected")
        return result

    def make_folder(self, path):
        self._do("make_folder", path)

    def names(self, folder):
        return self._do("names", folder)

    def read(self, path):
        return self._do("read", path)

    def write(self, path, data):
        self._do("write", path, data)

    def sync(self, path):
        self._do("sync", path)

    def rename(self, path, to):
        self._do("rename", path, to)

    def remove(self, folder):
        self._do("remove", folder)


class _File:
    def __init__(self) -> None:
        self.data, self.synced = b"", b""

    def cut(self, rng: random.Random) -> None:
        if self.data != self.synced:
            kept = self.data[: rng.randrange(len(self.data))]
            self.data = self.synced = rng.choice([b"", kept, self.data, rng.randbytes(len(self.data))])


class _Folder:
    def __init__(self) -> None:
        self.names, self.synced, self.changes = {}, {}, []

    def change(self, change) -> None:
        change(self.names)
        self.changes.append(change)

    def cut(self, rng: random.Random) -> None:
        names = dict(self.synced)
        for change in self.changes:
            if rng.random() < 0.5:
                change(names)
        self.names, self.synced, self.changes = names, dict(names), []
        for node in names.values():
            node.cut(rng)


class DiskFiles(Files):
    """A disk in memory that forgets what was not synced when its power is cut.

    Of a folder's changes that are not synced any may survive; a file that is not synced may hold anything.
    """

    ROOT = Path("/data")

    def __init__(self) -> None:
        self._root = _Folder()
        self.operations_left = 1 << 60

    def cut_power(self, rng: random.Random) -> None:
        """Cuts the power, and gives it back."""
        self._root.cut(rng)
        self.operations_left = 1 << 60

    def _find(self, path: Path):
        if self.operations_left <= 0:
            raise OSError(errno.ENODEV, "no power")
        self.operations_left -= 1
        node = self._root
        for name in path.relative_to(self.ROOT).parts:
            if not isinstance(node, _Folder) or name not in node.names:
                raise FileNotFoundError(errno.ENOENT, "not there")
            node = node.names[name]
        return node

    def make_folder(self, path):
        made = _Folder()
        self._find(path.parent).change(lambda names: names.update({path.name: made}))

    def names(self, folder):
        try:
            return list(self._find(folder).names)
        except FileNotFoundError:
            return []

    def read(self, path):
        return self._find(path).data

    def write(self, path, data):
        made = _File()
        self._find(path.parent).change(lambda names: names.update({path.name: made}))
        made.data = data

    def sync(self, path):
        node = self._find(path)
        if isinstance(node, _File):
            node.synced = node.data
        else:
            node.synced, node.changes = dict(node.names), []

    def rename(self, path, to):
        assert path.parent == to.parent

        def change(names: dict) -> None:
            if path.name in names:
                names[to.name] = names.pop(path.name)

        self._find(path)
        self._find(path.parent).change(change)

    def remove(self, folder):
        self._find(folder)
        self._find(folder.parent).change(lambda names: names.pop(folder.name, None))
