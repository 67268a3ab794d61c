"""A model of how long a grouped GEMM takes on a tile. It compares tiles for which no times were measured.

Time = launch + the slower of two: moving the bytes, and computing the tiles in rounds of a persistent grid.

The host does not know group sizes, so two routings stand for all:

    EVEN      all experts have the same number of rows
    SKEWED    experts' shares of the rows are drawn from Dirichlet(0.5), so that an expert's rows are distributed like
              average * Z^2, with Z standard normal

The constants were fitted to half of the language models in perf/results/tiles-h200.csv; tests/test_choice.py checks the
choices on the other half.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass

from ..arch import Gemm
from ..tiles import TileConfig

BYTES = 2  # bytes of an element
EVEN, SKEWED = "uniform", "dirichlet"
RARE = 1e-4  # sums over an expert's row tiles end where the probability of more rows falls below this


@dataclass(frozen=True)
class Machine:
    """Rates that the kernels reach on a GPU.

    Attributes:
        sms: streaming multiprocessors.
        launch_us: microseconds from the launch to the first tile, plus microseconds from the last tile to the end.
        cluster_us: additional launch time in microseconds if CTAs form clusters.
        memory: bytes a microsecond that the whole GPU reads from memory.
        operands: bytes a microsecond that an SM receives while all SMs load.
        flop: FLOP a microsecond of an SM.
        reread: share of the weights that is read again if two clusters need the same weights.
        sharpness: exponent p of the norm (memory^p + tiles^p)^(1 / p) that combines memory time and tile time; the
            larger, the better the two overlap.
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
    """Return the probability that an expert has more than `rows` rows under SKEWED routing: P(average Z^2 > rows), with
    Z standard normal."""
    return math.erfc(math.sqrt(rows / (2 * average)))


def active_share(average: float, routing: str) -> float:
    """Return the share of experts that get at least one row; always above 0, since callers divide by it.

    Args:
        average: rows of an expert on average.
        routing: EVEN or SKEWED.
    """
    return min(average, 1.0) if routing == EVEN else max(_more_than(0.5, average), sys.float_info.min)


@functools.lru_cache(maxsize=1024)  # one choice of a tile calls row_tiles for several tiles, GEMMs and terms
def row_tiles(average: float, height: int, routing: str) -> float:
    """Return the average number of row tiles of an expert, counting 0 for experts without rows.

    With EVEN routing, each expert that has rows has max(average, 1) / height tiles, rounded up.

    With SKEWED routing an expert has r = average * Z^2 rows (Z standard normal). The result is the sum of
    P(r > j height) over j = 0, 1, ...; the term of j = 0 is `active_share`.

    If average < height, the terms are added until they fall below RARE. Otherwise the Euler-Maclaurin formula sums the
    terms from j = 1 on, which are erfc(sqrt(j s)) with s = height / (2 average):

        integral      average / height
        value at 0    -1 / 2, half of the value 1 at j = 0
        correction    -zeta(-1/2) * 2 / sqrt(pi) * sqrt(s) = 0.2346 sqrt(s), because erfc(sqrt(j s)) falls like
                      1 - 2 / sqrt(pi) * sqrt(j s) near j = 0

    Args:
        average: rows of an expert on average.
        height: rows of a tile.
        routing: EVEN or SKEWED.
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
    """Return True if the CTAs of a cluster have different row tiles, and therefore share weights."""
    return tile.cluster_m > 1 and not (tile.adaptive and average <= tile.m)


def _memory_us(gemm: Gemm, average: float, height: int, routing: str, machine: Machine) -> float:
    """Return the microseconds that moving all bytes takes.

    All rows are read once, and so are the weights of experts that have rows. A part of the weights (`machine.reread`)
    is read again if two clusters need the same weights.

    Args:
        average: rows of an expert on average.
        height: rows that share one load of weights: a row tile, or all row tiles of a cluster.
        routing: EVEN or SKEWED.
    """
    active = active_share(average, routing)
    readers = row_tiles(average, height, routing) / active
    weights = gemm.experts * active * gemm.columns * gemm.depth * (1 + machine.reread * (min(readers, 2.0) - 1))
    return BYTES * (weights + gemm.rows * (gemm.depth + gemm.stored)) / machine.memory


def _tile_us(
    gemm: Gemm, average: float, tile: TileConfig, pairs_rows: bool, routing: str, busy: float, machine: Machine
) -> float:
    """Return the microseconds of one tile of a CTA: of its MMAs or of its loads, whichever take longer.

    The epilogue costs nothing here, because it runs while the next tile is multiplied.

    Args:
        average: rows of an expert on average.
        pairs_rows: True if the CTAs of a cluster have different row tiles, and share weights.
        routing: EVEN or SKEWED.
        busy: share of all CTAs that have a tile at the same time.
    """
    share_weights = tile.cluster_m if pairs_rows else 1
    share_rows = tile.cluster_m * tile.cluster_n // share_weights
    box = tile.box_rows  # only boxes that hold a row of the group are loaded
    loaded_rows = box * row_tiles(average, box, routing) / row_tiles(average, tile.m, routing)
    loaded = loaded_rows / share_rows + tile.n / share_weights
    load = busy * BYTES * tile.k * loaded / machine.operands
    mma = 2 * tile.m * tile.n * tile.k / machine.flop
    return math.ceil(gemm.depth / tile.k) * max(mma, load)


def _tiles_us(gemm: Gemm, average: float, tile: TileConfig, pairs_rows: bool, routing: str, machine: Machine) -> float:
    """Return the microseconds of all rounds of tiles. In a round each cluster of the grid computes one tile.

    With EVEN routing the number of rounds is rounded up. With SKEWED routing it is the fraction tiles / clusters plus
    0.5, but at least 1.

    Args:
        average: rows of an expert on average.
        pairs_rows: True if the CTAs of a cluster have different row tiles, and share weights.
        routing: EVEN or SKEWED.
    """
    high, wide = (1, 1) if tile.adaptive else (tile.cluster_m, tile.cluster_n)
    across = math.ceil(gemm.columns / (tile.n * wide))
    tiles = gemm.experts * row_tiles(average, tile.m * high, routing) * across
    share = tiles / (machine.sms // (high * wide))
    rounds = math.ceil(share) if routing == EVEN else max(share + 0.5, 1.0)
    return rounds * _tile_us(gemm, average, tile, pairs_rows, routing, min(share, 1.0), machine)


def routed_us(gemm: Gemm, tile: TileConfig, routing: str, machine: Machine = H200) -> float:
    """Return the modelled microseconds of a GEMM on a tile under one routing, EVEN or SKEWED."""
    average = gemm.average
    pairs_rows = _pairs_rows(average, tile)
    height = tile.m * tile.cluster_m if pairs_rows else tile.m
    memory = _memory_us(gemm, average, height, routing, machine)
    tiles = _tiles_us(gemm, average, tile, pairs_rows, routing, machine)
    less, more = (memory, tiles) if memory < tiles else (tiles, memory)
    launch = machine.launch_us + (machine.cluster_us if tile.cluster_m * tile.cluster_n > 1 else 0.0)
    return launch + more * math.pow(1 + math.pow(less / more, machine.sharpness), 1 / machine.sharpness)


def time_us(gemm: Gemm, tile: TileConfig, machine: Machine = H200) -> float:
    """Return the modelled microseconds of a GEMM on a tile: the geometric mean over both routings.

    With one expert there is only EVEN routing.
    """
    if gemm.experts == 1:
        return routed_us(gemm, tile, EVEN, machine)
    return math.sqrt(routed_us(gemm, tile, EVEN, machine) * routed_us(gemm, tile, SKEWED, machine))
