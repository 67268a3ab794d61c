"""Estimate a problem's time on each of several tiles: from measurements of its shape, else by a cost model.

Each architecture has a file of measurements (`ArchPolicy.MEASURED`) and a cost model. The file has the times of every
tile that was tried on the shapes of known models, at 1 to 4096 rows an expert. `python -m perf table` writes it. It is
read once, when the first plan is made.
"""

from __future__ import annotations

import bisect
import functools
import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from cute_kernels.arch import policy_of
from cute_kernels.tiles import TileConfig

from .problem import ProblemGemm

MODELLED = "by the cost model"


def interpolated(x: float, left: tuple[float, float], right: tuple[float, float]) -> float:
    """Interpolate between two points (x, y), linearly in the logarithms of x and y; return y at x."""
    (x0, y0), (x1, y1) = left, right
    return y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0)) if x1 > x0 else y0


class Curve(NamedTuple):
    """Measured times of one GEMM shape, as a function of the number of rows an expert.

    Attributes:
        rows: the numbers of rows an expert that were measured, ascending.
        us: {tile's name: microseconds at each number of `rows`}.
    """

    rows: list[int]
    us: dict[str, list[float]]

    def at(self, tile: str, average: float) -> float | None:
        """Return the microseconds on a tile, interpolated at `average` rows an expert.

        None: the tile was not measured, or `average` is outside of the measured range.
        """
        if tile not in self.us or not self.rows[0] <= average <= self.rows[-1]:
            return None
        right = max(bisect.bisect_left(self.rows, average), 1)
        left, us = right - 1, self.us[tile]
        return interpolated(average, (self.rows[left], us[left]), (self.rows[right], us[right]))


class Measured(NamedTuple):
    """One architecture's measurements.

    Attributes:
        gpu: name of the GPU that was measured.
        curves: a curve for each GEMM shape (`ProblemGemm.key`).
    """

    gpu: str
    curves: dict[tuple[str, int, int, int], Curve]


@functools.cache
def measured(arch: str) -> Measured:
    """Return the shipped measurements of an architecture; without curves if there is no file."""
    path = policy_of(arch).MEASURED
    if not path.is_file():
        return Measured("", {})
    held: dict[str, Any] = json.loads(path.read_text())
    shapes = held["shapes"]
    curves = {(s["form"], s["experts"], s["columns"], s["depth"]): Curve(s["rows_per_expert"], s["us"]) for s in shapes}
    return Measured(held["stamp"]["gpu"], curves)


class Estimate(NamedTuple):
    """Estimated time on one tile.

    Attributes:
        us: microseconds, the mean over even and skewed routing.
        tile: the tile.
        source: origin of the number, as text: "measured on <gpu>" or `MODELLED`.
    """

    us: float
    tile: TileConfig
    source: str


def _measured_us(parts: Sequence[ProblemGemm], tile: TileConfig, known: Measured) -> float | None:
    """Return the sum of the measured times of a problem's GEMMs (`parts`) on a tile; None: `known` lacks one."""
    curves = [known.curves.get(part.key) for part in parts]
    times = [curve and curve.at(tile.name, part.gemm.average) for curve, part in zip(curves, parts, strict=True)]
    return sum(us for us in times if us) if all(times) else None


def estimates(parts: Sequence[ProblemGemm], tiles: Sequence[TileConfig], arch: str) -> list[Estimate]:
    """Estimate a problem's time on each tile; return an `Estimate` for each, the fastest first.

    If any time was not measured, all times come from the architecture's cost model, so that they are comparable.

    Args:
        parts: the problem's GEMMs, whose times are added.
        tiles: the tiles.
        arch: the architecture.
    """
    known = measured(arch)
    times, source = [_measured_us(parts, tile, known) for tile in tiles], f"measured on {known.gpu}"
    if None in times:
        model = policy_of(arch).time_us
        times, source = [sum(model(part.gemm, tile) for part in parts) for tile in tiles], MODELLED
    found = [Estimate(us, tile, source) for us, tile in zip(times, tiles, strict=True) if us is not None]
    return sorted(found, key=lambda estimate: estimate.us)
