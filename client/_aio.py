"""The awaiting client: the same methods as the blocking one, in the same order."""

import functools
import time
from collections.abc import Callable, Coroutine, Iterable
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, overload

import grpc
import grpc.aio
import numpy.typing as npt

from attnd.client import _attention, _caches, _steps
from attnd.client._calls import CacheHandle, Call, SequenceHandle, StepMetadata, public
from attnd.client._channel import Settings, tenant_metadata
from attnd.client._core import Core
from attnd.client._info import CacheInfo, CallRecord
from attnd.client._stream_aio import AsyncSessionTransport
from attnd.client._transport import AsyncTransport, RefusalError
from attnd.client._unary import AsyncUnaryTransport

P = ParamSpec("P")
AnswerT = TypeVar("AnswerT")
ResultT = TypeVar("ResultT")


class AsyncExecutor:
    """Runs calls over a transport and awaits each. Tasks of one event loop may share it."""

    def __init__(self, settings: Settings) -> None:
        self.core = Core(settings)
        unary = AsyncUnaryTransport(self.core)
        self._transport: AsyncTransport = AsyncSessionTransport(self.core, unary)
        if settings.looks_for_local_socket:
            from attnd.client._local_aio import AsyncLocalTransport  # noqa: PLC0415 - Linux only

            self._transport = AsyncLocalTransport(self.core, self._transport, unary)

    async def run(self, call: Call[AnswerT], started_ns: int) -> AnswerT:
        """Runs one call."""
        conversation = self.core.converse(call, started_ns)
        try:
            sending = next(conversation)
            while True:
                try:
                    answer = await self._transport.send(sending)
                except (grpc.RpcError, RefusalError) as error:
                    sending = conversation.throw(error)
                else:
                    sending = conversation.send(answer)
        except StopIteration as end:
            result: AnswerT = end.value
            return result

    async def close(self) -> None:
        """Closes the connection; calls that still run are cancelled."""
        if not self.core.closed:
            self.core.closed = True
            await self._transport.close()


@overload
def _awaited(
    build: Callable[Concatenate[Any, P], Call[AnswerT]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, AnswerT]]: ...
@overload
def _awaited(
    build: Callable[Concatenate[Any, P], Call[AnswerT]], wrap: Callable[[Any, AnswerT], ResultT]
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, ResultT]]: ...
def _awaited(
    build: Callable[Concatenate[Any, P], Call[Any]], wrap: Callable[[Any, Any], Any] | None = None
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, Any]]:
    """Returns the coroutine method that runs what `build` returns and gives what `wrap` makes of it."""

    @functools.wraps(build)
    async def method(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        started_ns = time.perf_counter_ns()
        answer = await self._executor.run(build(self, *args, **kwargs), started_ns)
        return answer if wrap is None else wrap(self, answer)

    return public(method, build, wrap)


class AsyncSequence(SequenceHandle):
    """A sequence whose pages the server manages."""

    def __init__(self, executor: AsyncExecutor, cache_id: str, handle: bytes, incarnation_id: str) -> None:
        super().__init__(cache_id, handle, incarnation_id)
        self._executor = executor

    def _fork(self, handle: bytes) -> "AsyncSequence":
        return AsyncSequence(self._executor, self.cache_id, handle, self.incarnation_id)

    fork = _awaited(_caches.fork, _fork)
    truncate = _awaited(_caches.truncate)
    release = _awaited(_caches.release)


class AsyncStep(_steps.StepHandle):
    """One step over some sequences, ready to attend layer by layer."""

    def __init__(self, executor: AsyncExecutor, cache: CacheHandle, metadata: StepMetadata) -> None:
        super().__init__(cache, metadata)
        self._executor = executor

    attend = _awaited(_steps.attend)


class AsyncCache(CacheHandle):
    """A cache on the server."""

    def __init__(self, executor: AsyncExecutor, info: CacheInfo) -> None:
        super().__init__(info)
        self._executor = executor

    def sequence(self, handle: bytes) -> AsyncSequence:
        """Returns the sequence of a handle, without asking the server whether it still exists."""
        return AsyncSequence(self._executor, self.info.cache_id, handle, self.incarnation_id)

    async def step(
        self, sequences: Iterable[AsyncSequence], *, q_lens: npt.ArrayLike, kv_lens: npt.ArrayLike
    ) -> AsyncStep:
        """Returns a step over sequences whose pages the server manages.

        Args:
            sequences: S sequences, each at most once.
            q_lens: int32 [S]. New tokens of each sequence, >= 0.
            kv_lens: int32 [S]. Length of each sequence after this step, >= q_lens.

        Raises:
            InvalidArgumentError: A sequence of another cache, or a length beyond int32. The rest the server checks.
        """
        return AsyncStep(self._executor, self, _steps.sequence_step(self, sequences, q_lens, kv_lens))

    async def plan(
        self,
        kv_lens: npt.ArrayLike,
        page_indices: npt.ArrayLike,
        cu_q_lens: npt.ArrayLike,
        num_seqs: npt.ArrayLike,
    ) -> AsyncStep:
        """Returns a step over pages that the client manages, its metadata as in `ragged_paged_attention`.

        Raises:
            InvalidArgumentError: A number beyond int32. The rest the server checks.
        """
        return AsyncStep(self._executor, self, _steps.planned_step(self, kv_lens, page_indices, cu_q_lens, num_seqs))

    def _sequences(self, handles: list[bytes]) -> list[AsyncSequence]:
        return [self.sequence(handle) for handle in handles]

    ragged_paged_attention = _awaited(_attention.ragged_paged_attention)
    paged_attention = _awaited(_attention.paged_attention)
    validate_batch = _awaited(_attention.validate_batch)
    write_pages = _awaited(_caches.write_pages)
    read_pages = _awaited(_caches.read_pages)
    create_sequences = _awaited(_caches.create_sequences, _sequences)
    list_sequences = _awaited(_caches.list_sequences)
    release_sequences = _awaited(_caches.release_sequences)
    keep_alive = _awaited(_caches.keep_alive)
    save = _awaited(_caches.save)
    delete = _awaited(_caches.delete_cache)


class AsyncClient:
    """A connection to an attnd server. Tasks of one event loop may share it.

    Nothing is sent before the first call, and only layers of steps are repeated, when their session breaks: they write
    the same to the same place. The methods are those of `Client`,
    awaited; a cancelled task cancels its call.

    Args:
        address: `HOST:PORT`, or a gRPC target such as `unix:/run/attnd.sock`.
        timeout_s: Seconds that a call may take unless it says so itself. None: as long as it takes.
        credentials: TLS credentials, as from `grpc.ssl_channel_credentials`. None: plain text.
        tenant: Whose caches it sees, where the server tells tenants by name rather than by certificate: 0 to 128 of
            A-Z a-z 0-9 . _ -.
        metadata: Pairs to send with every call, such as an authorization.
        on_call: Told of every answered call by a `CallRecord`, before the call returns.
        local: Whether to look for the server's unix socket when the address is one of this host. False: all calls go
            over gRPC.

    Raises:
        InvalidArgumentError: The address has no port, or the timeout is not a positive number.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = 30.0,
        credentials: grpc.ChannelCredentials | None = None,
        tenant: str = "",
        metadata: Iterable[tuple[str, str | bytes]] = (),
        on_call: Callable[[CallRecord], object] | None = None,
        local: bool = True,
    ) -> None:
        self._executor = AsyncExecutor(
            Settings(
                address=address,
                timeout_s=timeout_s,
                credentials=credentials,
                metadata=(*tenant_metadata(tenant), *metadata),
                on_call=on_call,
                local=local,
            )
        )

    @property
    def address(self) -> str:
        """Where the server is."""
        return self._executor.core.settings.address

    async def close(self) -> None:
        """Closes the connection; calls that still run are cancelled. Caches and sequences stay on the server."""
        await self._executor.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r})"

    def _open(self, info: CacheInfo) -> AsyncCache:
        return AsyncCache(self._executor, info)

    def _open_all(self, infos: list[CacheInfo]) -> list[AsyncCache]:
        return [self._open(info) for info in infos]

    server_info = _awaited(_caches.server_info)
    create_cache = _awaited(_caches.create_cache, _open)
    get_cache = _awaited(_caches.get_cache, _open)
    list_caches = _awaited(_caches.list_caches, _open_all)
    restore_cache = _awaited(_caches.restore_cache, _open)
