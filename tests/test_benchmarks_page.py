"""docs/benchmarks.md is what benchmarks/render.py writes from the results."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def render(monkeypatch):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "render", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def decode_row(**changes) -> dict:
    row = {"batch": 8, "context": 8192, "retention": 1.0, "ms/step": 16.25, "spread": 0.0004}
    return row | {"of roofline": 0.879, "tokens/s": 12345.6, "vs torch": float("nan")} | changes


RESULTS = {
    "decode": {
        "setup": {"device": "Test 1", "jax": "0.1", "jaxlib": "0.1", "dtype": "bfloat16"},
        "rows": [decode_row(), decode_row(batch=3), decode_row(retention=0.1)],
    }
}


def test_the_page_is_up_to_date(render):
    assert render.main(["--check"]) == 0


def test_every_table_is_on_the_page_once(render):
    marked = re.findall(r"<!-- table: (.+?) -->", render.PAGE.read_text())
    assert sorted(marked) == sorted(render.TABLES)
    assert set(render.GOALS) <= set(render.TABLES)


def test_a_table_has_its_rows_goals_and_setup(render):
    lines = render.table_text("decode", RESULTS).splitlines()
    assert lines[0].startswith("| requests | context | ms a step | tokens/s |")
    assert lines[0].endswith("| spread | goal |")
    assert lines[2] == "| 8 | 8192 | 16.2 | 12346 | 0.879 |  |  | 4e-04 | >= 0.85 |"
    assert lines[3].endswith("|  |")  # no goal for this case
    assert lines[4:] == ["", "Test 1, jax 0.1, dtype bfloat16."]


def test_goals_are_found_by_what_they_name(render):
    goal = render._goal
    sparse = render.GOALS["sparse attention"]
    row = {"batch": 8, "context": 8192, "op": "consume", "retention": 0.1}
    assert goal(row, sparse) == "<= 0.25"
    assert goal(row | {"op": "select"}, sparse) == "<= 20 us"
    assert goal(row | {"retention": 0.5}, sparse) == ""


def test_what_was_not_measured_is_said(render):
    assert render.table_text("prefill", RESULTS) == "Not measured yet."
    with pytest.raises(ValueError, match="no table is called 'other'"):
        render.table_text("other", RESULTS)


def test_an_old_page_is_noticed_and_written_anew(render, tmp_path, monkeypatch, capsys):
    page, results = tmp_path / "page.md", tmp_path / "results.json"
    page.write_text("Text.\n<!-- table: decode -->\nold\n<!-- end -->\nMore.\n")
    results.write_text(json.dumps(RESULTS))
    monkeypatch.setattr(render, "PAGE", page)
    monkeypatch.setattr(render, "RESULTS", results)
    assert render.main(["--check"]) == 1
    assert "is not what" in capsys.readouterr().out
    assert "old" in page.read_text()
    assert render.main([]) == 0
    assert render.main(["--check"]) == 0
    text = page.read_text()
    assert text.startswith("Text.\n<!-- table: decode -->\n| requests |")
    assert text.endswith("dtype bfloat16.\n<!-- end -->\nMore.\n")
