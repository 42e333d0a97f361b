"""Chooses block sizes by their schedules and writes `kernels/block_sizes.json`: `make tune-blocks`.

Every candidate is compiled and scored: decode by the sum of passes over 64 ragged sequences of 100 to 2,000 tokens and
over 8 of 16k, prefill by the cycles of a full interior block for each query and token. Shapes that are not here use a
safe default.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from attnd.kernels import pallas_blocks
from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_decode_config import DecodeConfig
from attnd.kernels.tpu_chips import CHIPS
from tools.tpu.compiler import ROOT, Compiler
from tools.tpu.passes import PassCosts, batch_cycles
from tools.tpu.schedule import Schedule
from tools.tpu.shapes import LLAMA

TABLE: Final = ROOT / "kernels" / pallas_blocks.TABLE
# Heads, head_dim and pages of models that people serve: Llama 3, Qwen 3, Mistral; Gemma; Qwen 2.5; SmolLM2.
SHAPES: Final[Sequence[Mapping[str, Any]]] = (
    {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "kv_dtype": "bfloat16"},
    {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 128, "kv_dtype": "bfloat16"},
    {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256, "page_size": 16, "kv_dtype": "bfloat16"},
    {"num_q_heads": 28, "num_kv_heads": 4, "head_dim": 128, "page_size": 16, "kv_dtype": "bfloat16"},
)
DECODE_TOKENS: Final = (256, 512, 1024, 2048)
CHUNK_SIZES: Final = ((128, 512), (128, 1024))
LONG: Final = (16_384,) * 8
TIMEOUT_S: Final = 600.0


def decode_scores(compiler: Compiler, shape: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields the time of two batches over that of their memory traffic, and the block size.

    Below the memory's time, cycles hardly count: a hundredth of them does, to tell sizes apart.
    """
    short = np.random.default_rng(0).integers(100, 2001, 64).tolist()
    for block_tokens in DECODE_TOKENS:
        arguments = _arguments(shape) | {"block_tokens": block_tokens}
        try:
            config = DecodeConfig(**LLAMA | arguments | {"append": True})
        except ValueError:
            continue
        if config.vmem_bytes > CHIPS[compiler.generation].vmem_bytes - pallas_blocks.VMEM_RESERVE_BYTES:
            continue
        compiled = compiler.compile("tools.tpu.own:decode", arguments, timeout_s=TIMEOUT_S)
        if compiled.error is None:
            costs = PassCosts.of(config, compiled.schedules[0])
            token_bytes = config.rows_per_token * config.lanes * config.kv_itemsize
            token_cycles = token_bytes / CHIPS[compiler.generation].hbm_bytes_per_cycle
            times = [batch_cycles(config, costs, kv_lens) / (token_cycles * sum(kv_lens)) for kv_lens in (short, LONG)]
            yield sum(max(1.0, time) + 0.01 * time for time in times) / len(times), {"block_tokens": block_tokens}


def chunk_scores(compiler: Compiler, shape: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yields cycles for each query and token of a full block, in thousandths, and the sizes of tile and block."""
    for query_block, block_tokens in CHUNK_SIZES:
        sizes = {"query_block": query_block, "block_tokens": block_tokens}
        arguments = _arguments(shape) | sizes
        base = LLAMA | {"num_rows": 8, "num_tokens": 1024, "append": True}
        config = ChunkConfig(**base | arguments)
        if config.vmem_limit_bytes > CHIPS[compiler.generation].vmem_bytes - pallas_blocks.VMEM_RESERVE_BYTES:
            continue
        compiled = compiler.compile("tools.tpu.own:chunk", arguments, timeout_s=TIMEOUT_S)
        if compiled.error is None:
            cycles = _interior(compiled.schedules[0], config)
            yield 1000 * cycles / (query_block * block_tokens), sizes


def tune(generation: str) -> list[dict[str, Any]]:
    """Returns the best sizes for each shape on a generation."""
    entries = []
    with Compiler(generation, with_schedules=True) as compiler:
        for shape in SHAPES:
            for kernel, scores in (("decode", decode_scores), ("chunk", chunk_scores)):
                tried = list(scores(compiler, shape))
                for score, sizes in tried:
                    print(f"{generation} {kernel} {dict(shape)} {sizes}: {score:.3f}", flush=True)
                if tried:
                    score, sizes = min(tried, key=lambda one: one[0])
                    key = {name: shape[name] for name in ("num_kv_heads", "head_dim", "page_size", "kv_dtype")}
                    entries.append({"kernel": kernel} | key | sizes | {"score": round(score, 3)})
    return entries


def _arguments(shape: Mapping[str, Any]) -> dict[str, Any]:
    page_size = shape["page_size"]
    return dict(shape) | {"num_pages": 65536 // page_size, "pages_per_seq": 2048 // page_size}


def _interior(schedule: Schedule, config: ChunkConfig) -> int:
    loop = schedule.main_loop()
    assert loop is not None
    matmuls = int(schedule.longest_line(loop).matmuls * 0.9)  # the last block of a tile does a little more
    cost = schedule.cheapest(loop, dma_starts=config.fetches_per_block, matmuls=matmuls)
    assert cost is not None
    return cost.cycles


def main() -> None:
    """Writes the table; generations that are not asked for keep their entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generations", nargs="*", default=["v6e", "v5e", "tpu7x"], help=f"of {', '.join(CHIPS)}")
    arguments = parser.parse_args()
    for generation in arguments.generations:
        table = json.loads(TABLE.read_text()) | {generation: tune(generation)}
        lines = [
            f"  {json.dumps(name)}: [\n" + ",\n".join(f"    {json.dumps(entry)}" for entry in table[name]) + "\n  ]"
            for name in sorted(table)
        ]
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
