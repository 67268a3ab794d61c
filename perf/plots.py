"""Plots of results, as SVG: the same results give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .results import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .report import Line

SETTINGS = {"svg.hashsalt": "glulam", "svg.fonttype": "none", "font.size": 8.0, "axes.grid": True, "grid.alpha": 0.3}
TORCH = "#d1495b"  # in any of its ways
COLOURS = {"QuACK": "#e6a700", "BF16": "#7a7a7a"}
BAR = 0.8  # height of all bars of a line together, over the distance between two lines


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(f"drawing needs matplotlib ({error}); pip install 'glulam[plots]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_overview(lines: list[Line]) -> Figure:
    """Each peer's time over ours, a layer of one model; right of the dotted line we are faster."""
    figure = _figure(7.0, 0.8 + 0.5 * len(lines))
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


def draw_curves(result: Result) -> Figure:
    """The losses of training runs over each other, and the differences of their means from the first run's."""
    runs, window = [record for record in result["records"] if "loss" in record], result["records"][-1]["window"]
    first = smoothed(runs[0]["loss"], window)
    figure = _figure(8.0, 6.0)
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    for number, run in enumerate(runs):
        # Each curve is thinner than the one that it covers, so that both are seen.
        style: dict[str, Any] = {"linewidth": 1 + 5 * (len(runs) - 1 - number) / len(runs), "alpha": 0.8}
        above.plot(run["loss"], color=f"C{number}", label=f"{run['run']} (held out: {run['held_out']:.4f})", **style)
        if number:
            apart = [a - b for a, b in zip(smoothed(run["loss"], window), first, strict=True)]
            below.plot(apart, color=f"C{number}", linewidth=1.2, label=run["run"])
    above.set_ylabel("loss, nats a byte")
    above.set_title(f"{result['stamp']['gpu']}, commit {result['stamp']['commit'][:12]}")
    below.set_ylabel(f"minus {runs[0]['run']}")
    below.set_xlabel(f"step (differences are of means over {window} steps)")
    below.axhline(0, color="C0", linewidth=0.8)
    for axes in (above, below):
        axes.legend()
    return figure


def smoothed(losses: list[float], window: int) -> list[float]:
    """Return for each step the mean of the last `window` losses; at the start, of as many as there are."""
    spans = [losses[max(0, end - window) : end] for end in range(1, len(losses) + 1)]
    return [sum(span) / len(span) for span in spans]


def save(draw: Callable[[], Figure], path: Path) -> None:
    """Draw and write a plot in the format of path's suffix. Raises RuntimeError without matplotlib."""
    _figure(1, 1)  # says what is missing
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(SETTINGS):
        draw().savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
