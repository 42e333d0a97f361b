"""Raw calls: what any gRPC client, without the SDK, sees of a server."""

from dataclasses import dataclass

import grpc
import numpy as np
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from attnd.v1 import attention_pb2, cache_pb2, server_pb2, tensors

SERVICES = {
    name: service
    for file in (attention_pb2, cache_pb2, server_pb2)
    for name, service in file.DESCRIPTOR.services_by_name.items()
}
OPTIONS = [("grpc.max_receive_message_length", 1 << 30), ("grpc.max_send_message_length", 1 << 30)]


@dataclass
class Refused(Exception):
    """A call that did not end with OK."""

    code: grpc.StatusCode
    message: str
    reason: str
    fields: list[str]
    descriptions: list[str]


class RawClient:
    """Calls RPCs by name: `client("AttentionService/Attend", request)`; a request may be bytes."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=OPTIONS)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def __call__(self, path: str, request: Message | bytes, timeout: float = 60.0) -> Message:
        service, method = path.split("/")
        response_class = GetMessageClass(SERVICES[service].methods_by_name[method].output_type)
        call = self.channel.unary_unary(f"/attnd.v1.{path}")
        try:
            data = request if isinstance(request, bytes) else request.SerializeToString()
            return response_class.FromString(call(data, timeout=timeout))
        except grpc.RpcError as error:
            raise refusal(error) from error


def refusal(error: grpc.RpcError) -> Refused:
    refused = Refused(error.code(), error.details(), "", [], [])
    status = rpc_status.from_call(error)
    for detail in status.details if status is not None else ():
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            refused.reason = info.reason
        elif detail.Unpack(bad):
            refused.fields = [violation.field for violation in bad.field_violations]
            refused.descriptions = [violation.description for violation in bad.field_violations]
    return refused


def create_cache(client: RawClient, name: str, *, pages_by="SERVER", layout="INTERLEAVED", **spec) -> str:
    sizes = {"num_layers": 2, "num_pages": 16, "page_size": 8, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
    request = cache_pb2.CreateCacheRequest(
        name=name,
        spec=cache_pb2.CacheSpec(layout=f"LAYOUT_KV_{layout}", **{**sizes, **spec}),
        pages_by=f"PAGES_BY_{pages_by}",
    )
    return client("CacheService/CreateCache", request).cache.cache_id


def ints(*values) -> "attention_pb2.Tensor":
    return tensors.to_tensor(np.array(values, np.int32))


def normal(*shape, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def attend_request(cache_id, sequences, q_lens, kv_lens, *, layer=0, q=None, k=None, v=None, num_q_heads=4, seed=0):
    """A call with random arrays for a cache made by `create_cache`."""
    tokens = sum(q_lens)
    arrays = {
        "q": normal(tokens, num_q_heads, 16, seed=seed) if q is None else q,
        "k": normal(tokens, 2, 16, seed=seed + 1) if k is None else k,
        "v": normal(tokens, 2, 16, seed=seed + 2) if v is None else v,
    }
    return attention_pb2.AttendRequest(
        cache_id=cache_id,
        layer=layer,
        sequences=sequences,
        q_lens=ints(*q_lens),
        kv_lens=ints(*kv_lens),
        **{name: tensors.to_tensor(array) for name, array in arrays.items()},
    )


def create_sequences(client: RawClient, cache_id: str, num_sequences: int) -> list[bytes]:
    request = cache_pb2.CreateSequencesRequest(cache_id=cache_id, num_sequences=num_sequences)
    return list(client("CacheService/CreateSequences", request).sequences)
