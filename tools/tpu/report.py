"""Prints the cycles of our TPU kernels beside those of other people's, for Llama 3 8B: `make tpu-schedule`.

Everything is compiled here and now by the same libtpu; no TPU is needed. Cycles are those of the static schedule of a
full interior block, its memory traffic not counted: the HBM limit stands beside them.
"""

import argparse
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from attnd.kernels import pallas_blocks
from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, Layout
from attnd.kernels.pallas_blocks import Features, Tuning
from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_decode_config import DecodeConfig
from attnd.kernels.pallas_plan import LaunchShape
from attnd.kernels.tpu_chips import CHIPS
from tools.tpu.compiler import Compiled, Compiler
from tools.tpu.passes import PassCosts, batch_cycles, tile_cycles
from tools.tpu.schedule import Schedule
from tools.tpu.shapes import LLAMA

TARGETS_DECODE: Final[Mapping[str, float]] = {"v6e": 1.9, "v5e": 1.8, "tpu7x": 1.95}
TARGETS_PREFILL: Final[Mapping[str, int]] = {"v6e": 4000, "v5e": 8800, "tpu7x": 3850}
TARGET_BATCH: Final = 1.25
TARGET_TILE: Final = 0.7
TOKEN_BYTES: Final = 2 * 8 * 128 * 2  # k and v of 8 heads in bfloat16
KV_TOKENS: Final = 512  # of a unit of prefill, with 128 queries
TILE_CONTEXT: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A program to look at.

    Attributes:
        label: What the report calls it.
        program: As `Compiler.compile` takes it.
        arguments: Its arguments.
        tokens: KV tokens of a block.
        copies: Copies that fetch a block.
        times: How often the loop runs over a block: heads that are worked on one after another.
        share: Part of the longest straight line's matrix products that a full block takes: some lines do a little
            more at the end of a tile.
    """

    label: str
    program: str
    arguments: Mapping[str, Any]
    tokens: int
    copies: int
    times: int = 1
    share: float = 1.0


def decode_subjects(generation: str, block_tokens: int | None) -> Iterator[Subject]:
    """Yields the decode programs; ours have the server's block size unless told otherwise."""
    for pages, queries in ((8, 32), (32, 8), (64, 8)):
        yield Subject(
            label=f"page 16   JAX ragged, {pages} pages x {queries} queries",
            program="tools.tpu.programs:jax_ragged",
            arguments={"pages_per_block": pages, "queries_per_block": queries},
            tokens=pages * 16, copies=pages,
        )  # fmt: skip
    yield Subject(
        label="page 16   JAX decode, 32 pages", program="tools.tpu.programs:jax_paged",
        arguments={"pages_per_block": 32}, tokens=512, copies=64, times=8,
    )  # fmt: skip
    if importlib.util.find_spec("flywheel_tpu") is not None:
        yield Subject(
            label="page 128  flywheel-tpu, append", program="tools.tpu.programs:flywheel",
            arguments={}, tokens=1024, copies=8,
        )  # fmt: skip
    for page_size in (16, 128):
        size = block_tokens or server_sizes(generation, page_size)[0]
        yield _own_decode(f"page {page_size:<4} attnd, append", size, {"page_size": page_size})
    for name, features in (
        ("append, soft cap", {"capped": True}), ("append, window", {"windowed": True}),
        ("append, lse", {"return_lse": True}),
    ):  # fmt: skip
        size = block_tokens or server_sizes(generation, 16)[0]
        yield _own_decode(f"page 16   attnd, {name}", size, features)


def _own_decode(label: str, block_tokens: int, changes: Mapping[str, Any]) -> Subject:
    page_size = changes.get("page_size", 16)
    arguments = {"block_tokens": block_tokens, "num_pages": 65536 // page_size, "pages_per_seq": 2048 // page_size}
    return Subject(
        label=label, program="tools.tpu.own:decode", arguments=arguments | dict(changes),
        tokens=block_tokens, copies=block_tokens // page_size,
    )  # fmt: skip


def server_sizes(generation: str, page_size: int) -> tuple[int, int]:
    """Returns the block sizes of decode and chunk kernel that a server chooses for Llama 3 8B."""
    spec = CacheSpec(
        layout=Layout.INTERLEAVED, num_layers=1, num_pages=65536 // page_size, page_size=page_size, num_kv_heads=8,
        head_dim=128, dtype=CACHE_DTYPES["bfloat16"],
    )  # fmt: skip
    features, tuning = Features(append=True), Tuning(chip=CHIPS[generation])
    rows = LaunchShape(query_block=1, num_tokens=64, num_rows=64, pages_per_seq=64)
    tiles = LaunchShape(query_block=128, num_tokens=512, num_rows=8, pages_per_seq=64)
    return (
        pallas_blocks.decode_config(spec, 32, "bfloat16", rows, features, tuning).block_tokens,
        pallas_blocks.chunk_config(spec, 32, "bfloat16", tiles, features, tuning).block_tokens,
    )


def prefill_subjects(generation: str) -> Iterator[Subject]:
    """Yields the prefill programs; a block is 128 queries by 512 tokens unless they choose otherwise."""
    yield Subject(
        label="page 16   JAX ragged", program="tools.tpu.programs:jax_ragged",
        arguments={"num_tokens": 1024, "num_seqs": 8, "pages_per_block": 32, "queries_per_block": 128},
        tokens=512, copies=32,
    )  # fmt: skip
    if importlib.util.find_spec("flywheel_tpu") is not None:
        yield Subject(
            label="page 128  flywheel-tpu", program="tools.tpu.programs:flywheel",
            arguments={"num_tokens": 4096, "num_seqs": 1}, tokens=512, copies=4,
        )  # fmt: skip
    for page_size in (16, 128):
        size = server_sizes(generation, page_size)[1]
        yield Subject(
            label=f"page {page_size:<4} attnd", program="tools.tpu.own:chunk",
            arguments={"page_size": page_size, "num_pages": 65536 // page_size, "pages_per_seq": 4096 // page_size}
            | {"fold": CHIPS[generation].mxu_depth == 256, "block_tokens": size},
            tokens=size, copies=size // page_size, share=0.9,
        )  # fmt: skip


def cycles_of(subject: Subject, schedule: Schedule) -> int | None:
    """Returns the cycles of a full interior block."""
    loop = schedule.main_loop()
    if loop is None:
        return None
    matmuls = int(schedule.longest_line(loop).matmuls * subject.share)
    cost = schedule.cheapest(loop, dma_starts=subject.copies, matmuls=matmuls)
    return None if cost is None else cost.cycles * subject.times


def show_decode(compiler: Compiler, block_tokens: int | None, match: str) -> None:
    """Prints the decode table of a generation."""
    chip = CHIPS[compiler.generation]
    limit = TOKEN_BYTES / chip.hbm_bytes_per_cycle
    target = TARGETS_DECODE.get(chip.generation)
    print(f"\n{chip.generation}: decode, cycles per KV token" + (f" (target {target})" if target else ""))
    print(f"  {limit:7.2f}  HBM limit")
    for subject in decode_subjects(compiler.generation, block_tokens):
        if match not in subject.label:
            continue
        compiled = compiler.compile(subject.program, dict(subject.arguments))
        cycles = _cycles_or_reason(subject, compiled)
        print(
            f"  {cycles if isinstance(cycles, str) else f'{cycles / subject.tokens:7.2f}'}  {subject.label}", flush=True
        )
        if compiled.error is None and subject.label == "page 16   attnd, append":
            config = DecodeConfig(**LLAMA | dict(subject.arguments) | {"append": True})
            kv_lens = np.random.default_rng(0).integers(100, 2001, 64).tolist()
            total = batch_cycles(config, PassCosts.of(config, compiled.schedules[0]), kv_lens)
            times = total / (limit * sum(kv_lens))
            print(
                f"           64 sequences of 100 to 2,000 tokens: {times:.2f} x their HBM time (target {TARGET_BATCH})"
                f", in blocks of {config.block_tokens}"
            )


def show_prefill(compiler: Compiler, match: str) -> None:
    """Prints the prefill table of a generation."""
    target = TARGETS_PREFILL.get(compiler.generation)
    print(
        f"\n{compiler.generation}: prefill, cycles per 128 q x 512 kv x 32 heads"
        + (f" (target {target})" * bool(target))
    )
    for subject in prefill_subjects(compiler.generation):
        if match not in subject.label:
            continue
        compiled = compiler.compile(subject.program, dict(subject.arguments), timeout_s=600)
        cycles = _cycles_or_reason(subject, compiled)
        print(
            f"  {cycles if isinstance(cycles, str) else f'{cycles * KV_TOKENS // subject.tokens:7d}'}  {subject.label}",
            flush=True,
        )
        if isinstance(cycles, int) and "attnd" in subject.label:
            config = ChunkConfig(**LLAMA | {"num_rows": 8, "num_tokens": 1024, "append": True} | subject.arguments)
            whole = tile_cycles(compiled.schedules[0], config, TILE_CONTEXT)
            rate = TILE_CONTEXT // subject.tokens * cycles / whole
            print(
                f"           a whole tile at {TILE_CONTEXT} tokens: {rate:.0%} of this rate (target {TARGET_TILE:.0%})"
            )


def _cycles_or_reason(subject: Subject, compiled: Compiled) -> int | str:
    if compiled.error is not None:
        return f"{'-':>7}  ({compiled.error.splitlines()[0][:90]})"
    cycles = cycles_of(subject, compiled.schedules[0])
    return f"{'?':>7}" if cycles is None else cycles


def main() -> None:
    """Prints the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generations", nargs="*", default=["v6e", "v5e", "tpu7x"], help=f"of {', '.join(CHIPS)}")
    parser.add_argument("--block-tokens", type=int, help="KV tokens of a block of our decode kernel; else the server's")
    parser.add_argument("--only", choices=("decode", "prefill"))
    parser.add_argument("--match", default="", help="part of the name of the kernels to show: attnd, flywheel, JAX")
    arguments = parser.parse_args()
    for generation in arguments.generations:
        with Compiler(generation, with_schedules=True) as compiler:
            if arguments.only != "prefill":
                show_decode(compiler, arguments.block_tokens, arguments.match)
            if arguments.only != "decode":
                show_prefill(compiler, arguments.match)


if __name__ == "__main__":
    main()
