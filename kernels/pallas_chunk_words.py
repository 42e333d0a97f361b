"""From the rows of a block to the keys and values of its heads, whatever the cache's dtype."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.pallas_chunk_config import LANES, ChunkConfig
from attnd.kernels.pallas_words import load_words

_F32, _BF16, _I32, _U32 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32


def low_bfloat16(words: jax.Array) -> jax.Array:
    """Returns the low half of each word, the even rows, as float32."""
    return pltpu.bitcast(words << 16, _F32)


def high_bfloat16(words: jax.Array) -> jax.Array:
    """Returns the high half of each word, the odd rows, as float32."""
    return pltpu.bitcast(words & _U32(0xFFFF0000), _F32)


def unpack(words: jax.Array, dtype: Any) -> list[jax.Array]:
    """Returns the rows that a word holds, first to last, as float32; exact.

    Args:
        words: uint32, or float32 if `dtype` is.
        dtype: What the words hold.
    """
    dtype = jnp.dtype(dtype)
    if dtype == _F32:
        return [words]
    if dtype == _BF16:
        return [low_bfloat16(words), high_bfloat16(words)]
    decode = {"int8": _int8, "float8_e4m3fn": _float8_e4m3fn, "float8_e5m2": _float8_e5m2}[dtype.name]
    return [decode(pltpu.bitcast(words, _I32) << (24 - 8 * n)) for n in range(4)]


def _int8(byte: jax.Array) -> jax.Array:
    """Decodes int8 in the top byte of an int32."""
    return (byte >> 24).astype(_F32)


def _float8_e4m3fn(byte: jax.Array) -> jax.Array:
    """Decodes 1 sign, 4 exponent (bias 7) and 3 mantissa bits in the top byte of an int32."""
    return _small_float(byte, mantissa_bits=3, bias=7, is_nan=lambda magnitude: magnitude == 0x7F)


def _float8_e5m2(byte: jax.Array) -> jax.Array:
    """Decodes 1 sign, 5 exponent (bias 15) and 2 mantissa bits in the top byte of an int32."""
    value = _small_float(byte, mantissa_bits=2, bias=15, is_nan=lambda magnitude: magnitude > 0x7C)
    magnitude = (byte >> 24) & 0x7F
    signed = jnp.where(byte < 0, -jnp.inf, jnp.inf).astype(_F32)
    return jnp.where(magnitude == 0x7C, signed, value)


def _small_float(byte: jax.Array, *, mantissa_bits: int, bias: int, is_nan: Any) -> jax.Array:
    """Decodes a float8 in the top byte by moving its bits into a float32.

    A subnormal would become a float32 subnormal, which the vector units flush to zero: the exponent is rebiased
    first, which makes it 2**(1 - bias - 1) * (1 + fraction), and the 1 is then taken off.
    """
    magnitude = (byte >> 24) & 0x7F
    rebased = (magnitude << (23 - mantissa_bits)) + ((127 - bias) << 23)
    value = pltpu.bitcast(rebased, _F32)
    value = jnp.where(magnitude < (1 << mantissa_bits), 2.0 * (value - 2.0**-bias), value)
    value = jnp.where(is_nan(magnitude), jnp.nan, value)
    signed: jax.Array = jnp.where(byte < 0, -value, value)
    return signed


def row_phases(config: ChunkConfig) -> int:
    """Returns after how many tokens the rows of the cache begin a word again: 1, or 2 for odd heads of 8 bits."""
    return 1 if config.rows_per_token % config.packing == 0 else 2


def stored_heads(
    refs: Any, slot: Any, first: Any, count: int, keep: jax.Array | None
) -> Iterator[tuple[int, jax.Array, jax.Array]]:
    """Yields each kv head with its keys and values of consecutive tokens of a block, as float32 [count, lanes].

    With two phases (see `row_phases`) the even tokens come before the odd ones.

    Args:
        refs: The kernel's references.
        slot: The buffer.
        first: First token, counted in the block; even.
        count: Tokens.
        keep: [count, 128], which tokens may be looked at; the others come as zeros. A product with zero does not
            clean a NaN, a select does.
    """
    config = refs.config
    phases, packing = row_phases(config), int(config.packing)
    period = config.rows_per_token * phases // config.packing  # words
    start = first * config.rows_per_token
    start = start if isinstance(start, int) else pl.multiple_of(start, 16)
    unpacked: dict[tuple[int, int], list[jax.Array]] = {}

    def half_row(half: int, row: int) -> jax.Array:
        word, n = divmod(row, packing)
        if (half, word) not in unpacked:
            block = refs.kv_buffer.at[slot, half, pl.ds(start, count * config.rows_per_token)]
            words: jax.Array
            if packing == 1:
                words = block[pl.ds(word, count, period)]
            else:
                words = load_words(block, word, count // phases, stride=period, interpret=refs.interpreted)
            if keep is not None and phases == 1:
                words = jnp.where(keep, words, jnp.zeros((), words.dtype))
            unpacked[half, word] = unpack(words, refs.kv_buffer.dtype)
        return unpacked[half, word][n]

    def whole_row(row: int) -> jax.Array:
        halves = range(config.lanes // LANES)
        parts = [
            jnp.concatenate([half_row(half, phase * config.rows_per_token + row) for phase in range(phases)], axis=0)
            for half in halves
        ]
        if keep is not None and phases > 1:
            parts = [jnp.where(keep, part, 0.0) for part in parts]
        return jnp.concatenate(parts, axis=1)

    for head in range(config.num_kv_heads):
        yield head, whole_row(2 * head), whole_row(2 * head + 1)
