"""What the report says of a figure, as text and as JSON."""

import io
import json
import socket

import pytest
from rich.console import Console

from benchmarks import report
from benchmarks.timing import Ratio, Timing


def section():
    made = report.Section(name="part")
    made.timings("shape", {"ours": Timing({0: 0.001, 1: 0.003})}, lambda timing: "7", "GB/s")
    made.ratio("speed", Ratio(value=1.5, low=1.0, high=2.0), report.Target(bound=1.7))
    made.value("memory", 60.0, "MiB", report.Target(bound=70, side="at most"))
    made.notes.append("a note")
    return made


def test_shows_values_spread_targets_and_notes():
    out = io.StringIO()
    report.show_section(Console(file=out, width=report.WIDTH_MIN), section())
    text = out.getvalue()
    for expected in ("1.5 x  (1 to 2)", "at least 1.7: MISSED", "at most 70: met", "note: a note", "GB/s", "shape"):
        assert expected in text


def test_json_holds_every_figure(tmp_path):
    path = tmp_path / "out.json"
    report.write_json(path, {"processor": "x"}, [section()])
    loaded = json.loads(path.read_text())
    assert loaded["machine"] == {"processor": "x"}
    assert [figure["value"] for figure in loaded["sections"][0]["figures"]] == [1.5, 60.0]
    assert loaded["sections"][0]["figures"][0]["target"] == {"bound": 1.7, "side": "at least"}


def test_markdown_replaces_only_the_figures(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(f"before\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nafter\n")
    facts = {"processor": "x", "load": "0.1", "jax": "1", "torch": "2"}
    for _ in range(2):
        report.write_markdown(path, facts, [section()])
    text = path.read_text()
    assert text.startswith(f"before\n{report.MARKS[0]}\n\nMeasured on: x;")
    assert text.endswith(f"\n\n{report.MARKS[1]}\nafter\n")
    assert text.count("| speed | 1.5 x  (1 to 2) | at least 1.7: MISSED |") == 1
    assert "old" not in text


def test_markdown_refuses_a_page_without_marks(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("nothing here")
    with pytest.raises(ValueError, match="has no lines"):
        report.write_markdown(path, {}, [])


def test_machine_names_what_figures_depend_on_and_no_host():
    facts = report.machine()
    assert {"processor", "memory", "load", "python", "numpy", "jax"} <= facts.keys()
    assert socket.gethostname() not in " ".join(facts.values())


def test_table_is_readable_without_a_terminal():
    console = report.make_console()
    assert console.is_terminal or console.width == report.WIDTH_MIN
