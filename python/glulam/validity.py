"""Tiles that users name: which limit of the hardware one breaks, and the nearest one that breaks none."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

from cute_kernels.sm90 import budget
from cute_kernels.specs import Spec
from cute_kernels.tiles import CLUSTERS, SCHEDULES, TILE_K, TILE_M, TILE_N, SpecError, TileConfig

ADAPTIVE = "adaptive"
MakeSpec = Callable[[TileConfig], Spec]


@functools.cache
def all_tiles(k: int = TILE_K[16]) -> tuple[TileConfig, ...]:
    """Every tile of a depth that registers and clusters allow."""
    tiles = []
    for m, n, cluster, schedule, adaptive in itertools.product(TILE_M, TILE_N, CLUSTERS, SCHEDULES, (False, True)):
        try:
            tiles.append(TileConfig(m, n, k, *cluster, schedule, adaptive))
        except SpecError:
            continue
    return tuple(tiles)


def check(spec: Spec) -> None:
    """Raises SpecError where a kernel of a spec cannot run on its architecture, which a spec alone does not tell."""
    budget.check(spec)


def is_valid(make: MakeSpec, tile: TileConfig) -> bool:
    try:
        check(make(tile))
    except SpecError:
        return False
    return True


def valid_tiles(make: MakeSpec, k: int = TILE_K[16]) -> tuple[TileConfig, ...]:
    """Every tile that the kernel which `make` describes can have."""
    return tuple(tile for tile in all_tiles(k) if is_valid(make, tile))


def _wanted(tile: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str) -> TileConfig:
    """The tile that the words describe. Raises SpecError, which names the limit, where there is none."""
    m, n, k = tile
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
    adaptive = cluster == ADAPTIVE
    shape = (2, 1) if isinstance(cluster, str) else cluster
    if (isinstance(cluster, str) and not adaptive) or shape not in CLUSTERS:
        raise SpecError(f"a cluster of {cluster!r}: at most two CTAs share an operand")
    return TileConfig(m, n, k, *shape, schedule, adaptive)


def _words(tile: TileConfig) -> str:
    cluster = ADAPTIVE if tile.adaptive else (tile.cluster_m, tile.cluster_n)
    return f"tile=({tile.m}, {tile.n}, {tile.k}), cluster={cluster!r}, schedule={tile.schedule!r}"


def _distance(wanted: tuple[Any, ...], tile: TileConfig) -> tuple[float, ...]:
    """Shapes first, in doublings; then the schedule, then the cluster."""
    (m, n, _), cluster, schedule = wanted
    doublings = abs(math.log2(max(m, 1) / tile.m)) + abs(math.log2(max(n, 1) / tile.n))
    return doublings, schedule != tile.schedule, _cluster_distance(cluster, tile), tile.adaptive


def _cluster_distance(cluster: tuple[int, int] | str, tile: TileConfig) -> int:
    if isinstance(cluster, str):
        return int(not tile.adaptive)
    return abs(cluster[0] - tile.cluster_m) + abs(cluster[1] - tile.cluster_n)


def tile_for(make: MakeSpec, tile: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str) -> TileConfig:
    """The tile of these words, with which `make` describes a kernel that can run.

    Raises:
        SpecError: which limit stands against it, and the nearest valid tile, where there is any.
    """
    try:
        wanted = _wanted(tile, cluster, schedule)
        check(make(wanted))
        return wanted
    except SpecError as error:
        valid = valid_tiles(make) or valid_tiles(make, TILE_K[8])
        if not valid:  # whatever the tile
            raise
        nearest = min(valid, key=functools.partial(_distance, (tile, cluster, schedule)))
        raise SpecError(f"{error}; the nearest valid choice is {_words(nearest)}") from None
