"""The decode kernel of the split layout in TPU interpret mode, against float64, over poisoned memory."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from attnd.kernels.contract import AttentionOptions, CacheSpec, KernelHints, Layout, RaggedBatch
from attnd.kernels.host_pages import HostPages, bits_of
from attnd.kernels.pallas_decode_split import decode_split
from attnd.kernels.pallas_decode_split_parts import SplitDecodeConfig
from attnd.kernels.quantization import quantize_int8
from attnd.kernels.reference import Reference
from tests.support import mutations
from tests.support.interpreting import jit_quickly, without_races


@dataclass(frozen=True)
class Case:
    """One call."""

    lengths: tuple[int, ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 128
    page_size: int = 16
    q_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    block_tokens: int = 128
    soft_cap: float | None = None
    stored: bool = True
    mode: str = "on_wait"

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.q_dtype == self.kv_dtype == "float32" else 2e-2


CASES = {
    "ragged_with_empty_rows": Case((0, 300, 40, 0), mode="eager"),
    "full_blocks_of_int8": Case((700, 40), heads=(6, 3), kv_dtype="int8", mode="eager"),
    "int8_scales_as_jax_shapes_them": Case((150, 17), kv_dtype="int8", stored=False),
    "float32_and_cap": Case((300, 16), heads=(16, 1), head_dim=64, q_dtype="float32", kv_dtype="float32", soft_cap=3.0),
    "float8_of_many_query_heads": Case((150, 128), heads=(24, 2), head_dim=192, kv_dtype="float8_e4m3fn"),
}


def filled(case: Case) -> tuple[HostPages, np.ndarray]:
    """Returns pages of which only the tokens in use hold numbers, and their table, with junk in its unused slots."""
    rng = np.random.default_rng(len(case.lengths))
    counts = [-(-n // case.page_size) for n in case.lengths]
    dtype = jnp.dtype(case.kv_dtype)
    spec = CacheSpec(
        layout=Layout.SPLIT, num_layers=1, num_pages=sum(counts) + 2, page_size=case.page_size,
        num_kv_heads=case.heads[1], head_dim=case.head_dim, dtype=dtype,
    )  # fmt: skip
    pages = HostPages.zeros(spec)
    kv = np.full(spec.layer_shape, 99 if case.kv_dtype == "int8" else np.nan).astype(dtype)
    free = list(rng.permutation(spec.num_pages))
    table = np.full((len(counts), max(counts) + 1), 10**6, np.int32)
    for scales in pages.scales:
        scales[...] = np.nan
    for row, length in enumerate(case.lengths):
        table[row, : counts[row]] = [free.pop() for _ in range(counts[row])]
        for t in range(length):
            at = (slice(None), slice(None), table[row, t // case.page_size], t % case.page_size)
            token = rng.standard_normal((2, case.heads[1], case.head_dim)).astype(np.float32)
            if spec.quantized_per_token:
                token, pages.scales[0][at] = quantize_int8(token)
            kv[at] = token.astype(dtype)
    pages.bits[0][...] = bits_of(kv)
    return pages, table


def check(case: Case) -> None:
    """Runs a case and asserts that its answer is right, and that no copy was in the way of another."""
    pages, table = filled(case)
    lengths = np.array(case.lengths, np.int32)
    q = np.random.default_rng(1).standard_normal((len(lengths), case.heads[0], case.head_dim))
    q = q.astype(jnp.dtype(case.q_dtype))
    config = SplitDecodeConfig(
        num_rows=len(lengths), num_q_heads=case.heads[0], num_kv_heads=case.heads[1], head_dim=case.head_dim,
        page_size=case.page_size, num_pages=pages.spec.num_pages, pages_per_seq=table.shape[1], q_dtype=case.q_dtype,
        kv_dtype=case.kv_dtype, block_tokens=case.block_tokens, capped=case.soft_cap is not None, return_lse=True,
        scaled=pages.spec.quantized_per_token,
    )  # fmt: skip
    params = pltpu.InterpretParams(dma_execution_mode=case.mode, detect_races=True, uninitialized_memory="nan")
    options: dict[str, object] = {"sm_scale": np.float32(0.1)}
    if case.soft_cap is not None:
        options["attn_logits_soft_cap"] = np.float32(case.soft_cap)
    if pages.scales:
        scales = pages.scales[0]
        if case.stored:
            scales = scales[..., 0].swapaxes(1, 2).reshape(2, *config.scales_shape)
        options |= {"k_scales": scales[0], "v_scales": scales[1]}
    kv = pages.bits[0].view(pages.spec.dtype)
    with without_races():
        out, lse = map(
            np.asarray,
            jit_quickly(lambda *args, **kwargs: decode_split(config, *args, **kwargs, interpret=params))(
                q, kv[0], kv[1], lengths, table, **options
            ),
        )

    rows = np.flatnonzero(lengths)
    expected = Reference().attend(
        pages, 0, RaggedBatch.compact(lengths[rows], table[rows], np.ones(len(rows), np.int32), case.page_size),
        q[rows].astype(np.float64), options=AttentionOptions(sm_scale=0.1, soft_cap=case.soft_cap, return_lse=True),
        hints=KernelHints(),
    )  # fmt: skip
    assert expected.lse_natural is not None
    np.testing.assert_allclose(out.astype(np.float64)[rows], expected.out, rtol=0, atol=case.tolerance)
    np.testing.assert_allclose(lse[rows], expected.lse_natural, rtol=0, atol=case.tolerance)
    assert (out[lengths == 0] == 0).all()
    assert (lse[lengths == 0] == -np.inf).all()


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    check(CASES[name])


MUTATED = Case((180, 70, 300), kv_dtype="int8", soft_cap=3.0, mode="eager")
# Of the others there is no window here, and stale int8 rows are finite: their weights are zero.
MUTATIONS = (
    "copies_never_waited_for", "fetch_into_the_buffer_in_use", "mask_off_by_one", "last_page_dropped", "cap_skipped",
)  # fmt: skip


def test_nothing_is_wrong_before_mutation() -> None:
    check(MUTATED)


@pytest.mark.parametrize("name", MUTATIONS)
def test_notices_a_wrong_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutations.DECODE[name](monkeypatch)
    with pytest.raises(AssertionError):
        check(MUTATED)
