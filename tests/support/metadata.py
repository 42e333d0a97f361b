"""Generated calls: valid ones, and valid ones with a few faults, each on or around the edge of a rule."""

import math
import random
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from attnd.kernels.contract import AttentionOptions, KernelHints, Layout
from attnd.kernels.validation import ArrayInfo
from tests.support import calls

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
# Of the floats only float64: the others print themselves rounded, where the rendered text has the number itself.
OTHER_DTYPES = [np.int64, np.int16, np.uint8, np.uint32, np.uint64, np.float64, np.bool_, ">i4"]
# Half a unit above the largest float32 rounds to infinity, a quarter does not.
AROUND_FLOAT32_MAX = [2.0**128 - 2.0**103, 2.0**128 - 2.0**104, 1e39]
FLOATS = [0.0, -0.0, 1.0, 1, 0, -1, -0.5, 0.05, math.inf, -math.inf, math.nan, 1e-50, 1e-40, *AROUND_FLOAT32_MAX]

Call = dict[str, Any]
Fault = Callable[[random.Random, Call], None]


def ragged(rng: random.Random) -> Call:
    """Returns a call of the ragged kernel with up to three faults; one in five has none."""
    return _with_faults(rng, _valid_ragged(rng), RAGGED_FAULTS)


def decode(rng: random.Random) -> Call:
    """Returns a call of the decode kernel with up to three faults; one in five has none."""
    call = _with_faults(rng, _valid_decode(rng), DECODE_FAULTS)
    # JAX's wrapper reshapes q: it must be an array that can be.
    return call | {"q": ArrayInfo(tuple(max(size, 0) for size in call["q"].shape), call["q"].dtype)}


def _with_faults(rng: random.Random, call: Call, faults: list[Fault]) -> Call:
    for fault in rng.choices(faults, k=rng.choice([0, 1, 1, 2, 3])):
        fault(rng, call)
    options, hints = call.pop("option_values"), call.pop("hint_values")
    return call | {"options": AttentionOptions(**options), "hints": KernelHints(**hints)}


def _length(rng: random.Random, page_size: int, pages_per_seq: int) -> int:
    capacity = page_size * pages_per_seq
    length = rng.choice([0, 1, page_size - 1, page_size, page_size + 1, capacity, rng.randint(0, capacity)])
    return min(length, capacity)


def _table(rng: random.Random, rows: int, width: int, used: list[int], num_pages: int) -> np.ndarray:
    """Returns a page table whose unused slots are junk as often as not."""
    junk = rng.choice([0, 0, -7, 10**6, INT32_MIN])
    slots = [
        [rng.randrange(num_pages) if slot < (used[row] if row < len(used) else 0) else junk for slot in range(width)]
        for row in range(rows)
    ]
    return np.array(slots, np.int32).reshape(rows, width)


def _valid_ragged(rng: random.Random) -> Call:
    page_size, pages_per_seq, num_pages = rng.choice([1, 2, 8]), rng.choice([1, 2, 3]), rng.choice([1, 2, 9])
    max_num_seqs = rng.choice([0, 1, 2, 3, 4])
    num_seqs = rng.randint(0, max_num_seqs)
    kv_lens = [_length(rng, page_size, pages_per_seq) for _ in range(num_seqs)]
    q_lens = [min(kv_len, rng.choice([0, 1, kv_len, rng.randint(0, kv_len)])) for kv_len in kv_lens]
    cu_q_lens = [sum(q_lens[:i]) for i in range(num_seqs + 1)]
    unused = max_num_seqs - num_seqs
    spec = calls.cache(
        num_pages=num_pages, page_size=page_size, num_kv_heads=rng.choice([1, 2, 3]), head_dim=rng.choice([8, 64, 128])
    )
    num_q_heads = spec.num_kv_heads * rng.choice([1, 2, 7])
    return {
        "spec": spec,
        "q": ArrayInfo((cu_q_lens[-1] + rng.choice([0, 0, 1, 5]), num_q_heads, spec.head_dim), np.dtype(np.float32)),
        "kv_lens": calls.int32(kv_lens + [rng.choice([0, -5, 10**6])] * unused),
        "page_indices": _table(rng, max_num_seqs, pages_per_seq, [-(-n // page_size) for n in kv_lens], num_pages),
        "cu_q_lens": calls.int32(cu_q_lens + [rng.choice([0, cu_q_lens[-1], 10**6])] * unused),
        "num_seqs": calls.int32([num_seqs]),
        "option_values": {},
        "hint_values": {},
    }


def _valid_decode(rng: random.Random) -> Call:
    page_size, pages_per_sequence, num_pages = rng.choice([1, 2, 8]), rng.choice([1, 2, 4, 6]), rng.choice([1, 2, 9])
    lengths = [_length(rng, page_size, pages_per_sequence) for _ in range(rng.choice([0, 1, 2, 3, 4]))]
    spec = calls.cache(
        layout=Layout.SPLIT, num_pages=num_pages, page_size=page_size, num_kv_heads=rng.choice([1, 2, 3]), head_dim=128
    )
    used = [-(-n // page_size) for n in lengths]
    return {
        "spec": spec,
        "q": ArrayInfo((len(lengths), spec.num_kv_heads * rng.choice([1, 2, 8]), 128), np.dtype(np.float32)),
        "lengths": calls.int32(lengths),
        "page_indices": _table(rng, len(lengths), pages_per_sequence, used, num_pages),
        "option_values": {},
        "hint_values": {"pages_per_compute_block": rng.choice([1, pages_per_sequence])},
    }


def _with_size(rng: random.Random, array: np.ndarray) -> np.ndarray:
    """Returns the array with a last axis of another size, or of another rank."""
    change = rng.choice(["longer", "shorter", "flat", "deeper", "scalar"])
    if change == "longer":
        return np.concatenate([array, array[:1]]) if len(array) else np.zeros((1, *array.shape[1:]), array.dtype)
    if change == "shorter":
        return array[:-1]
    if change == "scalar":
        return np.zeros((), array.dtype)
    return array.reshape(-1) if change == "flat" else array[np.newaxis]


def _resize(name: str) -> Fault:
    def fault(rng: random.Random, call: Call) -> None:
        if call[name].ndim:
            call[name] = _with_size(rng, call[name])

    return fault


def _retype(name: str) -> Fault:
    def fault(rng: random.Random, call: Call) -> None:
        with np.errstate(all="ignore"):
            call[name] = call[name].astype(rng.choice(OTHER_DTYPES))

    return fault


def _revalue(name: str, values: Callable[[random.Random, Call], list[int]]) -> Fault:
    """Puts one of `values` into one element, if the array has any and can hold it."""

    def fault(rng: random.Random, call: Call) -> None:
        if call[name].size and call[name].dtype == np.int32:
            array = call[name].copy()
            array.flat[rng.randrange(array.size)] = rng.choice(values(rng, call))
            call[name] = array

    return fault


def _nudge(name: str) -> Fault:
    def fault(rng: random.Random, call: Call) -> None:
        if call[name].size and call[name].dtype == np.int32:
            array = call[name].astype(np.int64)
            array.flat[rng.randrange(array.size)] += rng.choice([-1, 1, 3])
            call[name] = np.clip(array, INT32_MIN, INT32_MAX).astype(np.int32)

    return fault


def _change_q(rng: random.Random, call: Call) -> None:
    q = call["q"]
    if len(q.shape) != 3:
        return
    tokens, heads, head_dim = q.shape
    call["q"] = rng.choice([
        ArrayInfo((max(tokens - 1, 0), heads, head_dim), q.dtype),
        ArrayInfo((0, heads, head_dim), q.dtype),
        ArrayInfo((-tokens - 1, heads, head_dim), q.dtype),
        ArrayInfo((tokens, heads + 1, head_dim), q.dtype),
        ArrayInfo((tokens, 0, head_dim), q.dtype),
        ArrayInfo((tokens, -heads, head_dim), q.dtype),
        ArrayInfo((tokens, heads, head_dim + 1), q.dtype),
        ArrayInfo((tokens, heads, 0), q.dtype),
        ArrayInfo((tokens, heads), q.dtype),
        ArrayInfo((1, tokens, heads, head_dim), q.dtype),
        ArrayInfo(q.shape, np.dtype(rng.choice([np.float64, np.int32, np.int8, ml_dtypes.bfloat16]))),
    ])  # fmt: skip


def _narrow_table(rng: random.Random, call: Call) -> None:
    if call["page_indices"].ndim == 2:
        call["page_indices"] = call["page_indices"][:, : rng.choice([0, 1])]


def _set_option(name: str, values: list[Any]) -> Fault:
    def fault(rng: random.Random, call: Call) -> None:
        call["option_values"][name] = rng.choice(values)

    return fault


def _set_hint(name: str, values: list[Any]) -> Fault:
    def fault(rng: random.Random, call: Call) -> None:
        call["hint_values"][name] = rng.choice(values)

    return fault


def _lengths(rng: random.Random, call: Call) -> list[int]:
    spec, table = call["spec"], call["page_indices"]
    capacity = spec.page_size * (table.shape[-1] if table.ndim else 1)
    return [0, 1, capacity, capacity + 1, capacity + spec.page_size, -1, INT32_MIN, INT32_MAX]


def _page_ids(rng: random.Random, call: Call) -> list[int]:
    num_pages = call["spec"].num_pages
    return [0, num_pages - 1, num_pages, -1, INT32_MIN, INT32_MAX]


def _counts(rng: random.Random, call: Call) -> list[int]:
    rows = call["page_indices"].shape[0] if call["page_indices"].ndim else 0
    return [0, rows, rows + 1, -1, -rows - 1, -rows - 2, INT32_MIN, INT32_MAX]


RAGGED_FAULTS: list[Fault] = [
    *(_resize(name) for name in ("num_seqs", "kv_lens", "cu_q_lens", "page_indices")),
    *(_retype(name) for name in ("num_seqs", "kv_lens", "cu_q_lens", "page_indices")),
    *[_revalue("num_seqs", _counts)] * 2,
    *[_revalue("kv_lens", _lengths), _revalue("page_indices", _page_ids)] * 3,
    *[_nudge("kv_lens"), _nudge("cu_q_lens")] * 3,
    _revalue("cu_q_lens", lambda rng, call: [0, 1, -1, INT32_MIN, INT32_MAX]),
    *[_change_q] * 3,
    _narrow_table,
    *(_set_option(name, FLOATS) for name in ("sm_scale", "soft_cap", "k_scale", "v_scale")),
    _set_option("sliding_window", [1, 0, -1, 2**40, INT32_MIN]),
    *(_set_hint(name, [-1, 0, 1, 2, 3, 4, 2**40]) for name in ("num_kv_pages_per_block", "num_queries_per_block")),
    _set_hint("vmem_limit_bytes", [-1, 0, 1, 2**40]),
]

DECODE_FAULTS: list[Fault] = [
    *(_resize(name) for name in ("lengths", "page_indices")),
    *(_retype(name) for name in ("lengths", "page_indices")),
    *[_revalue("lengths", _lengths), _revalue("page_indices", _page_ids), _nudge("lengths")] * 2,
    *[_change_q] * 3,
    _narrow_table,
    *(_set_option(name, FLOATS) for name in ("soft_cap", "sm_scale")),
    *[_set_hint("pages_per_compute_block", [-2, -1, 0, 1, 2, 3, 4, 5, 8, 2**40])] * 2,
    *[_set_hint("megacore_mode", ["kv_head", "batch", None, "cores", ""])] * 3,
    _set_hint("inline_seq_dim", [True, False]),
]
