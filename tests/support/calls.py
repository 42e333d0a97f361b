"""Calls to validate: a valid one of each kind, to be changed in one place."""

from typing import Any

import numpy as np

from attnd.kernels import validation
from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, Layout
from attnd.kernels.errors import InvalidArgumentError

OPTION_NAMES = tuple(AttentionOptions.__dataclass_fields__)
HINT_NAMES = tuple(KernelHints.__dataclass_fields__)


def int32(values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def cache(**changes: Any) -> CacheSpec:
    """Eight pages of eight tokens, two kv heads."""
    spec = {"layout": Layout.INTERLEAVED, "num_layers": 3, "num_pages": 8, "page_size": 8, "num_kv_heads": 2}
    spec |= {"head_dim": 128, "dtype": np.float32} | changes
    return CacheSpec(**spec | {"dtype": np.dtype(spec["dtype"])})


def ragged(**changes: Any) -> dict[str, Any]:
    """Two sequences of 9 and 13 tokens, 3 and 5 of them queries."""
    call = {
        "spec": cache(),
        "q": np.zeros((8, 4, 128), np.float32),
        "kv_lens": int32([9, 13]),
        "page_indices": int32([[0, 1], [2, 3]]),
        "cu_q_lens": int32([0, 3, 8]),
        "num_seqs": int32([2]),
    }
    return _with_options(call | changes)


def decode(**changes: Any) -> dict[str, Any]:
    """Three rows of at most 16 tokens."""
    call = {
        "spec": cache(layout=Layout.SPLIT),
        "q": np.zeros((3, 8, 128), np.float32),
        "lengths": int32([16, 13, 9]),
        "page_indices": int32([[0, 1], [2, 3], [4, 5]]),
    }
    return _with_options(call | changes)


def step(**changes: Any) -> dict[str, Any]:
    """Three sequences, one of which has nothing to do."""
    call = {
        "spec": cache(),
        "q": np.zeros((8, 4, 128), np.float32),
        "q_lens": int32([7, 0, 1]),
        "kv_lens": int32([7, 0, 20]),
        "num_sequences": 3,
    }
    call = _with_options(call | changes)
    del call["hints"]
    return call


def refusal(judge: Any, call: dict[str, Any]) -> InvalidArgumentError | None:
    """Returns the error that a call raises, or None."""
    try:
        judge(**call)
    except InvalidArgumentError as error:
        return error
    return None


def ragged_refusal(**changes: Any) -> InvalidArgumentError:
    """Returns the error of a ragged call that is expected to raise one."""
    error = refusal(validation.ragged_batch, ragged(**changes))
    assert error is not None
    return error


def decode_refusal(**changes: Any) -> InvalidArgumentError:
    """Returns the error of a decode call that is expected to raise one."""
    error = refusal(validation.decode_batch, decode(**changes))
    assert error is not None
    return error


def _with_options(call: dict[str, Any]) -> dict[str, Any]:
    """Moves scalars to where they belong, so that tests may name them like any argument."""
    options = AttentionOptions(**{name: call.pop(name) for name in OPTION_NAMES if name in call})
    hints = KernelHints(**{name: call.pop(name) for name in HINT_NAMES if name in call})
    return call | {"options": options, "hints": hints}
