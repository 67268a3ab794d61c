"""What every architecture but Hopper's own answers for itself (`arch.Room`): two tiles, and a rule by rows."""

from __future__ import annotations

from pathlib import Path

from ..arch import Gemm, Problem, Reasons, of_one_kernel, of_two_tiles, tile_among
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
"""An expert, on average, that SMALL is for: a weight is read again for every row tile of an expert."""
_OF_TRAINING = ("grouped_wgrad", "grouped_dglu", "quantize_mxfp8")


def gemm_policy(spec: GemmSpec) -> GemmPolicy:
    return GemmPolicy()


def tiles(problem: Problem) -> tuple[TileConfig, ...]:
    """One tile for all numbers of rows where a problem is of training alone, whose experts have many."""
    is_of_training = problem.op in _OF_TRAINING or (problem.transpose_w and OPERANDS[problem.operands].decodes)
    return (LARGE,) if is_of_training else TILES


def rows_decide(problem: Problem) -> bool:
    return len(tiles(problem)) > 1


def ruled(problem: Problem) -> TileConfig:
    few = rows_decide(problem) and problem.rows <= MOST_ROWS * problem.experts
    return SMALL if few else LARGE


def reasons(problem: Problem, tile: TileConfig) -> Reasons:
    if not rows_decide(problem):
        return of_one_kernel(problem)
    return of_two_tiles(problem, tile, MOST_ROWS, few=SMALL, many=LARGE)


def advice(problem: Problem) -> tuple[str, ...]:
    return ()


def time_us(gemm: Gemm, tile: TileConfig) -> float:
    """Elements of the tiles that cover a GEMM: an order of tiles, and no time, which no GPU of these has told."""
    return tile.padded(max(gemm.rows // gemm.experts, 1), gemm.columns) * gemm.experts * gemm.depth * 1e-9


even_us = time_us


def all_tiles(bits: int) -> tuple[TileConfig, ...]:
    return TILES if bits == 16 else ()


def tile_of(shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str) -> TileConfig:
    """Raises SpecError where it is none of TILES."""
    return tile_among(TILES, shape, cluster)


def check(spec: Spec) -> None:
    """All tiles fit, since those that there are ship."""
