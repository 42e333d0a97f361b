from attnd.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PagesBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PAGES_BY_UNSPECIFIED: _ClassVar[PagesBy]
    PAGES_BY_CLIENT: _ClassVar[PagesBy]
    PAGES_BY_SERVER: _ClassVar[PagesBy]

class Layout(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LAYOUT_UNSPECIFIED: _ClassVar[Layout]
    LAYOUT_KV_INTERLEAVED: _ClassVar[Layout]
    LAYOUT_KV_SPLIT: _ClassVar[Layout]
PAGES_BY_UNSPECIFIED: PagesBy
PAGES_BY_CLIENT: PagesBy
PAGES_BY_SERVER: PagesBy
LAYOUT_UNSPECIFIED: Layout
LAYOUT_KV_INTERLEAVED: Layout
LAYOUT_KV_SPLIT: Layout

class CreateCacheRequest(_message.Message):
    __slots__ = ("name", "spec", "pages_by", "num_q_heads")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PAGES_BY_FIELD_NUMBER: _ClassVar[int]
    NUM_Q_HEADS_FIELD_NUMBER: _ClassVar[int]
    name: str
    spec: CacheSpec
    pages_by: PagesBy
    num_q_heads: int
    def __init__(self, name: _Optional[str] = ..., spec: _Optional[_Union[CacheSpec, _Mapping]] = ..., pages_by: _Optional[_Union[PagesBy, str]] = ..., num_q_heads: _Optional[int] = ...) -> None: ...

class CreateCacheResponse(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: Cache
    def __init__(self, cache: _Optional[_Union[Cache, _Mapping]] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class GetCacheResponse(_message.Message):
    __slots__ = ("cache",)
    CACHE_FIELD_NUMBER: _ClassVar[int]
    cache: Cache
    def __init__(self, cache: _Optional[_Union[Cache, _Mapping]] = ...) -> None: ...

class ListCachesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListCachesResponse(_message.Message):
    __slots__ = ("caches",)
    CACHES_FIELD_NUMBER: _ClassVar[int]
    caches: _containers.RepeatedCompositeFieldContainer[Cache]
    def __init__(self, caches: _Optional[_Iterable[_Union[Cache, _Mapping]]] = ...) -> None: ...

class DeleteCacheRequest(_message.Message):
    __slots__ = ("cache_id", "keep_saves")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_SAVES_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    keep_saves: bool
    def __init__(self, cache_id: _Optional[str] = ..., keep_saves: bool = ...) -> None: ...

class DeleteCacheResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WritePagesRequest(_message.Message):
    __slots__ = ("cache_id", "layer", "page_indices", "kv_pages", "scales")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDICES_FIELD_NUMBER: _ClassVar[int]
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    layer: int
    page_indices: _tensor_pb2.Tensor
    kv_pages: _tensor_pb2.Tensor
    scales: _tensor_pb2.Tensor
    def __init__(self, cache_id: _Optional[str] = ..., layer: _Optional[int] = ..., page_indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., kv_pages: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scales: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class WritePagesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadPagesRequest(_message.Message):
    __slots__ = ("cache_id", "layer", "page_indices")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDICES_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    layer: int
    page_indices: _tensor_pb2.Tensor
    def __init__(self, cache_id: _Optional[str] = ..., layer: _Optional[int] = ..., page_indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ReadPagesResponse(_message.Message):
    __slots__ = ("kv_pages", "scales")
    KV_PAGES_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    kv_pages: _tensor_pb2.Tensor
    scales: _tensor_pb2.Tensor
    def __init__(self, kv_pages: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., scales: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CreateSequencesRequest(_message.Message):
    __slots__ = ("cache_id", "num_sequences", "lease_s")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    num_sequences: int
    lease_s: float
    def __init__(self, cache_id: _Optional[str] = ..., num_sequences: _Optional[int] = ..., lease_s: _Optional[float] = ...) -> None: ...

class CreateSequencesResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, sequences: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ForkSequenceRequest(_message.Message):
    __slots__ = ("cache_id", "sequence")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    sequence: bytes
    def __init__(self, cache_id: _Optional[str] = ..., sequence: _Optional[bytes] = ...) -> None: ...

class ForkSequenceResponse(_message.Message):
    __slots__ = ("sequence",)
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    sequence: bytes
    def __init__(self, sequence: _Optional[bytes] = ...) -> None: ...

class TruncateSequenceRequest(_message.Message):
    __slots__ = ("cache_id", "sequence", "length")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    sequence: bytes
    length: int
    def __init__(self, cache_id: _Optional[str] = ..., sequence: _Optional[bytes] = ..., length: _Optional[int] = ...) -> None: ...

class TruncateSequenceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseSequencesRequest(_message.Message):
    __slots__ = ("cache_id", "sequences")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    sequences: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, cache_id: _Optional[str] = ..., sequences: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ReleaseSequencesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSequencesRequest(_message.Message):
    __slots__ = ("cache_id",)
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    def __init__(self, cache_id: _Optional[str] = ...) -> None: ...

class ListSequencesResponse(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[Sequence]
    def __init__(self, sequences: _Optional[_Iterable[_Union[Sequence, _Mapping]]] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("cache_id", "sequences")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    sequences: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, cache_id: _Optional[str] = ..., sequences: _Optional[_Iterable[bytes]] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SaveCacheRequest(_message.Message):
    __slots__ = ("cache_id",)
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    def __init__(self, cache_id: _Optional[str] = ...) -> None: ...

class SaveCacheResponse(_message.Message):
    __slots__ = ("saved_bytes", "total_bytes")
    SAVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    saved_bytes: int
    total_bytes: int
    def __init__(self, saved_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ...) -> None: ...

class RestoreCacheRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RestoreCacheResponse(_message.Message):
    __slots__ = ("restored_bytes", "total_bytes", "cache")
    RESTORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    restored_bytes: int
    total_bytes: int
    cache: Cache
    def __init__(self, restored_bytes: _Optional[int] = ..., total_bytes: _Optional[int] = ..., cache: _Optional[_Union[Cache, _Mapping]] = ...) -> None: ...

class Cache(_message.Message):
    __slots__ = ("cache_id", "name", "spec", "pages_by", "size_bytes", "num_free_pages", "num_sequences", "implementation", "incarnation_id")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PAGES_BY_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_ID_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    name: str
    spec: CacheSpec
    pages_by: PagesBy
    size_bytes: int
    num_free_pages: int
    num_sequences: int
    implementation: str
    incarnation_id: str
    def __init__(self, cache_id: _Optional[str] = ..., name: _Optional[str] = ..., spec: _Optional[_Union[CacheSpec, _Mapping]] = ..., pages_by: _Optional[_Union[PagesBy, str]] = ..., size_bytes: _Optional[int] = ..., num_free_pages: _Optional[int] = ..., num_sequences: _Optional[int] = ..., implementation: _Optional[str] = ..., incarnation_id: _Optional[str] = ...) -> None: ...

class CacheSpec(_message.Message):
    __slots__ = ("layout", "num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim", "dtype")
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    layout: Layout
    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    def __init__(self, layout: _Optional[_Union[Layout, str]] = ..., num_layers: _Optional[int] = ..., num_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ...) -> None: ...

class Sequence(_message.Message):
    __slots__ = ("sequence", "length", "num_pages", "complete_length", "lease_s", "expires_in_s", "restored_from", "damaged")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FROM_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    sequence: bytes
    length: int
    num_pages: int
    complete_length: int
    lease_s: float
    expires_in_s: float
    restored_from: bytes
    damaged: bool
    def __init__(self, sequence: _Optional[bytes] = ..., length: _Optional[int] = ..., num_pages: _Optional[int] = ..., complete_length: _Optional[int] = ..., lease_s: _Optional[float] = ..., expires_in_s: _Optional[float] = ..., restored_from: _Optional[bytes] = ..., damaged: bool = ...) -> None: ...
