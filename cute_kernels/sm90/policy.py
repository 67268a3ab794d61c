"""Hopper's implementation of `arch.ArchPolicy`, which describes these functions: rules that choose among the shipped
tiles, all possible tiles, and their modelled times.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from pathlib import Path

from ..arch import Gemm, PolicyProblem, Reasons, of_one_kernel, rows_in_words
from ..formats import DECODED
from ..tiles import CLUSTERS, SLAB_ROWS, TILE_K, TILE_M, TILE_N, SpecError, TileConfig
from . import cost
from .accumulation import accumulation as accumulation
from .budget import check as check
from .configs import (
    DECODING_TILES,
    DGLU8,
    DGRAD_W,
    FITTED_W8,
    HALVES_W8,
    LARGE,
    LARGE8,
    LARGE8_W4,
    LARGE_W8,
    MEDIUM_W8,
    QUARTERS_W8,
    SLIM8_W4,
    SLIM_W8,
    SMALL8,
    SMALL_W8,
    TILES,
    TINY8_W4,
    TINY_W8,
    WGRAD_TILES,
)
from .configs import glu_form as glu_form
from .configs import second_tile as second_tile
from .cost import time_us as time_us
from .gemm_policy import gemm_policy as gemm_policy

MEASURED = Path(__file__).with_name("measured.json")

_DECODING = {TINY_W8: 11, SLIM_W8: 27, SMALL_W8: 52, FITTED_W8: 85, MEDIUM_W8: 120, LARGE_W8: math.inf}
MOST_ROWS: dict[str, Mapping[TileConfig, float]] = {
    **dict.fromkeys(("mxfp8", "fp8_block"), {SMALL8: 60, LARGE8: math.inf}),
    "mxfp4": {TINY8_W4: 12, SLIM8_W4: 24, SMALL8: 40, LARGE8_W4: math.inf},
    **dict.fromkeys(DECODED, _DECODING),
}
"""For each key of `formats.OPERANDS`: tiles in ascending order, each with the greatest average number of rows an expert
for which the tile is chosen.

Weights that are decoded to 16 bits are decoded again for every row tile of an expert. A tile of the next size (TINY_W8
16 rows, SLIM_W8 32, SMALL_W8 64, FITTED_W8 96, MEDIUM_W8 128, LARGE_W8 256) takes 1.03, 1.11, 1.12, 1.15 and 1.55
times as long; in 4 bits SMALL_W8 takes 1.55 to 1.85 times as long as SLIM_W8, which has a faster mainloop
(mainloop/few_rows.py). The limits are the averages at which the smaller size takes as long as the larger one: random
routing then gives 6, 15, 5, 11 and 25 % of the groups more rows than the smaller tile holds. NVFP4 has MXFP4's limits;
generating tokens takes 1.05 to 1.08 times as long with it as with MXFP4 (docs/decisions/nvfp4-weights.md).

FP8 operands: with 64 rows on average, half of the groups have more rows than a tile of SMALL8, and LARGE8 is 1.01 to
1.29 times as fast (four models, one H100).
"""
FEW_SLABS = {QUARTERS_W8: 132, HALVES_W8: 396}
"""Tiles that serve instead of TINY_W8 where few experts can have rows, if they ship (configs.DECODING_TILES).

Each has the greatest number of slabs (64 weight rows) for which it is chosen: slabs of the call's last weight, in all
experts that can have rows, which are at most as many as the rows.

132: the SMs of an H100 or H200. On an SM, QUARTERS_W8 has four warpgroups for one slab, HALVES_W8 two for each of two
slabs, TINY_W8 four for four slabs (docs/decisions/decoding-split-depth.md).
"""
WIDE_PADDING = 0.9
"""WGRAD_WIDE is chosen if the tiles that cover the weights then have at most this share of the elements that they would
have with WGRAD.

At or below this share WGRAD_WIDE takes 0.61 to 1.04 times as long as WGRAD. With a share of 0.94 to 0.98 it may be 1.15
times as fast under sustained load, and 0.81 times as fast on a cool GPU (gpt-oss-120b). If neither tile pads anything,
WGRAD_WIDE is up to 1.2 times as slow under skew.
"""
WIDE_PADDING_BY_INDEX = 1.15
"""The value of WIDE_PADDING for rows that come by index.

WGRAD_WIDE then takes 0.80 to 0.94 times as long as WGRAD, since it has more MMAs for each copied row.
"""
FASTER = "recipe='mxfp8' would halve the weights' bytes and double the MMA rate, at MXFP8's precision"


def tiles(problem: PolicyProblem) -> tuple[TileConfig, ...]:
    """Return the tiles that ship for a problem. Some calls that only training makes have one tile, since their experts
    have many rows.
    """
    if problem.op == "grouped_wgrad":
        return WGRAD_TILES
    if problem.op == "grouped_dglu":
        return (LARGE,) if problem.operands == "16bit" else (DGLU8,)
    if problem.op in ("quantize_mxfp8", "quantize_fp8_block"):  # their specs have no tile
        return (LARGE,)
    if problem.operands == "16bit":
        return TILES
    if problem.transpose_w:
        return (DGRAD_W,)
    by_rows = tuple(MOST_ROWS[problem.operands])
    if problem.save_preact:
        return by_rows[-1:]
    return *(tile for tile in DECODING_TILES.get(problem.operands, ()) if tile not in by_rows), *by_rows


def rows_decide(problem: PolicyProblem) -> bool:
    """Return True if the choice of a problem's tile depends on its number of rows."""
    return problem.op != "grouped_wgrad" and len(tiles(problem)) > 1


def fixed_tile(problem: PolicyProblem) -> TileConfig | None:
    """Return the tile that a fixed rule chooses. None: 16-bit operands with several tiles, whose times are compared."""
    if not rows_decide(problem):
        return _by_padding(problem) if problem.op == "grouped_wgrad" else tiles(problem)[0]
    if problem.operands == "16bit":
        return None
    return _by_rows(problem)


def _by_rows(problem: PolicyProblem) -> TileConfig:
    """Return the tile for a problem's average number of rows an expert (MOST_ROWS). In place of TINY_W8, return the
    first tile of FEW_SLABS that ships and whose limit of slabs is not exceeded, if there is one."""
    limits = MOST_ROWS[problem.operands].items()
    chosen = next(tile for tile, most in limits if problem.rows <= most * problem.experts)
    if chosen is not TINY_W8:
        return chosen
    return next((tile for tile in _split_tiles(problem) if _slabs(problem) <= FEW_SLABS[tile]), chosen)


def _split_tiles(problem: PolicyProblem) -> tuple[TileConfig, ...]:
    """Return the tiles of FEW_SLABS that ship for a problem, in ascending order."""
    return tuple(tile for tile in FEW_SLABS if tile in DECODING_TILES.get(problem.operands, ()))


def _slabs(problem: PolicyProblem) -> int:
    """Return how many slabs (64 weight rows) the last weights of all experts that can have rows have together."""
    columns, _ = problem.weights[-1]
    return min(problem.rows, problem.experts) * math.ceil(columns / SLAB_ROWS)


def _covered(problem: PolicyProblem, tile: TileConfig) -> int:
    """Return how many elements, padding included, the weight gradients of a problem have if they are covered by copies
    of `tile`."""
    return sum(tile.padded(n, k) for n, k in problem.weights)


def _by_padding(problem: PolicyProblem) -> TileConfig:
    """Return the tile for a weight gradient: WGRAD_WIDE if its tiles have at most WIDE_PADDING times as many elements
    as WGRAD's (WIDE_PADDING_BY_INDEX if rows come by index), else WGRAD."""
    usual, wide = WGRAD_TILES
    most = WIDE_PADDING_BY_INDEX if problem.gathers else WIDE_PADDING
    return wide if _covered(problem, wide) <= most * _covered(problem, usual) else usual


def reasons(problem: PolicyProblem, tile: TileConfig) -> Reasons:
    """Return the reasons why `fixed_tile` chooses `tile`."""
    if problem.op == "grouped_wgrad":
        return _padding_in_words(problem, tile)
    if not rows_decide(problem):
        return of_one_kernel(problem)
    return _rows_in_words(problem, tile)


def _padding_in_words(problem: PolicyProblem, tile: TileConfig) -> Reasons:
    """Return the reasons for the tile of a weight gradient, which depends on the padding of the weights alone."""
    (other,) = (each for each in WGRAD_TILES if each is not tile)
    shapes = " and ".join(f"{n} x {k}" for n, k in problem.weights)
    rows = " by rows that come by index" if problem.gathers else ""
    share = _covered(problem, other) / _covered(problem, tile)
    why = f"{tile.name} serves weights of {shapes}{rows}, whatever the number of rows"
    return Reasons(why, (f"{other.name}: its tiles, padding included, cover {share:.2f} times as many elements",))


def _rows_in_words(problem: PolicyProblem, tile: TileConfig) -> Reasons:
    """Return the reasons for a tile that the number of rows or of slabs chooses (`_by_rows`)."""
    limits = MOST_ROWS[problem.operands]
    spans = _spans(limits)
    others = {other: f"{other.name}: for {span} rows an expert" for other, span in spans.items() if other is not tile}
    slabs = _spans({split: FEW_SLABS[split] for split in _split_tiles(problem)})
    why_not = [f"{other.name}: for {span} slabs of weights" for other, span in slabs.items() if other is not tile]
    if tile in slabs:
        others[TINY_W8] += f" and {_span(FEW_SLABS[tuple(slabs)[-1]], math.inf)} slabs of weights"
        few = f"at most {limits[TINY_W8]}, and reach at most {_slabs(problem)} slabs of 64 weight rows, {slabs[tile]}"
        return Reasons(f"{rows_in_words(problem)}, {few}: {tile.name}", (*why_not, *others.values()))
    return Reasons(f"{rows_in_words(problem)}, {spans[tile]}: {tile.name}", (*why_not, *others.values()))


def _spans(limits: Mapping[TileConfig, float]) -> dict[TileConfig, str]:
    """Return, for each tile of a table of limits in ascending order, the numbers for which it is chosen, as text."""
    return dict(zip(limits, itertools.starmap(_span, itertools.pairwise((0, *limits.values()))), strict=True))


def _span(above: float, most: float) -> str:
    """Return a range of numbers as text.

    Args:
        above: the numbers lie above this; 0: no lower limit.
        most: the greatest number; inf: no upper limit.
    """
    limits = (f"more than {above:.0f}" if above else "", f"at most {most:.0f}" if most < math.inf else "")
    return " and ".join(limit for limit in limits if limit)


def suggestions(problem: PolicyProblem) -> tuple[str, ...]:
    """Return sentences about other calls that would be faster: FASTER for a 16-bit grouped_mlp, otherwise none."""
    return (FASTER,) if problem.op == "grouped_mlp" and problem.operands == "16bit" else ()


def even_us(gemm: Gemm, tile: TileConfig) -> float:
    """Return the modelled microseconds of a GEMM on a tile if all experts have the same number of rows."""
    return cost.routed_us(gemm, tile, cost.EVEN)


@functools.cache
def all_tiles(bits: int) -> tuple[TileConfig, ...]:
    """Return every cooperative or pingpong tile for operands whose elements have `bits` bits."""
    tiles = []
    schedules = "cooperative", "pingpong"
    for m, n, cluster, schedule, adaptive in itertools.product(TILE_M, TILE_N, CLUSTERS, schedules, (False, True)):
        try:
            tiles.append(TileConfig(m, n, TILE_K[bits], *cluster, schedule, adaptive))
        except SpecError:
            continue
    return tuple(tiles)


def tile_of(shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str) -> TileConfig:
    m, n, k = shape
    if m not in TILE_M:
        raise SpecError(
            f"a tile of {m} rows: a warpgroup's wgmma has 64 rows, and registers hold the accumulators of 64 or 128"
        )
    if n not in TILE_N:
        raise SpecError(
            f"a tile of {n} weight rows: a wgmma has at most 256 columns, and an epilogue has them in steps of 64"
        )
    if k not in TILE_K.values():
        raise SpecError(
            f"a tile of depth {k}: an operand's row in shared memory is a swizzle of 128 bytes, 64 elements"
        )
    adaptive = cluster == "adaptive"
    sizes = (2, 1) if adaptive else cluster
    if isinstance(sizes, str) or sizes not in CLUSTERS:
        raise SpecError(f"a cluster of {cluster!r}: at most two CTAs share an operand")
    return TileConfig(m, n, k, *sizes, schedule, adaptive)
