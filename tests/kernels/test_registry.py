"""Which implementation serves a cache."""

import numpy as np
import pytest

from attnd.kernels import registry
from attnd.kernels.contract import CacheSpec, Layout
from attnd.kernels.errors import UnsupportedError
from attnd.kernels.xla import Xla

SPEC = CacheSpec(
    layout=Layout.SPLIT, num_layers=1, num_pages=4, page_size=8, num_kv_heads=1, head_dim=8, dtype=np.dtype(np.float32)
)


def test_auto_on_a_cpu_is_numba_where_it_is_installed():
    assert registry.choose(SPEC, "cpu").name == "numba"


def test_auto_elsewhere_is_plain_jax():
    assert registry.choose(SPEC, "gpu").name == "xla"


@pytest.mark.parametrize("name", registry.names())
def test_named_implementation_is_created_under_its_name(name):
    assert registry.create(name).name == name


@pytest.mark.parametrize("name", ["pallas", "jax_ops"])
def test_kernel_for_tpus_says_that_there_is_none(name):
    with pytest.raises(UnsupportedError, match="need.? a TPU.* 'cpu'"):
        registry.choose(SPEC, "cpu", name)


def test_auto_on_a_tpu_prefers_our_kernels(monkeypatch):
    made = []
    monkeypatch.setattr(registry, "create", lambda name: made.append(name) or Xla())
    registry.choose(SPEC, "tpu")
    assert made == ["pallas"]


def test_unknown_implementation_is_unsupported_and_the_known_are_named():
    with pytest.raises(UnsupportedError, match="'cuda' must be one of auto, reference, xla"):
        registry.choose(SPEC, "cpu", "cuda")
