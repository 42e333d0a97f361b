"""Requests to the terms of the kernels: arrays, shapes, options."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

import numpy as np
from google.protobuf.message import Message

from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, Layout
from attnd.kernels.errors import InvalidArgumentError
from attnd.kernels.validation import ArrayInfo
from attnd.service.caches import PagesBy
from attnd.v1 import attention_pb2, cache_pb2, tensors

_OPTIONS_BYTES_MAX: Final = 64
_LAYOUTS: Final = {
    cache_pb2.LAYOUT_KV_INTERLEAVED: Layout.INTERLEAVED,
    cache_pb2.LAYOUT_KV_SPLIT: Layout.SPLIT,
}
_PAGES_BY: Final = {
    cache_pb2.PAGES_BY_CLIENT: PagesBy.CLIENT,
    cache_pb2.PAGES_BY_SERVER: PagesBy.SERVER,
}


class HasBlockSizes(Protocol):
    """A request that carries the block sizes of JAX's ragged kernel."""

    block_sizes: attention_pb2.RaggedBlockSizes


def array(given: Mapping[str, np.ndarray], field: str) -> np.ndarray:
    """Returns a required array of a request.

    Raises:
        InvalidArgumentError: It is missing.
    """
    if field not in given:
        raise InvalidArgumentError.of(field, f"{field} must be set.")
    return given[field]


def arrays(given: Mapping[str, np.ndarray], fields: Iterable[str]) -> dict[str, np.ndarray]:
    """Returns required arrays of a request by field.

    Raises:
        InvalidArgumentError: One is missing.
    """
    return {field: array(given, field) for field in fields}


def array_info(request: attention_pb2.ValidateBatchRequest) -> ArrayInfo:
    """Returns what a ValidateBatch call tells of q.

    Raises:
        TensorError: The dtype has no such name.
    """
    return ArrayInfo(tuple(request.q_shape), tensors.dtype_of_name(request.q_dtype or "float32", "q"))


def cache_spec(message: cache_pb2.CacheSpec) -> CacheSpec:
    """Returns the shape of a cache.

    Raises:
        InvalidArgumentError: A size is out of range, or the layout is unset.
        TensorError: The dtype has no such name.
    """
    if message.layout not in _LAYOUTS:
        raise InvalidArgumentError.of("spec.layout", "layout must be LAYOUT_KV_INTERLEAVED or LAYOUT_KV_SPLIT.")
    return CacheSpec(
        layout=_LAYOUTS[message.layout],
        num_layers=message.num_layers,
        num_pages=message.num_pages,
        page_size=message.page_size,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        dtype=tensors.dtype_of_name(message.dtype, "spec"),
    )


def pages_by(value: cache_pb2.PagesBy) -> PagesBy:
    """Returns who manages the pages.

    Raises:
        InvalidArgumentError: It is unset.
    """
    if value not in _PAGES_BY:
        raise InvalidArgumentError.of("pages_by", "pages_by must be PAGES_BY_CLIENT or PAGES_BY_SERVER.")
    return _PAGES_BY[value]


def options(message: attention_pb2.AttentionOptions) -> AttentionOptions:
    """Returns the scalars of a call as they were sent; `kernels.validation` judges them."""
    data = message.SerializeToString()
    # The layers of a model have the same; whoever sends fields that there are not shall not fill the cache with them.
    return (_options if len(data) <= _OPTIONS_BYTES_MAX else _options.__wrapped__)(data)


@functools.lru_cache(maxsize=256)
def _options(data: bytes) -> AttentionOptions:
    message = attention_pb2.AttentionOptions.FromString(data)
    return AttentionOptions(
        sm_scale=message.sm_scale if message.HasField("sm_scale") else 1.0,
        sliding_window=_optional(message, "sliding_window"),
        soft_cap=_optional(message, "soft_cap"),
        k_scale=_optional(message, "k_scale"),
        v_scale=_optional(message, "v_scale"),
        return_lse=message.return_lse,
    )


def decode_options(request: attention_pb2.PagedAttentionRequest) -> AttentionOptions:
    """Returns the scalars of a PagedAttention call: JAX's decode kernel does not scale scores."""
    return AttentionOptions(soft_cap=_optional(request, "attn_logits_soft_cap"), return_lse=request.return_lse)


def ragged_hints(request: HasBlockSizes) -> KernelHints:
    """Returns the block sizes of a RaggedPagedAttention call."""
    sizes = request.block_sizes
    return KernelHints(
        num_kv_pages_per_block=_optional(sizes, "num_kv_pages_per_block"),
        num_queries_per_block=_optional(sizes, "num_queries_per_block"),
        vmem_limit_bytes=_optional(sizes, "vmem_limit_bytes"),
    )


def decode_hints(request: attention_pb2.PagedAttentionRequest) -> KernelHints:
    """Returns how JAX's decode kernel should work."""
    return KernelHints(
        pages_per_compute_block=_optional(request, "pages_per_compute_block"),
        megacore_mode=_optional(request, "megacore_mode"),
        inline_seq_dim=request.inline_seq_dim if request.HasField("inline_seq_dim") else True,
    )


def _optional(message: Message, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None
