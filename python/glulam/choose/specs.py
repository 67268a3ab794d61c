"""Specs that users and files describe: fields of the right types, and tiles that can be.

A refusal names the limit of the hardware and the nearest tile that breaks none.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from cute_kernels.arch import room
from cute_kernels.architectures import ARCHS
from cute_kernels.specs import GroupedGluSpec, GroupedMlpSpec, Spec, from_dict, to_dict
from cute_kernels.tiles import SpecError, TileConfig, require

from . import records

ADAPTIVE = "adaptive"
MakeSpec = Callable[[TileConfig], Spec]
SPECS: dict[str, Any] = {spec.op: spec for spec in get_args(Spec)}


class TileError(SpecError):
    """A tile that cannot be. `limit`: what stands against it; `nearest`: the nearest that can."""

    def __init__(self, limit: str, nearest: TileConfig) -> None:
        cluster = ADAPTIVE if nearest.adaptive else (nearest.cluster_m, nearest.cluster_n)
        words = f"tile=({nearest.m}, {nearest.n}, {nearest.k}), cluster={cluster!r}, schedule={nearest.schedule!r}"
        super().__init__(f"{limit}; the nearest valid choice is {words}")
        self.limit, self.nearest = limit, nearest


def fields_of(op: Any) -> Mapping[str, Any]:
    """What an operator's kernels are told apart by: the keywords of `glulam.compile`, with their types.

    Raises:
        SpecError: there is no such operator.
    """
    return records.types_of(_described_by(op))


def _described_by(op: Any) -> Any:
    """The class of whose fields keywords are: of a grouped_mlp, that of its FC1."""
    require("op", op, tuple(SPECS))
    return GroupedGluSpec if op == GroupedMlpSpec.op else SPECS[op]


def check(spec: Spec) -> None:
    """Raises SpecError where a kernel of a spec cannot run on its architecture, which a spec alone does not tell."""
    room(spec.arch).check(spec)


def described(data: Any) -> Spec:
    """The spec that a file describes as `to_dict` does: every field, of its type, and nothing else.

    Raises:
        ValueError: it is no such description, or no kernel of the spec can run.
    """
    if not isinstance(data, dict):
        raise ValueError(f"a kernel is described by a {type(data).__name__}, not an object")
    require("op", data.get("op"), tuple(SPECS))
    fields = {name: value for name, value in data.items() if name != "op"}
    spec: Spec = records.typed(data["op"], fields, SPECS[data["op"]])
    if to_dict(spec) != data:
        raise ValueError(f"the description of {spec.name} lacks fields")
    check(spec)
    return spec


def spec_of(op: Any, fields: Mapping[str, Any]) -> Spec:
    """The spec that keywords of `glulam.compile` describe.

    Raises:
        SpecError, TypeError: as `glulam.compile`.
    """
    types = fields_of(op)
    shape = {name: fields[name] for name in ("tile", "cluster", "schedule") if name in fields and "tile" in types}
    try:
        given = records.fields(op, {name: fields[name] for name in fields if name not in shape}, _described_by(op))
    except ValueError as error:
        raise SpecError(str(error)) from None
    if "tile" not in types:
        return from_dict({"op": op, **given})
    make = functools.partial(_spec_on, {"op": op, **given})
    tile = shape.pop("tile", (TileConfig.m, TileConfig.n, TileConfig.k))
    if isinstance(tile, TileConfig):
        if shape:
            raise TypeError(f"compile: {next(iter(shape))} is given beside a TileConfig, which says what it is")
        return make(tile)
    m, n, k = _integers("tile", tile, 3)
    cluster, schedule = shape.get("cluster", (1, 1)), shape.get("schedule", "cooperative")
    if not isinstance(schedule, str):
        raise TypeError(f"compile: schedule is {schedule!r}; give 'cooperative' or 'pingpong'")
    if not isinstance(cluster, str):
        cluster_m, cluster_n = _integers("cluster", cluster, 2)
        cluster = cluster_m, cluster_n
    return make(_tile_for(make, given.get("arch", GroupedGluSpec.arch), (m, n, k), cluster, schedule))


def _integers(name: str, value: Any, length: int) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or len(value) != length or any(type(v) is not int for v in value):
        raise TypeError(f"compile: {name} is {value!r}; give {length} integers, as a tuple")
    return tuple(value)


def _spec_on(fields: dict[str, Any], tile: TileConfig) -> Spec:
    """The spec that keywords describe but for its tile; a grouped_mlp uses one tile for both of its GEMMs."""
    fields = {**fields, "tile": tile}
    if fields["op"] != GroupedMlpSpec.op:
        return from_dict(fields)
    fc1 = from_dict({**fields, "op": "grouped_glu"})
    shared = {name: value for name, value in fields.items() if name in ("dtype", "arch", "tile", "transpose_w")}
    return from_dict({"op": "grouped_mlp", "fc1": fc1, "fc2": from_dict({**shared, "op": "grouped_mm"})})


def _is_valid(make: MakeSpec, tile: TileConfig) -> bool:
    try:
        check(make(tile))
    except SpecError:
        return False
    return True


def valid_tiles(make: MakeSpec, arch: str, bits: int = 16) -> list[TileConfig]:
    """Every tile for elements of so many bits that the kernel which `make` describes can have."""
    return [tile for tile in room(arch).all_tiles(bits) if _is_valid(make, tile)]


def _distance(
    shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str, tile: TileConfig
) -> tuple[float, ...]:
    """Shapes first, in doublings; then the schedule, then the cluster."""
    doublings = abs(math.log2(max(shape[0], 1) / tile.m)) + abs(math.log2(max(shape[1], 1) / tile.n))
    if isinstance(cluster, str):
        clusters = int(not tile.adaptive)
    else:
        clusters = abs(cluster[0] - tile.cluster_m) + abs(cluster[1] - tile.cluster_n)
    return doublings, schedule != tile.schedule, clusters, tile.adaptive


def _tile_for(
    make: MakeSpec, arch: str, shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str
) -> TileConfig:
    """The tile of these words, with which `make` describes a kernel that can run.

    Raises:
        TileError: which limit stands against it, and the nearest valid tile.
        SpecError: no tile can be, for another reason.
    """
    require("arch", arch, ARCHS)
    try:
        wanted = room(arch).tile_of(shape, cluster, schedule)
        check(make(wanted))
        return wanted
    except SpecError as error:
        valid = valid_tiles(make, arch) or valid_tiles(make, arch, bits=8)
        if not valid:  # whatever the tile
            raise
        nearest = min(valid, key=functools.partial(_distance, shape, cluster, schedule))
        raise TileError(str(error), nearest) from None
