"""The choice of tiles on Blackwell: SMALL for few rows an expert, else LARGE (configs.py). No GPU has measured it.

`arch.ArchPolicy` describes the functions of this module. Problems with decoded weights get portable tiles.
"""

from __future__ import annotations

from pathlib import Path

from ..arch import Gemm, PolicyProblem, Reasons, of_one_kernel, of_two_tiles, tile_among
from ..formats import OPERANDS
from ..portable import policy as portable
from ..sm90.budget import check as check
from ..tiles import TileConfig
from . import cost
from .accumulation import accumulation as accumulation
from .configs import BACKWARD, LARGE, LARGE8, SMALL, TILES
from .configs import glu_form as glu_form
from .configs import second_tile as second_tile
from .gemm_policy import gemm_policy as gemm_policy

MEASURED = Path(__file__).with_name("measured.json")
MOST_ROWS = 64
"""Greatest average number of rows an expert for which SMALL is chosen: up to this number, loading a weight takes longer
than its MMAs. Not measured."""


def _is_portable(problem: PolicyProblem) -> bool:
    """Return True if a problem's weights are decoded; portable kernels compute such problems."""
    return OPERANDS[problem.operands].decodes


def tiles(problem: PolicyProblem) -> tuple[TileConfig, ...]:
    """Return the tiles that ship for a problem: only one for operators of training, whose experts have many rows."""
    if _is_portable(problem) or problem.op.startswith("quantize"):
        return portable.tiles(problem)
    if OPERANDS[problem.operands].multiplies_blocks:
        return (LARGE8,)
    if problem.op == "grouped_wgrad":
        return (LARGE,)
    return (BACKWARD,) if problem.op == "grouped_dglu" else TILES


def rows_decide(problem: PolicyProblem) -> bool:
    """Return True if the choice of a problem's tile depends on its number of rows."""
    return len(tiles(problem)) > 1


def fixed_tile(problem: PolicyProblem) -> TileConfig:
    """Return the only tile that ships or, of two, SMALL for at most MOST_ROWS rows an expert on average, else LARGE.

    Portable kernels have their own rule.
    """
    if _is_portable(problem):
        return portable.fixed_tile(problem)
    if not rows_decide(problem):
        return tiles(problem)[0]
    return SMALL if problem.rows <= MOST_ROWS * problem.experts else LARGE


def reasons(problem: PolicyProblem, tile: TileConfig) -> Reasons:
    """Return the reasons why `fixed_tile` chooses `tile`."""
    if _is_portable(problem):
        return portable.reasons(problem, tile)
    if not rows_decide(problem):
        return of_one_kernel(problem)
    return of_two_tiles(problem, tile, MOST_ROWS, few=SMALL, many=LARGE)


def suggestions(problem: PolicyProblem) -> tuple[str, ...]:
    """Return no suggestions: no other call is known to be faster than this one."""
    return ()


def even_us(gemm: Gemm, tile: TileConfig) -> float:
    """Return the microseconds of a GEMM by the model (cost.py); for portable tiles, a number that only orders them."""
    return portable.time_us(gemm, tile) if tile.by_warps else cost.even_us(gemm, tile)


time_us = even_us


def all_tiles(bits: int) -> tuple[TileConfig, ...]:
    """Return every tile for elements of `bits` bits, 16 or 8."""
    return TILES if bits == 16 else (LARGE8,)


def tile_of(shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str) -> TileConfig:
    """Return the tile (m, n, k) = `shape`, without a cluster; raise SpecError if no such tile ships."""
    return tile_among((*TILES, LARGE8), shape, cluster)
