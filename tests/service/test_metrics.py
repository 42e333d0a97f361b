"""The metrics of a running server, as Prometheus reads them."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from attnd.client import Client
from attnd.service.config import ConfigError, ServerConfig
from tests.support.server import attnd_server


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_tells_queue_batches_and_what_caches_hold():
    port = free_port()
    with attnd_server("--metrics-port", str(port)) as server, Client(server.address, tenant="t") as client:
        cache = client.create_cache(
            "c", num_layers=1, num_pages=7, page_size=4, num_kv_heads=1, head_dim=8, dtype="float32", pages_by="server"
        )
        cache.create_sequences(3)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            families = {each.name: each for each in text_string_to_metric_families(answer.read().decode())}
    samples = {(s.name, *sorted(s.labels.items())): s.value for family in families.values() for s in family.samples}
    where = (("cache", "c"), ("tenant", "t"))
    assert samples["attnd_free_pages", *where] == 7
    assert samples["attnd_sequences", *where] == 3
    assert samples["attnd_queue_depth",] == 0
    assert samples["attnd_batch_calls_count",] == samples["attnd_queue_seconds_count",] >= 1


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_refuses_a_port_that_is_none(port):
    with pytest.raises(ConfigError, match="metrics_port"):
        ServerConfig(metrics_port=port)


def test_says_when_the_port_is_taken():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(RuntimeError, match="Cannot serve metrics"),
            attnd_server("--metrics-port", str(taken.getsockname()[1])),
        ):
            pass
