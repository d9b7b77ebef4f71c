"""The notebooks run from top to bottom, and the executed ones say what a run says."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import io
import re
from pathlib import Path
from typing import Any

import jupytext
import matplotlib
import nbformat
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("[0-9]*.py"))
AGAIN = "run `make notebooks`"
# Prints what is in a file of the repository, and so the same everywhere.
READS_ONLY = "06_reading_benchmarks"


@dataclasses.dataclass
class Ran:
    """What a code cell printed, and the figure that it ended with."""

    text: str
    figure: Figure | None


def run_cells(cells: list) -> list[Ran]:
    """Runs code cells in one new namespace, without a kernel."""
    namespace: dict[str, Any] = {"__name__": "notebook"}
    return [run_cell(cell.source, namespace) for cell in cells if cell.cell_type == "code"]


def run_cell(source: str, namespace: dict[str, Any]) -> Ran:
    tree = ast.parse(re.sub(r"^%.*$", "", source, flags=re.MULTILINE))  # without magics
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, "cell", "exec", dont_inherit=True), namespace)
        if isinstance(last, ast.Expr):
            shown = ast.Expression(last.value)
            value = eval(compile(shown, "cell", "eval", dont_inherit=True), namespace)
    return Ran(printed.getvalue(), value if isinstance(value, Figure) else None)


def outputs(cell) -> tuple[str, int]:
    """The text that an executed cell printed, and how many pictures it shows."""
    text = "".join(o.text for o in cell.outputs if o.output_type == "stream")
    return text, sum("image/png" in o.get("data", {}) for o in cell.outputs)


@pytest.fixture
def make():
    """notebooks/make.py as a module."""
    spec = importlib.util.spec_from_file_location("make_notebooks", NOTEBOOKS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_six():
    assert [path.stem[:2] for path in SOURCES] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_executed_notebook_is_of_this_source(source):
    executed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    nbformat.validate(executed)
    cells = [(c.cell_type, c.source) for c in jupytext.read(source).cells]
    assert [(c.cell_type, c.source) for c in executed.cells] == cells, AGAIN
    code = [c for c in executed.cells if c.cell_type == "code"]
    assert [c.execution_count for c in code] == [i + 1 for i in range(len(code))], AGAIN
    kinds = {o.get("name", o.output_type) for c in code for o in c.outputs}
    assert kinds <= {"stdout", "execute_result", "display_data"}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_it_runs_and_draws(source, monkeypatch):
    monkeypatch.chdir(NOTEBOOKS)
    with matplotlib.rc_context():
        ran = run_cells(jupytext.read(source).cells)
        figures = [cell.figure for cell in ran if cell.figure is not None]
        assert len(figures) >= 2
        for figure in figures:
            FigureCanvasAgg(figure).draw()  # a layout that does not fit is a warning
            assert all(axis.has_data() for axis in figure.axes)
    executed = nbformat.read(source.with_suffix(".ipynb"), as_version=4)
    shown = [outputs(cell) for cell in executed.cells if cell.cell_type == "code"]
    assert [int(cell.figure is not None) for cell in ran] == [n for _, n in shown], AGAIN
    assert [bool(cell.text) for cell in ran] == [bool(text) for text, _ in shown], AGAIN
    # What a notebook claims, it prints as True.
    assert not any(": False" in cell.text for cell in ran)
    if source.stem == READS_ONLY:
        assert [cell.text for cell in ran] == [text for text, _ in shown], AGAIN


def test_a_cell_that_raises_fails():
    cells = nbformat.v4.new_code_cell("x = 1"), nbformat.v4.new_code_cell("assert x == 2")
    with pytest.raises(AssertionError):
        run_cells(list(cells))


def test_notebooks_are_chosen_by_the_beginning_of_their_names(make):
    assert make.sources([]) == SOURCES
    assert make.sources(["02", "05_self"]) == [SOURCES[1], SOURCES[4]]
    with pytest.raises(ValueError, match="no notebook begins with '9'"):
        make.sources(["9"])


def test_what_differs_between_runs_is_left_out(make):
    cell = nbformat.v4.new_code_cell("1", metadata={"execution": {"started": "now"}})
    language = {"name": "python", "version": "3.0"}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"language_info": language})
    tidied = make.tidy(notebook)
    assert (tidied.cells[0]["id"], tidied.cells[0].metadata) == ("cell-00", {})
    assert "version" not in tidied.metadata.language_info
    cell.outputs = [nbformat.v4.new_output("stream", name="stderr", text="a warning")]
    with pytest.raises(ValueError, match="cell 0 wrote to standard error: a warning"):
        make.tidy(notebook)
