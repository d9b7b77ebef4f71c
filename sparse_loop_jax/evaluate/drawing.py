"""How pictures are drawn: style, files, axes, colours."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT = "#222222", "#d9d9d9"
COLOURS = ("#1f4e79", "#c05a1c", "#2e7d4f", "#7a3e9d")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}


# What formats note of their making; left out, so that the same numbers give the same file.
_NO_DATES: dict[str, dict] = {".png": {"Software": None}, ".svg": {"Date": None}}


def styled(plot: Callable[..., Figure]) -> Callable[..., Figure]:
    """Draws in this module's style, writes the figure to `path` if given, and hands it out."""

    @functools.wraps(plot)
    def draw(content: Any, path: str | Path | None = None) -> Figure:
        _require_matplotlib()
        if path is not None:
            check_picture(path)
        import matplotlib

        with matplotlib.rc_context(STYLE):
            figure = plot(content)
            if path is not None:
                figure.savefig(path, dpi=160, metadata=_NO_DATES.get(Path(path).suffix))
        return figure

    return draw


def check_picture(path: str | Path) -> None:
    """Complains about a picture that cannot be drawn before anything is measured for it.

    Raises:
      ValueError: matplotlib is not installed, or does not know the ending of the name.
    """
    _require_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    ending = Path(path).suffix.removeprefix(".")
    if ending not in known:
        raise ValueError(f"{path}: a picture's name must end with one of {sorted(known)}")


def _require_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plots need matplotlib: pip install -e '.[plots]'")


def new_figure(size: tuple[float, float], rows: int = 1, columns: int = 1, **options):
    """A figure of `size` inches outside of pyplot, and its axes, always in two dimensions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def ramp(count: int) -> list:
    """Colours from light to dark."""
    from matplotlib import colormaps

    if count == 1:
        return [COLOURS[1]]
    return [colormaps["viridis"](0.8 * (1 - i / max(count - 1, 1))) for i in range(count)]


def log_scale(axis: Axes) -> None:
    """A logarithmic y axis whose ticks are plain numbers, also within one decade."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())


def percent(share: float) -> str:
    return f"{share * 100:g} %"
