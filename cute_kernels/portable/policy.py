"""The choice of tiles for architectures with portable kernels: SMALL for few rows an expert, else LARGE (configs.py).

`arch.ArchPolicy` describes the functions of this module.
"""

from __future__ import annotations

from pathlib import Path

from ..arch import Gemm, PolicyProblem, Reasons, of_one_kernel, of_two_tiles, tile_among
from ..formats import OPERANDS
from ..gemms import GemmPolicy
from ..specs import GemmSpec, Spec
from ..tiles import TileConfig
from .accumulation import accumulation as accumulation
from .configs import LARGE, SMALL, TILES
from .configs import glu_form as glu_form
from .configs import second_tile as second_tile

MEASURED = Path(__file__).with_name("measured.json")
MOST_ROWS = 16
"""Greatest average number of rows an expert for which SMALL is chosen.

With more rows an expert would have several row tiles of SMALL, and each would read the expert's weights again.
"""
_OF_TRAINING = ("grouped_wgrad", "grouped_dglu", "quantize_mxfp8")


def gemm_policy(spec: GemmSpec) -> GemmPolicy:
    """Return the default `GemmPolicy`: no tickets, and every CTA's tiles are fixed, in the order of experts."""
    return GemmPolicy()


def tiles(problem: PolicyProblem) -> tuple[TileConfig, ...]:
    """Return the tiles that ship for a problem: only LARGE for operators of training, whose experts have many rows."""
    is_of_training = problem.op in _OF_TRAINING or (problem.transpose_w and OPERANDS[problem.operands].decodes)
    return (LARGE,) if is_of_training else TILES


def rows_decide(problem: PolicyProblem) -> bool:
    """Return True if the choice of a problem's tile depends on its number of rows."""
    return len(tiles(problem)) > 1


def fixed_tile(problem: PolicyProblem) -> TileConfig:
    """Return SMALL for at most MOST_ROWS rows an expert on average, if it ships for the problem; otherwise LARGE."""
    few = rows_decide(problem) and problem.rows <= MOST_ROWS * problem.experts
    return SMALL if few else LARGE


def reasons(problem: PolicyProblem, tile: TileConfig) -> Reasons:
    """Return the reasons why `fixed_tile` chooses `tile`."""
    if not rows_decide(problem):
        return of_one_kernel(problem)
    return of_two_tiles(problem, tile, MOST_ROWS, few=SMALL, many=LARGE)


def suggestions(problem: PolicyProblem) -> tuple[str, ...]:
    """Return no suggestions: no other call is known to be faster here."""
    return ()


def time_us(gemm: Gemm, tile: TileConfig) -> float:
    """Return a number that orders tiles: the multiply-adds of all tiles that cover a GEMM, in units of 1e9.

    The number is not a time, since no GPU of these architectures has been measured.
    """
    return tile.padded(max(gemm.rows // gemm.experts, 1), gemm.columns) * gemm.experts * gemm.depth * 1e-9


even_us = time_us


def all_tiles(bits: int) -> tuple[TileConfig, ...]:
    """Return every tile for operands whose elements have `bits` bits: TILES for 16 bits, otherwise none."""
    return TILES if bits == 16 else ()


def tile_of(shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str) -> TileConfig:
    """Return the tile (m, n, k) = `shape`, without a cluster; raise SpecError if it is not one of TILES."""
    return tile_among(TILES, shape, cluster)


def check(spec: Spec) -> None:
    """Do nothing: only TILES exist here, and all of them fit."""
