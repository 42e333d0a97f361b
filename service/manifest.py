"""What a save holds, as its manifest says it, and the checksums by which damage is found.

A save is a folder: `manifest.json` and files of pages, each a safetensors container of at most about `FILE_BYTES`.
Every byte of it is covered: the manifest by its own checksum, the header of a file of pages by one in the manifest,
each page by one that also covers which page of which save it is, so that no page passes for another.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Shaped

from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, Layout
from attnd.service.errors import FailedPreconditionError
from attnd.service.snapshots import SequenceState

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
_CHECKSUM_BYTES: Final = 16


class DamagedError(Exception):
    """What was read is not what was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveId:
    """Which save of which cache.

    Attributes:
        save_id: Unguessable, new for each save.
        number: Higher than those of all earlier saves of a cache of this name.
        tenant: Whose cache it is.
        name: Its name.
        cache_id: Its id when it was saved.
    """

    save_id: str
    number: int
    tenant: str
    name: str
    cache_id: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageFile:
    """One file of pages.

    Attributes:
        name: Its name in the folder.
        size_bytes: Its size.
        header_checksum: Of its bytes before those of the pages.
        first_layer: The first layer whose pages it holds.
        end_layer: The layer after the last.
        pages: Their ids in the cache, in the file's order.
        checksums: Of each page over these layers.
    """

    name: str
    size_bytes: int
    header_checksum: str
    first_layer: int
    end_layer: int
    pages: tuple[int, ...]
    checksums: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Manifest:
    """One save.

    Attributes:
        id: Which.
        spec: Shape of the cache.
        pages_by: Who manages the pages: `client` or `server`.
        sequences: The sequences, oldest first.
        damaged_pages: Layers and pages that were lost in an earlier save, where the client manages the pages.
        files: The files of pages.
    """

    id: SaveId
    spec: CacheSpec
    pages_by: str
    sequences: tuple[SequenceState, ...]
    damaged_pages: tuple[tuple[int, int], ...]
    files: tuple[PageFile, ...]

    @property
    def pages_bytes(self) -> int:
        """Bytes of the files of pages."""
        return sum(file.size_bytes for file in self.files)

    def encode(self) -> bytes:
        """Returns the text of the manifest, its checksum included."""
        body = {
            "format": FORMAT,
            **{name: getattr(self.id, name) for name in SaveId.__slots__},
            "spec": {
                **{name: getattr(self.spec, name) for name in CacheSpec.__slots__},
                "layout": self.spec.layout.value,
                "dtype": self.spec.dtype.name,
            },
            "pages_by": self.pages_by,
            "sequences": [
                {
                    "handle": state.handle.hex(),
                    "layer_lens": state.layer_lens.tolist(),
                    "pages": state.pages.tolist(),
                    "lease_s": state.lease_s,
                    "damaged": state.damaged,
                }
                for state in self.sequences
            ],
            "damaged_pages": self.damaged_pages,
            "files": [{name: getattr(file, name) for name in PageFile.__slots__} for file in self.files],
        }
        return _text({"checksum": _checksum(_text(body)), "manifest": body})

    @classmethod
    def decode(cls, text: bytes) -> "Manifest":
        """Returns the manifest of a text.

        Raises:
            DamagedError: A bit of it differs from what was written.
            FailedPreconditionError: Another version of attnd wrote it, in a way that this one does not know.
        """
        try:
            whole = json.loads(text)
            body, checksum = whole["manifest"], whole["checksum"]
            intact = checksum == _checksum(_text(body)) and _text(whole) == text
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise DamagedError("it is no manifest") from error
        if not intact:
            raise DamagedError("the manifest does not match its checksum")
        if body["format"] != FORMAT:
            message = f"The save has format {body['format']}; this version of attnd reads format {FORMAT}."
            raise FailedPreconditionError("SAVE_FORMAT_UNKNOWN", message)
        spec = body["spec"]
        return cls(
            id=SaveId(**{name: body[name] for name in SaveId.__slots__}),
            spec=CacheSpec(**{**spec, "layout": Layout(spec["layout"]), "dtype": CACHE_DTYPES[spec["dtype"]]}),
            pages_by=body["pages_by"],
            sequences=tuple(_sequence(each) for each in body["sequences"]),
            damaged_pages=tuple((layer, page) for layer, page in body["damaged_pages"]),
            files=tuple(
                PageFile(**{**each, "pages": tuple(each["pages"]), "checksums": tuple(each["checksums"])})
                for each in body["files"]
            ),
        )


def header_checksum(header: bytes) -> str:
    """Returns the checksum of the bytes of a file of pages before those of the pages."""
    return _checksum(header)


def page_checksums(
    save: SaveId,
    layers: range,
    pages: Sequence[int],
    arrays: Sequence[Shaped[np.ndarray, "num_pages ..."]],
) -> tuple[str, ...]:
    """Returns the checksum of each page, over its bytes and over which page it is.

    Args:
        save: The save.
        layers: The layers that the arrays cover.
        pages: Ids of the pages.
        arrays: What they hold, contiguous, a page after the other.
    """
    identity = [save.tenant, save.name, save.cache_id, save.save_id, layers.start, layers.stop]
    common = hashlib.blake2b(_text({"identity": identity}), digest_size=_CHECKSUM_BYTES)
    checksums = []
    for i, page in enumerate(pages):
        checksum = common.copy()
        checksum.update(page.to_bytes(8, "little"))
        for array in arrays:
            checksum.update(memoryview(array[i].reshape(-1).view(np.uint8)))
        checksums.append(checksum.hexdigest())
    return tuple(checksums)


def _sequence(body: dict[str, Any]) -> SequenceState:
    return SequenceState(
        handle=bytes.fromhex(body["handle"]),
        layer_lens=np.array(body["layer_lens"], np.int32),
        pages=np.array(body["pages"], np.int32),
        lease_s=body["lease_s"],
        damaged=body["damaged"],
    )


def _checksum(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_CHECKSUM_BYTES).hexdigest()


def _text(value: dict[str, Any]) -> bytes:
    # One text for each value: what differs from it in any byte is damaged. ASCII, so that no name can break it.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
