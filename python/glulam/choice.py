"""Which of several tiles: by measured times where the shape was measured, else by the model of `cost`.

The table measured/<arch>.json holds every tile that was tried on the shapes of known models, at 1 to 4096 rows an
expert; `python -m perf table` writes it. It is read when the first plan is made, once.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.tiles import TileConfig

from .cost import Gemm, time_us

FOLDER = Path(__file__).with_name("measured")
MODELLED = "by the cost model"


class Part(NamedTuple):
    """One GEMM of a problem. form: "glu", "nt" or "nn", the kernel family whose times are its own."""

    form: str
    gemm: Gemm

    @property
    def key(self) -> Shape:
        return self.form, self.gemm.experts, self.gemm.columns, self.gemm.depth


Shape = tuple[str, int, int, int]


class Curve(NamedTuple):
    """Microseconds by rows an expert, of each tile by its name."""

    rows: list[int]
    us: dict[str, list[float]]

    def at(self, tile: str, average: float) -> float | None:
        """Between the measured numbers of rows linear in logarithms; None outside of them, or of another tile."""
        if tile not in self.us or not self.rows[0] <= average <= self.rows[-1]:
            return None
        right = max(bisect.bisect_left(self.rows, average), 1)
        (x0, x1), (y0, y1) = self.rows[right - 1 : right + 1], self.us[tile][right - 1 : right + 1]
        return y0 * math.exp(math.log(y1 / y0) * math.log(average / x0) / math.log(x1 / x0))


@dataclass(frozen=True)
class Table:
    """What was measured for one architecture, and the GPU that it was measured on."""

    gpu: str
    curves: dict[Shape, Curve]


@functools.cache
def table(arch: str) -> Table:
    """The shipped measurements of an architecture; an empty table where there are none."""
    path = FOLDER / f"{arch}.json"
    if not path.is_file():
        return Table("", {})
    held: dict[str, Any] = json.loads(path.read_text())
    shapes = held["shapes"]
    curves = {(s["form"], s["experts"], s["columns"], s["depth"]): Curve(s["rows_per_expert"], s["us"]) for s in shapes}
    return Table(held["stamp"]["gpu"], curves)


class Estimate(NamedTuple):
    """Microseconds on a tile, the mean over even and skewed routing, and how they are known."""

    us: float
    tile: TileConfig
    source: str


def _measured(parts: Sequence[Part], tile: TileConfig, known: Table) -> float | None:
    """The sum of all parts; None where one was not measured."""
    total = 0.0
    for part in parts:
        curve = known.curves.get(part.key)
        us = curve.at(tile.name, part.gemm.average) if curve else None
        if us is None:
            return None
        total += us
    return total


def estimates(parts: Sequence[Part], tiles: Sequence[TileConfig], arch: str) -> list[Estimate]:
    """Each tile's time for all parts, the fastest first. All are measured, or all are modelled."""
    known = table(arch)
    measured = [_measured(parts, tile, known) for tile in tiles]
    if None not in measured:
        found = [Estimate(us, tile, f"measured on {known.gpu}") for us, tile in zip(measured, tiles, strict=True) if us]
    else:
        found = [Estimate(sum(time_us(part.gemm, tile) for part in parts), tile, MODELLED) for tile in tiles]
    return sorted(found, key=lambda estimate: estimate.us)
