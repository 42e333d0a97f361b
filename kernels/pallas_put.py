"""Writes into a pool that XLA cannot scatter into in place: that of 8-bit rows of more than 128 lanes.

XLA scatters 8-bit values in tiles of 8 rows but keeps arrays of them in tiles of 32. Up to 128 lanes that is the same
memory; for wider rows it copies the whole pool to the other tiles, and back. Copies of whole tiles need neither, so the
tiles with new tokens are gathered, changed and copied to where they were.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Int32, Shaped

from attnd.kernels.tpu_chips import LANES

_TILE_ROWS: Final = 32


def scatters_in_place(dtype: np.dtype, lanes: int) -> bool:
    """Returns whether XLA on a TPU scatters into a donated pool without copying it."""
    return dtype.itemsize > 1 or lanes <= LANES


def put_tokens(
    pool: Shaped[jax.Array, "pages page_rows lanes"],
    page: Int32[jax.Array, " tokens"],
    offset: Int32[jax.Array, " tokens"],
    tokens: Shaped[jax.Array, "tokens rows lanes"],
    *,
    interpret: Any = False,
) -> Shaped[jax.Array, "pages page_rows lanes"]:
    """Writes tokens to their places; in place if the pool is donated.

    Args:
        pool: Pages of whole tokens.
        page: Page of each token; pages past the end get none.
        offset: Which token of its page it is. Of two tokens at one place, one is written.
        tokens: The rows of each token: a power of two of them.
        interpret: False, or `pltpu.InterpretParams`.

    Returns:
        The pool with the tokens; no other byte changes.
    """
    if interpret:  # A CPU has no float8: it would give NaNs back as others.
        pool_bits, token_bits = (
            lax.bitcast_convert_type(array, f"uint{8 * pool.itemsize}") for array in (pool, tokens)
        )
        return lax.bitcast_convert_type(_put(pool_bits, page, offset, token_bits, interpret), pool.dtype)
    return _put(pool, page, offset, tokens, interpret)


def _put(pool: jax.Array, page: jax.Array, offset: jax.Array, tokens: jax.Array, interpret: Any) -> jax.Array:
    num_pages, page_rows, lanes = pool.shape
    num_tokens, rows, _ = tokens.shape
    page_size = page_rows // rows
    together = max(1, _TILE_ROWS // rows)
    if page_size % together:
        together = page_size  # a page is a unit, too, whatever its tiles
    pieces = page_size // together
    piece = jnp.minimum(page, num_pages) * pieces + offset // together
    # Tokens of one piece share a slot; slots past the last piece name one past the pool.
    order = jnp.argsort(piece)
    ordered = piece[order]
    slot = jnp.cumsum(jnp.diff(ordered, prepend=-1) != 0, dtype=jnp.int32) - 1
    slots = jnp.zeros_like(page).at[order].set(slot)
    held = jnp.full_like(page, num_pages * pieces).at[slot].set(ordered)
    at, part = jnp.divmod(held, pieces)
    old = pool.reshape(num_pages, pieces, together * rows, lanes).at[at, part].get(mode="clip")
    new = old.reshape(num_tokens, together, rows, lanes).at[slots, offset % together].set(tokens)
    return put_pieces(pool, at, part, new.reshape(old.shape), interpret=interpret)


def put_pieces(
    pool: Shaped[jax.Array, "pages page_rows lanes"],
    page: Int32[jax.Array, " n"],
    part: Int32[jax.Array, " n"],
    pieces: Shaped[jax.Array, "n rows lanes"],
    *,
    interpret: Any = False,
) -> Shaped[jax.Array, "pages page_rows lanes"]:
    """Overwrites pieces of pages, whole tiles or whole pages; in place if the pool is donated.

    Args:
        pool: The pool.
        page: Page of each piece; pages past the end get none.
        part: Which piece of its page it is.
        pieces: What to write; one alone goes everywhere.
        interpret: False, or `pltpu.InterpretParams`.

    Returns:
        The pool with the pieces.
    """
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    rows = pieces.shape[1]

    def kernel(page: Any, part: Any, pieces: Any, _: Any, pool: Any, semaphore: Any) -> None:
        def each(act: Any) -> None:
            @pl.loop(0, page.shape[0])
            def _(n: jax.Array) -> None:
                target = pool.at[page[n], pl.ds(pl.multiple_of(part[n] * rows, rows), rows)]
                source = pieces.at[n if pieces.shape[0] > 1 else 0]
                pl.when(page[n] < pool.shape[0])(lambda: act(pltpu.make_async_copy(source, target, semaphore)))

        each(lambda copy: copy.start())
        each(lambda copy: copy.wait())

    result: jax.Array = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(1,), in_specs=[hbm, hbm], out_specs=hbm,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),  # type: ignore[no-untyped-call]
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True, disable_semaphore_checks=True),
        interpret=interpret,
        name="attnd_put",
    )(page, part, pieces, pool)  # fmt: skip
    return result
