"""The numba kernel: one query token after another over the host's pages, a tile of keys of one KV head at a time.

Everything that numba compiles stands in this file: its cache on disk is stale when the file changes, and knows of no
other. The shapes of a call are run-time values, so that there is one program for each dtype of the pages.
"""

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar, cast

import numba
import numpy as np
from jaxtyping import Float32, Int32, Int64, Shaped
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from attnd.kernels.contract import CACHE_DTYPES, INT8_SCALE

# Keys of one head that follow each other are often a power of two of bytes apart, so that they share the same few
# places of a core's first cache: more of them would evict each other before their values are read.
TILE: Final = 16
_LINE_BYTES: Final = 64
KINDS: Final = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
_FLOAT32, _BFLOAT16, _FLOAT16, _FLOAT8_E4M3FN, _FLOAT8_E5M2, _INT8 = range(len(KINDS))
# Sums may be taken in any order; what is infinite or not a number stays so. Calls between the helpers would cost as
# much as the work of a tile.
_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {"fastmath": {"reassoc", "contract", "nsz", "arcp"}, "error_model": "numpy", "forceinline": True}
)
# Beyond this, exponentials are zero for a float32 sum that holds a 1.
_EXP_MIN: Final = np.float32(-87.0)

Paging: TypeAlias = tuple[int, int, int, int, int]
Kernel: TypeAlias = Callable[..., None]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_log = logging.getLogger(__name__)


def _helper(function: FunctionT) -> FunctionT:
    """Lets numba compile a function as part of those that call it."""
    return cast("FunctionT", numba.njit(**_OPTIONS)(function))


@intrinsic
def _prefetch(_context: Any, array: Any, index: Any) -> Any:
    """Asks for the cache line of array[index], into a core's second cache."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
        word = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
        read, second_cache, of_data = (ir.Constant(word, value) for value in (0, 2, 1))
        function = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
        builder.call(function, [pointer, read, second_cache, of_data])
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def _prefer_wide_vectors(_context: Any) -> Any:
    """Lets the function that calls it use vectors of 512 bits; for most processors that have them, LLVM does not."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        attributes = builder.function.attributes
        if isinstance(attributes, set):  # llvmlite knows few attributes by name, and its own method refuses others
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


# What the decorator returns takes the arguments after the context alone, which a type checker does not see.
_prefetched: Final = cast("Callable[[Any, int], None]", _prefetch)
_with_wide_vectors: Final = cast("Callable[[], None]", _prefer_wide_vectors)


@_helper
def _float32_of(bits: Any) -> Any:
    return np.uint32(bits).view(np.float32)


@_helper
def _widened(bits: Any, kind: int) -> Any:
    """Returns the float32 value of a number of `KINDS[kind]`, a constant, by arithmetic that becomes vectors.

    Where a narrow float has fewer bits of exponent, they are moved to their places as they are: a product corrects the
    bias, of subnormal numbers as well. float8_e5m2 is the upper byte of float16.
    """
    wide = np.uint32(bits)
    if kind == _FLOAT32:
        return _float32_of(wide)
    if kind == _BFLOAT16:
        return _float32_of(wide << 16)
    if kind == _INT8:
        return np.float32(np.int8(bits))
    if kind == _FLOAT8_E4M3FN:
        magnitude = wide & 0x7F
        value = np.float32(np.nan) if magnitude == 0x7F else _float32_of(magnitude << 20) * np.float32(2.0**120)
        return -value if wide & 0x80 else value
    if kind == _FLOAT8_E5M2:
        wide = np.uint32(wide << 8)
    magnitude = (wide & 0x7FFF) << 13
    infinite = magnitude >= 0x7C00 << 13
    value = _float32_of(magnitude | 0x7F800000) if infinite else _float32_of(magnitude) * np.float32(2.0**112)
    return -value if wide & 0x8000 else value


@_helper
def _exp(x: Any) -> Any:
    """Returns the exponential of a number that is at most zero, within two units in the last place.

    exp(x) = 2**n * exp(r), r = x - n * log(2), |r| <= log(2) / 2; the polynomial is that of Cephes' `expf`. Written
    out because it must be compiled to vectors: a call of libm for each score would cost as much as the products.
    """
    x = _EXP_MIN if x < _EXP_MIN else x
    n = np.floor(x * np.float32(1.44269504088896341) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = _float32_of((np.int32(n) + 127) << 23)
    return (p * r * r + r + np.float32(1.0)) * power


@_helper
def _tanh(x: Any) -> Any:
    """Returns the hyperbolic tangent; near zero by the polynomial of Cephes' `tanhf`, relatively exact."""
    z = x * x
    p = np.float32(-5.70498872745e-3)
    p = p * z + np.float32(2.06390887954e-2)
    p = p * z + np.float32(-5.37397155531e-2)
    p = p * z + np.float32(1.33314422036e-1)
    p = p * z + np.float32(-3.33332819422e-1)
    magnitude = abs(x)
    decay = _exp(-2 * magnitude)
    far = (np.float32(1.0) - decay) / (np.float32(1.0) + decay)
    near = p * z * x + x
    return near if magnitude < np.float32(0.625) else (far if x > 0 else -far)


@_helper
def _locate(
    paging: Paging,
    pages: Int32[np.ndarray, " pages_per_seq"],
    first: int,
    end: int,
    count: int,
    here: Int64[np.ndarray, " tile"],
    ahead: Int64[np.ndarray, " tile"],
) -> None:
    """Finds where the tokens of a tile, and those as far into the next one, begin in the pool.

    A short tile is filled up with its last token: what is read twice is weighted with zero, but may be read.
    """
    page_size, page_stride, token_stride = paging[0], paging[1], paging[2]
    for t in range(TILE):
        position = first + min(t, count - 1)
        here[t] = pages[position // page_size] * page_stride + position % page_size * token_stride
        position = min(position + count, end - 1)
        ahead[t] = pages[position // page_size] * page_stride + position % page_size * token_stride


@_helper
def _fetch(bits: Shaped[np.ndarray, " size"], start: int, value_offset: int, head_dim: int) -> None:
    """Asks for the key and the value of one token and head."""
    for d in range(0, head_dim, _LINE_BYTES // bits.itemsize):
        _prefetched(bits, start + d)
        _prefetched(bits, start + value_offset + d)


@_helper
def _score(
    bits: Shaped[np.ndarray, " size"],
    head: int,
    value_offset: int,
    q: Float32[np.ndarray, "group head_dim"],
    here: Int64[np.ndarray, " tile"],
    ahead: Int64[np.ndarray, " tile"],
    count: int,
    scores: Float32[np.ndarray, "group tile"],
    kind: int,
) -> None:
    """Writes the products of a tile's keys with the queries of one KV head: two keys with four queries, or with one.

    Meanwhile memory is asked for what the next tile needs. Unsigned indices spare each access the test for an index
    from the end, which would forbid vectors.
    """
    _with_wide_vectors()
    group, head_dim = q.shape
    for t in range(0, count, 2):
        _fetch(bits, ahead[t] + head, value_offset, head_dim)
        _fetch(bits, ahead[t + 1] + head, value_offset, head_dim)
        a, b = np.uint64(here[t] + head), np.uint64(here[t + 1] + head)
        g = 0
        while g + 4 <= group:
            a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0.0)
            for d in range(head_dim):
                key_a, key_b = _widened(bits[a + np.uint64(d)], kind), _widened(bits[b + np.uint64(d)], kind)
                a0 += key_a * q[g, d]
                a1 += key_a * q[g + 1, d]
                a2 += key_a * q[g + 2, d]
                a3 += key_a * q[g + 3, d]
                b0 += key_b * q[g, d]
                b1 += key_b * q[g + 1, d]
                b2 += key_b * q[g + 2, d]
                b3 += key_b * q[g + 3, d]
            scores[g, t], scores[g + 1, t], scores[g + 2, t], scores[g + 3, t] = a0, a1, a2, a3
            scores[g, t + 1], scores[g + 1, t + 1], scores[g + 2, t + 1], scores[g + 3, t + 1] = b0, b1, b2, b3
            g += 4
        while g < group:
            a0 = b0 = np.float32(0.0)
            for d in range(head_dim):
                a0 += _widened(bits[a + np.uint64(d)], kind) * q[g, d]
                b0 += _widened(bits[b + np.uint64(d)], kind) * q[g, d]
            scores[g, t], scores[g, t + 1] = a0, b0
            g += 1


@numba.njit(fastmath={"nnan", "nsz"}, forceinline=True)
def _largest(row: Float32[np.ndarray, " tile"]) -> Any:
    """Returns the largest of a tile's scores; numbers alone: the search for one that is none forbids vectors."""
    _with_wide_vectors()
    largest = row[0]
    for t in range(len(row)):
        largest = max(largest, row[t])
    return largest


@_helper
def _weigh(
    scores: Float32[np.ndarray, "group tile"],
    count: int,
    soft_cap: np.float32,
    top: Float32[np.ndarray, " group"],
    total: Float32[np.ndarray, " group"],
    out: Float32[np.ndarray, "group head_dim"],
) -> None:
    """Turns scores into weights relative to the largest seen so far, to which it rescales what has been summed."""
    _with_wide_vectors()
    group, head_dim = out.shape
    for g in range(group):
        row = scores[g]
        if soft_cap > 0:
            for t in range(len(row)):
                row[t] = soft_cap * _tanh(row[t] / soft_cap)
        for t in range(count, len(row)):
            row[t] = -np.inf
        largest = max(top[g], _largest(row))
        if largest > top[g]:
            decay = _exp(top[g] - largest)
            top[g] = largest
            total[g] *= decay
            for d in range(head_dim):
                out[g, d] *= decay
        added = np.float32(0.0)
        for t in range(len(row)):
            weight = _exp(row[t] - largest)
            row[t] = weight
            added += weight
        total[g] += added


@_helper
def _add(
    bits: Shaped[np.ndarray, " size"],
    head: int,
    here: Int64[np.ndarray, " tile"],
    count: int,
    weights: Float32[np.ndarray, "group tile"],
    out: Float32[np.ndarray, "group head_dim"],
    kind: int,
) -> None:
    """Adds a tile's weighted values to the sums of one KV head: four values to two queries at a time, or to one."""
    _with_wide_vectors()
    group, head_dim = out.shape
    for t in range(0, count, 4):
        a, b = np.uint64(here[t] + head), np.uint64(here[t + 1] + head)
        c, e = np.uint64(here[t + 2] + head), np.uint64(here[t + 3] + head)
        g = 0
        while g + 2 <= group:
            v0, v1, v2, v3 = weights[g, t], weights[g, t + 1], weights[g, t + 2], weights[g, t + 3]
            w0, w1, w2, w3 = weights[g + 1, t], weights[g + 1, t + 1], weights[g + 1, t + 2], weights[g + 1, t + 3]
            for d in range(head_dim):
                value_a, value_b = _widened(bits[a + np.uint64(d)], kind), _widened(bits[b + np.uint64(d)], kind)
                value_c, value_e = _widened(bits[c + np.uint64(d)], kind), _widened(bits[e + np.uint64(d)], kind)
                out[g, d] += v0 * value_a + v1 * value_b + v2 * value_c + v3 * value_e
                out[g + 1, d] += w0 * value_a + w1 * value_b + w2 * value_c + w3 * value_e
            g += 2
        if g < group:
            v0, v1, v2, v3 = weights[g, t], weights[g, t + 1], weights[g, t + 2], weights[g, t + 3]
            for d in range(head_dim):
                value_a, value_b = _widened(bits[a + np.uint64(d)], kind), _widened(bits[b + np.uint64(d)], kind)
                value_c, value_e = _widened(bits[c + np.uint64(d)], kind), _widened(bits[e + np.uint64(d)], kind)
                out[g, d] += v0 * value_a + v1 * value_b + v2 * value_c + v3 * value_e


@_helper
def _multiply_scales(
    scales: Float32[np.ndarray, " size"],
    head: int,
    head_dim: int,
    here: Int64[np.ndarray, " tile"],
    count: int,
    rows: Float32[np.ndarray, "group tile"],
) -> None:
    """Multiplies scores or weights by the scales of their keys or values."""
    _with_wide_vectors()
    for t in range(count):
        scale = scales[(here[t] + head) // head_dim] * np.float32(1 / INT8_SCALE)
        for g in range(len(rows)):
            rows[g, t] *= scale


@_helper
def _attend(
    bits: Shaped[np.ndarray, " size"],
    scales: Float32[np.ndarray, " scales"],
    paging: Paging,
    table: Int32[np.ndarray, "rows pages_per_seq"],
    items: Int64[np.ndarray, "n 5"],
    q: Float32[np.ndarray, "tokens num_kv_heads group head_dim"],
    soft_cap: np.float32,
    out: Float32[np.ndarray, "slots num_kv_heads group head_dim"],
    lse: Float32[np.ndarray, "slots num_kv_heads group"],
    kind: int,
) -> None:
    """Attends over the items; see `compiled`."""
    _with_wide_vectors()
    num_kv_heads, group, head_dim = q.shape[1], q.shape[2], q.shape[3]
    head_stride, value_offset = paging[3], paging[4]
    here, ahead = np.empty(TILE, np.int64), np.empty(TILE, np.int64)
    scores, total = np.empty((group, TILE), np.float32), np.empty((num_kv_heads, group), np.float32)
    for i in range(len(items)):
        token, row, start, end, slot = items[i, 0], items[i, 1], items[i, 2], items[i, 3], items[i, 4]
        total[:] = 0
        out[slot] = 0
        lse[slot] = -np.inf
        for first in range(start, end, TILE):
            count = min(TILE, end - first)
            _locate(paging, table[row], first, end, count, here, ahead)
            for h in range(num_kv_heads):
                head = h * head_stride
                _score(bits, head, value_offset, q[token, h], here, ahead, count, scores, kind)
                if len(scales):
                    _multiply_scales(scales, head, head_dim, here, count, scores)
                _weigh(scores, count, soft_cap, lse[slot, h], total[h], out[slot, h])
                if len(scales):
                    _multiply_scales(scales, head + value_offset, head_dim, here, count, scores)
                _add(bits, head + value_offset, here, count, scores, out[slot, h], kind)
        for h in range(num_kv_heads):
            for g in range(group):
                for d in range(head_dim):
                    out[slot, h, g, d] /= total[h, g]
                lse[slot, h, g] += np.log(total[h, g])


def compiled(dtype: str) -> Kernel:
    """Returns the kernel for pages of a dtype, from numba's cache on disk if it is there.

    It releases the GIL, and takes, in this order:

    - bits: [size], the bits of one layer's pages as unsigned integers.
    - scales: float32 [size / head_dim], a scale for each token and head of K and V; empty if there are none.
    - paging: page_size, and in elements of bits: from page to page, from token to token, from KV head to KV head, and
      from a key to its value.
    - table: int32 [rows, pages_per_seq]. Only what an item's keys lie in is followed.
    - items: int64 [n, 5], see `numba_work.Decodes`. No item is without keys.
    - q: float32 [tokens, num_kv_heads, group, head_dim], scaled.
    - soft_cap: float32; 0 if there is none.
    - out: float32 [slots, num_kv_heads, group, head_dim]: the items' are overwritten, normalised over their keys.
    - lse: float32 [slots, num_kv_heads, group], the natural log-sum-exp.

    All arrays are in C order. Calls with other types are refused, not compiled.
    """
    signature = _signature(dtype)
    kind = KINDS.index(dtype)

    # numba knows what it has cached by the code and the captured number.
    def attend(
        bits: Any, scales: Any, paging: Any, table: Any, items: Any, q: Any, soft_cap: Any, out: Any, lse: Any
    ) -> None:
        _attend(bits, scales, paging, table, items, q, soft_cap, out, lse, kind)

    dispatcher = numba.njit(nogil=True, **_OPTIONS)(attend)
    try:
        dispatcher.enable_caching()
        dispatcher.compile(signature)
    except Exception as error:  # nowhere to write, or what is there cannot be read: numba has many ways to say so
        _log.warning("numba's cache is of no use, the kernel is compiled anew: %s", error)
        dispatcher = numba.njit(nogil=True, **_OPTIONS)(attend)
        dispatcher.compile(signature)
    dispatcher.disable_compile()
    return cast("Kernel", dispatcher)


def _signature(dtype: str) -> Any:
    float32, int32, int64 = types.float32, types.int32, types.int64
    bits: Any = {4: types.uint32, 2: types.uint16, 1: types.uint8}[CACHE_DTYPES[dtype].itemsize]
    return types.void(
        bits[::1],
        float32[::1],
        types.UniTuple(int64, 5),  # type: ignore[no-untyped-call]
        int32[:, ::1],
        int64[:, ::1],
        float32[:, :, :, ::1],
        float32,
        float32[:, :, :, ::1],
        float32[:, :, ::1],
    )
