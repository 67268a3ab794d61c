"""Specs that users and files describe: fields that an operator has, and tiles. Which limit of the hardware one breaks,
and the nearest one that breaks none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args, get_type_hints

from cute_kernels.sm90 import budget
from cute_kernels.specs import GroupedGluSpec, GroupedMlpSpec, Spec, from_dict, to_dict
from cute_kernels.tiles import CLUSTERS, SCHEDULES, TILE_K, TILE_M, TILE_N, SpecError, TileConfig, require

ADAPTIVE = "adaptive"
MakeSpec = Callable[[TileConfig], Spec]
SPECS: dict[str, Any] = {spec.op: spec for spec in get_args(Spec)}
TILED = ("grouped_mm", "grouped_glu", "grouped_mlp", "grouped_dglu", "grouped_wgrad")
"""Operators whose kernels have tiles, so that there is something to choose."""


class TileError(SpecError):
    """A tile that cannot be. `limit`: what stands against it; `nearest`: the nearest that can."""

    def __init__(self, limit: str, nearest: TileConfig) -> None:
        super().__init__(f"{limit}; the nearest valid choice is {_words(nearest)}")
        self.limit, self.nearest = limit, nearest


def fields_of(op: Any) -> Mapping[str, Any]:
    """What an operator's kernels are told apart by: the keywords of `glulam.compile`, with their types.

    Raises:
        SpecError: there is no such operator.
    """
    require("op", op, tuple(SPECS))
    return _types_of(GroupedGluSpec if op == GroupedMlpSpec.op else SPECS[op])


@functools.cache
def _types_of(spec: Any) -> Mapping[str, Any]:
    """The fields of a spec's class."""
    hints = get_type_hints(spec)
    return {field.name: hints[field.name] for field in dataclasses.fields(spec)}


def check_fields(what: str, fields: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Raises SpecError where a field is none of these, or its value is not of its type, or of a class like it."""
    for name, value in fields.items():
        if name not in types:
            raise SpecError(f"{what} has no field {name!r}; it has: {', '.join(sorted(types))}")
        wanted, *others = get_args(types[name]) or (types[name],)  # a type, or that or None
        if dataclasses.is_dataclass(wanted) and isinstance(value, dict):
            check_fields(f"{what}'s {name}", value, _types_of(wanted))  # type: ignore[arg-type]
        elif type(value) not in (wanted, *others):
            raise SpecError(f"{name}={value!r} is a {type(value).__name__}; give a {wanted.__name__}")


def described(data: Any) -> Spec:
    """The spec that a file describes as `to_dict` does: every field, of its type, and nothing else.

    Raises:
        SpecError: it is no such description, or no kernel of the spec can run.
    """
    if not isinstance(data, dict):
        raise SpecError(f"a kernel is described by a {type(data).__name__}, not an object")
    fields = {name: value for name, value in data.items() if name != "op"}
    require("op", data.get("op"), tuple(SPECS))
    check_fields(data["op"], fields, _types_of(SPECS[data["op"]]))
    spec = from_dict(data)
    if to_dict(spec) != data:
        raise SpecError(f"the description of {spec.name} lacks fields")
    check(spec)
    return spec


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
        TileError: which limit stands against it, and the nearest valid tile.
        SpecError: no tile can be, for another reason.
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
        raise TileError(str(error), nearest) from None
