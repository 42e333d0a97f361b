"""The caches of a server: their names, ids, pages and memory."""

import enum
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from jaxtyping import Int32

from attnd.kernels import registry
from attnd.kernels.contract import CacheSpec, Implementation, Layout
from attnd.kernels.errors import InvalidArgumentError
from attnd.service.engine import Engine
from attnd.service.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError, ResourceExhaustedError
from attnd.service.sequences import SequenceTable
from attnd.service.warming import WarmUp

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class PagesBy(enum.Enum):
    """Who manages the pages of a cache."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Cache:
    """A cache.

    Attributes:
        cache_id: Unguessable and never used again, so that the id of a deleted cache finds nothing.
        incarnation_id: The run of the server that holds it.
        name: Its name.
        spec: Its shape.
        pages_by: Who manages its pages.
        implementation: What serves it.
        pages: Its pages, in the implementation's form. Only the engine's thread touches them.
        sequences: Its sequences; None if the client manages the pages.
        warm_up: Compiles its programs ahead of the first call of a kind; None if each is compiled when needed.
    """

    cache_id: str
    incarnation_id: str
    name: str
    spec: CacheSpec
    pages_by: PagesBy
    implementation: Implementation[Any]
    pages: Any
    sequences: SequenceTable | None
    warm_up: WarmUp | None

    def require_pages_by_client(self) -> None:
        """Raises FailedPreconditionError if the server manages the pages."""
        if self.pages_by is not PagesBy.CLIENT:
            message = f"The server manages the pages of cache {self.name!r}: use its sequences."
            raise FailedPreconditionError("PAGES_BY_SERVER", message)

    def require_layout(self, layout: Layout) -> None:
        """Raises FailedPreconditionError if the pages lie otherwise."""
        if self.spec.layout is not layout:
            message = f"Cache {self.name!r} has layout {self.spec.layout.value}; this call needs layout {layout.value}."
            raise FailedPreconditionError("WRONG_LAYOUT", message)

    def require_megacore(self, megacore_mode: str | None) -> None:
        """Raises FailedPreconditionError if two cores are asked for: JAX's kernel hangs where there is one."""
        if megacore_mode is not None:
            message = f"{megacore_mode=} needs a device with megacore; cache {self.name!r} is served by one core."
            raise FailedPreconditionError("MEGACORE_UNAVAILABLE", message)

    def require_sequences(self) -> SequenceTable:
        """Returns the sequences.

        Raises:
            FailedPreconditionError: The client manages the pages.
        """
        if self.sequences is None:
            message = f"The client manages the pages of cache {self.name!r}: it has no sequences."
            raise FailedPreconditionError("PAGES_BY_CLIENT", message)
        return self.sequences


class CacheRegistry:
    """All caches. Methods are called from the event loop's thread.

    Attributes:
        incarnation_id: Unguessable id of this run: caches live and die with it.

    Args:
        engine: Where pages are allocated and cleared.
        platform: "cpu" or "tpu"; decides the default implementation.
        implementation: Name of the implementation to use, or "auto".
        size_bytes_max: Bytes that all caches together may take.
        warm_up: Whether the first call of a kind compiles all programs of its kind.
    """

    def __init__(
        self, engine: Engine, *, platform: str, implementation: str, size_bytes_max: int, warm_up: bool
    ) -> None:
        self.incarnation_id = secrets.token_hex(16)
        self._engine = engine
        self._platform = platform
        self._implementation = implementation
        self._size_bytes_max = size_bytes_max
        self._warm_up = warm_up
        self._by_id: dict[str, Cache] = {}
        self._ids: dict[str, str] = {}
        self._being_created: dict[str, int] = {}
        self._implementations: dict[str, Implementation[Any]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all caches, those being created included."""
        return sum(cache.spec.size_bytes for cache in self._by_id.values()) + sum(self._being_created.values())

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled since the start."""
        return sum(implementation.num_compiled_programs for implementation in self._implementations.values())

    def all(self) -> list[Cache]:
        """Returns the caches, ordered by name."""
        return [self._by_id[self._ids[name]] for name in sorted(self._ids)]

    def by_id(self, cache_id: str) -> Cache:
        """Returns a cache.

        Raises:
            NotFoundError: There is none of this id.
        """
        try:
            return self._by_id[cache_id]
        except KeyError:
            raise NotFoundError("CACHE_NOT_FOUND", f"No cache of id {cache_id[:64]!r}.") from None

    def by_name(self, name: str) -> Cache:
        """Returns a cache.

        Raises:
            NotFoundError: There is none of this name.
        """
        if name not in self._ids:
            raise NotFoundError("CACHE_NOT_FOUND", f"No cache named {name[:128]!r}.")
        return self._by_id[self._ids[name]]

    async def create(self, name: str, spec: CacheSpec, pages_by: PagesBy, num_q_heads: int | None) -> Cache:
        """Creates a cache, its pages zeroed, and compiles its kernels if `num_q_heads` is known.

        Raises:
            InvalidArgumentError: The name or the number of heads is not legal.
            AlreadyExistsError: The name is taken.
            ResourceExhaustedError: The pages do not fit.
            UnsupportedError: No implementation serves the shape.
        """
        if not _NAME.fullmatch(name):
            message = f"name={name[:140]!r} must be 1 to 128 of A-Z a-z 0-9 . _ -, a letter or digit first."
            raise InvalidArgumentError.of("name", message)
        if num_q_heads is not None and (num_q_heads <= 0 or num_q_heads % spec.num_kv_heads):
            message = f"{num_q_heads=} must be divisible by num_kv_heads={spec.num_kv_heads}"
            raise InvalidArgumentError.of("num_q_heads", message)
        if name in self._ids or name in self._being_created:
            raise AlreadyExistsError("CACHE_EXISTS", f"A cache named {name!r} exists.")
        chosen = registry.choose(spec, self._platform, self._implementation)
        # One instance of each implementation, so that caches of one shape share its compiled programs.
        implementation = self._implementations.setdefault(chosen.name, chosen)
        free_bytes = self._size_bytes_max - self.size_bytes
        if spec.size_bytes > free_bytes:
            message = f"The cache takes {spec.size_bytes} bytes; {free_bytes} of {self._size_bytes_max} are free."
            raise ResourceExhaustedError("CACHE_MEMORY_EXHAUSTED", message)

        warm_up = WarmUp(name, spec, implementation)

        def allocate() -> Any:
            if num_q_heads is not None:
                warm_up.run(num_q_heads)
            return implementation.allocate(spec)

        self._being_created[name] = spec.size_bytes
        try:
            pages = (await self._engine.run(allocate)).value
        finally:
            del self._being_created[name]
        cache = Cache(
            cache_id=secrets.token_hex(16),
            incarnation_id=self.incarnation_id,
            name=name,
            spec=spec,
            pages_by=pages_by,
            implementation=implementation,
            pages=pages,
            sequences=self._sequences(spec, implementation, pages) if pages_by is PagesBy.SERVER else None,
            warm_up=warm_up if self._warm_up else None,
        )
        self._by_id[cache.cache_id] = cache
        self._ids[name] = cache.cache_id
        return cache

    def delete(self, cache_id: str) -> None:
        """Forgets a cache. Its memory is freed when the calls that use it have ended.

        Raises:
            NotFoundError: There is none of this id.
        """
        cache = self.by_id(cache_id)
        del self._by_id[cache_id]
        del self._ids[cache.name]

    def _sequences(self, spec: CacheSpec, implementation: Implementation[Any], pages: Any) -> SequenceTable:
        def clear(freed: Int32[np.ndarray, " n"], then: Callable[[], None]) -> None:
            self._engine.post(lambda: implementation.clear(pages, freed), lambda _done: then())

        return SequenceTable(spec, clear)
