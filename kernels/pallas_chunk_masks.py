"""Who sees what in a block that needs a mask."""

import jax
import jax.numpy as jnp
from jax import lax

from attnd.kernels.pallas_chunk_config import SUBLANES, ChunkConfig
from attnd.kernels.pallas_chunk_schedule import Refs, Scalar, Tile
from attnd.kernels.pallas_chunk_words import row_phases

_I32 = jnp.int32


def token_of(config: ChunkConfig, row: jax.Array, count: int) -> jax.Array:
    """Returns the token that each row of `count` loaded tokens is.

    Tokens whose rows do not fill whole words are loaded in two phases, the even tokens before the odd ones.
    """
    phases = row_phases(config)
    if phases == 1:
        return row
    half = count // phases
    token: jax.Array = jnp.where(row < half, row * 2, (row - half) * 2 + 1)
    return token


def fetched(refs: Refs, tile: Tile, block: Scalar, first: Scalar, count: int, lanes: int) -> jax.Array:
    """Returns which of the loaded rows are in visible pages' reach; the others may hold anything.

    Args:
        refs: The kernel's references.
        tile: The tile.
        block: The block.
        first: First loaded token, counted in the block.
        count: Loaded tokens.
        lanes: Columns of the answer.
    """
    token = token_of(refs.config, lax.broadcasted_iota(_I32, (count, lanes), 0), count) + first
    keep: jax.Array = token < _stop(refs.config, tile, block)
    if refs.config.windowed:
        keep &= token >= tile.begin - block * refs.config.block_tokens
    return keep


def visible(refs: Refs, tile: Tile, block: Scalar, first: Scalar, part: int) -> jax.Array:
    """Returns which keys of an edge step the queries in the columns of a kv head's item see.

    Rows of the tile past its queries see what the last query sees, so that no column is without a key.

    Returns:
        Bool [edge_tokens / 8, 8, columns].
    """
    config = refs.config
    shape = (config.edge_tokens // SUBLANES, SUBLANES, config.columns)
    base = block * config.block_tokens + first
    column = lax.broadcasted_iota(_I32, shape[1:], 1) + part * config.columns
    last = jnp.minimum(tile.position + (column & (config.query_block - 1)), tile.end - 1) - base
    stop = jnp.minimum(last, _stop(config, tile, block) - 1 - first)
    if row_phases(config) > 1:
        row = lax.broadcasted_iota(_I32, shape, 0) * SUBLANES + lax.broadcasted_iota(_I32, shape, 1)
        token = token_of(config, row, config.edge_tokens)
    else:  # the token's place in its register moves to the other side, where it is one addition for all registers
        place = lax.broadcasted_iota(_I32, shape[1:], 0)
        token, last, stop = lax.broadcasted_iota(_I32, shape, 0) * SUBLANES, last - place, stop - place
    seen = token <= stop[jnp.newaxis]
    if config.windowed:
        seen &= token > (last - refs.window[0])[jnp.newaxis]
    return seen


def num_masks(config: ChunkConfig) -> int:
    """Returns how many of a kv head's items differ in their mask; part `p` has the mask of `p % num_masks`."""
    return max(1, config.query_block // config.columns)


def _stop(config: ChunkConfig, tile: Tile, block: Scalar) -> Scalar:
    """Returns one past the last token of a block that any query sees, counted in the block."""
    return jnp.minimum(tile.end - block * config.block_tokens, config.block_tokens)
