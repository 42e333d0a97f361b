"""Prints the cycles of our TPU kernels beside those of other people's, for Llama 3 8B: `make tpu-schedule`.

Everything is compiled here and now by the same libtpu; no TPU is needed. Cycles are those of the static schedule of a
full interior block, its memory traffic not counted: the HBM limit stands beside them. Fails if a target is missed.
"""

import argparse
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
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
TARGETS_BATCH: Final = ("v6e", "v5e")  # where TARGET_BATCH is one
TARGET_TILE: Final = 0.7
TARGET_FEATURE: Final = 0.1  # what a feature may add to the cycles of decode
FEATURES: Final[Mapping[str, Mapping[str, bool]]] = {
    "soft cap": {"capped": True}, "window": {"windowed": True}, "lse": {"return_lse": True},
}  # fmt: skip
TOKEN_BYTES: Final = 2 * 8 * 128 * 2  # k and v of 8 heads in bfloat16
TOKEN_BYTES_INT8: Final = 2 * 8 * (128 + 4)  # with a float32 scale each
BATCHES: Final[Mapping[str, Sequence[int]]] = {
    "64 sequences of 100 to 2,000 tokens": np.random.default_rng(0).integers(100, 2001, 64).tolist(),
    "8 sequences of 16,384 tokens": [16384] * 8,
}
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
    yield _jax_decode({})
    if importlib.util.find_spec("flywheel_tpu") is not None:
        yield Subject(
            label="page 128  flywheel-tpu, append", program="tools.tpu.programs:flywheel",
            arguments={}, tokens=1024, copies=8,
        )  # fmt: skip
    for page_size in (16, 128):
        size = block_tokens or server_sizes(generation, page_size)[0]
        yield _own_decode(f"page {page_size:<4} attnd, append", size, {"page_size": page_size})
    for name, features in FEATURES.items():
        size = block_tokens or server_sizes(generation, 16)[0]
        yield _own_decode(f"page 16   attnd, append, {name}", size, features)
    yield _jax_decode({"kv_dtype": "int8"})
    for page_size in (16, 128):
        yield _own_split(generation, page_size)


def _jax_decode(changes: Mapping[str, Any]) -> Subject:
    return Subject(
        label="page 16   JAX decode, 32 pages" + ", int8" * bool(changes), program="tools.tpu.programs:jax_paged",
        arguments={"pages_per_block": 32} | dict(changes), tokens=512, copies=64, times=8,
    )  # fmt: skip


def _own_split(generation: str, page_size: int) -> Subject:
    """The decode kernel of int8 pages with scales, whose K and V are copied one by one."""
    spec = CacheSpec(
        layout=Layout.SPLIT, num_layers=1, num_pages=65536 // page_size, page_size=page_size, num_kv_heads=8,
        head_dim=128, dtype=CACHE_DTYPES["int8"],
    )  # fmt: skip
    shape = LaunchShape(query_block=1, num_tokens=64, num_rows=64, pages_per_seq=2048 // page_size)
    tuning = Tuning(chip=CHIPS[generation])
    config = pallas_blocks.decode_config(spec, 32, "bfloat16", shape, Features(append=False), tuning)
    sizes = {"page_size": page_size, "num_pages": spec.num_pages, "pages_per_seq": shape.pages_per_seq}
    return Subject(
        label=f"page {page_size:<4} attnd, int8", program="tools.tpu.own:split",
        arguments=sizes | {"block_tokens": config.block_tokens},
        tokens=config.block_tokens, copies=2 * config.strips_per_block + 2,
    )  # fmt: skip


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


def show_decode(compiler: Compiler, block_tokens: int | None, match: str) -> int:
    """Prints the decode table of a generation; returns how many targets are missed."""
    chip, missed = CHIPS[compiler.generation], 0
    limits = (TOKEN_BYTES / chip.hbm_bytes_per_cycle, TOKEN_BYTES_INT8 / chip.hbm_bytes_per_cycle)
    target = TARGETS_DECODE.get(chip.generation)
    plain = None
    print(f"\n{chip.generation}: decode, cycles per KV token")
    print(f"  {limits[0]:7.2f}  HBM limit; with int8 and scales {limits[1]:.2f}")
    for subject in decode_subjects(compiler.generation, block_tokens):
        if match not in subject.label:
            continue
        compiled = compiler.compile(subject.program, dict(subject.arguments))
        cycles = _cycles_or_reason(subject, compiled)
        if isinstance(cycles, str):
            print(f"  {cycles}  {subject.label}", flush=True)
            missed += "attnd" in subject.label and target is not None
            continue
        per_token, feature, verdict = cycles / subject.tokens, subject.label.rpartition(", ")[2], ""
        if subject.label.endswith("attnd, append") and target is not None:
            plain = plain or per_token
            verdict = _against(per_token, target)
            missed += per_token > target
        elif feature in FEATURES and plain is not None:
            more = per_token / plain - 1
            verdict = f": {more:+.1%}{_against(more, TARGET_FEATURE, '.0%')}"
            missed += more > TARGET_FEATURE
        print(f"  {per_token:7.2f}  {subject.label}{verdict}", flush=True)
        if subject.label.endswith("attnd, append"):
            missed += _show_batches(subject, compiled.schedules[0], limits[0], generation=chip.generation)
    return missed


def _show_batches(subject: Subject, schedule: Schedule, limit: float, *, generation: str) -> int:
    """Prints what real batches take, the sum of their passes; returns how many targets are missed."""
    config = DecodeConfig(**LLAMA | dict(subject.arguments) | {"append": True})
    costs, missed = PassCosts.of(config, schedule), 0
    for name, kv_lens in BATCHES.items():
        times = batch_cycles(config, costs, kv_lens) / (limit * sum(kv_lens))
        aimed = len(kv_lens) == LLAMA["num_rows"] and generation in TARGETS_BATCH
        missed += aimed and times > TARGET_BATCH
        print(
            f"           {name}: {times:.2f} x their HBM time{_against(times, TARGET_BATCH) * aimed}, in blocks of "
            f"{config.block_tokens}"
        )
    return missed


def show_prefill(compiler: Compiler, match: str) -> int:
    """Prints the prefill table of a generation; returns how many targets are missed."""
    target, missed = TARGETS_PREFILL.get(compiler.generation), 0
    print(f"\n{compiler.generation}: prefill, cycles per 128 q x 512 kv x 32 heads")
    for subject in prefill_subjects(compiler.generation):
        if match not in subject.label:
            continue
        compiled = compiler.compile(subject.program, dict(subject.arguments), timeout_s=600)
        cycles = _cycles_or_reason(subject, compiled)
        own = "attnd" in subject.label
        if isinstance(cycles, str):
            print(f"  {cycles}  {subject.label}", flush=True)
            missed += own and target is not None
            continue
        unit = cycles * KV_TOKENS // subject.tokens
        aimed = own and target is not None
        print(f"  {unit:7d}  {subject.label}{_against(unit, target) if own and target is not None else ''}", flush=True)
        missed += aimed and target is not None and unit > target
        if own:
            config = ChunkConfig(**LLAMA | {"num_rows": 8, "num_tokens": 1024, "append": True} | subject.arguments)
            whole = tile_cycles(compiled.schedules[0], config, TILE_CONTEXT)
            rate = TILE_CONTEXT // subject.tokens * cycles / whole
            missed += aimed and rate < TARGET_TILE
            print(
                f"           a whole tile at {TILE_CONTEXT} tokens: {rate:.0%} of this rate (target {TARGET_TILE:.0%})"
            )
    return missed


def _against(value: float, target: float, form: str = "") -> str:
    """Returns a target, and whether a value that should be no larger misses it."""
    return f" (target {target:{form}}{', MISSED' * (value > target)})"


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
    missed = 0
    for generation in arguments.generations:
        with Compiler(generation, with_schedules=True) as compiler:
            if arguments.only != "prefill":
                missed += show_decode(compiler, arguments.block_tokens, arguments.match)
            if arguments.only != "decode":
                missed += show_prefill(compiler, arguments.match)
    print(f"\n{missed} targets missed")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
