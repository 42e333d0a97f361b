from attnd.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RaggedPagedAttentionRequest(_message.Message):
    __slots__ = ("cache_id", "layer", "options", "block_sizes", "kv_lens", "page_indices", "cu_q_lens", "num_seqs", "q", "k", "v")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZES_FIELD_NUMBER: _ClassVar[int]
    KV_LENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDICES_FIELD_NUMBER: _ClassVar[int]
    CU_Q_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    layer: int
    options: AttentionOptions
    block_sizes: RaggedBlockSizes
    kv_lens: _tensor_pb2.Tensor
    page_indices: _tensor_pb2.Tensor
    cu_q_lens: _tensor_pb2.Tensor
    num_seqs: _tensor_pb2.Tensor
    q: _tensor_pb2.Tensor
    k: _tensor_pb2.Tensor
    v: _tensor_pb2.Tensor
    def __init__(self, cache_id: _Optional[str] = ..., layer: _Optional[int] = ..., options: _Optional[_Union[AttentionOptions, _Mapping]] = ..., block_sizes: _Optional[_Union[RaggedBlockSizes, _Mapping]] = ..., kv_lens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., page_indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., cu_q_lens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., num_seqs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., q: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., k: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class RaggedPagedAttentionResponse(_message.Message):
    __slots__ = ("timings", "implementation", "out", "lse_natural")
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    LSE_NATURAL_FIELD_NUMBER: _ClassVar[int]
    timings: Timings
    implementation: str
    out: _tensor_pb2.Tensor
    lse_natural: _tensor_pb2.Tensor
    def __init__(self, timings: _Optional[_Union[Timings, _Mapping]] = ..., implementation: _Optional[str] = ..., out: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse_natural: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class PagedAttentionRequest(_message.Message):
    __slots__ = ("cache_id", "layer", "pages_per_compute_block", "attn_logits_soft_cap", "megacore_mode", "inline_seq_dim", "return_lse", "lengths", "page_indices", "q", "k", "v")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    PAGES_PER_COMPUTE_BLOCK_FIELD_NUMBER: _ClassVar[int]
    ATTN_LOGITS_SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    MEGACORE_MODE_FIELD_NUMBER: _ClassVar[int]
    INLINE_SEQ_DIM_FIELD_NUMBER: _ClassVar[int]
    RETURN_LSE_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDICES_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    layer: int
    pages_per_compute_block: int
    attn_logits_soft_cap: float
    megacore_mode: str
    inline_seq_dim: bool
    return_lse: bool
    lengths: _tensor_pb2.Tensor
    page_indices: _tensor_pb2.Tensor
    q: _tensor_pb2.Tensor
    k: _tensor_pb2.Tensor
    v: _tensor_pb2.Tensor
    def __init__(self, cache_id: _Optional[str] = ..., layer: _Optional[int] = ..., pages_per_compute_block: _Optional[int] = ..., attn_logits_soft_cap: _Optional[float] = ..., megacore_mode: _Optional[str] = ..., inline_seq_dim: bool = ..., return_lse: bool = ..., lengths: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., page_indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., q: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., k: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class PagedAttentionResponse(_message.Message):
    __slots__ = ("timings", "implementation", "out", "lse_natural")
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    LSE_NATURAL_FIELD_NUMBER: _ClassVar[int]
    timings: Timings
    implementation: str
    out: _tensor_pb2.Tensor
    lse_natural: _tensor_pb2.Tensor
    def __init__(self, timings: _Optional[_Union[Timings, _Mapping]] = ..., implementation: _Optional[str] = ..., out: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse_natural: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ("cache_id", "layer", "options", "sequences", "q_lens", "kv_lens", "q", "k", "v")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    Q_LENS_FIELD_NUMBER: _ClassVar[int]
    KV_LENS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    layer: int
    options: AttentionOptions
    sequences: _containers.RepeatedScalarFieldContainer[bytes]
    q_lens: _tensor_pb2.Tensor
    kv_lens: _tensor_pb2.Tensor
    q: _tensor_pb2.Tensor
    k: _tensor_pb2.Tensor
    v: _tensor_pb2.Tensor
    def __init__(self, cache_id: _Optional[str] = ..., layer: _Optional[int] = ..., options: _Optional[_Union[AttentionOptions, _Mapping]] = ..., sequences: _Optional[_Iterable[bytes]] = ..., q_lens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., kv_lens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., q: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., k: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class AttendResponse(_message.Message):
    __slots__ = ("timings", "implementation", "out", "lse_natural")
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    OUT_FIELD_NUMBER: _ClassVar[int]
    LSE_NATURAL_FIELD_NUMBER: _ClassVar[int]
    timings: Timings
    implementation: str
    out: _tensor_pb2.Tensor
    lse_natural: _tensor_pb2.Tensor
    def __init__(self, timings: _Optional[_Union[Timings, _Mapping]] = ..., implementation: _Optional[str] = ..., out: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., lse_natural: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ValidateBatchRequest(_message.Message):
    __slots__ = ("cache_id", "options", "block_sizes", "q_shape", "q_dtype", "kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    CACHE_ID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZES_FIELD_NUMBER: _ClassVar[int]
    Q_SHAPE_FIELD_NUMBER: _ClassVar[int]
    Q_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_INDICES_FIELD_NUMBER: _ClassVar[int]
    CU_Q_LENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    cache_id: str
    options: AttentionOptions
    block_sizes: RaggedBlockSizes
    q_shape: _containers.RepeatedScalarFieldContainer[int]
    q_dtype: str
    kv_lens: _tensor_pb2.Tensor
    page_indices: _tensor_pb2.Tensor
    cu_q_lens: _tensor_pb2.Tensor
    num_seqs: _tensor_pb2.Tensor
    def __init__(self, cache_id: _Optional[str] = ..., options: _Optional[_Union[AttentionOptions, _Mapping]] = ..., block_sizes: _Optional[_Union[RaggedBlockSizes, _Mapping]] = ..., q_shape: _Optional[_Iterable[int]] = ..., q_dtype: _Optional[str] = ..., kv_lens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., page_indices: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., cu_q_lens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., num_seqs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class ValidateBatchResponse(_message.Message):
    __slots__ = ("violations", "num_violations")
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    violations: _containers.RepeatedCompositeFieldContainer[Violation]
    num_violations: int
    def __init__(self, violations: _Optional[_Iterable[_Union[Violation, _Mapping]]] = ..., num_violations: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("id", "timeout_s", "others_wait", "plan", "planned", "cancel", "ragged_paged_attention", "paged_attention", "attend")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    OTHERS_WAIT_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    RAGGED_PAGED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    PAGED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    id: int
    timeout_s: float
    others_wait: bool
    plan: PlanRequest
    planned: PlannedAttendRequest
    cancel: CancelRequest
    ragged_paged_attention: RaggedPagedAttentionRequest
    paged_attention: PagedAttentionRequest
    attend: AttendRequest
    def __init__(self, id: _Optional[int] = ..., timeout_s: _Optional[float] = ..., others_wait: bool = ..., plan: _Optional[_Union[PlanRequest, _Mapping]] = ..., planned: _Optional[_Union[PlannedAttendRequest, _Mapping]] = ..., cancel: _Optional[_Union[CancelRequest, _Mapping]] = ..., ragged_paged_attention: _Optional[_Union[RaggedPagedAttentionRequest, _Mapping]] = ..., paged_attention: _Optional[_Union[PagedAttentionRequest, _Mapping]] = ..., attend: _Optional[_Union[AttendRequest, _Mapping]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("id", "status", "plan", "ragged_paged_attention", "paged_attention", "attend")
    ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    RAGGED_PAGED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    PAGED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    id: int
    status: bytes
    plan: PlanResponse
    ragged_paged_attention: RaggedPagedAttentionResponse
    paged_attention: PagedAttentionResponse
    attend: AttendResponse
    def __init__(self, id: _Optional[int] = ..., status: _Optional[bytes] = ..., plan: _Optional[_Union[PlanResponse, _Mapping]] = ..., ragged_paged_attention: _Optional[_Union[RaggedPagedAttentionResponse, _Mapping]] = ..., paged_attention: _Optional[_Union[PagedAttentionResponse, _Mapping]] = ..., attend: _Optional[_Union[AttendResponse, _Mapping]] = ...) -> None: ...

class PlanRequest(_message.Message):
    __slots__ = ("plan_id", "ragged_paged_attention", "attend")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    RAGGED_PAGED_ATTENTION_FIELD_NUMBER: _ClassVar[int]
    ATTEND_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    ragged_paged_attention: RaggedPagedAttentionRequest
    attend: AttendRequest
    def __init__(self, plan_id: _Optional[int] = ..., ragged_paged_attention: _Optional[_Union[RaggedPagedAttentionRequest, _Mapping]] = ..., attend: _Optional[_Union[AttendRequest, _Mapping]] = ...) -> None: ...

class PlanResponse(_message.Message):
    __slots__ = ("plan_id",)
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    def __init__(self, plan_id: _Optional[int] = ...) -> None: ...

class PlannedAttendRequest(_message.Message):
    __slots__ = ("plan_id", "layer", "options", "q", "k", "v")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    V_FIELD_NUMBER: _ClassVar[int]
    plan_id: int
    layer: int
    options: AttentionOptions
    q: _tensor_pb2.Tensor
    k: _tensor_pb2.Tensor
    v: _tensor_pb2.Tensor
    def __init__(self, plan_id: _Optional[int] = ..., layer: _Optional[int] = ..., options: _Optional[_Union[AttentionOptions, _Mapping]] = ..., q: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., k: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., v: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class AttentionOptions(_message.Message):
    __slots__ = ("sm_scale", "sliding_window", "soft_cap", "k_scale", "v_scale", "return_lse")
    SM_SCALE_FIELD_NUMBER: _ClassVar[int]
    SLIDING_WINDOW_FIELD_NUMBER: _ClassVar[int]
    SOFT_CAP_FIELD_NUMBER: _ClassVar[int]
    K_SCALE_FIELD_NUMBER: _ClassVar[int]
    V_SCALE_FIELD_NUMBER: _ClassVar[int]
    RETURN_LSE_FIELD_NUMBER: _ClassVar[int]
    sm_scale: float
    sliding_window: int
    soft_cap: float
    k_scale: float
    v_scale: float
    return_lse: bool
    def __init__(self, sm_scale: _Optional[float] = ..., sliding_window: _Optional[int] = ..., soft_cap: _Optional[float] = ..., k_scale: _Optional[float] = ..., v_scale: _Optional[float] = ..., return_lse: bool = ...) -> None: ...

class RaggedBlockSizes(_message.Message):
    __slots__ = ("num_kv_pages_per_block", "num_queries_per_block", "vmem_limit_bytes")
    NUM_KV_PAGES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_QUERIES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    VMEM_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_kv_pages_per_block: int
    num_queries_per_block: int
    vmem_limit_bytes: int
    def __init__(self, num_kv_pages_per_block: _Optional[int] = ..., num_queries_per_block: _Optional[int] = ..., vmem_limit_bytes: _Optional[int] = ...) -> None: ...

class Violation(_message.Message):
    __slots__ = ("field", "description")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    field: str
    description: str
    def __init__(self, field: _Optional[str] = ..., description: _Optional[str] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_ns", "validate_ns", "write_ns", "compile_ns", "kernel_ns", "encode_ns")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    VALIDATE_NS_FIELD_NUMBER: _ClassVar[int]
    WRITE_NS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_NS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_NS_FIELD_NUMBER: _ClassVar[int]
    ENCODE_NS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    validate_ns: int
    write_ns: int
    compile_ns: int
    kernel_ns: int
    encode_ns: int
    def __init__(self, queue_ns: _Optional[int] = ..., validate_ns: _Optional[int] = ..., write_ns: _Optional[int] = ..., compile_ns: _Optional[int] = ..., kernel_ns: _Optional[int] = ..., encode_ns: _Optional[int] = ...) -> None: ...
