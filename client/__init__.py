"""The attnd client: attention over caches that a server holds.

    from attnd.client import Client

    with Client("127.0.0.1:50051") as client:
        cache = client.create_cache("llama", num_layers=30, num_pages=1024, page_size=16, num_kv_heads=3, head_dim=64,
                                    dtype="bfloat16", pages_by="server")
        [sequence] = cache.create_sequences(1)
        step = cache.step([sequence], q_lens=[7], kv_lens=[7])
        out = step.attend(0, q, k, v, sm_scale=0.125)

`AsyncClient` has the same methods, awaited. Every error is an `AttndError`; `_errors.py` shows the tree.
"""

from attnd.client._aio import AsyncCache, AsyncClient, AsyncSequence, AsyncStep
from attnd.client._errors import (
    AbortedError,
    AlreadyExistsError,
    AttndError,
    CallCancelledError,
    DataLossError,
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    SessionLostError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    UnknownError,
    Violation,
)
from attnd.client._info import (
    CacheInfo,
    CallRecord,
    DeviceInfo,
    ImplementationInfo,
    SequenceInfo,
    ServerInfo,
    ServerLimits,
    Timings,
)
from attnd.client._sync import Cache, Client, Sequence, Step
from attnd.v1.allocator import keep_freed_memory

__all__ = [
    "AbortedError",
    "AlreadyExistsError",
    "AsyncCache",
    "AsyncClient",
    "AsyncSequence",
    "AsyncStep",
    "AttndError",
    "Cache",
    "CacheInfo",
    "CallCancelledError",
    "CallRecord",
    "Client",
    "DataLossError",
    "DeadlineExceededError",
    "DeviceInfo",
    "FailedPreconditionError",
    "ImplementationInfo",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "PermissionDeniedError",
    "ResourceExhaustedError",
    "Sequence",
    "SequenceInfo",
    "ServerInfo",
    "ServerLimits",
    "SessionLostError",
    "Step",
    "Timings",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "UnknownError",
    "Violation",
    "keep_freed_memory",
]
