"""Make specs (descriptions of kernels) from the keywords of `glulam.compile` and from files.

Types of fields are checked, and tiles against the hardware's limits. An error names the limit and the nearest valid
tile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from cute_kernels.arch import policy_of
from cute_kernels.architectures import ARCHS
from cute_kernels.specs import GroupedGluSpec, GroupedMlpSpec, Spec, from_dict, to_dict
from cute_kernels.tiles import SpecError, TileConfig, require

from . import records

ADAPTIVE = "adaptive"
MakeSpec = Callable[[TileConfig], Spec]
SPECS: dict[str, Any] = {spec.op: spec for spec in get_args(Spec)}


class TileError(SpecError):
    """Raised for a tile that the hardware cannot run; the message names the limit and the nearest valid tile.

    Attributes:
        limit: text that says which limit the tile breaks.
        nearest: the nearest valid tile.
    """

    def __init__(self, limit: str, nearest: TileConfig) -> None:
        cluster = ADAPTIVE if nearest.adaptive else (nearest.cluster_m, nearest.cluster_n)
        words = f"tile=({nearest.m}, {nearest.n}, {nearest.k}), cluster={cluster!r}, schedule={nearest.schedule!r}"
        super().__init__(f"{limit}; the nearest valid choice is {words}")
        self.limit, self.nearest = limit, nearest


def fields_of(op: Any) -> Mapping[str, Any]:
    """Return {field: type} of the fields that describe an operator's kernels. They are keywords of `glulam.compile`.

    Raises:
        SpecError: there is no such operator.
    """
    return records.types_of(_described_by(op))


def _described_by(op: Any) -> Any:
    """Return the spec class whose fields are the keywords of an operator; for a grouped_mlp, the class of its FC1."""
    require("op", op, tuple(SPECS))
    return GroupedGluSpec if op == GroupedMlpSpec.op else SPECS[op]


def check(spec: Spec) -> None:
    """Raise SpecError if a spec's kernel cannot run on its architecture. Constructing a spec does not check this."""
    policy_of(spec.arch).check(spec)


def described(data: Any) -> Spec:
    """Make a spec from its JSON in a file, which must have exactly the fields of `to_dict`.

    Raises:
        ValueError: fields are missing, unknown or of a wrong type, or a kernel of the spec cannot run.
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
    """Make the spec that keywords of `glulam.compile` describe.

    Args:
        op: the operator.
        fields: the keywords except `op`.

    Raises:
        SpecError, TypeError: see `glulam.compile`.
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
    """Make the spec with these fields on a tile; a grouped_mlp uses one tile for both of its GEMMs."""
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
    """Return all tiles on which a kernel can run.

    Args:
        make: function that returns the kernel's spec on a tile.
        arch: the architecture.
        bits: size of the operands' elements.
    """
    return [tile for tile in policy_of(arch).all_tiles(bits) if _is_valid(make, tile)]


def _distance(
    shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str, tile: TileConfig
) -> tuple[float, ...]:
    """Return a sort key: how far `tile` is from a requested shape (m, n, k), cluster and schedule.

    The distance of m and n in doublings counts first, then the schedule, then the cluster.
    """
    doublings = abs(math.log2(max(shape[0], 1) / tile.m)) + abs(math.log2(max(shape[1], 1) / tile.n))
    if isinstance(cluster, str):
        clusters = int(not tile.adaptive)
    else:
        clusters = abs(cluster[0] - tile.cluster_m) + abs(cluster[1] - tile.cluster_n)
    return doublings, schedule != tile.schedule, clusters, tile.adaptive


def _tile_for(
    make: MakeSpec, arch: str, shape: tuple[int, int, int], cluster: tuple[int, int] | str, schedule: str
) -> TileConfig:
    """Make the tile with this shape, cluster and schedule, and check that the kernel can run with it.

    Args:
        make: function that returns the kernel's spec on a tile.
        arch: the architecture.
        shape: (m, n, k) of the tile.
        cluster: CTAs along m and n, or "adaptive".
        schedule: "cooperative" or "pingpong".

    Raises:
        TileError: the tile breaks a limit; the error names the limit and the nearest valid tile.
        SpecError: the kernel can run on no tile, so the cause is not the tile.
    """
    require("arch", arch, ARCHS)
    try:
        wanted = policy_of(arch).tile_of(shape, cluster, schedule)
        check(make(wanted))
        return wanted
    except SpecError as error:
        valid = valid_tiles(make, arch) or valid_tiles(make, arch, bits=8)
        if not valid:  # the error does not depend on the tile
            raise
        nearest = min(valid, key=functools.partial(_distance, shape, cluster, schedule))
        raise TileError(str(error), nearest) from None
