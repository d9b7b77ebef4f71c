"""The tables of an evaluation: as rows, as JSON, as pandas, on a terminal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# The first key of the file; a file of another kind is refused.
FORMAT = "sparse-loop evaluation"


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Tables of plain rows; what each holds is said at `evaluate`.

    Attributes:
      tables: rows by the name of their table; a table that was not asked for is missing.
      setup: what was evaluated, with which sizes, on what.
    """

    tables: dict[str, list[Row]]
    setup: dict[str, Any]

    def __getitem__(self, name: str) -> list[Row]:
        """The rows of one table.

        Raises:
          KeyError: it was not measured.
        """
        if name not in self.tables:
            raise KeyError(f"no table {name!r}; there are {sorted(self.tables)}")
        return self.tables[name]

    def frame(self, name: str):
        """A table as a `pandas.DataFrame`.

        Raises:
          ImportError: pandas is not installed.
        """
        import pandas

        return pandas.DataFrame(self[name])

    def write_json(self, path: str | Path) -> None:
        """Writes everything to a file that `read_json` reads."""
        data = {"format": FORMAT, "setup": self.setup, "tables": self.tables}
        Path(path).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def markdown(self, name: str, columns: list[str] | None = None) -> str:
        """A table in Markdown, of the given columns or of all."""
        rows = self[name]
        names = columns or list(dict.fromkeys(key for row in rows for key in row))
        lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
        lines += ["| " + " | ".join(cell(row.get(n)) for n in names) + " |" for row in rows]
        return "\n".join(lines)


def read_json(path: str | Path) -> Evaluation:
    """An evaluation that `write_json` wrote.

    Raises:
      ValueError: the file is something else.
      OSError: it cannot be read.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: is no JSON: {error}") from None
    whole = isinstance(data, dict) and data.get("format") == FORMAT
    if not whole or not all(isinstance(data.get(key), dict) for key in ("tables", "setup")):
        raise ValueError(f"{path}: is no file of `sparse-loop evaluate --json`")
    return Evaluation(data["tables"], data["setup"])


def cell(value: Any) -> str:
    """A value for a table: three or four digits, "-" for nothing."""
    if value is None:
        return "-"
    if isinstance(value, float):
        if value == 0 or 1e-3 <= abs(value) < 1e3:
            return f"{value:.4g}"
        return f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.1e}"
    if isinstance(value, list):
        return ", ".join(cell(v) for v in value)
    return str(value)
