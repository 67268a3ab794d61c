"""What a tuning run found, in words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..choose.table import Layer, Point, Stamp


def describe(layer: Layer) -> str:
    """A problem in one line."""
    p = layer.problem
    sizes = [str(p[name]) for name in ("in_features", "intermediate", "out_features") if name in p]
    words = [str(p[name]) for name in ("dtype", "activation") if name in p]
    words += [name for name, value in p.items() if value is True]
    return f"{p.get('op')}, {p.get('experts')} experts, {' -> '.join(sizes)} ({', '.join(words)})"


def _us(point: Point, name: str) -> str:
    us = point.mean_us(name)
    return "-" if us is None else f"{us:.0f}" if us >= 1000 else f"{us:.4g}"


def rows_of(layer: Layer) -> list[tuple[str, ...]]:
    """A line a point: rows an expert, microseconds of the shipped and of the chosen kernel, gain, the latter's name."""
    return [
        (
            f"{point.rows_per_expert:.15g}",
            _us(point, point.shipped),
            _us(point, point.chosen),
            f"{point.gain:.3f}" if point.chosen != point.shipped else "-",
            point.chosen if point.chosen != point.shipped else "the shipped one",
        )
        for point in layer.points
    ]


HEADER = ("rows an expert", "shipped us", "tuned us", "gain", "kernel")


@dataclass(frozen=True, repr=False)
class TuneReport:
    """What `glulam.tune` found.

    Attributes:
        layers: the problems and what was decided for them.
        stamp: what the times hold for.
        path: the table that has them.
        seconds: how long it took.
        notes: what was left out, and why.
    """

    layers: tuple[Layer, ...]
    stamp: Stamp
    path: Path
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """The shipped kernels' time over the tuned ones', geometric mean over all that was measured."""
        gains = [point.gain for layer in self.layers for point in layer.points]
        return math.exp(sum(map(math.log, gains)) / len(gains))

    def __repr__(self) -> str:
        lines = [f"tuned on {self.stamp.gpu} in {self.seconds:.0f} s; mean gain {self.gain:.3f}; {self.path}"]
        for layer in self.layers:
            lines += [describe(layer), "  " + "  ".join(HEADER)]
            widths = [len(heading) for heading in HEADER[:-1]]
            for *cells, name in rows_of(layer):
                padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
                lines.append("  " + "  ".join([*padded, name]))
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])
