"""Calls as values: what to send, how to read the answer, and the handles that they name. Both clients run the same."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from attnd.client._errors import InvalidArgumentError
from attnd.client._info import CacheInfo
from attnd.v1 import attention_pb2, cache_pb2, server_pb2

ResultT = TypeVar("ResultT")
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One rpc that takes one message.

    Attributes:
        name: Its name.
        path: What gRPC calls it: `/attnd.v1.AttentionService/Attend`.
        response_type: The class of its answers.
        streams: Whether it has many answers, of which the last one counts.
    """

    name: str
    path: str
    response_type: type[Message]
    streams: bool


class Call(NamedTuple, Generic[ResultT]):
    """One call, not yet sent.

    Attributes:
        method: Name of the rpc.
        request: The message without its arrays.
        arrays: The arrays of the message, by field.
        step: What the call shares with the other layers of its step; `request` and `arrays` have the layer's alone.
        read: Makes the result from the answer, without its arrays, and the arrays by field.
        timeout_s: Seconds to wait for the answer; None leaves it to the client.
        incarnation_id: The run of the server that made the handles in the request; empty when it has none.
        on_answer: Told of each answer of an rpc that streams.
    """

    method: str
    request: Message
    read: Callable[[Any, Mapping[str, np.ndarray]], ResultT]
    arrays: Mapping[str, np.ndarray] = MappingProxyType({})
    step: "StepMetadata | None" = None
    timeout_s: float | None = None
    incarnation_id: str = ""
    on_answer: Callable[[Any], object] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepMetadata:
    """What all layers of a step share, converted once.

    Attributes:
        field: The field of a session's plan that carries it.
        request: The message of a whole call without layer, options and arrays.
        arrays: int32 arrays by field: lengths, and page tables for a cache whose pages the client manages.
    """

    field: str
    request: Message
    arrays: Mapping[str, np.ndarray]

    def whole(self, layer: Message, tokens: Mapping[str, np.ndarray]) -> tuple[Message, Mapping[str, np.ndarray]]:
        """Returns the call of one layer, a `PlannedAttendRequest`, as it is without a plan."""
        request: Any = type(self.request)()
        request.CopyFrom(self.request)
        given: Any = layer
        request.layer = given.layer
        request.options.CopyFrom(given.options)
        return request, {**self.arrays, **tokens}


class CacheHandle:
    """What names a cache.

    Attributes:
        info: The cache as it was when the handle was made.
    """

    def __init__(self, info: CacheInfo) -> None:
        self.info = info

    @property
    def incarnation_id(self) -> str:
        """The run of the server that holds it: by it a restart can be told from a deletion."""
        return self.info.incarnation_id

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name

    def __repr__(self) -> str:
        i = self.info
        return (
            f"<{type(self).__name__} {i.name!r}: {i.num_layers} layers of {i.num_pages} pages of {i.page_size} tokens, "
            f"{i.num_kv_heads} kv heads of {i.head_dim}, {i.dtype}, {i.layout}, pages by {i.pages_by}>"
        )


class SequenceHandle:
    """What names a sequence.

    Attributes:
        cache_id: The cache that holds it.
        handle: Its 16 bytes; whoever knows them may use the sequence.
        incarnation_id: The run of the server that holds it.
    """

    def __init__(self, cache_id: str, handle: bytes, incarnation_id: str) -> None:
        self.cache_id = cache_id
        self.handle = handle
        self.incarnation_id = incarnation_id

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SequenceHandle):
            return NotImplemented
        return (self.cache_id, self.handle) == (other.cache_id, other.handle)

    def __hash__(self) -> int:
        return hash((self.cache_id, self.handle))

    def __repr__(self) -> str:
        # Four bytes tell sequences apart; the whole handle in a log would be a key to the sequence.
        return f"<{type(self).__name__} {self.handle[:4].hex()}…>"


def handles_of(cache: CacheHandle, sequences: Iterable[SequenceHandle]) -> list[bytes]:
    """Returns the handles of sequences of a cache.

    Raises:
        InvalidArgumentError: One of them is not a sequence, or another cache's.
    """
    handles = []
    for i, sequence in enumerate(sequences):
        if not isinstance(sequence, SequenceHandle):
            raise InvalidArgumentError.of(f"sequences[{i}]", f"sequences[{i}]={sequence!r} must be a sequence.")
        if sequence.cache_id != cache.info.cache_id:
            raise InvalidArgumentError.of(f"sequences[{i}]", f"sequences[{i}] belongs to another cache.")
        handles.append(sequence.handle)
    return handles


def public(method: MethodT, build: Callable[..., Any], wrap: Callable[..., Any] | None) -> MethodT:
    """Returns a method with the signature of what it builds its call with, and the type of what it really returns."""
    # The modules of `build` keep annotations as text: "Call[list[bytes]]".
    result = build.__annotations__["return"].removeprefix("Call[").removesuffix("]")
    annotations = {**build.__annotations__, "return": result if wrap is None else wrap.__annotations__["return"]}
    signature = inspect.signature(build).replace(return_annotation=annotations["return"])
    method.__annotations__ = annotations
    method.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect and help()
    return method


def _methods() -> dict[str, Method]:
    services = [
        service
        for module in (attention_pb2, cache_pb2, server_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    return {
        method.name: Method(
            name=method.name,
            path=f"/{service.full_name}/{method.name}",
            response_type=GetMessageClass(method.output_type),
            streams=method.server_streaming,
        )
        for service in services
        for method in service.methods
        if not method.client_streaming
    }


METHODS: Final = _methods()
