"""Plots of results, as SVG: the same results give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .report import Line

SETTINGS = {"svg.hashsalt": "glulam", "svg.fonttype": "none", "font.size": 8.0, "axes.grid": True, "grid.alpha": 0.3}
TORCH = "#d1495b"  # in any of its ways
COLOURS = {"QuACK": "#e6a700", "BF16": "#7a7a7a"}
BAR = 0.8  # height of all bars of a line together, over the distance between two lines


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure. Raises RuntimeError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"drawing needs matplotlib ({error}); pip install 'glulam[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_overview(lines: list[Line]) -> Figure:
    """Each peer's time over ours, a layer of one model; right of the dotted line we are faster."""
    figure = new_figure(7.0, 0.8 + 0.5 * len(lines))
    axes = figure.subplots()
    axes.set_axisbelow(True)
    for place, line in enumerate(lines):
        height = BAR / max(len(line.peers), 1)
        for number, (title, ratios) in enumerate(line.peers.items()):
            y = place + (number - (len(line.peers) - 1) / 2) * height
            axes.barh(y, ratios[0], height, color=COLOURS.get(title, TORCH))
            axes.text(ratios[0], y, f" {title} {ratios[0]:.2f}", va="center", fontsize=7)
    axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(lines)), [line.what.replace("`", "") for line in lines])
    axes.set_xlim(right=1.2 * max((ratios[0] for line in lines for ratios in line.peers.values()), default=1.0))
    axes.invert_yaxis()
    axes.set_xlabel("peer's time / ours")
    return figure


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw and write a plot in the format of path's suffix. Raises RuntimeError without matplotlib."""
    new_figure(1, 1)  # says what is missing
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(SETTINGS):
        draw().savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
