"""A table on the terminal, and the same rows as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def print_table(title: str, rows: Sequence[Row], setup: dict[str, str]) -> None:
    """Prints rows of equal keys under each other, numbers to the right."""
    print(f"\n{title}")
    print("  " + ", ".join(f"{key} {value}" for key, value in setup.items()))
    if not rows:
        print("  (no rows)")
        return
    names = list(rows[0])
    cells = [[_cell(row[name]) for name in names] for row in rows]
    widths = [max(len(n), *(len(c[i]) for c in cells)) for i, n in enumerate(names)]
    print("  " + "  ".join(n.rjust(w) for n, w in zip(names, widths, strict=True)))
    for line in cells:
        print("  " + "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))


def note(line: str) -> None:
    """Tells on standard error what is measured now; a log shows it while a run goes on."""
    print(line, file=sys.stderr, flush=True)


def write_json(path: str | Path, benchmark: str, rows: Sequence[Row], setup: dict) -> None:
    """Adds this benchmark's rows to a JSON file, in place of older ones of its name.

    A NaN, which stands for what was not measured, is null there: JSON has no NaN.
    """
    path = Path(path)
    data = json.loads(path.read_text()) if path.exists() else {}
    measured = [
        {name: None if value != value else value for name, value in row.items()} for row in rows
    ]
    data[benchmark] = {"setup": setup, "rows": measured}
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")


def _cell(value: Any) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
