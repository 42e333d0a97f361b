"""Damages saves and restores them on a real server: all damage is found, and costs what it hit and nothing else."""

import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from attnd import client as sdk
from attnd.client import Cache, Client
from tests.soak.crashes import values
from tests.soak.report import Row
from tests.support.server import attnd_server

SHAPE = {"num_layers": 2, "page_size": 64, "num_kv_heads": 8, "head_dim": 64, "dtype": "float32"}
NUM_PAGES, NUM_PAGES_HELD = 200, 70  # 512 KiB each over both layers: three files
NAMES = ("one", "two")


@dataclass
class Save:
    """A complete save, as it was written.

    Attributes:
        folder: Where it lies.
        files: What the manifest says of its files of pages.
        older: The files of an older save of the same cache.
        other: The files of a save of another cache of the same shape.
        undo: What puts it back as it was.
    """

    folder: Path
    files: list[dict]
    older: Path
    other: Path
    undo: list[Callable[[], None]] = field(default_factory=list)

    def edit(self, name: str, data: bytes | None) -> None:
        """Gives a file other content, or removes it."""
        path = self.folder / name
        whole = path.read_bytes()
        assert data != whole, "nothing was damaged"
        self.undo.append(lambda: path.write_bytes(whole))
        path.unlink() if data is None else path.write_bytes(data)

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def pages_at(self, file: dict, start: int, end: int) -> set[int]:
        """Returns the pages of which bytes of a file are a part: all, for bytes of its header."""
        header = 8 + int.from_bytes(self.read(file["name"])[:8], "little")
        page_bytes = (file["size_bytes"] - header) // len(file["pages"])
        if start < header:
            return set(file["pages"])
        return set(file["pages"][(start - header) // page_bytes : -(-(end - header) // page_bytes)])


Damage = Callable[[Save, random.Random], set[int] | None]
"""Damages a save; returns the pages that it hit, or None if it hit the manifest."""


def flip_bit(save: Save, rng: random.Random) -> set[int] | None:
    name, file = _any_file(save, rng)
    data = bytearray(save.read(name))
    place = rng.randrange(min(len(data), 200)) if rng.random() < 0.2 else rng.randrange(len(data))
    pages = None if file is None else save.pages_at(file, place, place + 1)
    data[place] ^= 1 << rng.randrange(8)
    save.edit(name, bytes(data))
    return pages


def overwrite_sector(save: Save, rng: random.Random) -> set[int] | None:
    name, file = _any_file(save, rng)
    data = bytearray(save.read(name))
    start = rng.randrange(0, len(data), 512)
    end = min(start + 512, len(data))
    pages = None if file is None else save.pages_at(file, start, end)
    # Where no token is, there are zeros already.
    zeroes = any(data[start:end]) and rng.random() < 0.5
    data[start:end] = bytes(end - start) if zeroes else rng.randbytes(end - start)
    save.edit(name, bytes(data))
    return pages


def truncate(save: Save, rng: random.Random) -> set[int] | None:
    name, file = _any_file(save, rng)
    data = save.read(name)
    save.edit(name, data[: rng.choice([0, 7, rng.randrange(len(data)), len(data) - 1])])
    return None if file is None else set(file["pages"])


def extend(save: Save, rng: random.Random) -> set[int] | None:
    name, file = _any_file(save, rng)
    save.edit(name, save.read(name) + rng.choice([b"\0", b"\n", rng.randbytes(4096)]))
    return None if file is None else set(file["pages"])


def lose(save: Save, rng: random.Random) -> set[int] | None:
    name, file = _any_file(save, rng)
    save.edit(name, None)
    return None if file is None else set(file["pages"])


def swap_pages_of_a_file(save: Save, rng: random.Random) -> set[int]:
    file = rng.choice([file for file in save.files if len(file["pages"]) > 1])
    return _swap(save, (file, file), rng.sample(range(len(file["pages"])), 2))


def swap_pages_of_two_files(save: Save, rng: random.Random) -> set[int]:
    files = tuple(rng.sample(save.files, 2))
    return _swap(save, files, [rng.randrange(len(file["pages"])) for file in files])


def swap_files(save: Save, rng: random.Random) -> set[int]:
    one, other = rng.sample(save.files, 2)
    first, second = save.read(one["name"]), save.read(other["name"])
    save.edit(one["name"], second)
    save.edit(other["name"], first)
    return {*one["pages"], *other["pages"]}


def take_file_of_older_save(save: Save, rng: random.Random) -> set[int]:
    return _take(save, rng.choice(save.files[:2]), save.older)


def take_file_of_other_cache(save: Save, rng: random.Random) -> set[int]:
    return _take(save, rng.choice(save.files[:2]), save.other)


def take_manifest_of_older_save(save: Save, _: random.Random) -> None:
    save.edit("manifest.json", (save.older / "manifest.json").read_bytes())


def take_manifest_of_other_cache(save: Save, _: random.Random) -> None:
    save.edit("manifest.json", (save.other / "manifest.json").read_bytes())


DAMAGES: list[Damage] = [
    flip_bit, flip_bit, flip_bit, overwrite_sector, truncate, extend, lose, swap_pages_of_a_file,
    swap_pages_of_two_files, swap_files, take_file_of_older_save, take_file_of_other_cache,
    take_manifest_of_older_save, take_manifest_of_other_cache,
]  # fmt: skip


def _take(save: Save, file: dict, folder: Path) -> set[int]:
    whole, data = save.read(file["name"]), (folder / file["name"]).read_bytes()
    save.edit(file["name"], data)
    assert len(data) == len(whole), "the first files are full"
    slots = [_slot(whole, file, slot) for slot in range(len(file["pages"]))]
    # A page that is the same in both is not damaged.
    return {page for page, slot in zip(file["pages"], slots, strict=True) if whole[slot] != data[slot]}


def _any_file(save: Save, rng: random.Random) -> tuple[str, dict | None]:
    file = rng.choice([None, *save.files, *save.files])
    return ("manifest.json", None) if file is None else (file["name"], file)


def _swap(save: Save, files: tuple[dict, dict], slots: list[int]) -> set[int]:
    for one, slot, other, slot_of_other in (
        (files[0], slots[0], files[1], slots[1]),
        (files[1], slots[1], files[0], slots[0]),
    ):
        data, source = bytearray(save.read(one["name"])), save.folder.parents[3] / "whole" / other["name"]
        page, page_of_other = _slot(data, one, slot), _slot(source.read_bytes(), other, slot_of_other)
        data[page] = source.read_bytes()[page_of_other]
        save.edit(one["name"], bytes(data))
    return {file["pages"][slot] for file, slot in zip(files, slots, strict=True)}


def _slot(data: bytes, file: dict, slot: int) -> slice:
    header = 8 + int.from_bytes(data[:8], "little")
    page_bytes = (file["size_bytes"] - header) // len(file["pages"])
    return slice(header + slot * page_bytes, header + (slot + 1) * page_bytes)


class Text:
    """Sequences with pages of their own and shared ones, and what they hold."""

    def __init__(self, rng: random.Random, first_token: int) -> None:
        self.rng = rng
        self.tokens: dict[bytes, list[int]] = {}
        self._next = first_token

    def write(self, client: Client, cache: Cache) -> None:
        while client.get_cache(cache.name).info.num_free_pages > NUM_PAGES - NUM_PAGES_HELD:
            if self.tokens and self.rng.random() < 0.3:
                parent = self.rng.choice(list(self.tokens))
                sequence, tokens = cache.sequence(parent).fork(), list(self.tokens[parent])
            else:
                (sequence,), tokens = cache.create_sequences(1), []
            self._append(cache, sequence.handle, tokens, self.rng.randint(1, 300))

    def rewrite(self, cache: Cache) -> None:
        """Gives the second half of every sequence other tokens."""
        for handle, tokens in self.tokens.items():
            kept = len(tokens) // 2
            cache.sequence(handle).truncate(kept)
            self._append(cache, handle, tokens[:kept], len(tokens) - kept)

    def _append(self, cache: Cache, handle: bytes, tokens: list[int], more: int) -> None:
        self.tokens[handle] = [*tokens, *range(self._next, self._next + more)]
        self._next += more
        attend(cache, handle, self.tokens[handle], len(tokens))


def attend(cache: Cache, handle: bytes, tokens: list[int], start: int) -> None:
    """Writes tokens, or the same ones again; one that differs from what the server holds is refused."""
    step = cache.step([cache.sequence(handle)], q_lens=[len(tokens) - start], kv_lens=[len(tokens)])
    for layer in range(2):
        k, v = values(np.array(tokens[start:]), layer, (8, 64))
        step.attend(layer, k[:, :8], k, v)


def run(count: int, seed: int) -> list[Row]:
    """Restores `count` damaged saves."""
    rng = random.Random(seed)
    row = Row("a damaged save is found out, and costs what was hit and no more", count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = ["--data-dir", str(folder / "data"), "--implementation", "reference"]
        with attnd_server(*options) as server, Client(server.address, timeout_s=120.0) as client:
            save, text = _saved(client, folder, rng)
            for i in range(count):
                damage = DAMAGES[i % len(DAMAGES)]
                if failure := _try(client, save, text, damage, rng):
                    row.fail(f"{damage.__name__}, number {i} of seed {seed}: {failure}")
                row.progress(i + 1)
            print(file=sys.stderr)
            # So that the server has nothing to save at its end.
            for cache in client.list_caches():
                cache.delete()
    row.notes = f"{len(set(DAMAGES))} kinds of damage"
    return [row]


def _saved(client: Client, folder: Path, rng: random.Random) -> tuple[Save, Text]:
    folders = {}
    for first_token, name in ((1, NAMES[1]), (100_000, NAMES[0])):
        cache = client.create_cache(name, **SHAPE, num_pages=NUM_PAGES, pages_by="server")
        text = Text(rng, first_token)
        text.write(client, cache)
        for age in ("older", "newer"):
            if age == "newer":
                text.rewrite(cache)
            cache.save()
            (newest,) = (folder / "data" / "tenant-" / name).iterdir()
            folders[name, age] = shutil.copytree(newest, folder / f"{name}-{age}")
        cache.delete(keep_saves=True)
    shutil.copytree(newest, newest.parents[3] / "whole")
    files = json.loads((newest / "manifest.json").read_bytes())["manifest"]["files"]
    assert len(files) >= 3
    return Save(newest, files, folders[NAMES[0], "older"], folders[NAMES[1], "newer"]), text


def _try(client: Client, save: Save, text: Text, damage: Damage, rng: random.Random) -> str | None:
    """Damages the save, restores it and mends it; returns what was not as it must be."""
    hit = damage(save, rng)
    try:
        cache = client.restore_cache(NAMES[0])
    except sdk.DataLossError:
        return None if hit is None else "all of it is refused, though only pages were hit"
    else:
        try:
            return "the manifest was believed" if hit is None else _wrong(cache, save, text, hit)
        finally:
            cache.delete(keep_saves=True)
    finally:
        while save.undo:
            save.undo.pop()()


def _wrong(cache: Cache, save: Save, text: Text, hit: set[int]) -> str | None:
    manifest = json.loads((save.folder.parents[3] / "whole" / "manifest.json").read_bytes())["manifest"]
    expected = {each["handle"] for each in manifest["sequences"] if hit & set(each["pages"])}
    infos = cache.list_sequences()
    found = {info.restored_from.hex() for info in infos if info.damaged}
    if found != expected:
        return f"{len(expected - found)} damaged sequences were believed, {len(found - expected)} others refused"
    for info in infos:
        tokens = text.tokens[info.restored_from]
        try:
            attend(cache, info.handle, tokens, 0)
        except sdk.DataLossError:
            if not info.damaged:
                return "a whole sequence is refused"
        except sdk.FailedPreconditionError:
            return "a sequence holds tokens that it never held"
        else:
            if info.damaged:
                return "a damaged sequence is served"
    return None


if __name__ == "__main__":
    from tests.soak.report import table

    print(table(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))
