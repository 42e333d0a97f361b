"""The chunk kernel in the TPU interpreter, against the float64 reference."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from attnd.kernels import pallas_chunk_masks, pallas_chunk_schedule
from attnd.kernels.contract import AttentionOptions
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.pallas_chunk_config import ChunkConfig
from tests.support import chunk_calls
from tests.support.chunk_calls import Call, Shape
from tests.support.interpreting import RaceDetected

SCALE = 128**-0.5
LSE = AttentionOptions(sm_scale=SCALE, return_lse=True)
RAGGED = {"q_lens": [1, 18, 0, 20], "kv_lens": [8, 67, 3, 112]}
MAIN = Shape()
WINDOWED = Shape(windowed=True, num_q_heads=1)


def windowed(window: int) -> AttentionOptions:
    return AttentionOptions(sm_scale=SCALE, return_lse=True, sliding_window=window)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_answers_a_ragged_batch_and_appends(mode: str) -> None:
    answer = Call(shape=MAIN, **RAGGED, options=LSE).run(mode)
    answer.check(1e-2)
    assert answer.counts["reruns"] == 0
    assert answer.counts["interior_blocks"] > 2


@pytest.mark.parametrize(
    ("q_lens", "kv_lens"),
    [
        ([], []),
        ([0, 0], [9, 0]),
        ([16], [16]),
        ([17, 2], [17, 8]),
        ([0, 1, 0, 1, 33], [5, 7, 0, 9, 33]),
        ([2, 46], [33, 128]),
    ],
)
def test_answers_extremes(q_lens: list[int], kv_lens: list[int]) -> None:
    Call(shape=MAIN, q_lens=q_lens, kv_lens=kv_lens, options=LSE, seed=1).run().check(1e-2)


@pytest.mark.parametrize("window", [1, 7, 16, 33, 2**31 - 1])
def test_slides_a_window(window: int) -> None:
    Call(shape=WINDOWED, **RAGGED, options=windowed(window)).run().check(1e-2)


@pytest.mark.parametrize("wrong", [15, 17])
def test_window_matters_to_the_token(wrong: int) -> None:
    assert Call(shape=WINDOWED, **RAGGED, options=windowed(16)).run(sliding_window=wrong).error() > 2e-2


@pytest.mark.parametrize(
    ("shape", "window", "kv_len"),
    [
        pytest.param(WINDOWED, 32, 125, id="32_over_125"),
        pytest.param(
            dataclasses.replace(
                WINDOWED, page_size=16, block_tokens=512, edge_tokens=128, kv_len_max=16_384, append=False
            ),
            1024,
            16_007,
            id="1024_over_16007",
        ),
    ],
)
def test_a_window_bounds_what_is_fetched_and_computed(shape: Shape, window: int, kv_len: int) -> None:
    long = Call(shape=shape, q_lens=[16], kv_lens=[kv_len], options=windowed(window)).run()
    short = Call(shape=shape, q_lens=[16], kv_lens=[window], options=windowed(2**30)).run()
    long.check(1e-2)
    assert long.counts["fetches"] <= short.counts["fetches"] + shape.block_tokens // shape.page_size
    steps = shape.block_tokens // shape.edge_tokens

    def work(counts: dict[str, int]) -> int:
        return counts["interior_blocks"] * steps + counts["edge_steps"]

    assert work(long.counts) <= work(short.counts) + steps


@pytest.mark.parametrize(
    ("shape", "options", "tolerance"),
    [
        pytest.param(
            Shape(kv_dtype="float32", q_dtype="float32", num_q_heads=3, num_kv_heads=3, head_dim=80, capped=True),
            AttentionOptions(sm_scale=0.2, return_lse=True, soft_cap=3.0),
            1e-5,
            id="float32-capped-three_heads-80",
        ),
        pytest.param(
            Shape(kv_dtype="float8_e4m3fn", num_q_heads=6, num_kv_heads=2),
            AttentionOptions(sm_scale=SCALE, return_lse=True, k_scale=1.5, v_scale=0.5),
            1e-2,
            id="e4m3-grouped",
        ),
        pytest.param(
            Shape(kv_dtype="float8_e5m2", num_q_heads=3, num_kv_heads=3, q_dtype="float32", windowed=True, head_dim=64),
            AttentionOptions(sm_scale=0.125, return_lse=True, sliding_window=40),
            1e-2,
            id="e5m2-odd_heads-64-windowed",
        ),
        pytest.param(
            Shape(kv_dtype="int8", num_q_heads=7, page_size=16, append=False, return_lse=False),
            AttentionOptions(sm_scale=SCALE, k_scale=1 / 30, v_scale=1 / 40),
            1e-2,
            id="int8-one_head-seven_queries",
        ),
        pytest.param(
            Shape(head_dim=192, num_q_heads=4, num_kv_heads=4, page_size=64),
            AttentionOptions(sm_scale=0.07, return_lse=True),
            1e-2,
            id="192-page_larger_than_block",
        ),
        pytest.param(
            Shape(page_size=24, block_tokens=24, fold=False, num_q_heads=1),
            AttentionOptions(sm_scale=-0.1, return_lse=True),
            1e-2,
            id="page_of_24-no_interior",
        ),
        pytest.param(
            Shape(kv_dtype="int8", head_dim=192, num_q_heads=4, num_kv_heads=4, page_size=16),
            AttentionOptions(sm_scale=0.07, return_lse=True, k_scale=1 / 30, v_scale=1 / 40),
            1e-2,
            id="int8-192-tokens_share_a_tile",
        ),
        pytest.param(
            Shape(kv_dtype="float8_e4m3fn", head_dim=256),
            AttentionOptions(sm_scale=0.06, return_lse=True),
            1e-2,
            id="e4m3-256-page_is_half_a_tile",
        ),
    ],
)
def test_answers_other_shapes(shape: Shape, options: AttentionOptions, tolerance: float) -> None:
    Call(shape=shape, **RAGGED, options=options).run().check(tolerance)


def test_a_new_scalar_compiles_nothing() -> None:
    program = chunk_calls.program(WINDOWED.config(), "on_wait")
    Call(shape=WINDOWED, **RAGGED, options=windowed(5)).run()
    before = program._cache_size()
    Call(shape=WINDOWED, **RAGGED, options=windowed(6)).run(sm_scale=0.3)
    assert program._cache_size() == before


def test_scores_far_above_the_anchor_run_a_tile_again() -> None:
    call = Call(shape=MAIN, q_lens=[20, 9], kv_lens=[90, 60], options=LSE, q_factor=40.0)
    answer = call.run()
    assert 0 < answer.counts["reruns"] <= answer.counts["tiles"]
    answer.check(1e-2)


def test_an_attention_sink_needs_no_second_run() -> None:
    call = Call(shape=MAIN, q_lens=[16], kv_lens=[112], options=LSE)
    first = call.page_indices[0, 0]
    # The first key scores about 20 for every query, all others about 0.
    call.q[:16, :, 0] = 8.0
    call.pool[first, 0, 0] = 0
    call.pool[first, 0, 0, 0] = 28.0
    answer = call.run()
    assert answer.counts["reruns"] == 0
    answer.check(1e-2)


def test_scores_that_sink_below_everything_still_sum_to_one() -> None:
    call = Call(shape=MAIN, q_lens=[16], kv_lens=[80], options=LSE)
    call.q[:16] = -1e15
    call.k[:16] = 1e15
    for slot in range(8):
        call.pool[call.page_indices[0, slot], :, 0] = 1e15
    answer = call.run()
    assert np.isfinite(answer.out).all()
    expected = call.expected()[0]
    assert np.abs(answer.out - expected)[:16].max() < 2e-2


def test_not_a_number_stays_in_its_sequence() -> None:
    call = Call(shape=MAIN, q_lens=[16, 16, 16], kv_lens=[112, 120, 112], options=LSE)
    call.pool[call.page_indices[1, 2]] = np.nan
    answer = call.run()
    for mine in (slice(0, 16), slice(32, 48)):
        assert answer.error(only=mine) < 1e-2
    assert np.isnan(answer.out[16:32]).all()


def test_rows_may_begin_after_other_rows() -> None:
    call = Call(shape=MAIN, q_lens=[9, 12], kv_lens=[30, 50], options=LSE)
    expected, lse, _ = call.expected()
    call.kv_lens_array[:2], call.page_indices[:2] = call.kv_lens_array[1:3], call.page_indices[1:3]
    call.cu_q_lens[:2], call.q_lens = call.cu_q_lens[1:3], [12]
    answer = call.run()
    assert (answer.out[:9] == 0).all()
    assert np.isneginf(answer.lse[:9]).all()
    np.testing.assert_allclose(answer.out[9:21], expected[9:21], atol=1e-2)
    np.testing.assert_allclose(answer.lse[9:21], lse[9:21], atol=1e-2)


# ---- What must be caught.
def _no_wait(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda refs, tile, block, slot: None


class _OtherBuffer:
    """Stands for the two buffers of a block and takes one for the other; their semaphores stay right."""

    def __init__(self, buffers: Any) -> None:
        self.buffers = buffers

    @property
    def at(self) -> "_OtherBuffer":
        return self

    def __getitem__(self, index: Any) -> Any:
        return self.buffers.at[(1 - index[0], *index[1:])]


def _into_the_buffer_in_use(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda refs, tile, block, slot: original(
        dataclasses.replace(refs, kv_buffer=_OtherBuffer(refs.kv_buffer)), tile, block, slot
    )


def _one_fetch_less(original: Callable[..., Any]) -> Callable[..., Any]:
    def mutant(refs: Any, tile: Any, block: Any) -> Any:
        first, stop = original(refs, tile, block)
        return first, jnp.maximum(stop - 1, first)

    return mutant


def _sees_one_more(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda refs, tile, block, first, part: original(
        refs, tile._replace(position=tile.position + 1), block, first, part
    )


MUTATED = Call(
    shape=Shape(append=False, return_lse=False, num_q_heads=1, edge_tokens=32),
    q_lens=[18],
    kv_lens=[120],
    options=AttentionOptions(sm_scale=SCALE),
)


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_nothing_is_wrong_before_mutation(mode: str) -> None:
    MUTATED.run(mode).check(1e-2)


@pytest.mark.parametrize(
    ("module", "name", "mutate", "mode"),
    [
        pytest.param(pallas_chunk_schedule, "await_block", _no_wait, "on_wait", id="missing_wait"),
        pytest.param(pallas_chunk_schedule, "fetch_whole_block", _into_the_buffer_in_use, "eager", id="buffer_in_use"),
        pytest.param(pallas_chunk_schedule, "_visible_fetches", _one_fetch_less, "on_wait", id="last_page_dropped"),
        pytest.param(pallas_chunk_masks, "visible", _sees_one_more, "on_wait", id="mask_off_by_one"),
    ],
)
def test_mutants_are_caught(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mutate: Callable[..., Any], mode: str
) -> None:
    monkeypatch.setattr(module, name, mutate(getattr(module, name)))
    chunk_calls.program.cache_clear()
    try:
        assert MUTATED.run(mode).error() > 2e-2
    except RaceDetected:
        pass
    finally:
        chunk_calls.program.cache_clear()


def test_refuses_what_it_cannot_serve() -> None:
    good = {
        "num_tokens": 8, "num_rows": 1, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 128, "page_size": 16,
        "num_pages": 4, "pages_per_seq": 4, "q_dtype": "bfloat16", "kv_dtype": "bfloat16",
    }  # fmt: skip
    ChunkConfig(**good)
    for wrong in (
        {"q_dtype": "float16"}, {"kv_dtype": "int4"}, {"num_kv_heads": 3}, {"query_block": 24}, {"block_tokens": 100},
        {"page_size": 1, "block_tokens": 128}, {"edge_tokens": 40},
    ):  # fmt: skip
        with pytest.raises(UnsupportedError):
            ChunkConfig(**{**good, **wrong})


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "kv_dtype", "in_kernel"),
    [
        (8, 128, "bfloat16", True), (4, 128, "int8", True), (2, 128, "bfloat16", False), (3, 128, "float32", False),
        (4, 256, "bfloat16", True), (4, 256, "int8", False), (16, 256, "int8", True),
    ],
)  # fmt: skip
def test_the_kernel_appends_whole_tiles_only(num_kv_heads: int, head_dim: int, kv_dtype: str, in_kernel: bool) -> None:
    shape = Shape(num_q_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, kv_dtype=kv_dtype)
    assert shape.config().append_in_kernel == in_kernel


def test_knows_its_memory() -> None:
    config = MAIN.config()
    assert config.vmem_bytes == sum(
        int(np.prod(shape)) * dtype.itemsize for shape, dtype in config.scratch_shapes().values()
    )
    assert config.smem_bytes > 4 * config.num_rows * config.pages_per_seq
