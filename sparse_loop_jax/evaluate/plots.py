"""Pictures of an evaluation and of a benchmark file. Needs matplotlib (extra "plots").

python -m sparse_loop_jax.evaluate.plots EVALUATION.json --out FOLDER [--bench BENCH.json]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_loop_jax.evaluate.drawing import (
    COLOURS,
    INK,
    log_scale,
    new_figure,
    percent,
    ramp,
    styled,
)
from sparse_loop_jax.evaluate.report import Evaluation, Row, read_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled
def plot_quality(result: Evaluation) -> Figure:
    """Perplexity, KL, agreement and answers, and retained mass against retention.

    Raises:
      ValueError: neither text nor answers were measured, or matplotlib is missing.
    """
    text, answers = result.tables.get("text"), result.tables.get("answers")
    if text is None and answers is None:
        raise ValueError("there is nothing to draw: neither a text nor tasks were measured")
    figure, axes = new_figure((8.2, 5.8), 2, 2)
    _perplexity(axes[0][0], text)
    _divergence(axes[0][1], text)
    _shares(axes[1][0], text, answers)
    _mass(axes[1][1], text)
    for row in axes:
        for axis in row:
            if axis.has_data():
                _retention_axis(axis, [r["retention"] for r in text or answers or []])
            else:
                axis.axis("off")
    figure.suptitle(f"What retention costs: {_subject(result)}", x=0.01, ha="left")
    return figure


@styled
def plot_mass(result: Evaluation) -> Figure:
    """Heat maps of the kept keys' mass, layer by loop, a panel for each sparse retention."""
    rows = result["attention"]
    retentions = sorted({r["retention"] for r in rows}, reverse=True)
    loops = sorted({r["loop"] for r in rows})
    layers = sorted({r["layer"] for r in rows})
    cells = {
        retention: [
            [
                _mean(
                    r["mass"]
                    for r in rows
                    if (r["retention"], r["layer"], r["loop"]) == (retention, layer, loop)
                )
                for loop in loops
            ]
            for layer in layers
        ]
        for retention in retentions
    }
    low = min(value for grid in cells.values() for line in grid for value in line)
    width = max(1.5 * len(retentions) + 1.6, 6.0)
    height = min(max(0.42 * len(layers) + 1.7, 3.0), 8.0)
    figure, axes = new_figure((width, height), 1, len(retentions), sharey=True)
    image: Any = None
    for axis, retention in zip(axes[0], retentions, strict=True):
        image = axis.imshow(
            cells[retention], cmap="viridis", vmin=math.floor(low * 10) / 10, vmax=1.0,
            aspect="auto",
        )  # fmt: skip
        axis.grid(False)
        axis.set_title(f"{percent(retention)} of keys")
        axis.set_xticks(range(len(loops)), [str(loop) for loop in loops])
        axis.set_xlabel("loop")
        axis.tick_params(length=0)
        if len(layers) <= 12:
            for y, line in enumerate(cells[retention]):
                for x, value in enumerate(line):
                    dark = value < (1 + low) / 2
                    axis.text(
                        x, y, f"{value:.2f}", ha="center", va="center", fontsize=7.5,
                        color="white" if dark else INK,
                    )  # fmt: skip
    step = 1 if len(layers) <= 12 else 4
    axes[0][0].set_yticks(range(0, len(layers), step), [str(i) for i in layers[::step]])
    axes[0][0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=axes[0].tolist(), pad=0.01, fraction=0.03)
    bar.outline.set_visible(False)
    figure.suptitle(
        f"Attention mass that the keys kept by loop {loops[0]} have in each loop",
        x=0.01, ha="left",
    )  # fmt: skip
    return figure


@styled
def plot_positions(result: Evaluation) -> Figure:
    """KL, retained mass and attention error against the keys that a row saw."""
    rows = [r for r in result["positions"] if r["retention"] < 1.0]
    titles = {
        "KL": "KL(dense || sparse), nats",
        "mass": "mass of the kept keys",
        "error": "error of attention outputs",
    }
    # Without windows whose attention was looked at there is the first alone.
    seen = {k for r in rows for k in titles if r[k] is not None}
    titles = {k: v for k, v in titles.items() if k == "KL" or k in seen}
    figure, axes = new_figure((3.2 * len(titles), 3.3), 1, len(titles))
    retentions = sorted({r["retention"] for r in rows}, reverse=True)
    colours = ramp(len(retentions))
    for axis, (name, title) in zip(axes[0], titles.items(), strict=True):
        for retention, colour in zip(retentions, colours, strict=True):
            mine = [r for r in rows if r["retention"] == retention and r[name] is not None]
            axis.plot(
                [(r["from"] + r["to"]) / 2 for r in mine], [r[name] for r in mine],
                marker="o", color=colour, label=percent(retention),
            )  # fmt: skip
        axis.set_title(title)
        axis.set_xlabel("keys that the row saw")
    if any(r["KL"] > 0 for r in rows):
        log_scale(axes[0][0])
    if len(titles) > 1:
        axes[0][1].set_ylim(top=1.02)
        axes[0][2].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", title="keys kept")
    return figure


@styled
def plot_speed(bench: dict) -> Figure:
    """Milliseconds a decode step against context, with the least that its bytes allow.

    Args:
      bench: a file of `sparse-loop bench decode --json`, parsed.

    Raises:
      ValueError: it holds no decode benchmark.
    """
    if "decode" not in bench or not bench["decode"].get("rows"):
        raise ValueError("the benchmark file has no rows of `sparse-loop bench decode`")
    rows: list[Row] = bench["decode"]["rows"]
    setup = bench["decode"].get("setup", {})
    pairs = {(r["batch"], r["context"]) for r in rows}
    batches = sorted({batch for batch, _ in pairs})
    # A batch at one context only is no line.
    batches = [b for b in batches if sum(p[0] == b for p in pairs) > 1] or batches
    retentions = sorted({r["retention"] for r in rows}, reverse=True)
    colours = [INK, *ramp(len(retentions) - 1)]
    figure, axes = new_figure((0.9 + 3.4 * len(batches), 3.6), 1, len(batches))
    for axis, batch in zip(axes[0], batches, strict=True):
        for retention, colour in zip(retentions, colours, strict=True):
            mine = sorted(
                (r for r in rows if (r["batch"], r["retention"]) == (batch, retention)),
                key=lambda r: r["context"],
            )
            context = [r["context"] for r in mine]
            name = "dense" if retention == 1.0 else f"{percent(retention)} of keys"
            axis.plot(
                context, [r["ms/step"] for r in mine], marker="o", color=colour, label=name
            )
            axis.plot(
                context, [r["ms/step"] * r["of roofline"] for r in mine], linestyle=":",
                color=colour, linewidth=1.2,
            )  # fmt: skip
        axis.set_title(f"batch {batch}")
        axis.set_xlabel("tokens of context")
        # Not logarithmic: bytes are linear in the context, and so are lines between points.
        axis.set_xticks(sorted(c for b, c in pairs if b == batch))
        axis.set_xlim(left=0)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("ms a step")
    axes[0][0].plot([], [], linestyle=":", color="#777777", label="its bytes at full bandwidth")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center")
    figure.suptitle(
        ", ".join(str(setup[k]) for k in ("device", "shape", "dtype") if k in setup),
        x=0.01, ha="left",
    )  # fmt: skip
    return figure


def _perplexity(axis: Axes, text: list[Row] | None) -> None:
    if text is None:
        return
    x = [r["retention"] for r in text]
    dense = text[0]["nll"]
    axis.axhline(text[0]["perplexity"], color="#999999", linewidth=1, linestyle=":")
    error = [2 * (r["standard error"] or 0.0) for r in text]
    band = [
        [math.exp(dense + r["nll change"] + s * e) for r, e in zip(text, error, strict=True)]
        for s in (-1, 1)
    ]
    axis.fill_between(x, band[0], band[1], color=COLOURS[0], alpha=0.15, linewidth=0)
    axis.plot(x, [r["perplexity"] for r in text], marker="o", color=COLOURS[0])
    axis.set_title("perplexity of held-out text")
    axis.ticklabel_format(axis="y", useOffset=False)


def _divergence(axis: Axes, text: list[Row] | None) -> None:
    rows = [r for r in text or [] if r["KL"] > 0]
    if not rows:
        return
    x = [r["retention"] for r in rows]
    axis.plot(
        x, [r["KL p99"] for r in rows], marker="o", color=COLOURS[1], label="99th percentile"
    )
    axis.plot(x, [r["KL"] for r in rows], marker="o", color=COLOURS[0], label="mean")
    log_scale(axis)
    axis.set_title("KL(dense || sparse) of the next token, nats")
    axis.legend()


def _shares(axis: Axes, text: list[Row] | None, answers: list[Row] | None) -> None:
    if text is not None:
        axis.plot(
            [r["retention"] for r in text], [r["agreement"] for r in text], marker="o",
            color=COLOURS[0], label="likeliest token equals dense's",
        )  # fmt: skip
    if answers is not None:
        axis.plot(
            [r["retention"] for r in answers], [r["accuracy"] for r in answers], marker="s",
            color=COLOURS[1], label=f"right answers of {answers[0]['questions']}",
        )  # fmt: skip
    axis.set_title("share of tokens and answers")
    axis.set_ylim(min(0.8, axis.get_ylim()[0]), 1.01)
    axis.legend(loc="lower left")


def _mass(axis: Axes, text: list[Row] | None) -> None:
    rows = [r for r in text or [] if "mass" in r]
    if not rows:
        return
    # All keys have all of the mass.
    x = [1.0, *(r["retention"] for r in rows)]
    lines = {"mass": "in the loop that chose them"}
    later = [k for k in rows[0] if k.startswith("mass in loop ")]
    lines |= {name: name.removeprefix("mass ") for name in later}
    for colour, (name, label) in zip(COLOURS, lines.items(), strict=False):
        axis.plot(x, [1.0, *(r[name] for r in rows)], marker="o", color=colour, label=label)
    axis.set_title("attention mass of the kept keys")
    axis.set_ylim(top=1.01)
    axis.legend(loc="lower left")


def _retention_axis(axis: Axes, retentions: Sequence[float]) -> None:
    """Fewer keys to the right; a tick for each retention that was measured."""
    axis.set_xscale("log")
    axis.set_xticks(list(retentions), [percent(r) for r in retentions])
    axis.minorticks_off()
    axis.set_xlim(max(retentions) * 1.15, min(retentions) / 1.15)
    axis.set_xlabel("keys kept")


def _subject(result: Evaluation) -> str:
    setup = result.setup
    parts = [f"{setup.get('model', 'a model')} model, {setup.get('dtype')}"]
    if setup.get("windows"):
        parts.append(f"{setup['windows']} windows of {setup['window']} tokens")
    return ", ".join(parts)


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draws an evaluation.")
    parser.add_argument("evaluation", help="file of `sparse-loop evaluate --json`")
    parser.add_argument("--bench", help="file of `sparse-loop bench decode --json`")
    parser.add_argument("--out", default=".", help="folder of the pictures")
    args = parser.parse_args(argv)
    result, out = read_json(args.evaluation), Path(args.out)
    plot_quality(result, out / "retention-quality.png")
    plot_mass(result, out / "retained-mass.png")
    plot_positions(result, out / "error-by-position.png")
    if args.bench is not None:
        plot_speed(json.loads(Path(args.bench).read_text()), out / "speed-by-context.png")


if __name__ == "__main__":
    main()
