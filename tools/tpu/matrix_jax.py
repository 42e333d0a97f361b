"""Parts of `make tpu-compile`: JAX's kernels have the limits that `jax_ops` tells, and ours can be sharded."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from attnd.kernels import jax_ops
from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, Layout
from tools.tpu.compiler import Compiled, Compiler

RAGGED: Final[tuple[Mapping[str, Any], ...]] = (
    {}, {"num_q_heads": 8, "num_kv_heads": 1}, {"num_q_heads": 4, "num_kv_heads": 4},
    {"num_q_heads": 12, "num_kv_heads": 2}, {"num_q_heads": 7, "num_kv_heads": 1},
    {"num_q_heads": 14, "num_kv_heads": 2}, {"num_q_heads": 40, "num_kv_heads": 10},
    {"num_q_heads": 6, "num_kv_heads": 3}, {"num_q_heads": 3, "num_kv_heads": 3},
    {"kv_dtype": "float8_e4m3fn"}, {"kv_dtype": "float8_e4m3fn", "num_kv_heads": 1}, {"kv_dtype": "int8"},
    {"kv_dtype": "float32"}, {"kv_dtype": "float16", "q_dtype": "float16"}, {"head_dim": 64}, {"head_dim": 256},
    {"page_size": 1}, {"page_size": 128, "pages_per_block": 4},
)  # fmt: skip
PAGED: Final[tuple[Mapping[str, Any], ...]] = (
    {}, {"head_dim": 64}, {"head_dim": 256}, {"kv_dtype": "float32", "q_dtype": "float32"}, {"kv_dtype": "int8"},
    {"kv_dtype": "float16", "q_dtype": "float16"}, {"kv_dtype": "float8_e4m3fn"}, {"num_q_heads": 9, "num_kv_heads": 3},
)  # fmt: skip


def jax_differences(compiler: Compiler) -> Iterator[tuple[str, str | None]]:
    """Yields each case and how analysis and compiler differ; None if they agree."""
    for layout, program, cases in (
        (Layout.INTERLEAVED, "jax_ragged", RAGGED),
        (Layout.SPLIT, "jax_paged", PAGED),
    ):
        for case in cases:
            spec = CacheSpec(
                layout=layout, num_layers=1, num_pages=4096, page_size=case.get("page_size", 16),
                num_kv_heads=case.get("num_kv_heads", 8), head_dim=case.get("head_dim", 128),
                dtype=CACHE_DTYPES[case.get("kv_dtype", "bfloat16")],
            )  # fmt: skip
            compiled = compiler.compile(f"tools.tpu.programs:{program}", dict(case))
            label = f"{compiler.generation} {program} {dict(case) or 'Llama 3 8B'}"
            yield label, difference(jax_ops.unsupported(spec), compiled)


def difference(refusal: str | None, compiled: Compiled) -> str | None:
    """Returns how analysis and compiler differ; None if they agree."""
    if refusal is None:
        return None if compiled.error is None else f"supported, but: {compiled.error.splitlines()[0][:300]}"
    return None if compiled.error is not None else f"refused ({refusal}), but it compiles"


def sharding_differences(compiler: Compiler) -> Iterator[tuple[str, str | None]]:
    """Yields each kernel and what goes wrong when four chips share its kv heads; None if nothing does.

    Every chip needs its own heads alone: no collectives, and the pool taken over, not copied.
    """
    pool_bytes = 4096 * 16 * 16 * 128 * 2 // 4
    for kernel in ("decode", "chunk"):
        compiled = compiler.compile("tools.tpu.own:sharded", {"kernel": kernel})
        problem = compiled.error
        if problem is None and compiled.collectives:
            problem = f"it communicates: {', '.join(compiled.collectives)}"
        problem = problem or compiled.copy_of_pool(pool_bytes)
        yield f"{compiler.generation} {kernel} sharded over 4 chips", problem and problem.splitlines()[0][:300]
