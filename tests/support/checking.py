"""What a right answer is: the one check of the suite, so that mutations can be put to it."""

import numpy as np

from attnd.kernels.contract import KernelHints
from tests.support.cases import TOLERANCES
from tests.support.dense import dense_attention

# Absolute and relative, of products of bfloat16.
BFLOAT16_TOLERANCE = 2e-2


def run(implementation, inputs, options=None):
    """Allocates and fills pages, attends, and returns the answer and the pages."""
    pages = implementation.allocate(inputs.spec)
    every_page = np.arange(inputs.spec.num_pages, dtype=np.int32)
    implementation.write(pages, inputs.layer, every_page, inputs.pages, inputs.scales)
    attended = implementation.attend(
        pages,
        inputs.layer,
        inputs.batch,
        inputs.q,
        k=inputs.k,
        v=inputs.v,
        options=options or inputs.options,
        hints=KernelHints(),
    )
    return attended, pages


def check_answer(inputs, out, lse, *, implementation=None):
    """Compares out and lse with the dense formula, and the padding with zero and -inf.

    Our TPU kernels are exact over float32 pages alone, and multiply bfloat16 over all others.
    """
    expected_out, expected_lse = dense_attention(inputs)
    num_tokens = inputs.batch.num_tokens
    assert out.shape == inputs.q.shape
    assert out.dtype == inputs.q.dtype
    # Scores keep 24 bits: what is lost of large ones is large.
    lost = max(1.0, inputs.case.q_factor / 10)
    narrow = getattr(implementation, "name", "").startswith("pallas") and inputs.spec.dtype != np.float32
    tolerance = (BFLOAT16_TOLERANCE if narrow else TOLERANCES[inputs.q.dtype]) * lost
    lse_tolerance = (BFLOAT16_TOLERANCE if narrow else 1e-5) * lost
    np.testing.assert_allclose(
        out[:num_tokens].astype(np.float64), expected_out, atol=tolerance, rtol=tolerance, err_msg=inputs.case.name
    )
    np.testing.assert_allclose(
        lse[:num_tokens], expected_lse, atol=lse_tolerance, rtol=lse_tolerance / lost, err_msg=inputs.case.name
    )
    assert not np.any(out[num_tokens:])
    assert np.all(lse[num_tokens:] == -np.inf)
