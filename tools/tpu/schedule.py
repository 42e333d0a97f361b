"""Reads the schedule that libtpu makes of a kernel: bundles, branches, loops, and the cycles of a path.

A TPU core issues one bundle of instructions a cycle, so bundles are cycles, stalls on memory aside. They are counted
in the dump `packed-bundles-post-ra`, which has the empty ones; in `final_bundles` those have been folded into delays
of their neighbours.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# A taken branch takes effect after this many more bundles.
DELAY_SLOTS: Final = 4
OPERATIONS: Final[Mapping[str, re.Pattern[str]]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "dma_starts": r"= dma\.\w+_to_\w+",
        "dma_waits": r"dma\.done\.wait",
        "matmuls": r"= vmatmul",
        "pushes": r"= vmatpush",
        "rotations": r"= vrot",
        "exponentials": r"= vpow2|= vexp",
        "loads": r"= vld\b",
        "stores": r"= vst\b|= vst\.",
        "fills": r"= vld \[vmem:\[#allocation\d+_spill",
        "spills": r"= vst \[vmem:\[#allocation\d+_spill",
        "bounds_checks": r"BoundsCheck",
    }.items()
}
_BUNDLE: Final = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*>*\s*\{(.*)$", re.DOTALL)
_BRANCH: Final = re.compile(r"sbr\.rel (?:\((!?%p\w+)\) )?target bundleno = (\d+)")
_COMMENT: Final = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True, slots=True)
class Loop:
    """Bundles `start` to `end - 1`, the last of which branch back."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Block:
    """Bundles that run one after another: no branch leads into their middle, none out of it."""

    start: int
    end: int
    next: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cost:
    """What a path costs and does."""

    cycles: int
    dma_starts: int
    matmuls: int

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.cycles + other.cycles, self.dma_starts + other.dma_starts, self.matmuls + other.matmuls)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The schedule of one kernel."""

    name: str
    bundles: tuple[str, ...]

    def count(self, operation: str, start: int = 0, end: int | None = None) -> int:
        """Returns how often an operation stands in bundles `start` to `end - 1`."""
        pattern = OPERATIONS[operation]
        return sum(len(pattern.findall(bundle)) for bundle in self.bundles[start:end])

    def cost(self, start: int, end: int) -> Cost:
        """Returns the cost of running through bundles `start` to `end - 1`."""
        return Cost(end - start, self.count("dma_starts", start, end), self.count("matmuls", start, end))

    def branch(self, at: int) -> tuple[bool, int] | None:
        """Returns whether the branch in a bundle has a condition, and its target; None if there is none."""
        match = _BRANCH.search(self.bundles[at])
        return (match[1] is not None, int(match[2])) if match else None

    def loops(self) -> list[Loop]:
        """Returns the loops, outer before inner ones."""
        found: dict[int, int] = {}
        for at in range(len(self.bundles)):
            branch = self.branch(at)
            if branch is not None and branch[1] <= at:
                found[branch[1]] = max(found.get(branch[1], 0), min(len(self.bundles), at + 1 + DELAY_SLOTS))
        return sorted((Loop(start, end) for start, end in found.items()), key=lambda loop: (loop.start, -loop.end))

    def main_loop(self) -> Loop | None:
        """Returns the innermost loop with the most matmuls of its own."""
        loops = self.loops()

        def own_matmuls(loop: Loop) -> int:
            inner = [each for each in loops if each != loop and loop.start <= each.start and each.end <= loop.end]
            outermost = [one for one in inner if not any(_holds(other, one) for other in inner)]
            nested = sum(self.count("matmuls", one.start, one.end) for one in outermost)
            return self.count("matmuls", loop.start, loop.end) - nested

        return max(loops, key=own_matmuls, default=None)

    def blocks(self, loop: Loop) -> list[Block]:
        """Returns the straight lines of a loop's body, in order; inner loops run once."""
        leaders = {loop.start}
        jumps: dict[int, tuple[bool, int]] = {}
        for at in range(loop.start, loop.end):
            branch = self.branch(at)
            if branch is None or branch[1] <= at:
                continue
            after = min(at + 1 + DELAY_SLOTS, loop.end)
            jumps[after] = (branch[0], min(branch[1], loop.end))
            leaders |= {after, jumps[after][1]}
        starts = sorted(leader for leader in leaders if leader < loop.end)
        blocks = []
        for start, end in zip(starts, [*starts[1:], loop.end], strict=True):
            conditional, target = jumps.get(end, (True, end))
            blocks.append(Block(start, end, (target,) if not conditional else tuple({end, target})))
        return blocks

    def cheapest(
        self,
        loop: Loop,
        *,
        dma_starts: int = 0,
        matmuls: int = 0,
        through: int | None = None,
        to: int | None = None,
    ) -> Cost | None:
        """Returns the cost of the fastest pass through a loop's body that does at least this much work.

        A full interior block fetches all pages of a later one and multiplies all of its own; the branches that it
        skips (edges, ends of sequences, recovery) only add cycles. None if no pass does that much.

        Args:
            loop: The loop.
            dma_starts: Copies that the pass must start.
            matmuls: Matrix products that it must issue.
            through: First bundle of a block that it must run through.
            to: First bundle of the block before which it ends; None for the loop's end.
        """
        end = loop.end if to is None else to
        reached: dict[int, set[Cost]] = {loop.start: {Cost(0, 0, 0)}}
        for block in self.blocks(loop):
            if block.start >= end:
                break
            if block.start == through:
                reached = {start: costs for start, costs in reached.items() if start == through}
            step = self.cost(block.start, block.end)
            for cost in reached.pop(block.start, ()):
                for following in block.next:
                    reached.setdefault(following, set()).add(cost + step)
            for following in block.next:
                if following in reached:
                    reached[following] = _undominated(reached[following])
        enough = [cost for cost in reached.get(end, ()) if cost.dma_starts >= dma_starts and cost.matmuls >= matmuls]
        return min(enough, key=lambda cost: cost.cycles, default=None)

    def longest_line(self, loop: Loop) -> Cost:
        """Returns the cost of the straight line with the most matmuls in a loop."""
        return max((self.cost(block.start, block.end) for block in self.blocks(loop)), key=lambda cost: cost.matmuls)


def read_schedules(folder: Path) -> list[Schedule]:
    """Returns the Pallas kernels in a folder of dumps, largest first."""
    schedules = []
    for path in folder.glob("*-packed-bundles-post-ra.txt"):
        if "schedule-analysis" in path.name:
            continue
        program = re.sub(r"-\d+-packed-bundles-post-ra\.txt$", "", path.name)
        analysis = next(folder.glob(f"{program}-*-schedule-analysis_packed-bundles-post-ra.txt"), None)
        # The analysis of the whole program ("TLP") quotes its kernels.
        if (
            program.endswith("-TLP")
            or analysis is None
            or "tpu_custom_call" not in analysis.read_text(errors="replace")
        ):
            continue
        schedules.append(parse(re.sub(r"^\d+-", "", program), path.read_text(errors="replace")))
    return sorted(schedules, key=lambda schedule: -len(schedule.bundles))


def parse(name: str, text: str) -> Schedule:
    """Returns the schedule in a dump's text."""
    bundles: list[str] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            assert int(match[1], 16) == len(bundles), (name, match[1], len(bundles))
            bundles.append(match[2])
        elif bundles:
            bundles[-1] += "\n" + line
    return Schedule(name=name, bundles=tuple(_COMMENT.sub("", bundle) for bundle in bundles))


def _holds(outer: Loop, inner: Loop) -> bool:
    return outer != inner and outer.start <= inner.start and inner.end <= outer.end


def _undominated(costs: Iterable[Cost]) -> set[Cost]:
    """Returns the costs that no other beats in cycles and work at once."""
    kept: list[Cost] = []
    for cost in sorted(costs, key=lambda cost: (cost.cycles, -cost.dma_starts, -cost.matmuls)):
        if not any(other.dma_starts >= cost.dma_starts and other.matmuls >= cost.matmuls for other in kept):
            kept.append(cost)
    return set(kept)
