"""Writes the tables of docs/benchmarks.md from what `sparse-loop bench --json` left.

    python benchmarks/render.py            # between the markers of the page
    python benchmarks/render.py --check    # status 1 if the page is not what it would write

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. Its rows come from
`benchmarks/results/h200.json`, its goals from `GOALS` below.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results" / "h200.json"

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of the page.

    Attributes:
      benchmark: whose rows.
      columns: header -> key of a row.
      where: which rows.
    """

    benchmark: str
    columns: dict[str, str]
    where: Callable[[Row], bool] = lambda row: True


CASE = {"requests": "batch", "context": "context"}
TABLES = {
    "dense attention": Table(
        "attention",
        {
            **CASE,
            "us": "us",
            "of bandwidth": "of bandwidth",
            "times torch SDPA": "vs torch",
            "error": "error",
            "spread": "spread",
        },
        lambda row: row["op"] == "dense" and row["rows"] == 1,
    ),
    "rows that share pages": Table(
        "attention",
        {**CASE, "rows": "rows", "us": "us", "of one row": "vs fewest rows"},
        lambda row: row["op"] == "dense" and row["rows"] > 1,
    ),
    "sparse attention": Table(
        "attention",
        {
            "op": "op",
            **CASE,
            "r": "retention",
            "us": "us",
            "of dense": "vs dense",
            "of bandwidth": "of bandwidth",
            "served by": "served by",
        },
        lambda row: row["op"] != "dense" and row["rows"] == 1,
    ),
    "sparse attention of several rows": Table(
        "attention",
        {
            "op": "op",
            **CASE,
            "rows": "rows",
            "r": "retention",
            "us": "us",
            "of dense for these rows": "vs dense",
            "served by": "served by",
        },
        lambda row: row["op"] != "dense" and row["rows"] > 1,
    ),
    "decode": Table(
        "decode",
        {
            **CASE,
            "ms a step": "ms/step",
            "tokens/s": "tokens/s",
            "of the roofline": "of roofline",
            "times torch": "vs torch",
            "compile s": "compile s",
            "spread": "spread",
        },
        lambda row: row["retention"] == 1,
    ),
    "sparse decode": Table(
        "decode",
        {
            **CASE,
            "r": "retention",
            "ms a step": "ms/step",
            "times dense": "vs dense",
            "of its own roofline": "of roofline",
            "spread": "spread",
        },
        lambda row: row["retention"] < 1,
    ),
    "speculative": Table(
        "speculative",
        {
            **CASE,
            "draft loops": "draft loops",
            "r": "retention",
            "ms a round": "ms/round",
            "tokens/s": "tokens/s",
            "times plain": "vs plain",
            "times the better of both alone": "vs better",
            "of the roofline": "of roofline",
        },
    ),
    "prefill": Table(
        "prefill",
        {
            "requests": "batch",
            "tokens": "tokens",
            "seconds": "seconds",
            "tokens/s": "tokens/s",
            "TFLOP/s": "TFLOP/s",
            "attention ms": "attention ms",
            "times torch SDPA": "attention vs torch",
            "peak GB": "peak GB",
        },
    ),
    "concurrency": Table(
        "concurrency",
        {
            "requests": "requests",
            "mode": "mode",
            "tokens/s": "tokens/s",
            "speed of dense": "of dense",
            "first token p95 ms": "first token p95 ms",
            "p95 of dense": "first token of dense",
            "ms a round": "ms/round",
            "times the floor": "times floor",
            "accepted": "acceptance",
        },
    ),
    "concurrency, what is held": Table(
        "concurrency",
        {
            "requests": "requests",
            "mode": "mode",
            "rounds": "rounds",
            "rows captured": "captured",
            "rows consumed": "consumed",
            "store MB": "store MB",
            "planned store GB": "planned store GB",
            "planned GB": "planned GB",
            "peak GB": "peak GB",
            "same tokens as dense": "same as dense",
            "warm-up s": "warm-up s",
        },
    ),
}


def _cases(text: str, **more: Any) -> list[tuple[Row, str]]:
    """ "8x8192 >= 0.9, ..." to what a row must hold and the goal."""
    goals = []
    for part in text.split(","):
        case, goal = part.split(maxsplit=1)
        batch, context = case.split("x")
        goals.append(({"batch": int(batch), "context": int(context), **more}, goal))
    return goals


# The first entry whose values a row holds gives its goal: a bound on the column that the text
# above the table names.
GOALS: dict[str, list[tuple[Row, str]]] = {
    "dense attention": _cases("32x32768 >= 0.90, 8x8192 >= 0.89, 1x32768 >= 0.75"),
    "rows that share pages": [({"rows": 4}, "<= 1.3")],
    "sparse attention": [
        *_cases("32x32768 <= 0.12, 8x8192 <= 20 us, 1x32768 <= 20 us", op="select"),
        *_cases("32x32768 <= 1.3, 8x8192 <= 1.4", op="capture"),
        *_cases("32x32768 <= 0.14, 8x8192 <= 0.25", op="consume", retention=0.1),
    ],
    "sparse attention of several rows": _cases(
        "8x8192 <= 0.45, 8x16384 <= 0.45", op="consume", rows=4, retention=0.1
    ),
    "decode": _cases(
        "1x1024 >= 0.6, 8x1024 >= 0.7, 32x2048 >= 0.85, 4x8192 >= 0.8, 8x8192 >= 0.85, "
        "1x32768 >= 0.8"
    ),
    "sparse decode": _cases(
        "8x8192 >= 1.3, 32x2048 >= 1.25, 1x32768 >= 1.2, 4x8192 >= 1.2, 1x1024 >= 0.95",
        retention=0.1,
    ),
    "speculative": [
        ({"context": 1024, "retention": 1, "draft loops": 2}, ">= 1.35 plain"),
        ({"context": 1024, "retention": 1, "draft loops": 1}, ">= 1.8 plain"),
        *_cases("8x8192 >= 1.1 the better", retention=0.1, **{"draft loops": 1}),
        *_cases("8x8192 >= 1.0 the better", retention=0.1, **{"draft loops": 2}),
    ],
    "prefill": [({"batch": 1, "tokens": 8192}, "<= 0.30 s, ahead of torch SDPA")],
    "concurrency": [
        ({"mode": "dense", "requests": 32}, "> 1200 tokens/s, <= 1.5 floors"),
        ({"mode": "r=0.1"}, ">= 0.95 of dense, first token <= 1.1"),
        ({"mode": "r=0.5", "requests": 64}, "within the plan"),
    ],
}


def table_text(name: str, results: dict[str, Any]) -> str:
    """A table in Markdown with what it was made on, or that nothing was measured.

    Raises:
      ValueError: there is no such table.
    """
    if name not in TABLES:
        raise ValueError(f"no table is called {name!r}; there are {sorted(TABLES)}")
    table = TABLES[name]
    made = results.get(table.benchmark, {})
    rows = [row for row in made.get("rows", []) if table.where(row)]
    if not rows:
        return "Not measured yet."
    goals = GOALS.get(name, [])
    header = [*table.columns, *(["goal"] if goals else [])]
    lines = [header, ["---"] * len(header)]
    for row in rows:
        cells = [_cell(row.get(key)) for key in table.columns.values()]
        lines.append([*cells, _goal(row, goals)] if goals else cells)
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{text}\n\n{_setup(made['setup'])}"


def _goal(row: Row, goals: list[tuple[Row, str]]) -> str:
    for wanted, goal in goals:
        if all(row.get(key) == value for key, value in wanted.items()):
            return goal
    return ""


def _setup(setup: dict[str, str]) -> str:
    left_out = ("platform", "python", "jaxlib", "triton", "device")
    parts = [f"{key} {value}" for key, value in setup.items() if key not in left_out]
    return ", ".join([setup.get("device", "?"), *parts]) + "."


def _cell(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):
        if value and abs(value) < 1e-3:
            return f"{value:.0e}"
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def page_text(page: str, results: dict[str, Any]) -> str:
    """The page with its tables written anew."""

    def write(match: re.Match) -> str:
        return f"{match[1]}\n{table_text(match[2], results)}\n{match[3]}"

    marked = re.compile(r"(<!-- table: (.+?) -->)\n.*?(<!-- end -->)", re.DOTALL)
    return marked.sub(write, page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes the tables of docs/benchmarks.md.")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    args = parser.parse_args(argv)
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    page = PAGE.read_text()
    text = page_text(page, results)
    if args.check:
        if text != page:
            print("docs/benchmarks.md is not what benchmarks/render.py writes")
        return int(text != page)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
