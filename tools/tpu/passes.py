"""What work of real lengths costs, each path at its cycles: a decode batch, and a tile of the chunk kernel.

The decode kernel walks blocks of rows; a pass works on two neighbouring blocks and costs what the larger of them needs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnd.kernels.pallas_chunk_config import ChunkConfig
from attnd.kernels.pallas_decode_config import DecodeConfig
from tools.tpu.schedule import Loop, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Cycles of the passes of one program.

    Attributes:
        fast: A pass over full blocks that fetches a full one.
        masked: A pass of the general path for each of `DecodeConfig.pass_tokens`, without what follows.
        fetch_full: Fetching a full block in a masked pass.
        fetch_strip: Fetching a page of a block that is not full.
        clear_group: Zeroing some stale rows of a block that is not full.
        row: What the end of a row adds: its new token, and the part of a page before it.
        once: What runs once.
    """

    fast: int
    masked: tuple[int, ...]
    fetch_full: int
    fetch_strip: int
    clear_group: int
    row: int
    once: int

    @classmethod
    def of(cls, config: DecodeConfig, schedule: Schedule) -> "PassCosts":
        """Reads the costs out of a schedule.

        The code stands in this order: the fast pass, the fetch of a full block, that of any other, and a masked pass
        for each size behind the clearing of its block.

        Raises:
            LookupError: The compiler has arranged it otherwise.
        """
        loop = schedule.main_loop()
        assert loop is not None
        fast_line, *masked_lines = (
            block for block in schedule.blocks(loop) if schedule.cost(block.start, block.end).matmuls
        )
        assert len(masked_lines) == len(config.pass_tokens), (len(masked_lines), config.pass_tokens)
        fast = schedule.cheapest(loop, dma_starts=config.strips_per_block, through=fast_line.start)
        masked = [schedule.cheapest(loop, through=line.start) for line in masked_lines]
        inner = [one for one in schedule.loops() if loop.start < one.start and one.end < loop.end]
        blocks = schedule.blocks(loop)
        # The compiler may have put a short one into its neighbours, under predicates: then it costs nothing more.
        fetches = (
            block.end - block.start
            for block in blocks
            if block.start > fast_line.start
            and schedule.cost(block.start, block.end).dma_starts == config.strips_per_block
        )
        single = [block for block in blocks if schedule.cost(block.start, block.end).dma_starts == 1]
        single = [block for block in single if not any(one.start == block.start for one in inner)]
        if fast is None:
            raise LookupError("no pass through the schedule does a full block's work")
        return cls(
            fast=fast.cycles,
            masked=tuple(cost.cycles for cost in masked if cost is not None),
            fetch_full=next(fetches, 0),
            fetch_strip=_cycles(inner[0]),
            clear_group=_cycles(inner[1]),
            row=sum(block.end - block.start for block in single),
            once=len(schedule.bundles) - _cycles(loop),
        )


def batch_cycles(config: DecodeConfig, costs: PassCosts, kv_lens: Sequence[int]) -> int:
    """Returns the cycles of a batch: the sum of its passes."""
    full, sizes = config.block_tokens, np.array(config.pass_tokens)
    blocks = [0, *(tokens for kv_len in kv_lens for tokens in _blocks(config, kv_len)), 0, 0, 0]
    total = costs.once + costs.row * len(kv_lens)
    for current, following, fetched in zip(blocks, blocks[1:], blocks[3:], strict=False):
        if current == following == fetched == full:
            total += costs.fast
            continue
        chosen = int(np.searchsorted(sizes, max(current, following)))
        total += costs.masked[chosen]
        total += costs.fetch_full if fetched == full else costs.fetch_strip * -(-fetched // config.strip_tokens)
        total += costs.clear_group * ((sizes[chosen] - current) // config.cleared_tokens)
    return int(total)


def interior_cycles(schedule: Schedule, config: ChunkConfig) -> int:
    """Returns the cycles of a full block of the chunk kernel that no mask touches."""
    loop = schedule.main_loop()
    assert loop is not None
    matmuls = int(schedule.longest_line(loop).matmuls * 0.9)  # the last block of a tile does a little more
    cost = schedule.cheapest(loop, dma_starts=config.fetches_per_block, matmuls=matmuls)
    assert cost is not None
    return cost.cycles


def tile_cycles(schedule: Schedule, config: ChunkConfig, context: int) -> int:
    """Returns the cycles of a tile of the chunk kernel at the end of `context` tokens, whole blocks of them.

    The last block takes edge steps, the others are interior.
    """
    main = schedule.main_loop()
    assert main is not None
    loops = schedule.loops()
    outer = min((one for one in loops if _inside(main, one)), key=_cycles)
    nested = [one for one in loops if _inside(one, outer)]
    once = _cycles(outer) - sum(_cycles(one) for one in nested if not any(_inside(one, two) for two in nested))
    step = max(
        (one for one in nested if _inside(one, main)), key=lambda one: schedule.count("matmuls", one.start, one.end)
    )
    interior = (context // config.block_tokens - 1) * interior_cycles(schedule, config)
    return interior + config.block_tokens // config.edge_tokens * _cycles(step) + once


def _blocks(config: DecodeConfig, left: int) -> Iterator[int]:
    """Yields the tokens of a row's blocks, as `pallas_decode_items.Items.tokens` cuts them."""
    full, unit = config.block_tokens, config.split_tokens
    while left > 0:
        half = -(-left // (2 * unit)) * unit
        tokens = full if left >= 2 * full else half if left > full else left
        yield min(tokens, left)
        left -= tokens


def _cycles(loop: Loop) -> int:
    return loop.end - loop.start


def _inside(inner: Loop, outer: Loop) -> bool:
    return inner != outer and outer.start <= inner.start and inner.end <= outer.end
