"""The caches of a server: their names, ids, pages and memory."""

import enum
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from jaxtyping import Int32

from attnd.kernels import registry
from attnd.kernels.contract import CacheSpec, Implementation, Layout
from attnd.kernels.errors import InvalidArgumentError
from attnd.service.client_pages import ClientPages
from attnd.service.config import ServerConfig
from attnd.service.engine import Engine
from attnd.service.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError, ResourceExhaustedError
from attnd.service.pages import RESERVED_PAGE
from attnd.service.quotas import Quota
from attnd.service.sequences import SequenceTable
from attnd.service.warming import WarmUp
from attnd.service.world import World

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def is_legal_name(name: str) -> bool:
    """Returns whether a cache can have this name."""
    return _NAME.fullmatch(name) is not None


async def _leave_empty(_cache: "Cache") -> None:
    pass


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
        tenant: Whose it is. Nobody else can tell that it exists.
        name: Its name, unique among the tenant's.
        spec: Its shape.
        pages_by: Who manages its pages.
        implementation: What serves it.
        pages: Its pages, in the implementation's form. Only the engine's thread touches them.
        quota: What its tenant may hold.
        sequences: Its sequences; None if the client manages the pages.
        client_pages: What saves and restores know of its pages; None if the server manages them.
        warm_up: Compiles its programs ahead of the first call of a kind; None if each is compiled when needed.
        debug_checks: Whether calls check at run time what no caller can break.
    """

    cache_id: str
    incarnation_id: str
    tenant: str
    name: str
    spec: CacheSpec
    pages_by: PagesBy
    implementation: Implementation[Any]
    pages: Any
    quota: Quota
    sequences: SequenceTable | None
    client_pages: ClientPages | None = None
    warm_up: WarmUp | None
    debug_checks: bool

    @property
    def memory_bytes(self) -> int:
        """Bytes that its pages take, the reserved one included."""
        return int(self.pages.spec.size_bytes)

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

    def require_client_pages(self) -> ClientPages:
        """Returns what saves and restores know of the client's pages.

        Raises:
            FailedPreconditionError: The server manages the pages.
        """
        self.require_pages_by_client()
        assert self.client_pages is not None
        return self.client_pages


class CacheRegistry:
    """All caches. Methods are called from the event loop's thread.

    Attributes:
        incarnation_id: Unguessable id of this run: caches live and die with it.

    Args:
        engine: Where pages are allocated and cleared.
        config: What the operator decided.
        platform: "cpu" or "tpu"; decides the default implementation.
        world: Time and chance.
    """

    def __init__(self, engine: Engine, config: ServerConfig, *, platform: str, world: World) -> None:
        self.incarnation_id = world.token(16).hex()
        self._engine = engine
        self._config = config
        self._platform = platform
        self._world = world
        self._size_bytes_max = config.cache_memory_bytes
        self._by_id: dict[str, Cache] = {}
        self._ids: dict[tuple[str, str], str] = {}
        self._being_created: dict[tuple[str, str], int] = {}
        self._implementations: dict[str, Implementation[Any]] = {}
        self._quotas: dict[str, Quota] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all caches, those being created included."""
        return sum(cache.memory_bytes for cache in self._by_id.values()) + sum(self._being_created.values())

    @property
    def num_compiled_programs(self) -> int:
        """Programs compiled since the start."""
        return sum(implementation.num_compiled_programs for implementation in self._implementations.values())

    def all(self) -> list[Cache]:
        """Returns the caches of all tenants, ordered by tenant and name."""
        return [self._by_id[self._ids[key]] for key in sorted(self._ids)]

    def of(self, tenant: str) -> list[Cache]:
        """Returns the caches of a tenant, ordered by name."""
        return [cache for cache in self.all() if cache.tenant == tenant]

    def by_id(self, cache_id: str, tenant: str) -> Cache:
        """Returns a cache.

        Raises:
            NotFoundError: The tenant has none of this id.
        """
        cache = self._by_id.get(cache_id)
        if cache is None or cache.tenant != tenant:
            raise NotFoundError("CACHE_NOT_FOUND", f"No cache of id {cache_id[:64]!r}.")
        return cache

    def by_name(self, name: str, tenant: str) -> Cache:
        """Returns a cache.

        Raises:
            NotFoundError: The tenant has none of this name.
        """
        cache_id = self._ids.get((tenant, name))
        if cache_id is None:
            raise NotFoundError("CACHE_NOT_FOUND", f"No cache named {name[:128]!r}.")
        return self._by_id[cache_id]

    def require_free_name(self, name: str, tenant: str) -> None:
        """Raises AlreadyExistsError if the tenant has a cache of this name, or creates one now."""
        if (tenant, name) in self._ids or (tenant, name) in self._being_created:
            raise AlreadyExistsError("CACHE_EXISTS", f"A cache named {name!r} exists.")

    async def create(
        self, name: str, tenant: str, spec: CacheSpec, pages_by: PagesBy, num_q_heads: int | None
    ) -> Cache:
        """Creates a cache, its pages zeroed, and compiles its kernels if `num_q_heads` is known.

        Raises:
            InvalidArgumentError: The name or the number of heads is not legal.
            AlreadyExistsError: The name is taken.
            ResourceExhaustedError: The pages do not fit, or pass the tenant's quota.
            UnsupportedError: No implementation serves the shape.
        """
        if not is_legal_name(name):
            message = f"name={name[:140]!r} must be 1 to 128 of A-Z a-z 0-9 . _ -, a letter or digit first."
            raise InvalidArgumentError.of("name", message)
        if num_q_heads is not None and (num_q_heads <= 0 or num_q_heads % spec.num_kv_heads):
            message = f"{num_q_heads=} must be divisible by num_kv_heads={spec.num_kv_heads}"
            raise InvalidArgumentError.of("num_q_heads", message)
        return await self._add(name, tenant, spec, pages_by, num_q_heads, _leave_empty)

    async def restore(
        self, name: str, tenant: str, spec: CacheSpec, pages_by: PagesBy, fill: Callable[[Cache], Awaitable[None]]
    ) -> Cache:
        """Creates a cache that nobody sees before `fill` has given it its sequences and pages. All or nothing.

        Raises:
            AlreadyExistsError: The name is taken.
            ResourceExhaustedError: The pages do not fit, or pass the tenant's quota.
            UnsupportedError: No implementation serves the shape.
            Exception: Whatever `fill` raises.
        """
        return await self._add(name, tenant, spec, pages_by, None, fill)

    async def _add(
        self,
        name: str,
        tenant: str,
        spec: CacheSpec,
        pages_by: PagesBy,
        num_q_heads: int | None,
        fill: Callable[[Cache], Awaitable[None]],
    ) -> Cache:
        self.require_free_name(name, tenant)
        self._require_memory(spec)
        by_server = pages_by is PagesBy.SERVER
        # One page more than the client's: the reserved one.
        memory = replace(spec, num_pages=spec.num_pages + 1) if by_server else spec
        chosen = registry.choose(memory, self._platform, self._config.implementation)
        # One instance of each implementation, so that caches of one shape share its compiled programs.
        implementation = self._implementations.setdefault(chosen.name, chosen)
        self._require_memory(memory)
        quota = self._quota(tenant)
        if not by_server:
            quota.take_pages(spec.num_pages)
        warm_up = WarmUp(name, memory, implementation)

        def allocate() -> Any:
            if num_q_heads is not None:
                warm_up.run(num_q_heads)
            pages = implementation.allocate(memory)
            if by_server:
                implementation.poison(pages, RESERVED_PAGE)
            return pages

        self._being_created[tenant, name] = memory.size_bytes
        try:
            pages = (await self._engine.run(allocate, lane=tenant)).value
            cache = Cache(
                cache_id=self._world.token(16).hex(),
                incarnation_id=self.incarnation_id,
                tenant=tenant,
                name=name,
                spec=spec,
                pages_by=pages_by,
                implementation=implementation,
                pages=pages,
                quota=quota,
                sequences=self._sequences(tenant, memory, implementation, pages) if by_server else None,
                client_pages=None if by_server else ClientPages(spec, implementation, pages),
                warm_up=warm_up if self._config.warm_up else None,
                debug_checks=self._config.debug_checks,
            )
            await fill(cache)
        except BaseException:
            if not by_server:
                quota.give_pages(spec.num_pages)
            raise
        finally:
            del self._being_created[tenant, name]
        self._by_id[cache.cache_id] = cache
        self._ids[tenant, name] = cache.cache_id
        return cache

    def delete(self, cache_id: str, tenant: str) -> None:
        """Forgets a cache. Its memory is freed when the calls that use it have ended.

        Raises:
            NotFoundError: The tenant has none of this id.
        """
        cache = self.by_id(cache_id, tenant)
        del self._by_id[cache_id]
        del self._ids[tenant, cache.name]
        if cache.sequences is None:
            cache.quota.give_pages(cache.spec.num_pages)
        else:
            cache.sequences.close()

    def holds(self, cache: Cache) -> bool:
        """Returns whether a cache has not been deleted."""
        return cache.cache_id in self._by_id

    def sweep(self) -> None:
        """Releases the sequences whose lease is over."""
        _sweep(self._by_id.values())

    def _require_memory(self, spec: CacheSpec) -> None:
        free_bytes = self._size_bytes_max - self.size_bytes
        if spec.size_bytes > free_bytes:
            message = f"The cache takes {spec.size_bytes} bytes; {free_bytes} of {self._size_bytes_max} are free."
            raise ResourceExhaustedError("CACHE_MEMORY_EXHAUSTED", message)

    def _quota(self, tenant: str) -> Quota:
        # Those of tenants that have nothing are forgotten, so that made-up names cost no memory.
        known = {cache.tenant for cache in self._by_id.values()} | {of for of, _ in self._being_created} | {tenant}
        self._quotas = {of: quota for of, quota in self._quotas.items() if of in known or not quota.is_idle}
        config = self._config
        quota = Quota(
            pages_max=config.tenant_pages_max,
            sequences_max=config.tenant_sequences_max,
            sweep=lambda: _sweep(self.of(tenant)),
        )
        return self._quotas.setdefault(tenant, quota)

    def _sequences(
        self, tenant: str, spec: CacheSpec, implementation: Implementation[Any], pages: Any
    ) -> SequenceTable:
        def clear(freed: Int32[np.ndarray, " n"], then: Callable[[bool], None]) -> None:
            self._engine.post(lambda: implementation.clear(pages, freed), then, lane=tenant)

        return SequenceTable(spec, clear, quota=self._quotas[tenant], world=self._world, lease_s=self._config.lease_s)


def _sweep(caches: Iterable[Cache]) -> None:
    for cache in caches:
        if cache.sequences is not None:
            cache.sequences.sweep()
