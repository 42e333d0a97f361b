"""Where saves lie, and how one takes the place of another: at every moment one of them is complete.

    DIR/lock                                        held by the server that uses DIR
    DIR/tenant-ACME/llama/000000000007-9f86…/       the newest save of the cache `llama` of the tenant `ACME`
    DIR/tenant-ACME/llama/.000000000008-60a5…/      one in progress, or a leftover of one

A save is written under a name with a dot, synced file by file, and renamed; then older ones are removed. What has a
dot means nothing, and is removed when the server starts.
"""

import contextlib
import errno
import hashlib
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

from attnd.service.errors import DataLossError, NotFoundError
from attnd.service.files import Files
from attnd.service.manifest import MANIFEST, DamagedError, Manifest, PageFile, SaveId

_SAVE: Final = re.compile(r"\.?(\d{12})-([0-9a-f]{32})")
_LEFTOVER: Final = "."
# A file's name has at most 255 bytes.
_TENANT_CHARS_MAX: Final = 200
# What a disk says of data that it has no longer. Other errors (too many open files, no permission) are of the moment.
_LOST: Final = frozenset({errno.EIO, errno.ENOENT, errno.EBADMSG, errno.EUCLEAN})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A save in progress.

    Attributes:
        id: Which.
        folder: Where it is written.
    """

    id: SaveId
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A complete save.

    Attributes:
        manifest: What it holds.
        folder: Where it lies.
    """

    manifest: Manifest
    folder: Path


class SaveStore:
    """The saves in a data directory. Methods block, and may raise OSError: they are not for the event loop's thread.

    Calls about one cache come one after another.

    Args:
        folder: The data directory.
        files: How files are read and written.
    """

    def __init__(self, folder: Path, files: Files) -> None:
        self._folder = folder
        self._files = files

    def sweep(self) -> None:
        """Removes what interrupted saves have left."""
        for tenant in self._tenants():
            for name in self._files.names(tenant):
                if name.startswith(_LEFTOVER):
                    self._remove(tenant / name)
                else:
                    self._sweep(tenant / name)

    def caches(self) -> list[SaveId]:
        """Returns the newest save of each cache that has one that can be read; the log has the rest."""
        found = []
        for tenant in self._tenants():
            for name in sorted(self._files.names(tenant)):
                try:
                    manifest = self._newest(tenant / name).manifest
                except (DataLossError, NotFoundError) as error:
                    _log.error("no cache is restored from %s: %s", tenant / name, error)
                except Exception:
                    _log.exception("no cache is restored from %s", tenant / name)
                else:
                    found.append(manifest.id)
        return found

    def newest(self, tenant: str, name: str) -> Save:
        """Returns the newest save of a cache whose manifest is whole.

        Raises:
            NotFoundError: There is none.
            DataLossError: There are some, and none has a whole manifest.
            FailedPreconditionError: Another version of attnd wrote it, in a way that this one does not know.
        """
        return self._newest(self._cache(tenant, name))

    def begin(self, tenant: str, name: str, cache_id: str, save_id: str) -> Draft:
        """Makes a place for a new save."""
        folder = self._cache(tenant, name)
        for each in (folder.parent, folder):
            if each.name not in self._files.names(each.parent):
                self._files.make_folder(each)
                self._files.sync(each.parent)
        self._sweep(folder)
        numbers = [int(match[1]) for match in map(_SAVE.fullmatch, self._files.names(folder)) if match]
        draft_id = SaveId(
            save_id=save_id, number=max(numbers, default=0) + 1, tenant=tenant, name=name, cache_id=cache_id
        )
        draft = Draft(id=draft_id, folder=folder / f"{_LEFTOVER}{_save_name(draft_id)}")
        self._files.make_folder(draft.folder)
        return draft

    def add(self, draft: Draft, name: str, data: bytes) -> None:
        """Writes a file of a save."""
        self._files.write(draft.folder / name, data)
        self._files.sync(draft.folder / name)

    def publish(self, draft: Draft, manifest: Manifest) -> None:
        """Makes a save the newest one of its cache, then removes the others. If it raises, the newest is as before.

        If it is the last step that fails, the newest after a restart may be either.
        """
        cache = draft.folder.parent
        self.add(draft, MANIFEST, manifest.encode())
        self._files.sync(draft.folder)
        self._files.rename(draft.folder, cache / _save_name(draft.id))
        self._files.sync(cache)
        self._remove_but(cache, _save_name(draft.id))

    def abandon(self, draft: Draft) -> None:
        """Removes what there is of a save that failed, or tries to: the next save, or start, tries again."""
        with contextlib.suppress(OSError):
            self._files.remove(draft.folder)

    def read(self, save: Save, file: PageFile) -> bytes | None:
        """Returns what a file of a save holds; None if the disk says that it is lost.

        Raises:
            OSError: It cannot be read now.
        """
        try:
            return self._files.read(save.folder / file.name)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            _log.error("%s is lost: %s", save.folder / file.name, error)
            return None

    def remove(self, tenant: str, name: str) -> None:
        """Removes all saves of a cache. If it raises, they are as before; or, if the last step fails, perhaps gone."""
        cache = self._cache(tenant, name)
        if cache.name not in self._files.names(cache.parent):
            return
        hidden = cache.parent / f"{_LEFTOVER}{cache.name}"
        if hidden.name in self._files.names(cache.parent):
            self._remove(hidden)
        self._files.rename(cache, hidden)
        self._files.sync(cache.parent)
        self._remove(hidden)

    def _tenants(self) -> Iterator[Path]:
        for name in sorted(self._files.names(self._folder)):
            if name.startswith(("tenant-", "hashed-")):
                yield self._folder / name

    def _cache(self, tenant: str, name: str) -> Path:
        # A certificate's common name may be any text; a name of a cache is legal as it is, and never begins with a dot.
        quoted = f"tenant-{quote(tenant, safe='')}"
        if len(quoted) > _TENANT_CHARS_MAX:
            quoted = f"hashed-{hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()}"
        return self._folder / quoted / name

    def _newest(self, cache: Path) -> Save:
        folders = [cache / name for name in sorted(self._files.names(cache), reverse=True) if _is_save(name)]
        if not folders:
            raise NotFoundError("SAVE_NOT_FOUND", f"There is no save of a cache named {cache.name!r}.")
        for folder in folders:
            try:
                return Save(manifest=self._manifest(folder), folder=folder)
            except DamagedError as error:
                _log.error("the save %s is damaged: %s", folder, error)
        raise DataLossError("SAVE_DAMAGED", f"The save of cache {cache.name!r} is damaged: nothing of it can be read.")

    def _manifest(self, folder: Path) -> Manifest:
        try:
            text = self._files.read(folder / MANIFEST)
        except OSError as error:
            if error.errno not in _LOST:
                raise
            raise DamagedError(f"its manifest is lost: {error.strerror}") from error
        manifest = Manifest.decode(text)
        place = self._cache(manifest.id.tenant, manifest.id.name) / _save_name(manifest.id)
        if place != folder:
            raise DamagedError(f"its manifest is that of {place}")
        return manifest

    def _sweep(self, folder: Path) -> None:
        for name in self._files.names(folder):
            if name.startswith(_LEFTOVER):
                self._remove(folder / name)

    def _remove_but(self, cache: Path, newest: str) -> None:
        try:
            names = self._files.names(cache)
        except OSError:
            _log.exception("older saves in %s could not be removed; the next save tries again", cache)
            return
        for name in names:
            if name != newest:
                self._remove(cache / name)

    def _remove(self, folder: Path) -> None:
        """Removes a folder that means nothing any more, or tries to: what is left is removed at the next start."""
        try:
            if not folder.name.startswith(_LEFTOVER):
                # So that a removal that stops halfway leaves no save that looks complete.
                hidden = folder.with_name(f"{_LEFTOVER}{folder.name}")
                self._files.rename(folder, hidden)
                folder = hidden
            self._files.remove(folder)
        except OSError:
            _log.exception("%s could not be removed; the next start of the server tries again", folder)


def _save_name(save: SaveId) -> str:
    return f"{save.number:012d}-{save.save_id}"


def _is_save(name: str) -> bool:
    return _SAVE.fullmatch(name) is not None and not name.startswith(_LEFTOVER)
