"""The arithmetic of the chunk kernel: one kv block against all queries of a tile.

Everything is transposed. The queries of a kv head, heads beside heads, are the columns of a matrix, so

    S^T [tokens, columns] = K [tokens, depth] Q^T [depth, columns]        keys stream through stationary queries
    P^T = exp2(S^T - anchor)                                              the anchor runs along the lanes
    O^T [lanes, columns] += V^T [lanes, tokens] P^T [tokens, columns]     values stream through stationary weights

and neither a maximum nor a sum ever crosses lanes. The anchor stands in for the running maximum of the usual
online softmax: it moves only in edge steps, which a tile begins with, so an interior block has neither a maximum,
nor a correction, nor a mask, and its scores go from the matrix unit through exp2 back into it. Softmax does not
depend on the anchor; only the range of float32 does, and `overflowed` tells when a tile must run again in edge steps.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels import pallas_chunk_masks as masks
from attnd.kernels.pallas_chunk_config import LANES, SUBLANES, ChunkConfig, Item
from attnd.kernels.pallas_chunk_schedule import Refs, Scalar, Tile
from attnd.kernels.pallas_chunk_words import high_bfloat16, low_bfloat16, stored_heads
from attnd.kernels.pallas_words import load_words, store_words

_F32, _BF16, _I32, _U32 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32
LOG2E = 1.4426950408889634
_LN2 = 0.6931471805599453
# Far below any score, exact in bfloat16, and finite: the difference of two of them is zero, not NaN.
_NEVER = -(2.0**127)
# A sum of weights above this sends a tile through its blocks again. 2**40 is 28 nats above the anchor, and leaves
# 2**87 for the values.
TOTAL_MAX = 2.0**40
# Rows of a bfloat16 register: the least that a store writes whole.
_PACKED_ROWS = 16


def reset(refs: Refs) -> None:
    """Forgets the tile before."""
    refs.anchor[...] = jnp.full_like(refs.anchor, _NEVER)
    refs.total[...] = jnp.zeros_like(refs.total)
    refs.acc[...] = jnp.zeros_like(refs.acc)


def overflowed(refs: Refs) -> jax.Array:
    """Returns whether a score rose so far above its anchor that the tile must run again; true for NaN, too."""
    return jnp.logical_not(jnp.max(refs.total[...]) <= TOTAL_MAX)


# ---- Queries and answers.
def build_queries(refs: Refs, tile: Tile) -> None:
    """Makes the stationary matrices of a tile's queries: transposed and scaled; rows past the queries are zero."""
    config = refs.config
    size = config.query_block
    keep = lax.broadcasted_iota(_I32, (size, config.lanes), 0) < tile.rows
    parts: dict[int, list[jax.Array]] = {}
    for head, rows in _query_heads(refs):
        parts[head] = _stationary(refs, jnp.where(keep, rows, 0.0))
    nothing = jnp.zeros((config.piece_tokens, config.lanes), config.compute_dtype)
    for i, item in enumerate(config.items()):
        for n in range(config.depth // config.lanes):
            pieces = [
                nothing if piece is None else parts[piece.q_head][n][piece.first_token :][: config.piece_tokens]
                for piece in item.pieces
            ]
            refs.queries[i, n * config.lanes : (n + 1) * config.lanes] = jnp.concatenate(pieces, axis=0).T


def _query_heads(refs: Refs) -> Any:
    """Yields each query head and its float32 rows [query_block, lanes]."""
    config = refs.config
    narrow = refs.q_buffer.dtype == _BF16
    per_word = 2 if narrow else 1
    for word in range(config.q_rows_per_token // per_word):
        if word * per_word >= config.num_q_heads:
            return
        halves = [refs.q_buffer.at[half] for half in range(config.lanes // LANES)]
        stride = config.q_rows_per_token // per_word
        if not narrow:
            yield word, jnp.concatenate([half[pl.ds(word, config.query_block, stride)] for half in halves], axis=1)
            continue
        words = [
            load_words(half, word, config.query_block, stride=stride, interpret=refs.interpreted) for half in halves
        ]
        for n, unpack in enumerate((low_bfloat16, high_bfloat16)):
            if 2 * word + n < config.num_q_heads:
                yield 2 * word + n, jnp.concatenate([unpack(half) for half in words], axis=1)


def _stationary(refs: Refs, rows: jax.Array) -> list[jax.Array]:
    """Returns what stands against each `lanes` of the keys' depth, for the float32 rows of a query head."""
    config = refs.config
    if config.exact_products:
        return [rows * refs.factors[0]]
    if not config.folded:
        return [rows.astype(_BF16)]
    scaled = rows * refs.factors[0]
    high = scaled.astype(_BF16)
    low = scaled - high.astype(_F32)
    if config.fold_lane == LANES:
        return [high, low.astype(_BF16)]
    return [(high.astype(_F32) + pltpu.roll(low, config.fold_lane, 1)).astype(_BF16)]


def store_answers(refs: Refs) -> None:
    """Normalises, transposes back and writes the answers of a tile to their buffer, and its log-sum-exp."""
    config = refs.config
    heads: dict[int, list[jax.Array]] = {}
    for i, item in enumerate(config.items()):
        total = jnp.sum(refs.total[i], axis=0, keepdims=True)
        # A sum of zero is a column without a key; NaN stays NaN.
        scale = jnp.where(total > 0, refs.factors[2] / total, jnp.where(total == 0, 0.0, total))
        answers = (refs.acc[i] * scale).astype(refs.out_buffer.dtype).T
        for n, piece in enumerate(item.pieces):
            if piece is not None:
                rows = answers[n * config.piece_tokens : (n + 1) * config.piece_tokens]
                heads.setdefault(piece.q_head, []).append(rows)
        if config.return_lse:
            refs.lse_buffer[i : i + 1] = refs.anchor[i, :1] * _LN2 + jnp.log(total)
    whole = {head: jnp.concatenate(rows, axis=0) for head, rows in heads.items()}
    for half in range(config.lanes // LANES):
        _store_heads(refs, half, {head: rows[:, half * LANES : (half + 1) * LANES] for head, rows in whole.items()})


def _store_heads(refs: Refs, half: int, heads: dict[int, jax.Array]) -> None:
    """Writes 128 lanes of all heads' answers, token after token."""
    config = refs.config
    buffer = refs.out_buffer.at[half]
    if buffer.dtype != _BF16:
        for head, rows in heads.items():
            buffer[pl.ds(head, config.query_block, config.q_rows_per_token)] = rows
        return
    for even in range(0, config.num_q_heads, 2):
        odd = heads.get(even + 1, heads[even])  # past the last head lies padding
        low, high = (pltpu.bitcast(rows.astype(_F32), _U32) for rows in (heads[even], odd))
        stride = config.q_rows_per_token // 2
        store_words(buffer, (low >> 16) | high, even // 2, stride=stride, interpret=refs.interpreted)


# ---- Keys and values.
def _make_planes(refs: Refs, slot: Scalar, first: Scalar, count: int, keep: jax.Array | None) -> None:
    """Lays out K and V^T of `count` tokens for the matrix units, all heads.

    Args:
        refs: The kernel's references.
        slot: The buffer of the block.
        first: First token, counted in the block.
        count: Tokens.
        keep: See `stored_heads`; given in edge steps, whose keys leave the anchor's lane zero.
    """
    config = refs.config
    anchor_lane = 1.0 if keep is None else 0.0
    for head, k, v in stored_heads(refs, slot, first, count, keep):
        k = k.astype(config.compute_dtype)  # noqa: PLW2901 - the same keys, narrower
        refs.values[head, :, :count] = v.astype(config.compute_dtype).T
        if not config.folded:
            refs.keys[head, :count] = k
            continue
        is_anchor = lax.broadcasted_iota(_I32, k.shape, 1) == LANES - 1
        if config.fold_lane == LANES:
            refs.keys[head, :count, :LANES] = k
            again = k
        else:  # lanes past head_dim are zero
            wide = k.astype(_F32)
            again = (wide + pltpu.roll(wide, config.fold_lane, 1)).astype(_BF16)
        refs.keys[head, :count, config.depth - LANES :] = jnp.where(is_anchor, jnp.array(anchor_lane, _BF16), again)


def _product(config: ChunkConfig, a: jax.Array, b: jax.Array) -> jax.Array:
    precision = lax.Precision.HIGHEST if config.exact_products else lax.Precision.DEFAULT
    return jnp.dot(a, b, preferred_element_type=_F32, precision=precision)


def _scores(refs: Refs, i: int, item: Item, count: int) -> jax.Array:
    """Returns log2(e) times the scaled, capped scores of an item [count / 8, 8, columns], as they come from the keys.

    With a fold and the keys of an interior block, the anchor has been subtracted.
    """
    config = refs.config
    s = _product(config, refs.keys[item.kv_head, :count], refs.queries[i])
    s = s.reshape(count // SUBLANES, SUBLANES, config.columns)
    if not config.folded and not config.exact_products:
        s *= refs.factors[0]
    return jnp.tanh(s) * refs.factors[1] if config.capped else s


def _weigh_values(refs: Refs, item: Item, weights: jax.Array) -> jax.Array:
    """Returns V^T P^T of an item."""
    return _product(refs.config, refs.values[item.kv_head, :, : weights.shape[0]], weights)


# ---- Interior blocks.
def begin_interior(refs: Refs) -> None:
    """Prepares for the interior blocks of a tile: anchors are final, nothing waits for its product with V."""
    config = refs.config
    items = list(config.items())
    refs.waiting[...] = jnp.zeros_like(refs.waiting)
    for head in sorted({item.kv_head for item in items[len(items) - config.deferred :]}):
        # Zero weights do not clean what another sequence left there, should it be NaN.
        refs.values[head] = jnp.zeros_like(refs.values[head])
    if not config.folded:
        return
    for i in range(len(items)):
        tail = slice(config.depth - _PACKED_ROWS, config.depth)
        rows = refs.queries[i, tail].astype(_F32)
        minus = -jnp.concatenate([refs.anchor[i]] * (_PACKED_ROWS // SUBLANES), axis=0)
        is_last = lax.broadcasted_iota(_I32, rows.shape, 0) == _PACKED_ROWS - 1
        refs.queries[i, tail] = jnp.where(is_last, minus, rows).astype(_BF16)


def interior_block(refs: Refs, slot: Scalar) -> None:
    """Attends to a block that all queries see in full.

    The products of the last items with V are left to the next block or to `end_interior`.
    """
    config = refs.config
    items = list(enumerate(config.items()))
    end_interior(refs)
    _make_planes(refs, slot, 0, config.block_tokens, None)
    waiting: list[tuple[int, Item, jax.Array]] = []
    for i, item in items:
        s = _scores(refs, i, item, config.block_tokens)
        p = jnp.exp2(s if config.folded else s - refs.anchor[i][jnp.newaxis])
        refs.total[i] += jnp.sum(p, axis=0)
        waiting.append((i, item, p.reshape(config.block_tokens, config.columns).astype(config.compute_dtype)))
        if len(waiting) > config.deferred:
            j, earlier, weights = waiting.pop(0)
            refs.acc[j] += _weigh_values(refs, earlier, weights)
    for n, (_, _, weights) in enumerate(waiting):
        refs.waiting[n, : config.block_tokens] = weights


def end_interior(refs: Refs) -> None:
    """Multiplies what waits with V."""
    config = refs.config
    items = list(enumerate(config.items()))
    for n, (i, item) in enumerate(items[len(items) - config.deferred :]):
        refs.acc[i] += _weigh_values(refs, item, refs.waiting[n])


# ---- Edge steps.
def edge_step(refs: Refs, tile: Tile, block: Scalar, slot: Scalar, step: Scalar, exact: Scalar) -> None:
    """Attends to `edge_tokens` tokens of a block under a mask, and moves the anchors up to their scores.

    Args:
        refs: The kernel's references.
        tile: The tile.
        block: The block.
        slot: Its buffer.
        step: Which `edge_tokens` of the block.
        exact: Nonzero when no interior block follows, so that anchors need not fit bfloat16.
    """
    config = refs.config
    count = config.edge_tokens
    first = step * count
    _make_planes(refs, slot, first, count, masks.fetched(refs, tile, block, first, count, LANES))
    seen = [masks.visible(refs, tile, block, first, part) for part in range(masks.num_masks(config))]
    waiting: list[tuple[int, Item, jax.Array, jax.Array]] = []
    for i, item in enumerate(config.items()):
        sees = seen[item.part % len(seen)]
        s = jnp.where(sees, _scores(refs, i, item, count), _NEVER)
        old = refs.anchor[i]
        new = jnp.maximum(old, jnp.max(jnp.max(s, axis=0), axis=0, keepdims=True))
        if config.folded:
            new = jnp.where(exact != 0, new, _floor_bfloat16(new))
        keep = jnp.exp2(old - new)
        # A column that has seen no key yet gets weights of 1 here; its first key takes them off (keep is then 0).
        p = jnp.exp2(s - new[jnp.newaxis])
        refs.anchor[i] = new
        refs.total[i] = refs.total[i] * keep + jnp.sum(p, axis=0)
        waiting.append((i, item, keep, p.reshape(count, config.columns).astype(config.compute_dtype)))
        if len(waiting) > config.deferred:
            _rescale_and_add(refs, *waiting.pop(0))
    for late in waiting:
        _rescale_and_add(refs, *late)


def _rescale_and_add(refs: Refs, i: int, item: Item, keep: jax.Array, weights: jax.Array) -> None:
    """Rescales the answers of an item to its new anchor and adds the weighted values."""
    lanes, columns = refs.acc.shape[1:]
    scaled = refs.acc[i].reshape(lanes // SUBLANES, SUBLANES, columns) * keep[jnp.newaxis]
    refs.acc[i] = scaled.reshape(lanes, columns) + _weigh_values(refs, item, weights)


def _floor_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds float32 down to bfloat16: an anchor above the scores could lose them all, one below cannot."""
    bits = pltpu.bitcast(x, _U32)
    bits = jnp.where(x < 0, bits + _U32(0xFFFF), bits)
    return pltpu.bitcast(bits & _U32(0xFFFF0000), _F32)
