"""The sections run from end to end at tiny sizes, and their parts answer right."""

import contextlib
import json

import numpy as np
import pytest

from attnd.kernels.contract import Attended
from attnd.kernels.reference import Reference
from benchmarks import __main__ as command
from benchmarks import append, batching, demo, memory, native, processes, report, rpc, rpc_peers


def labels(section):
    return " ".join(figure.label for figure in section.figures)


def test_append_runs_in_two_pools_and_compares_them():
    section = append.run(0, pools_bytes=(2**24, 2**25))
    assert "append: time in" in labels(section)
    assert len(section.tables[0].rows) == 6


def test_append_leaves_out_a_pool_that_does_not_fit():
    section = append.run(0, pools_bytes=(2**24, 2**60))
    assert any("does not hold" in note for note in section.notes)


def test_append_notices_an_implementation_that_does_not_write(monkeypatch):
    class Forgetful(Reference):
        def attend(self, pages, layer, batch, q, **_):
            return Attended(out=q)

    monkeypatch.setattr(append.registry, "create", lambda _: Forgetful())
    with pytest.raises(AssertionError, match="did not append"):
        append.make_pool("xla", 2**24)


@pytest.mark.parametrize("language", ["C", "Python"])
@pytest.mark.parametrize("size", [1, 200, 2**20 + 3])
def test_echo_answers_every_size(monkeypatch, language, size):
    if language == "Python":
        monkeypatch.setattr(rpc, "compile_c", lambda *_: None)
    elif native.compile_c("echo.c") is None:
        pytest.skip("no C compiler")
    with rpc._echo() as (name, driver):
        assert language in name
        durations = driver.measure(size, 3)
    assert len(durations) == 3
    assert all(duration > 0 for duration in durations)


def test_naive_peer_echoes_arrays():
    q = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(rpc_peers.naive_array(rpc_peers.naive_message(q)), q)


def test_every_payload_has_its_size_in_bytes():
    for size, shape in rpc_peers.Q_SHAPES.items():
        assert np.prod(shape) * 4 == size


def test_rpc_compares_attnd_with_both_echoes():
    section = rpc.run(0, sizes={200: 2})
    assert "raw unix-socket echo" in labels(section)
    assert "naive gRPC echo" in labels(section)
    assert [row[0] for row in section.tables[0].rows][2:] == [*rpc.BARE.values(), rpc.LOCAL, rpc.SESSION, rpc.UNARY]
    assert [row[0] for row in section.tables[1].rows] == [rpc.SESSION, rpc.UNARY]
    assert "planned in a session" in labels(section)


def test_batching_compares_clients_at_the_same_time_and_a_lone_one():
    section = batching.run(0)
    assert [table.rows[0][0] for table in section.tables] == ["together", "together"]
    assert "8 clients" in labels(section)
    assert "a lone client" in labels(section)


def test_memory_looks_at_every_checkpoint():
    section = memory.run(60, checkpoints=(8, 10), server_options=("--no-warm-up",))
    assert [row[0] for row in section.tables[0].rows] == ["0", "6", "8", "10"]
    assert "import attnd.client" in labels(section)


def test_a_child_that_ends_early_is_named():
    with processes.child(processes.python("benchmarks.rpc_peers", "echo-drive", "/nowhere")) as child:
        child.stdin.close()
        with pytest.raises(RuntimeError, match="ended with code"):
            processes.read_line(child)


def test_children_are_gone_after_use():
    with contextlib.suppress(ZeroDivisionError), rpc._naive() as driver:
        process = driver._process
        raise ZeroDivisionError
    assert process.poll() is not None


def test_command_runs_the_chosen_sections_and_writes_json(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(append, "run", lambda budget_s: report.Section(name=f"append for {budget_s:g} s"))
    command.main(["append", "--budget", "0.5", "--json", str(tmp_path / "out.json")])
    assert "append for 10 s" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["sections"]) == 1


def test_command_refuses_an_unknown_section(capsys):
    with pytest.raises(SystemExit):
        command.main(["attention", "typo"])
    assert "unknown section typo" in capsys.readouterr().err


def test_demo_runs_every_way_to_the_kernels_in_turn():
    section = demo.run(0, tokens=3)
    assert [figure.label for figure in section.figures] == [
        "SmolLM2, time per token: attnd, local socket, relative to the same kernels in process",
        "SmolLM2, time per token: attnd, gRPC session, relative to the same kernels in process",
    ]
