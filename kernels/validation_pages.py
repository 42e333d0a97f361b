"""Rules of whole pages, written to and read from a cache, and of its layers."""

import operator
from dataclasses import dataclass
from typing import Final, SupportsIndex

import numpy as np
from jaxtyping import Float32, Int32, Shaped

from attnd.kernels.contract import CacheSpec
from attnd.kernels.errors import InvalidArgumentError
from attnd.kernels.validation_rules import Facts, Rule, Violations, judge
from attnd.kernels.validation_values import Dtypes, token_dtypes


@dataclass(frozen=True, slots=True, kw_only=True)
class PageWrites:
    """Pages to write after validation.

    Attributes:
        page_indices: Distinct ids in [0, num_pages).
        kv_pages: `spec.pages_shape(n)`, in a dtype that casts to the cache's; finite floats that are to be quantized
            if the cache is quantized per token and `scales` is None.
        scales: `spec.scales_shape(n)`, finite and >= 0, if and only if `kv_pages` are quantized per token.
    """

    page_indices: Int32[np.ndarray, " n"]
    kv_pages: Shaped[np.ndarray, "..."]
    scales: Float32[np.ndarray, "..."] | None


_ID_RULES: Final = (
    Rule(
        "page_indices.shape",
        "{page_indices.shape=} must have one axis.",
        lambda page_indices: len(page_indices.shape) == 1,
    ),
    Rule(
        "page_indices.dtype",
        "{page_indices.dtype=} must be int32.",
        lambda page_indices: page_indices.dtype == np.int32,
    ),
)

_WRITE_RULES: Final = (
    Rule(
        "kv_pages.shape",
        "{kv_pages.shape=} must be {pages_shape}.",
        lambda kv_pages, pages_shape: kv_pages.shape == pages_shape,
    ),
    Rule(
        "kv_pages.dtype",
        "{kv_pages.dtype=} must be one of {dtypes}.",
        lambda kv_pages, dtypes: kv_pages.dtype in dtypes,
    ),
    Rule("scales", "scales must be unset: no token of the cache has its own.", lambda takes_scales: takes_scales),
    Rule(
        "scales",
        "scales must be set if and only if kv_pages.dtype={kv_pages.dtype} is int8.",
        lambda kv_pages, brings_scales: (kv_pages.dtype == np.int8) == brings_scales,
    ),
    Rule(
        "scales.shape",
        "{scales.shape=} must be {scales_shape}.",
        lambda scales, scales_shape: scales.shape == scales_shape,
    ),
    Rule(
        "scales.dtype",
        "{scales.dtype=} must be float32.",
        lambda scales: scales.dtype == np.float32,
    ),
)


def judge_page_ids(spec: CacheSpec, page_indices: np.ndarray) -> Violations:
    """Returns every violation of a list of pages."""
    found = Violations()
    judge(_ID_RULES, {"page_indices": page_indices}, found)
    if not found:
        for (i,) in found.where(page_indices.view(np.uint32) >= spec.num_pages):
            page_idx, total_num_pages = int(page_indices[i]), spec.num_pages
            found.add(f"page_indices[{i}]", f"Require 0 <= {page_idx=} < {total_num_pages=}.")
    return found


def judge_page_writes(
    spec: CacheSpec, page_indices: np.ndarray, kv_pages: np.ndarray, scales: np.ndarray | None
) -> Violations:
    """Returns every violation of pages to write."""
    found = judge_page_ids(spec, page_indices)
    judge(_WRITE_RULES, _write_facts(spec, page_indices, kv_pages, scales), found)
    if not found:
        _judge_distinct(page_indices, found)
        if spec.quantized_per_token:
            _judge_values(page_indices, kv_pages, scales, found)
    return found


def valid_layer(spec: CacheSpec, layer: SupportsIndex) -> int:
    """Returns a layer of the cache."""
    num_layers = spec.num_layers
    try:
        index = operator.index(layer)
    except TypeError:
        raise InvalidArgumentError.of("layer", f"layer must be an integer, not {type(layer).__name__}.") from None
    if not 0 <= index < num_layers:
        shown = index if index.bit_length() < 64 else "(more than 64 bits)"
        raise InvalidArgumentError.of("layer", f"layer={shown} must be in [0, {num_layers}).")
    return index


def _write_facts(spec: CacheSpec, page_indices: np.ndarray, kv_pages: np.ndarray, scales: np.ndarray | None) -> Facts:
    dtypes = token_dtypes(spec)
    facts: Facts = {"kv_pages": kv_pages}
    if spec.quantized_per_token:
        dtypes = Dtypes((*dtypes, spec.dtype))
        if kv_pages.dtype in dtypes:
            facts["brings_scales"] = scales is not None
    facts["dtypes"] = dtypes
    if page_indices.ndim == 1:
        facts["pages_shape"] = spec.pages_shape(len(page_indices))
    if scales is not None:
        facts |= {"scales": scales, "takes_scales": spec.quantized_per_token}
        if spec.quantized_per_token and page_indices.ndim == 1:
            facts["scales_shape"] = spec.scales_shape(len(page_indices))
    return facts


def _judge_distinct(page_indices: Int32[np.ndarray, " n"], found: Violations) -> None:
    order = np.argsort(page_indices, kind="stable")
    again = np.zeros(len(order), np.bool_)
    again[order[1:]] = page_indices[order[1:]] == page_indices[order[:-1]]
    for (i,) in found.where(again):
        page_idx = int(page_indices[i])
        found.add(f"page_indices[{i}]", f"{page_idx=} must be named once.")


def _judge_values(
    page_indices: Int32[np.ndarray, " n"],
    kv_pages: Shaped[np.ndarray, "2 num_kv_heads n page_size head_dim"],
    scales: Float32[np.ndarray, "2 num_kv_heads n page_size 1"] | None,
    found: Violations,
) -> None:
    """Refuses numbers that would become a scale, or are one, and are none."""
    if scales is None:
        name, must, fine = (
            "kv_pages",
            "finite: the largest magnitude of a token becomes its scale",
            np.isfinite(kv_pages),
        )
    else:
        name, must, fine = "scales", "finite and greater or equal to 0", np.isfinite(scales) & (scales >= 0)
    for (i,) in found.where(~fine.all(axis=(0, 1, 3, 4))):
        page_idx = int(page_indices[i])
        found.add(f"{name}[:,:,{i}]", f"{name} must be {must}, at {page_idx=}.")
