"""What every architecture but Hopper's own answers for itself (`arch.Room`): two tiles, and a rule by rows."""

from __future__ import annotations

from pathlib import Path

from ..arch import Gemm, Problem, Reasons, rows_in_words
from ..formats import OPERANDS
from ..gemms import GemmPolicy
from ..specs import GemmSpec, Spec
from ..tiles import SpecError, TileConfig
from .configs import LARGE, SMALL, TILES
from .configs import glu_form as glu_form

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
        return Reasons(f"every {problem.op} of this form has one kernel, whatever the number of rows", ())
    limits = {SMALL: f"at most {MOST_ROWS}", LARGE: f"more than {MOST_ROWS}"}
    (other,) = (each for each in TILES if each is not tile)
    why = f"{rows_in_words(problem)}, {limits[tile]}: {tile.name}"
    return Reasons(why, (f"{other.name}: for {limits[other]} rows an expert",))


def advice(problem: Problem) -> tuple[str, ...]:
    return ()


def second_tile(first: TileConfig) -> TileConfig:
    return first


def time_us(gemm: Gemm, tile: TileConfig) -> float:
    """Elements of the tiles that cover a GEMM: an order of tiles, and no time, which no GPU of these has told."""
    return tile.padded(max(gemm.rows // gemm.experts, 1), gemm.columns) * gemm.experts * gemm.depth * 1e-9


even_us = time_us


def all_tiles(bits: int) -> tuple[TileConfig, ...]:
    return TILES if bits == 16 else ()


def tile_of(shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str) -> TileConfig:
    """Raises SpecError where it is none of TILES."""
    known = {(tile.m, tile.n, tile.k): tile for tile in TILES}
    if shape not in known or cluster != (1, 1):
        raise SpecError(f"a tile of {shape} in a cluster of {cluster!r}: choose one of {sorted(known)}, cluster (1, 1)")
    return known[shape]


def check(spec: Spec) -> None:
    """All tiles fit, since those that there are ship."""
