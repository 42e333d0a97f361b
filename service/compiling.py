"""`attnd compile`: from its arguments to the kernels."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, Layout
from attnd.service.config import ConfigError

_FIELDS = {"num_pages", "page_size", "num_kv_heads", "head_dim", "dtype", "num_q_heads"}


def compile_for_tpu(tpu: str, spec: str, folder: Path, on_progress: Callable[[int, int], None]) -> int:
    """Compiles the programs of a cache, given as JSON; returns how many.

    Raises:
        ConfigError: The JSON is no shape of a cache.
        UnsupportedError: The TPU cannot serve it.
    """
    cache, num_q_heads = _parsed(spec)
    from attnd.kernels.pallas_ahead import ENVIRONMENT, compile_ahead  # noqa: PLC0415 - loads Pallas

    os.environ.update(ENVIRONMENT)
    return compile_ahead(tpu, cache, num_q_heads, folder, on_progress)


def _parsed(text: str) -> tuple[CacheSpec, int]:
    """Returns the shape of a cache and the number of query heads."""
    try:
        fields: dict[str, Any] = dict(json.loads(text))
        missing, unknown = _FIELDS - fields.keys(), fields.keys() - _FIELDS - {"layout", "num_layers"}
    except (json.JSONDecodeError, TypeError) as error:
        raise ConfigError(f"spec must be a JSON object: {error}.") from error
    if missing or unknown:
        raise ConfigError(f"spec lacks {sorted(missing)} and has unknown fields {sorted(unknown)}.")
    if fields["dtype"] not in CACHE_DTYPES:
        raise ConfigError(f"dtype={fields['dtype']} must be one of {', '.join(CACHE_DTYPES)}.")
    num_q_heads = fields.pop("num_q_heads")
    fields |= {"layout": Layout(fields.get("layout", Layout.INTERLEAVED)), "dtype": CACHE_DTYPES[fields["dtype"]]}
    return CacheSpec(**{"num_layers": 1} | fields), num_q_heads
