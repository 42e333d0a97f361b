"""How often the chunk kernel would run a tile again on a real model's attention: `python -m benchmarks.reruns`.

SmolLM2-135M reads a chat prompt and this repository's licence, a text that does not change. For every tile of every
layer the kernel's own condition is worked out in NumPy: do the weights of a column, relative to the anchor that its
edge steps leave, sum to too much?
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np

from attnd.kernels.pallas_chunk_compute import LOG2E, TOTAL_MAX
from examples.smollm2.chat import ChatTokenizer
from examples.smollm2.llama import Llama
from examples.smollm2.model_file import Floats, ModelFile, installed_model_path

PROMPT: Final = "What is gravity?"
TEXT: Final = Path(__file__).parents[1] / "LICENSE"
QUERY_BLOCK: Final = 128
BLOCKS: Final = (512, 128)
SUBLANES: Final = 8


def totals_of_tiles(q: Floats, k: Floats, sm_scale: float, query_block: int, block_tokens: int) -> list[float]:
    """Returns, for each tile with interior blocks, the largest sum of weights that the kernel would hold.

    Args:
        q: float32 [q_len, num_q_heads, head_dim], of the last tokens of a sequence.
        k: float32 [kv_len, num_kv_heads, head_dim].
        sm_scale: Factor of the scores.
        query_block: Queries of a tile.
        block_tokens: Tokens of a block.
    """
    q, k = (x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in (q, k))
    k = k.repeat(q.shape[1] // k.shape[1], axis=1).transpose(1, 2, 0)
    totals = []
    for first in range(0, len(q), query_block):
        tile = q[first : first + query_block]
        position = k.shape[2] - len(q) + first
        interior, end = (position + 1) // block_tokens * block_tokens, position + len(tile)
        if interior == 0:
            continue
        scores = tile.transpose(1, 0, 2) @ k[:, :, :end] * np.float32(sm_scale * LOG2E)
        scores[:, np.arange(end) > position + np.arange(len(tile))[:, np.newaxis]] = -np.inf
        # A tile begins with what needs a mask; what no query sees then leaves the first of the others as the anchor.
        edge = scores[:, :, interior:].max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp2(scores[:, :, :interior].astype(np.float64) - edge)
        totals.append(float(weights.reshape(*weights.shape[:2], -1, SUBLANES).sum(2).max()))
    return totals


class WatchedStep:
    """Attention of the model over one new sequence, which keeps the largest sum of every tile.

    Attributes:
        totals: For each block size, the sums of all tiles with interior blocks, in all layers so far.
        num_tiles: All tiles.
    """

    def __init__(self, sm_scale: float) -> None:
        self.totals: dict[int, list[float]] = {block: [] for block in BLOCKS}
        self.num_tiles = 0
        self._sm_scale = sm_scale

    def attend(self, layer: int, q: Floats, k: Floats, v: Floats) -> Floats:  # noqa: ARG002 - as `Step`
        """Attends over the new keys and values, which are all that there are."""
        self.num_tiles += -(-len(q) // QUERY_BLOCK)
        for block, totals in self.totals.items():
            totals.extend(totals_of_tiles(q, k, self._sm_scale, QUERY_BLOCK, block))
        keys, values = (x.repeat(q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        scores = q.transpose(1, 0, 2) @ keys.transpose(1, 2, 0) * np.float32(self._sm_scale)
        scores[:, np.triu(np.ones((len(q), len(q)), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out: Floats = (weights / weights.sum(-1, keepdims=True) @ values.transpose(1, 0, 2)).transpose(1, 0, 2)
        return np.ascontiguousarray(out)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each text and block size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reruns", description=__doc__)
    parser.add_argument("--tokens", type=int, default=1024, metavar="N", help="tokens of the long text; default 1024")
    chosen = parser.parse_args(arguments)
    file = ModelFile(installed_model_path())
    model, tokenizer = Llama(file), ChatTokenizer(file.vocabulary())
    texts = {
        "prompt": tokenizer.encode_chat([{"role": "user", "content": PROMPT}]),
        "licence": tokenizer.encode(TEXT.read_text())[: chosen.tokens],
    }
    for name, token_ids in texts.items():
        step = WatchedStep(model.config.sm_scale)
        ids = np.array(token_ids, np.int64)
        model.forward(ids, np.arange(len(ids)), np.array([len(ids) - 1]), step)
        for block, totals in step.totals.items():
            reruns = sum(not total <= TOTAL_MAX for total in totals)
            largest = f", largest sum 2^{np.log2(max(totals)):.1f}" if totals else ""
            print(
                f"{name}: {len(ids)} tokens, blocks of {block}: {reruns} reruns of {step.num_tiles} tiles, "
                f"{len(totals)} of which have interior blocks{largest}; limit 2^{np.log2(TOTAL_MAX):g}"
            )


if __name__ == "__main__":
    main()
