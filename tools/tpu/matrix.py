"""Compiles what the TPU kernels say they support and what they refuse: `make tpu-compile`.

Fails on any difference between `unsupported` and the compiler. The cases cover every pair of values of any two axes
(generation, kernel, head_dim, dtypes, page size, heads, features), not the full product, and the edges of the limits.
A program that copies the layer's pool where it should take it over fails, too.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from typing import Any, Final

from attnd.kernels import pallas_blocks
from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, Layout
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.pallas_blocks import Features, Tuning
from attnd.kernels.pallas_plan import LaunchShape
from attnd.kernels.pallas_pool import PoolShape
from attnd.kernels.pallas_quantized import array_shapes
from attnd.kernels.tpu_chips import CHIPS
from tools.tpu.compiler import Compiler
from tools.tpu.matrix_jax import difference, jax_differences, sharding_differences

AXES: Final[Mapping[str, Sequence[Any]]] = {
    "heads": ((32, 8), (8, 1), (9, 3), (4, 4), (12, 2), (14, 2), (40, 10), (64, 8), (32, 32)),
    "page_size": (16, 128, 8, 64, 32, 256, 48),
    "head_dim": (128, 64, 256, 80, 96, 192),
    "generation": ("v6e", "v5e", "tpu7x", "v5p", "v4"),
    "kv_dtype": ("bfloat16", "float8_e4m3fn", "int8", "float32", "float8_e5m2"),
    "features": ("append", "none", "windowed", "capped", "all"),
    "kernel": ("decode", "long", "short"),
    "q_dtype": ("bfloat16", "float32"),
}
SHORT: Final = 4
SHAPES: Final[Mapping[str, LaunchShape]] = {
    "decode": LaunchShape(query_block=1, num_tokens=64, num_rows=64, pages_per_seq=64),
    "split": LaunchShape(query_block=1, num_tokens=64, num_rows=64, pages_per_seq=64),
    "short": LaunchShape(query_block=32, num_tokens=256, num_rows=32, pages_per_seq=64),
    "long": LaunchShape(query_block=128, num_tokens=512, num_rows=8, pages_per_seq=64),
}
# Large enough for XLA to have no other place for it: pools of a few MB are moved to VMEM and back.
POOL_BYTES: Final = 1 << 30
FEATURES: Final[Mapping[str, Features]] = {
    "none": Features(append=False),
    "append": Features(append=True),
    "windowed": Features(append=True, windowed=True),
    "capped": Features(append=True, capped=True),
    "read": Features(append=False, capped=True, return_lse=True),
    "all": Features(append=True, windowed=True, capped=True, return_lse=True),
}
TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A program to compile, over a layer of about `POOL_BYTES`.

    `kernel` is one of "decode", "short", "long" and, for int8 pages of layout SPLIT, "split"; `shape` is that of the
    kernel unless given.
    """

    heads: tuple[int, int]
    page_size: int
    head_dim: int
    generation: str
    kv_dtype: str
    features: str
    kernel: str
    q_dtype: str
    shape: LaunchShape | None = None

    @property
    def spec(self) -> CacheSpec:
        """The cache."""
        page = CacheSpec(
            layout=Layout.SPLIT if self.kernel == "split" else Layout.INTERLEAVED, num_layers=1, num_pages=1,
            page_size=self.page_size, num_kv_heads=self.heads[1], head_dim=self.head_dim,
            dtype=CACHE_DTYPES[self.kv_dtype],
        )  # fmt: skip
        return replace(page, num_pages=POOL_BYTES // PoolShape.of(page).size_bytes)

    @property
    def pool_bytes(self) -> int:
        """Bytes of the largest array of the layer: of all of it, or of K where K and V are apart."""
        if self.kernel == "split":
            return math.prod(array_shapes(self.spec)[0])
        return PoolShape.of(self.spec).size_bytes

    @property
    def label(self) -> str:
        """What tells it from others."""
        shape = f" {self.shape.num_rows} x {self.shape.pages_per_seq} slots" if self.shape else ""
        return (
            f"{self.generation} {self.kernel} {self.heads[0]}/{self.heads[1]} heads, head_dim {self.head_dim}, "
            f"q {self.q_dtype}, kv {self.kv_dtype}, page {self.page_size}, {self.features}{shape}"
        )

    def refusal(self) -> str | None:
        """Returns what our analysis says: why it cannot be, or None."""
        tuning = Tuning(chip=CHIPS[self.generation])
        if reason := pallas_blocks.unsupported(self.spec, tuning):
            return reason
        try:
            self.config(tuning)
        except UnsupportedError as error:
            return str(error)
        return None

    def config(self, tuning: Tuning) -> Any:
        """Returns the kernel's config."""
        shape = self.shape or SHAPES[self.kernel]
        make = pallas_blocks.decode_config if shape.is_decode else pallas_blocks.chunk_config
        return make(self.spec, self.heads[0], self.q_dtype, shape, FEATURES[self.features], tuning)


def covering(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yields combinations of values that have every pair of values of any two axes at least once."""
    names = list(axes)
    missing = {
        ((a, x), (b, y)) for a, b in combinations(names, 2) for x in axes[a] for y in axes[b]
    }  # fmt: skip
    order = {(name, value): i for name in names for i, value in enumerate(axes[name])}
    while missing:
        row: dict[str, Any] = {}
        seed = min(missing, key=lambda pair: (order[pair[0]] + order[pair[1]], str(pair)))
        row |= dict(seed)
        for name in names:
            if name not in row:
                row[name] = max(
                    axes[name],
                    key=lambda value: (
                        sum(_pair(names, (name, value), other) in missing for other in row.items()),
                        -order[name, value],
                    ),
                )
        missing -= {_pair(names, one, other) for one, other in combinations(row.items(), 2)}
        yield row


def _pair(names: list[str], one: tuple[str, Any], other: tuple[str, Any]) -> tuple[Any, Any]:
    return (one, other) if names.index(one[0]) < names.index(other[0]) else (other, one)


def limits(generation: str) -> Iterator[Case]:
    """Yields cases at both sides of a limit: page tables that just fit SMEM and that do not, heads that do not fit."""
    base: dict[str, Any] = {
        "heads": (32, 8), "page_size": 16, "head_dim": 128, "generation": generation, "kv_dtype": "bfloat16",
        "features": "append", "q_dtype": "bfloat16",
    }  # fmt: skip
    for slots in (3584, 4096):
        shape = LaunchShape(query_block=1, num_tokens=64, num_rows=64, pages_per_seq=slots)
        yield Case(**base, kernel="decode", shape=shape)
    for slots in (28672, 32768):
        shape = LaunchShape(query_block=128, num_tokens=512, num_rows=8, pages_per_seq=slots)
        yield Case(**base, kernel="long", shape=shape)


def wide(generation: str) -> Iterator[Case]:
    """Yields cases whose rows are wider than a vector, at both sides of what the compiler loads and copies of them."""
    base: dict[str, Any] = {"head_dim": 256, "generation": generation, "q_dtype": "bfloat16"}
    for kernel, heads, page_size, kv_dtype, features in (
        ("decode", (32, 8), 16, "float32", "append"),  # no strided loads
        ("decode", (8, 1), 8, "int8", "append"),  # half a tile a page
        ("decode", (8, 1), 16, "int8", "append"),
        ("decode", (16, 8), 16, "float8_e4m3fn", "append"),  # a token is half a tile
        ("decode", (8, 1), 8, "bfloat16", "append"),
        ("long", (4, 4), 16, "bfloat16", "append"),  # a token is a tile, on 7x half of one
        ("long", (8, 1), 16, "bfloat16", "append"),  # a quarter
        ("short", (8, 1), 8, "int8", "none"),  # half a tile a page
        ("short", (16, 8), 16, "int8", "append"),
    ):
        yield Case(**base, kernel=kernel, heads=heads, page_size=page_size, kv_dtype=kv_dtype, features=features)


def quantized(generation: str) -> Iterator[Case]:
    """Yields cases of int8 pages with a scale for each token."""
    for heads, page_size, head_dim, features in (
        ((32, 8), 16, 128, "none"), ((32, 8), 128, 128, "read"), ((9, 3), 16, 64, "none"), ((8, 1), 48, 80, "read"),
        ((16, 8), 8, 256, "none"), ((32, 32), 64, 96, "read"), ((4, 4), 32, 192, "none"),
    ):  # fmt: skip
        yield Case(
            heads=heads, page_size=page_size, head_dim=head_dim, generation=generation, kv_dtype="int8",
            features=features, kernel="split", q_dtype="bfloat16",
        )  # fmt: skip


def moves(generation: str) -> Iterator[Case]:
    """Yields caches whose pages are written, cleared, copied and appended to: each way of their memory to be tiled."""
    for kernel, heads, page_size, head_dim, kv_dtype in (
        ("decode", (32, 8), 16, 128, "bfloat16"), ("decode", (9, 3), 16, 64, "float32"),
        ("decode", (16, 8), 16, 256, "int8"), ("decode", (8, 1), 8, 256, "float8_e4m3fn"),
        ("decode", (4, 4), 128, 192, "bfloat16"), ("split", (32, 8), 16, 128, "int8"),
        ("split", (16, 8), 16, 256, "int8"),
    ):  # fmt: skip
        yield Case(
            heads=heads, page_size=page_size, head_dim=head_dim, generation=generation, kv_dtype=kv_dtype,
            features="none", kernel=kernel, q_dtype="bfloat16",
        )  # fmt: skip


def program_arguments(case: Case, *, refused: bool) -> dict[str, Any]:
    """Returns what the child needs to build a case's program; a refused one is built all the same."""
    return {
        "spec": _portable(case.spec),
        "num_q_heads": case.heads[0],
        "q_dtype": case.q_dtype,
        "shape": asdict(case.shape or SHAPES[case.kernel]),
        "features": asdict(FEATURES[case.features]),
        "generation": case.generation,
        "limits": not refused,
    }


def _portable(spec: CacheSpec) -> dict[str, Any]:
    return asdict(spec) | {"layout": str(spec.layout), "dtype": spec.dtype.name}


def run(cases: Sequence[Case], *, others: bool) -> int:
    """Compiles the cases, prints every verdict, and returns how many differ.

    Args:
        cases: Programs of our kernels.
        others: Whether what moves pages, JAX's kernels and sharding are checked, too.
    """
    differing = 0
    for generation in dict.fromkeys(case.generation for case in cases):
        with Compiler(generation) as compiler:
            verdicts = [_verdicts(compiler, [case for case in cases if case.generation == generation])]
            if others and generation in {"v6e", "v5e", "tpu7x"}:
                verdicts += [_moves(compiler)]
            if others and generation in {"v6e", "v5e"}:
                verdicts += [jax_differences(compiler), sharding_differences(compiler)]
            started = time.monotonic()
            for label, differs in chain(*verdicts):
                differing += differs is not None
                seconds, started = time.monotonic() - started, time.monotonic()
                print(f"{'FAIL' if differs else 'ok':4} {seconds:4.0f} s  {label}: {differs or 'agreed'}", flush=True)
    return differing


def _verdicts(compiler: Compiler, cases: Sequence[Case]) -> Iterator[tuple[str, str | None]]:
    """Yields each case and how analysis and compiler differ; None if they agree."""
    for case in cases:
        refusal = case.refusal()
        arguments = program_arguments(case, refused=refusal is not None)
        compiled = compiler.compile("tools.tpu.own:attnd", arguments, timeout_s=TIMEOUT_S)
        differs = difference(refusal, compiled)
        copied = compiled.copy_of_pool(case.pool_bytes, donated=case.kernel != "split")
        yield case.label + (f" ({refusal})" if refusal else ""), differs or copied


def _moves(compiler: Compiler) -> Iterator[tuple[str, str | None]]:
    """Yields what moves pages, and what goes wrong; None if nothing does."""
    for case in moves(compiler.generation):
        for move in ("write", "append") if case.kernel == "split" else ("write", "clear", "copy", "append"):
            arguments = {"spec": _portable(case.spec), "move": move}
            compiled = compiler.compile("tools.tpu.own:moved", arguments, timeout_s=TIMEOUT_S)
            layout = f"head_dim {case.head_dim}, {case.kv_dtype}, page {case.page_size}, {case.spec.layout}"
            label = f"{case.generation} {move} pages of {case.heads[1]} heads, {layout}"
            yield label, difference(None, compiled) or compiled.copy_of_pool(case.pool_bytes)


def main() -> None:
    """Compiles the matrix."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generations", nargs="*", default=list(CHIPS), help=f"of {', '.join(CHIPS)}")
    parser.add_argument("--short", action="store_true", help="a few cases only")
    parser.add_argument("--list", action="store_true", help="only prints the cases and what the analysis says")
    arguments = parser.parse_args()
    cases = [Case(**row) for row in covering(AXES)]
    if arguments.short:
        cases = cases[:SHORT]
    else:
        cases += [case for generation in ("v6e", "v5e") for case in limits(generation)]
        cases += [case for generation in ("v6e", "v5e", "tpu7x") for case in wide(generation)]
        cases += [case for generation in ("v6e", "v5e", "tpu7x") for case in quantized(generation)]
    cases = [case for case in cases if case.generation in arguments.generations]
    if arguments.list:
        for case in cases:
            print(f"{case.label}: {case.refusal() or 'supported'}")
        return
    differing = run(cases, others=not arguments.short)
    print(f"{differing} verdicts differ from the compiler's")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    main()
