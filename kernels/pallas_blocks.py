"""Block sizes, and what does not fit a TPU: configs of both kernels for a cache, or the reason why there is none.

Sizes come from `block_sizes.json`, which `make tune-blocks` writes from schedules; shapes that it does not have get a
size that is safe everywhere. Nothing here compiles.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

from attnd.kernels.contract import CacheSpec
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_decode_config import DecodeConfig
from attnd.kernels.pallas_decode_split_parts import SplitDecodeConfig
from attnd.kernels.pallas_plan import LaunchShape
from attnd.kernels.pallas_pool import PoolShape
from attnd.kernels.tpu_chips import CHIPS, LANES, Chip

TABLE: Final = "block_sizes.json"
# What the compiler itself keeps in SMEM.
SMEM_RESERVE_BYTES: Final = 96 << 10
# What a program keeps in VMEM beside the kernel's own buffers.
VMEM_RESERVE_BYTES: Final = 1 << 20
KV_DTYPES: Final = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """What a call uses; a feature that is off is compiled out."""

    append: bool
    windowed: bool = False
    capped: bool = False
    return_lse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """For what programs are made.

    Attributes:
        chip: The TPU.
        decode_columns: Tokens times kv heads of a block of the decode kernel, unless the table knows better.
        chunk_tokens: Tokens of a block of the chunk kernel, unless the table knows better.
        table: Whether to look into the table.
        limits: Whether what does not fit is refused; off only to ask the compiler the same.
    """

    chip: Chip
    decode_columns: int = 4096
    chunk_tokens: int = 512
    table: bool = True
    limits: bool = True

    @classmethod
    def for_interpreter(cls) -> "Tuning":
        """Returns the smallest blocks: the interpreter pays for every instruction of every path."""
        return cls(chip=CHIPS["v6e"], decode_columns=128, chunk_tokens=128, table=False)

    @property
    def slots_max(self) -> int:
        """Slots that a page table may have."""
        return (self.chip.smem_bytes - SMEM_RESERVE_BYTES) // 4


def unsupported(spec: CacheSpec, tuning: Tuning) -> str | None:
    """Returns why our kernels cannot serve a cache, even with one query head for each kv head; None if they can."""
    if spec.dtype.name not in KV_DTYPES:
        return f"dtype={spec.dtype.name} must be one of {', '.join(KV_DTYPES)}."
    if spec.quantized_per_token:
        rows = LaunchShape(query_block=1, num_tokens=8, num_rows=8, pages_per_seq=64)
        try:
            decode_config(spec, spec.num_kv_heads, "bfloat16", rows, Features(append=False, return_lse=True), tuning)
        except UnsupportedError as error:
            return str(error)
        return None
    shape = LaunchShape(query_block=32, num_tokens=256, num_rows=1, pages_per_seq=64)
    features = Features(append=True, return_lse=True)
    try:
        chunk_config(spec, spec.num_kv_heads, "bfloat16", shape, features, tuning)
    except UnsupportedError as error:
        return str(error)
    return None


def serves_decode(spec: CacheSpec, num_q_heads: int, tuning: Tuning) -> bool:
    """Returns whether the decode kernel serves a cache; if not, the chunk kernel does."""
    shape = LaunchShape(query_block=1, num_tokens=8, num_rows=8, pages_per_seq=64)
    features = Features(append=not spec.quantized_per_token, return_lse=True)
    try:
        decode_config(spec, num_q_heads, "bfloat16", shape, features, tuning)
    except UnsupportedError:
        return False
    return True


def decode_config(
    spec: CacheSpec, num_q_heads: int, q_dtype: str, shape: LaunchShape, features: Features, tuning: Tuning
) -> DecodeConfig:
    """Returns the config of a launch of the decode kernel.

    Raises:
        UnsupportedError: It does not fit the chip; the text has the size and the limit.
    """
    pool = PoolShape.of(spec)
    fixed = {
        "num_rows": shape.num_rows, "num_q_heads": num_q_heads, "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim, "page_size": spec.page_size,
        "num_pages": spec.num_pages, "pages_per_seq": shape.pages_per_seq, "q_dtype": q_dtype,
        "kv_dtype": spec.dtype.name, "append": features.append, "windowed": features.windowed,
        "capped": features.capped, "return_lse": features.return_lse,
    }  # fmt: skip
    split = spec.quantized_per_token
    if split and features.windowed:
        raise UnsupportedError("int8 pages of layout split take no sliding window.")
    refused = ""
    for block_tokens in _decode_blocks(spec, pool, tuning):
        try:
            config: DecodeConfig
            if split:
                config = SplitDecodeConfig(**fixed, block_tokens=block_tokens, scaled=True)  # type: ignore[arg-type]
            else:
                config = DecodeConfig(**fixed, block_tokens=block_tokens)  # type: ignore[arg-type]
        except ValueError as error:
            refused = refused or str(error)
            continue
        refused = _misfit(config, tuning)
        if not refused:
            return config
    raise UnsupportedError(refused or f"page_size={spec.page_size} fits no block of the decode kernel.")


def chunk_config(
    spec: CacheSpec, num_q_heads: int, q_dtype: str, shape: LaunchShape, features: Features, tuning: Tuning
) -> ChunkConfig:
    """Returns the config of a launch of the chunk kernel.

    Raises:
        UnsupportedError: It does not fit the chip; the text has the size and the limit.
    """
    pool = PoolShape.of(spec)
    fixed = {
        "num_tokens": shape.num_tokens, "num_rows": shape.num_rows,
        "num_q_heads": num_q_heads // spec.num_kv_heads * pool.num_kv_heads,
        "num_kv_heads": pool.num_kv_heads, "head_dim": spec.head_dim, "page_size": spec.page_size,
        "num_pages": spec.num_pages, "pages_per_seq": shape.pages_per_seq, "q_dtype": q_dtype,
        "kv_dtype": spec.dtype.name, "append": features.append, "windowed": features.windowed,
        "capped": features.capped, "return_lse": features.return_lse,
        # A second copy of K in the contraction is free only where it would stand empty.
        "fold": tuning.chip.mxu_depth >= 2 * LANES,
        "large_tiles": tuning.chip.large_tiles,
    }  # fmt: skip
    refused = ""
    for query_block, block_tokens in _chunk_blocks(spec, shape.query_block, tuning):
        try:
            config = ChunkConfig(**fixed, query_block=query_block, block_tokens=block_tokens)  # type: ignore[arg-type]
        except UnsupportedError as error:
            refused = refused or str(error)
            continue
        refused = _misfit(config, tuning)
        if not refused:
            return config
    raise UnsupportedError(refused)


def _misfit(config: DecodeConfig | ChunkConfig, tuning: Tuning) -> str:
    """Returns what does not fit a chip; empty if all does."""
    chip = tuning.chip
    if not tuning.limits:
        return ""
    if isinstance(config, DecodeConfig) and config.lanes > LANES:
        if config.kv_dtype == "float32":
            return f"float32 rows of more than {LANES} lanes cannot be loaded with a stride."
        rows = config.strip_tokens * config.rows_per_token
        if rows % config.tile_rows:
            return (
                f"a page of {rows} rows (page_size={config.page_size}, k and v of {config.heads} heads) of more than "
                f"{LANES} lanes must be whole tiles of {config.tile_rows} rows ({config.kv_dtype})."
            )
    vmem = config.vmem_limit_bytes if isinstance(config, ChunkConfig) else config.vmem_bytes
    limit = chip.vmem_bytes - VMEM_RESERVE_BYTES
    if vmem > limit:
        return (
            f"blocks of {config.block_tokens} tokens with {config.num_q_heads} query heads, {config.num_kv_heads} kv "
            f"heads and head_dim {config.head_dim} need {vmem} bytes of VMEM; {chip.generation} has {limit}."
        )
    limit = chip.smem_bytes - SMEM_RESERVE_BYTES // 2
    if config.smem_bytes > limit:
        return (
            f"a page table of {config.num_rows} x {config.pages_per_seq} slots needs {config.smem_bytes} bytes of SMEM "
            f"with what goes along; {chip.generation} has {limit}."
        )
    return ""


def _decode_blocks(spec: CacheSpec, pool: PoolShape, tuning: Tuning) -> Iterator[int]:
    """Yields block sizes of the decode kernel to try: the table's, then ever smaller ones."""
    tuned = _tuned(tuning.chip.generation).get(_key("decode", spec)) if tuning.table else None
    if tuned is not None and not spec.quantized_per_token:
        yield int(tuned["block_tokens"])
    # A block is whole products: of 128 tokens, or fewer if many heads share one.
    if spec.quantized_per_token:
        yield from _blocks(spec.page_size, max(LANES, tuning.decode_columns // spec.num_kv_heads), LANES)
        return
    unit = max(128 // pool.num_kv_heads, min(128, 1024 // pool.num_kv_heads))
    wanted = max(unit, min(4096, tuning.decode_columns // pool.num_kv_heads))
    yield from _blocks(spec.page_size, wanted, unit)


def _chunk_blocks(spec: CacheSpec, query_block: int, tuning: Tuning) -> Iterator[tuple[int, int]]:
    """Yields tile and block sizes of the chunk kernel to try: the table's, then ever smaller ones."""
    tuned = _tuned(tuning.chip.generation).get(_key("chunk", spec)) if tuning.table else None
    if tuned is not None:
        yield min(query_block, int(tuned["query_block"])), int(tuned["block_tokens"])
    for queries in sorted({query_block, min(query_block, 64), min(query_block, 32), 16}, reverse=True):
        for block_tokens in _blocks(spec.page_size, tuning.chunk_tokens, 128):
            yield queries, block_tokens


def _blocks(page_size: int, wanted: int, unit: int) -> Iterator[int]:
    """Yields block sizes: multiples of `unit` that pages divide, or that divide pages, from `wanted` down.

    If no multiple up to `wanted` does, the least one that does, and then whole pages, whatever the unit.
    """
    sizes = [n for n in range(wanted // unit * unit, 0, -unit) if page_size % n == 0 or n % page_size == 0]
    if not sizes:
        sizes = [math.lcm(unit, page_size), page_size * max(1, wanted // page_size)]
    last = sizes[0] * 2
    for size in sizes:
        # Halving is enough: a step in between would save a little memory for another program to tune.
        if size <= last // 2 or size == sizes[-1]:
            last = size
            yield size


def _key(kernel: str, spec: CacheSpec) -> tuple[Any, ...]:
    return (kernel, spec.num_kv_heads, spec.head_dim, spec.page_size, spec.dtype.name)


@cache
def _tuned(generation: str) -> Mapping[tuple[Any, ...], Mapping[str, Any]]:
    """Returns the table of a generation."""
    text = resources.files("attnd.kernels").joinpath(TABLE).read_text()
    return {
        (entry["kernel"], entry["num_kv_heads"], entry["head_dim"], entry["page_size"], entry["kv_dtype"]): entry
        for entry in json.loads(text).get(generation, [])
    }
