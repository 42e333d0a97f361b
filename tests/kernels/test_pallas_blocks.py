"""Block sizes of our TPU kernels: the table is used and fits, and appends that would cut a tile are told apart."""

import json

import pytest

from attnd.kernels import pallas_blocks
from attnd.kernels.contract import CACHE_DTYPES, CacheSpec, Layout
from attnd.kernels.pallas_blocks import Features, Tuning
from attnd.kernels.pallas_plan import LaunchShape
from attnd.kernels.tpu_chips import CHIPS
from tools.tpu.tune import TABLE

ENTRIES = [(generation, entry) for generation, table in json.loads(TABLE.read_text()).items() for entry in table]
ROWS = LaunchShape(query_block=1, num_tokens=256, num_rows=256, pages_per_seq=64)
TILES = LaunchShape(query_block=128, num_tokens=512, num_rows=8, pages_per_seq=64)


def spec(**changes):
    shape = {
        "layout": Layout.INTERLEAVED, "num_layers": 1, "num_pages": 4096, "page_size": 16, "num_kv_heads": 8,
        "head_dim": 128, "dtype": CACHE_DTYPES["bfloat16"],
    }  # fmt: skip
    return CacheSpec(**shape | changes)


@pytest.mark.parametrize(("generation", "entry"), ENTRIES)
def test_sizes_of_the_table_fit_and_are_used(generation, entry):
    cache = spec(
        num_kv_heads=entry["num_kv_heads"], head_dim=entry["head_dim"], page_size=entry["page_size"],
        dtype=CACHE_DTYPES[entry["kv_dtype"]],
    )  # fmt: skip
    features, tuning = Features(append=True, return_lse=True), Tuning(chip=CHIPS[generation])
    if entry["kernel"] == "decode":
        config = pallas_blocks.decode_config(cache, 4 * cache.num_kv_heads, "bfloat16", ROWS, features, tuning)
    else:
        config = pallas_blocks.chunk_config(cache, 4 * cache.num_kv_heads, "bfloat16", TILES, features, tuning)
        assert config.query_block == entry["query_block"]
    assert config.block_tokens == entry["block_tokens"]


@pytest.mark.parametrize(
    ("generation", "changes", "in_kernel"),
    [
        ("v6e", {}, True),
        ("v6e", {"num_kv_heads": 4}, True),
        ("v6e", {"num_kv_heads": 2}, False),
        ("v6e", {"head_dim": 256, "dtype": CACHE_DTYPES["int8"]}, False),
        ("tpu7x", {}, True),
        ("tpu7x", {"num_kv_heads": 4}, False),
        ("tpu7x", {"dtype": CACHE_DTYPES["float8_e4m3fn"]}, False),
    ],
)
def test_chunk_kernel_copies_new_tokens_only_where_they_are_whole_tiles(generation, changes, in_kernel):
    tuning = Tuning(chip=CHIPS[generation])
    config = pallas_blocks.chunk_config(spec(**changes), 32, "bfloat16", TILES, Features(append=True), tuning)
    assert config.append
    assert config.append_in_kernel is in_kernel


@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("generation", ["v6e", "v5e", "tpu7x"])
def test_llama_decodes_in_blocks_of_which_the_cycles_are_documented(generation, page_size):
    tuning = Tuning(chip=CHIPS[generation])
    cache = spec(page_size=page_size)
    assert pallas_blocks.decode_config(cache, 32, "bfloat16", ROWS, Features(append=True), tuning).block_tokens == 1024
