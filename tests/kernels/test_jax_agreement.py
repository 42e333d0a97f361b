"""Agreement with JAX's own references, where those are right, and with its int8 quantization bit for bit."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.paged_attention import quantization_utils
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention

from attnd.kernels.quantization import dequantize_int8, quantize_int8
from attnd.kernels.xla import Xla
from tests.support.cases import BY_NAME
from tests.support.checking import run

# JAX's reference reads whole pages and adds a mask to the scores: it cannot bear the poison.
NAMES = ["page boundaries", "shared pages", "window 4", "soft cap"]


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_jax_ref_ragged_paged_attention(name):
    inputs = BY_NAME[name].build()
    inputs.pages = np.nan_to_num(inputs.pages)
    attended, _ = run(Xla(), inputs)
    batch, options = inputs.batch, inputs.options
    expected = ref_ragged_paged_attention(
        jnp.array(inputs.q[: batch.num_tokens]),
        jnp.array(inputs.pages),
        jnp.array(batch.kv_lens),
        jnp.array(batch.page_indices),
        jnp.array(batch.cu_q_lens),
        jnp.array([batch.num_seqs], jnp.int32),
        sm_scale=options.sm_scale,
        sliding_window=options.sliding_window,
        soft_cap=options.soft_cap,
    )
    np.testing.assert_allclose(attended.out[: batch.num_tokens], expected, atol=2e-5)


def _assert_quantizes_as_jax(values):
    weights, scales = quantize_int8(values)
    expected = quantization_utils.quantize_to_int8(jnp.array(values))
    np.testing.assert_array_equal(weights, np.asarray(expected.weight))
    np.testing.assert_array_equal(scales, np.asarray(expected.scales))


def test_quantizes_as_jax_bit_for_bit():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((200, 3, 64)).astype(np.float32) * np.exp(rng.uniform(-20, 20, (200, 3, 1)))
    _assert_quantizes_as_jax(values.astype(np.float32))


def test_quantized_extremes_saturate_without_flipping_and_zeros_stay_zeros():
    values = np.array([[1, -1, 0.5, 0], [0, 0, 0, 0]], np.float32)
    _assert_quantizes_as_jax(values)
    weights, scales = quantize_int8(values)
    np.testing.assert_array_equal(weights, [[127, -128, 64, 0], [0, 0, 0, 0]])
    back = dequantize_int8(weights, scales)
    assert np.all(np.abs(back - values) <= scales / 127)


def test_smallest_numbers_quantize_without_overflow():
    values = np.array([[3e-38, -1.5e-38, 0.0, 1e-40]], np.float32)
    weights, scales = quantize_int8(values)
    assert np.all(np.abs(dequantize_int8(weights, scales) - values) <= scales / 127)


def test_dequantizes_as_jax():
    weights, scales = quantize_int8(np.random.default_rng(1).standard_normal((40, 2, 32)).astype(np.float32))
    expected = quantization_utils.from_int8(jnp.array(weights), jnp.array(scales), jnp.float32)
    np.testing.assert_allclose(dequantize_int8(weights, scales), expected, rtol=1e-6)
