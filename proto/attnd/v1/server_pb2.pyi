from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "jax_version", "incarnation_id", "platform", "devices", "implementations", "limits", "num_compiled_programs", "caches_size_bytes", "resident_bytes", "queue_depth", "uptime_s", "num_calls", "num_batches", "local_socket")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_ID_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATIONS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPILED_PROGRAMS_FIELD_NUMBER: _ClassVar[int]
    CACHES_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CALLS_FIELD_NUMBER: _ClassVar[int]
    NUM_BATCHES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOCKET_FIELD_NUMBER: _ClassVar[int]
    version: str
    jax_version: str
    incarnation_id: str
    platform: str
    devices: _containers.RepeatedCompositeFieldContainer[Device]
    implementations: _containers.RepeatedCompositeFieldContainer[Implementation]
    limits: Limits
    num_compiled_programs: int
    caches_size_bytes: int
    resident_bytes: int
    queue_depth: int
    uptime_s: float
    num_calls: int
    num_batches: int
    local_socket: LocalSocket
    def __init__(self, version: _Optional[str] = ..., jax_version: _Optional[str] = ..., incarnation_id: _Optional[str] = ..., platform: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[Device, _Mapping]]] = ..., implementations: _Optional[_Iterable[_Union[Implementation, _Mapping]]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., num_compiled_programs: _Optional[int] = ..., caches_size_bytes: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., queue_depth: _Optional[int] = ..., uptime_s: _Optional[float] = ..., num_calls: _Optional[int] = ..., num_batches: _Optional[int] = ..., local_socket: _Optional[_Union[LocalSocket, _Mapping]] = ...) -> None: ...

class LocalSocket(_message.Message):
    __slots__ = ("path", "token")
    PATH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    path: str
    token: bytes
    def __init__(self, path: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("id", "kind")
    ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    id: int
    kind: str
    def __init__(self, id: _Optional[int] = ..., kind: _Optional[str] = ...) -> None: ...

class Implementation(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("message_bytes_max", "queue_depth_max", "caches_size_bytes_max", "sequences_max", "batch_calls_max", "lease_s")
    MESSAGE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    QUEUE_DEPTH_MAX_FIELD_NUMBER: _ClassVar[int]
    CACHES_SIZE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_MAX_FIELD_NUMBER: _ClassVar[int]
    BATCH_CALLS_MAX_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    message_bytes_max: int
    queue_depth_max: int
    caches_size_bytes_max: int
    sequences_max: int
    batch_calls_max: int
    lease_s: float
    def __init__(self, message_bytes_max: _Optional[int] = ..., queue_depth_max: _Optional[int] = ..., caches_size_bytes_max: _Optional[int] = ..., sequences_max: _Optional[int] = ..., batch_calls_max: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...
