"""Chooses block sizes by their schedules and writes `kernels/block_sizes.json`: `make tune-blocks`.

Every candidate is compiled and scored: decode by the sum of passes over 64 ragged sequences of 100 to 2,000 tokens and
over 8 of 16k, prefill by a whole tile at the end of 4,096 tokens. Of candidates that score alike, the one with the
fewest cycles a token in a full block wins. Shapes that are not here use a safe default.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from attnd.kernels import pallas_blocks
from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_decode_config import DecodeConfig
from attnd.kernels.tpu_chips import CHIPS
from tools.tpu.compiler import ROOT, Compiler
from tools.tpu.passes import PassCosts, batch_cycles, interior_cycles, tile_cycles
from tools.tpu.shapes import LLAMA

TABLE: Final = ROOT / "kernels" / pallas_blocks.TABLE
# Heads, head_dim and pages of models that people serve: Llama 3 8B, Qwen 3 8B, Mistral; Qwen 2.5 7B; Gemma 2 9B.
SHAPES: Final[Sequence[Mapping[str, Any]]] = (
    {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "kv_dtype": "bfloat16"},
    {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 128, "kv_dtype": "bfloat16"},
    {"num_q_heads": 28, "num_kv_heads": 4, "head_dim": 128, "page_size": 16, "kv_dtype": "bfloat16"},
    {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "kv_dtype": "float8_e4m3fn"},
    {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256, "page_size": 16, "kv_dtype": "bfloat16"},
)
DECODE_TOKENS: Final = (512, 1024, 2048)
# Tokens times kv heads: larger blocks take minutes to compile.
DECODE_COLUMNS_MAX: Final = 8192
# Likewise larger ones; the chunk kernel's tiles hide its pages, so that its sizes are tried with the first shape alone.
CHUNK_TOKENS: Final = (256, 512)
CHUNK_SHAPES: Final = SHAPES[:1]
QUERIES: Final = 128
CONTEXT: Final = 4096
LONG: Final = (16_384,) * 8
# Scores so near each other are alike: static cycles do not tell more. Larger blocks then win, because a long context
# has room for the copies that a real memory delivers late, and contexts grow.
ALIKE: Final = 1.06
TIMEOUT_S: Final = 300.0


class Candidate(NamedTuple):
    """Sizes that were compiled.

    Attributes:
        score: The smaller the better.
        full: Cycles a token of a full block.
        sizes: What the table gets.
    """

    score: float
    full: float
    sizes: Mapping[str, int]


def decode_candidates(compiler: Compiler, shape: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yields block sizes; the score is the time of two batches over that of their memory traffic.

    Below the memory's time, cycles hardly count: a hundredth of them does, to tell sizes apart.
    """
    chip = CHIPS[compiler.generation]
    short = np.random.default_rng(0).integers(100, 2001, 64).tolist()
    for block_tokens in DECODE_TOKENS:
        if block_tokens * shape["num_kv_heads"] > DECODE_COLUMNS_MAX:
            continue
        arguments = _arguments(shape) | {"block_tokens": block_tokens}
        config = DecodeConfig(**LLAMA | arguments | {"append": True})
        if config.vmem_bytes > chip.vmem_bytes - pallas_blocks.VMEM_RESERVE_BYTES:
            continue
        compiled = compiler.compile("tools.tpu.own:decode", arguments, timeout_s=TIMEOUT_S)
        if compiled.error is not None:
            continue
        try:
            costs = PassCosts.of(config, compiled.schedules[0])
        except LookupError as error:
            print(f"{compiler.generation} decode {dict(shape)} {block_tokens}: cannot be scored, {error}")
            continue
        token_cycles = config.rows_per_token * config.lanes * config.kv_itemsize / chip.hbm_bytes_per_cycle
        times = [batch_cycles(config, costs, kv_lens) / (token_cycles * sum(kv_lens)) for kv_lens in (short, LONG)]
        score = sum(max(1.0, time) + 0.01 * time for time in times) / len(times)
        print(f"  {' and '.join(f'{time:.3f}' for time in times)} x the time of the memory")
        yield Candidate(score, costs.fast / block_tokens, {"block_tokens": block_tokens})


def chunk_candidates(compiler: Compiler, shape: Mapping[str, Any]) -> Iterator[Candidate]:
    """Yields sizes of tile and block; the score is the cycles of a tile for each token that it sees."""
    chip = CHIPS[compiler.generation]
    for block_tokens in CHUNK_TOKENS if shape in CHUNK_SHAPES else ():
        sizes = {"query_block": QUERIES, "block_tokens": block_tokens}
        arguments = _arguments(shape) | sizes | {"fold": chip.mxu_depth == 256}
        config = ChunkConfig(**LLAMA | {"num_rows": 8, "num_tokens": 1024, "append": True} | arguments)
        if config.vmem_limit_bytes > chip.vmem_bytes - pallas_blocks.VMEM_RESERVE_BYTES:
            continue
        compiled = compiler.compile("tools.tpu.own:chunk", arguments, timeout_s=TIMEOUT_S)
        if compiled.error is None:
            schedule = compiled.schedules[0]
            full = interior_cycles(schedule, config) / block_tokens
            yield Candidate(tile_cycles(schedule, config, CONTEXT) / CONTEXT, full, sizes)


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the candidate with the fastest full blocks of those that score alike with the best."""
    best = min(candidate.score for candidate in candidates)
    return min((one for one in candidates if one.score <= ALIKE * best), key=lambda one: (one.full, one.score))


def tune(generation: str) -> list[dict[str, Any]]:
    """Returns the best sizes for each shape on a generation."""
    entries = []
    with Compiler(generation, with_schedules=True) as compiler:
        for shape in SHAPES:
            for kernel, candidates in (("decode", decode_candidates), ("chunk", chunk_candidates)):
                tried = []
                for one in candidates(compiler, shape):
                    tried.append(one)
                    print(
                        f"{generation} {kernel} {dict(shape)} {dict(one.sizes)}: score {one.score:.3f}, "
                        f"{one.full:.2f} cycles a token in a full block",
                        flush=True,
                    )
                if tried:
                    best = choose(tried)
                    key = {name: shape[name] for name in ("num_kv_heads", "head_dim", "page_size", "kv_dtype")}
                    entries.append({"kernel": kernel} | key | dict(best.sizes) | {"score": round(best.score, 3)})
    return entries


def _arguments(shape: Mapping[str, Any]) -> dict[str, Any]:
    page_size = shape["page_size"]
    return dict(shape) | {"num_pages": 65536 // page_size, "pages_per_seq": 2048 // page_size}


def main() -> None:
    """Writes the table; generations that are not asked for keep their entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generations", nargs="*", default=["v6e", "v5e", "tpu7x"], help=f"of {', '.join(CHIPS)}")
    arguments = parser.parse_args()
    for generation in arguments.generations:
        entries = tune(generation)
        table = json.loads(TABLE.read_text()) | {generation: entries}  # read last: others may run at the same time
        lines = [
            f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in table[name]) + "\n  ]"
            for name in sorted(table)
        ]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
