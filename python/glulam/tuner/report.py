"""The report of a tuning run, printed as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ..choose.table import Layer, Point, Stamp


def describe(layer: Layer) -> str:
    """Describe the problem of `layer`, an entry of a tuned table, in one line."""
    p = layer.problem
    sizes = [str(p[name]) for name in ("in_features", "intermediate", "out_features") if name in p]
    words = [str(p[name]) for name in ("dtype", "activation") if name in p]
    words += [name for name, value in p.items() if value is True]
    return f"{p.get('op')}, {p.get('experts')} experts, {' -> '.join(sizes)} ({', '.join(words)})"


def _us(point: Point, name: str) -> str:
    us = point.mean_us(name)
    return "-" if us is None else f"{us:.0f}" if us >= 1000 else f"{us:.4g}"


def rows_of(layer: Layer) -> list[tuple[str, ...]]:
    """Return the lines of the report's table, as cells in the columns of HEADER: one line for each number of rows."""
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
    """Results of `glulam.tune`.

    Attributes:
        layers: the problems and the kernels chosen for them.
        stamp: the GPU, versions and kernel sources for which the times hold.
        path: the table file with the results.
        seconds: duration of the run.
        notes: kernels and sizes that were left out, and why.
    """

    layers: tuple[Layer, ...]
    stamp: Stamp
    path: Path
    seconds: float
    notes: tuple[str, ...] = ()

    @property
    def gain(self) -> float:
        """Time of the shipped kernels divided by the time of the tuned kernels.

        It is the geometric mean over all problems and numbers of rows.
        """
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
