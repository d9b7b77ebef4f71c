"""Markdown tables of numbers, one a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Markdown of two columns without a heading."""
    return "\n".join(["| | |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]) + "\n"


def numbers(values: Sequence[float] | None, digits: int = 3) -> str:
    """Numbers of loop 1, 2, ..., or a dash where nothing was measured."""
    return ", ".join(f"{value:.{digits}f}" for value in values) if values else "-"


def comparison(models: Mapping[str, dict]) -> str:
    """One column a model, one row a measurement; cells hold one number a loop."""
    names = list(models)
    lines = [
        "| after loop 1, 2, ... | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]

    def row(label: str, pick) -> None:
        cells = [numbers(pick(models[name])) for name in names]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    row("held-out cross-entropy, nats per token", lambda m: m["text"]["cross_entropy"])
    row("held-out cross-entropy, nats per byte", lambda m: m["text"]["nats_per_byte"])
    row(
        "greedy tokens equal to the last loop's, held-out text",
        lambda m: m["text"]["agreement"],
    )
    row("the same, on text of its own", lambda m: m["own_text"])
    tables = (
        ("recall_by_length", "recall of a code in {} tokens"),
        ("hops_by_steps", "pointers followed: {}"),
        ("hops_by_length", "1 to 8 pointers in {} tokens"),
    )
    for name, label in tables:
        keys = sorted({key for model in models.values() for key in model[name]}, key=int)
        for key in keys:
            row(label.format(key), lambda m, n=name, k=key: m[n].get(k))
    return "\n".join(lines) + "\n"
