"""Writing into pools that XLA cannot scatter into in place: in interpret mode, every byte compared."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.contract import CACHE_DTYPES
from attnd.kernels.pallas_put import put_pieces, put_tokens, scatters_in_place
from tests.support.interpreting import DMA_MODES, jit_quickly, without_races

PAGES = 6


def bits(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Returns bytes of every kind, NaNs with all their payloads included."""
    return rng.integers(0, 256, shape).astype(np.uint8)


@pytest.mark.parametrize("mode", DMA_MODES)
@pytest.mark.parametrize(("page_size", "rows"), [(16, 16), (8, 2), (48, 2), (16, 1), (5, 16), (32, 1), (4, 64)])
def test_tokens_arrive_and_no_other_byte_changes(page_size: int, rows: int, mode: str) -> None:
    rng = np.random.default_rng(page_size)
    pool, tokens = bits(rng, PAGES, page_size * rows, 256), bits(rng, 24, rows, 256)
    # Tokens in any order, neighbours and not, some of no page.
    slots = rng.permutation(np.arange(PAGES * page_size, dtype=np.int32))[:24]
    page, offset = np.divmod(np.sort(slots), np.int32(page_size))
    page[rng.permutation(24)[:5]] = [PAGES, PAGES, PAGES + 7, 2**31 - 1, PAGES + 1]
    order = rng.permutation(24)
    page, offset = page[order], offset[order]
    expected = pool.reshape(PAGES, page_size, rows, 256).copy()
    for at, place, token in zip(page, offset, tokens, strict=True):
        if at < PAGES:
            expected[at, place] = token
    dtype = CACHE_DTYPES["float8_e4m3fn"]
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True, uninitialized_memory="nan")
    put = jit_quickly(lambda *arrays: put_tokens(*arrays, interpret=params))
    with without_races():
        held = jax.block_until_ready(put(pool.view(dtype), page, offset, tokens.view(dtype)))
    assert np.asarray(held).tobytes() == expected.tobytes()


@pytest.mark.parametrize("alone", [True, False])
def test_pieces_arrive_and_no_other_byte_changes(alone: bool) -> None:
    rng = np.random.default_rng(0)
    pool, pieces = bits(rng, PAGES, 64, 256), bits(rng, 1 if alone else 3, 32, 256)
    page, part = np.array([4, PAGES, 1], np.int32), np.array([1, 0, 0], np.int32)
    expected = pool.copy()
    expected[4, 32:], expected[1, :32] = pieces[0], pieces[-1]
    params = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    put = jit_quickly(lambda *arrays: put_pieces(*arrays, interpret=params))
    with without_races():
        held = jax.block_until_ready(put(pool, page, part, jnp.asarray(pieces)))
    assert np.asarray(held).tobytes() == expected.tobytes()


def test_only_wide_rows_of_8_bits_need_it() -> None:
    wide = {name for name, dtype in CACHE_DTYPES.items() if not scatters_in_place(dtype, 256)}
    assert wide == {"float8_e4m3fn", "float8_e5m2", "int8"}
    assert all(scatters_in_place(dtype, 128) for dtype in CACHE_DTYPES.values())
