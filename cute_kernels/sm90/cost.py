"""How long a grouped GEMM takes on a tile, by a model: what tiles are compared by where nothing was measured.

A launch, plus the slower of two: moving the bytes, or computing the tiles in rounds of a persistent grid. The host does
not know group sizes, so two routings stand for all: even, and Dirichlet(0.5), where an expert's rows are distributed as
the square of a normal variable. The constants were fitted to half of the models of perf/results/tiles-h200.csv;
tests/test_choice.py checks the choices on the other half.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass

from ..arch import Gemm
from ..tiles import TileConfig

BYTES = 2  # an element
EVEN, SKEWED = "uniform", "dirichlet"
RARE = 1e-4  # a sum over row tiles ends where the probability of more rows falls below this


@dataclass(frozen=True)
class Machine:
    """What the kernels reach on a GPU.

    Attributes:
        sms: streaming multiprocessors.
        launch_us: from launch to the first tile, and from the last tile to the end.
        cluster_us: what a launch takes longer where CTAs form clusters.
        memory: bytes a microsecond that the whole GPU reads.
        operands: bytes a microsecond that an SM receives while all SMs load.
        flop: FLOP a microsecond of an SM.
        reread: the share of the weights that is read again where two clusters want them.
        sharpness: exponent of the norm that joins both times; the larger, the better they overlap.
    """

    sms: int = 132
    launch_us: float = 7.0
    cluster_us: float = 0.75
    memory: float = 4.28e6
    operands: float = 60.8e3
    flop: float = 5.2e6
    reread: float = 0.26
    sharpness: float = 6.5


H200 = Machine()


def _more_than(rows: float, average: float) -> float:
    """The probability that a skewed expert has more than `rows`."""
    return math.erfc(math.sqrt(rows / (2 * average)))


def active_share(average: float, routing: str) -> float:
    """The share of experts that get any row, where the average expert has `average`. Above 0: others divide by it."""
    return min(average, 1.0) if routing == EVEN else max(_more_than(0.5, average), sys.float_info.min)


@functools.lru_cache(maxsize=1024)  # a choice asks several times: for tiles, GEMMs and their terms
def row_tiles(average: float, height: int, routing: str) -> float:
    """Tiles of `height` rows that an expert has, on average.

    Skewed: the sum over j of P(rows > j height). Where it has many terms, the Euler-Maclaurin formula gives it; for
    erfc of a square root its correction is 2 / sqrt(pi) * -zeta(-1/2) * sqrt(step), which is the 0.2346.
    """
    active = active_share(average, routing)
    if routing == EVEN:
        return active * math.ceil(max(average, 1.0) / height)
    if average >= height:
        return active + average / height - 0.5 + 0.2346 * math.sqrt(height / (2 * average))
    tiles, rows, more = active, height, 1.0
    while more > RARE:
        more = _more_than(rows, average)
        tiles, rows = tiles + more, rows + height
    return tiles


def _pairs_rows(average: float, tile: TileConfig) -> bool:
    """Whether the CTAs of a cluster have different row tiles, and thus share weights."""
    return tile.cluster_m > 1 and not (tile.adaptive and average <= tile.m)


def _memory_us(gemm: Gemm, average: float, height: int, routing: str, machine: Machine) -> float:
    """All rows and the weights of experts that have rows are read once, a part of the weights again where two clusters
    want them. `height`: rows of the row tiles that share weights.
    """
    active = active_share(average, routing)
    readers = row_tiles(average, height, routing) / active
    weights = gemm.experts * active * gemm.columns * gemm.depth * (1 + machine.reread * (min(readers, 2.0) - 1))
    return BYTES * (weights + gemm.rows * (gemm.depth + gemm.stored)) / machine.memory


def _tile_us(
    gemm: Gemm, average: float, tile: TileConfig, pairs_rows: bool, routing: str, busy: float, machine: Machine
) -> float:
    """One of a CTA's tiles while a share `busy` of all CTAs has one. The next tile hides its epilogue."""
    share_weights = tile.cluster_m if pairs_rows else 1
    share_rows = tile.cluster_m * tile.cluster_n // share_weights
    box = tile.box_rows  # boxes that hold any row are loaded
    loaded_rows = box * row_tiles(average, box, routing) / row_tiles(average, tile.m, routing)
    asked = loaded_rows / share_rows + tile.n / share_weights
    load = busy * BYTES * tile.k * asked / machine.operands
    mma = 2 * tile.m * tile.n * tile.k / machine.flop
    return math.ceil(gemm.depth / tile.k) * max(mma, load)


def _tiles_us(gemm: Gemm, average: float, tile: TileConfig, pairs_rows: bool, routing: str, machine: Machine) -> float:
    """All rounds of all clusters. The last one counts as full under even routing, as half full otherwise."""
    high, wide = (1, 1) if tile.adaptive else (tile.cluster_m, tile.cluster_n)
    across = math.ceil(gemm.columns / (tile.n * wide))
    tiles = gemm.experts * row_tiles(average, tile.m * high, routing) * across
    share = tiles / (machine.sms // (high * wide))
    rounds = math.ceil(share) if routing == EVEN else max(share + 0.5, 1.0)
    return rounds * _tile_us(gemm, average, tile, pairs_rows, routing, min(share, 1.0), machine)


def routed_us(gemm: Gemm, tile: TileConfig, routing: str, machine: Machine = H200) -> float:
    """Microseconds under one of the two routings."""
    average = gemm.average
    pairs_rows = _pairs_rows(average, tile)
    height = tile.m * tile.cluster_m if pairs_rows else tile.m
    memory = _memory_us(gemm, average, height, routing, machine)
    tiles = _tiles_us(gemm, average, tile, pairs_rows, routing, machine)
    less, more = (memory, tiles) if memory < tiles else (tiles, memory)
    launch = machine.launch_us + (machine.cluster_us if tile.cluster_m * tile.cluster_n > 1 else 0.0)
    return launch + more * math.pow(1 + math.pow(less / more, machine.sharpness), 1 / machine.sharpness)


def time_us(gemm: Gemm, tile: TileConfig, machine: Machine = H200) -> float:
    """Microseconds, the geometric mean of both routings; a single expert has only one."""
    if gemm.experts == 1:
        return routed_us(gemm, tile, EVEN, machine)
    return math.sqrt(routed_us(gemm, tile, EVEN, machine) * routed_us(gemm, tile, SKEWED, machine))
