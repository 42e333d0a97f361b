"""Results to messages."""

import time
from typing import Final

import numpy as np

from attnd.kernels.contract import Attended, CacheSpec, Layout
from attnd.kernels.validation import Violations
from attnd.service.caches import Cache, PagesBy
from attnd.service.dispatch import Reply
from attnd.service.engine import Ran
from attnd.service.sequence import Sequence
from attnd.v1 import attention_pb2, cache_pb2

_LAYOUTS: Final = {
    Layout.INTERLEAVED: cache_pb2.LAYOUT_KV_INTERLEAVED,
    Layout.SPLIT: cache_pb2.LAYOUT_KV_SPLIT,
}
_PAGES_BY: Final = {
    PagesBy.CLIENT: cache_pb2.PAGES_BY_CLIENT,
    PagesBy.SERVER: cache_pb2.PAGES_BY_SERVER,
}

AttentionResponse = (
    attention_pb2.RaggedPagedAttentionResponse | attention_pb2.PagedAttentionResponse | attention_pb2.AttendResponse
)


def attended(
    response_class: type[AttentionResponse], ran: Ran[Attended], implementation: str, validate_ns: int
) -> Reply:
    """Returns the answer to an attention call."""
    answer, timings = ran.value, ran.value.timings
    response = response_class(
        implementation=implementation,
        timings=attention_pb2.Timings(
            queue_ns=ran.queue_ns,
            validate_ns=validate_ns,
            write_ns=timings.write_ns,
            compile_ns=timings.compile_ns,
            kernel_ns=timings.kernel_ns,
            encode_ns=time.monotonic_ns() - ran.ended_at_ns,
        ),
    )
    arrays = {"out": answer.out}
    if answer.lse_natural is not None:
        arrays["lse_natural"] = answer.lse_natural
    return Reply(response, arrays)


def pages(kv_pages: np.ndarray, scales: np.ndarray | None) -> Reply:
    """Returns the answer to ReadPages."""
    arrays = {"kv_pages": kv_pages}
    if scales is not None:
        arrays["scales"] = scales
    return Reply(cache_pb2.ReadPagesResponse(), arrays)


def violations(found: Violations) -> attention_pb2.ValidateBatchResponse:
    """Returns the answer to ValidateBatch."""
    return attention_pb2.ValidateBatchResponse(
        violations=[attention_pb2.Violation(field=field, description=text) for field, text in found.first],
        num_violations=found.count,
    )


def cache(cache: Cache) -> cache_pb2.Cache:
    """Returns the description of a cache."""
    sequences = cache.sequences
    return cache_pb2.Cache(
        cache_id=cache.cache_id,
        name=cache.name,
        spec=_spec(cache.spec),
        pages_by=_PAGES_BY[cache.pages_by],
        size_bytes=cache.spec.size_bytes,
        num_free_pages=cache.spec.num_pages if sequences is None else sequences.num_free_pages,
        num_sequences=0 if sequences is None else len(sequences),
        implementation=cache.implementation.name,
        incarnation_id=cache.incarnation_id,
    )


def sequence(sequence: Sequence, now: float) -> cache_pb2.Sequence:
    """Returns the description of a sequence."""
    return cache_pb2.Sequence(
        sequence=sequence.handle,
        length=sequence.length,
        num_pages=len(sequence.pages),
        complete_length=int(sequence.layer_lens.min()),
        lease_s=sequence.lease_s,
        expires_in_s=sequence.lease_s if sequence.in_flight else max(0.0, sequence.expires_at - now),
        restored_from=sequence.restored_from,
        damaged=sequence.damaged,
    )


def _spec(spec: CacheSpec) -> cache_pb2.CacheSpec:
    return cache_pb2.CacheSpec(
        layout=_LAYOUTS[spec.layout],
        num_layers=spec.num_layers,
        num_pages=spec.num_pages,
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype.name,
    )
