"""Runs the notebooks: each .py beside this file becomes an .ipynb with its outputs.

    python notebooks/make.py [NAME ...]        # 03 is name enough for 03_....py

The .py (Jupytext's percent format) is what people edit; Jupyter with Jupytext opens it as a
notebook. Every notebook runs in a kernel of its own, on the CPU, so that a run gives the same
file wherever it happens.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import jupytext
import nbformat

HERE = Path(__file__).resolve().parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def sources(names: list[str]) -> list[Path]:
    """The notebooks whose names begin with one of `names`; all where there are none.

    Raises:
      ValueError: a name is that of no notebook.
    """
    every = sorted(HERE.glob("[0-9]*.py"))
    for name in names:
        if not any(path.name.startswith(name) for path in every):
            raise ValueError(f"no notebook begins with {name!r}: {[p.stem for p in every]}")
    return [path for path in every if not names or path.name.startswith(tuple(names))]


def execute(source: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs.

    Raises:
      CellExecutionError: a cell raised.
    """
    from nbclient import NotebookClient  # pyright: ignore[reportMissingImports]

    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict(METADATA)
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(HERE)}},
    ).execute()
    return notebook


def tidy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without what differs between runs: ids, times, the kernel's version.

    Raises:
      ValueError: a cell wrote to standard error, which a reader should not have to see.
    """
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02}"
        cell.metadata = nbformat.from_dict({})
        for output in cell.get("outputs", []):
            if output.get("name") == "stderr":
                raise ValueError(f"cell {number} wrote to standard error: {output.text}")
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main(names: list[str]) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # kernels inherit it
    for source in sources(names):
        print(f"== {source.name}", flush=True)
        nbformat.write(tidy(execute(source)), source.with_suffix(".ipynb"))


if __name__ == "__main__":
    main(sys.argv[1:])
