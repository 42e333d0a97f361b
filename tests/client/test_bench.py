"""`attnd bench`: the figures of a small load, against a server and with one of its own."""

import json

import pytest
import typer
from typer.testing import CliRunner

from attnd.client import Client
from attnd.client._load import Load
from attnd.client._roofline import Roofline, of_device
from attnd.client.bench import bench
from tests.support.server import ServerProcess

SMALL = [
    "--rows", "3", "--kv-len", "40", "--chunk", "8", "--q-heads", "2", "--kv-heads", "1", "--head-dim", "16",
    "--page-size", "8", "--layers", "2", "--dtype", "float32", "--duration-s", "0.2",
]  # fmt: skip


def run(*arguments):
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(("kind", "tokens"), [("decode", 3), ("prefill", 24), ("mixed", 10)])
def test_measures_a_server_and_leaves_no_cache_behind(server: ServerProcess, tmp_path, kind, tokens):
    result = run(server.address, "--kind", kind, "--clients", "2", *SMALL, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, result.output
    assert "throughput" in result.output
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["calls"] >= 4
    assert figures["tokens_per_s"] == pytest.approx(figures["calls_per_s"] * tokens)
    assert 0 < figures["latency_ms"]["p50"] <= figures["latency_ms"]["p99"] <= figures["latency_ms"]["max"]
    assert figures["roofline_share"] > 0
    with Client(server.address) as client:
        assert not [cache for cache in client.list_caches() if cache.name.startswith("bench-")]


def test_brings_a_server_of_its_own_and_draws(tmp_path):
    result = run(*SMALL, "--plot", str(tmp_path / "out.png"))
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_says_what_went_wrong(server: ServerProcess):
    result = run("127.0.0.1:1", *SMALL)
    assert result.exit_code == 1
    assert "no attnd server answers at 127.0.0.1:1" in result.output
    result = run(server.address, *SMALL, "--q-heads", "3", "--kv-heads", "2")
    assert result.exit_code == 1
    assert "must be divisible" in result.output


def test_counts_what_a_call_reads_and_computes():
    load = Load(kind="mixed", num_rows=2, kv_len=10, chunk=4, num_q_heads=2, num_kv_heads=1, head_dim=8)
    assert load.q_lens.tolist() == [4, 1]
    assert load.kv_bytes == 2 * 10 * 2 * 8 * 2
    assert load.flops == 4 * (7 + 8 + 9 + 10 + 10) * 2 * 8


def test_the_roofline_is_the_later_of_reading_and_computing():
    assert Roofline(10.0, 100.0, "").least_s(20, 100) == 2
    assert Roofline(10.0, 100.0, "").least_s(20, 1000) == 10
    assert of_device("TPU v6 lite").bytes_per_s == 1.64e12
    assert of_device("cpu").flops_per_s > 0
