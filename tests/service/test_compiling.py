"""`attnd compile` without libtpu: what it refuses, and why."""

import json

import pytest

from attnd.kernels.errors import InvalidArgumentError, UnsupportedError
from attnd.service.compiling import compile_for_tpu
from attnd.service.config import ConfigError

SPEC = {"num_pages": 64, "page_size": 16, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "num_q_heads": 32}


def compile_spec(tmp_path, spec, tpu="v6e"):
    return compile_for_tpu(tpu, spec if isinstance(spec, str) else json.dumps(spec), tmp_path, lambda done, of: None)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("{", "must be a JSON object"),
        ("[1]", "must be a JSON object"),
        (SPEC | {"pages": 1}, r"unknown fields \['pages'\]"),
        ({"num_pages": 1}, "lacks"),
        (SPEC | {"dtype": "int4"}, "dtype=int4 must be one of"),
    ],
)
def test_spec_that_is_no_shape_is_refused(tmp_path, spec, reason):
    with pytest.raises(ConfigError, match=reason):
        compile_spec(tmp_path, spec)


def test_sizes_are_judged_as_those_of_any_cache(tmp_path):
    with pytest.raises(InvalidArgumentError, match="head_dim=0"):
        compile_spec(tmp_path, SPEC | {"head_dim": 0})


def test_unknown_tpu_is_refused_and_the_known_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr("os.environ", {})
    with pytest.raises(UnsupportedError, match="tpu='v1' must be one of v4, v5e, v5p, v6e, tpu7x"):
        compile_spec(tmp_path, SPEC, "v1")
