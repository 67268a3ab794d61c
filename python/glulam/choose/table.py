"""File format of tuned tables (measurements of `glulam tune`) and of preferences of `glulam.compile`.

A file has sections. Each section has a stamp (GPU, versions, hash of the kernels' sources) that says where it holds,
and layers. A layer is a problem without its number of rows (an operator on the sizes of one layer of a model), with its
kernels and, for several numbers of rows, the times of all kernels that took part. A preference is a layer without
times: it names a family of kernels instead of a problem, and the only kernel that serves this family. It holds for one
version on any GPU.

A file may come from anybody. Entries that the tuner would not write, such as a kernel of another family than its
layer's, are ignored with a message. A section of another version is kept unchanged: it may hold problems and kernels
that this version does not know.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.specs import Spec, to_dict
from ffi_bridge import __version__, folders, locks, toolchain

from . import records, shipped, specs
from .problem import Problem

FORMAT, SCHEMA = "glulam-tuned", 3
FORMATS = (FORMAT, "glulam-preferred")  # earlier versions wrote the second into preferences
ALIGNMENT = 8
LARGEST_SIZE = 2**31 - 1
MOST_ROWS = 2.0**26

Us = dict[str, dict[str, float]]  # [kernel's name][routing's name]


@dataclasses.dataclass(frozen=True)
class Stamp:
    """The conditions under which a section of a table, a group of measurements, holds.

    Attributes:
        gpu: the GPU's name; "" for preferences.
        versions: {package: version} of everything that the kernels' code depends on.
        kernels: hash of the kernels' sources; "" for preferences.
        date, driver: when, and with which driver, the section was measured. They are not compared.
    """

    gpu: str
    versions: dict[str, str | None]
    kernels: str
    date: str
    driver: str

    @property
    def holds_for(self) -> tuple[Any, ...]:
        return self.gpu, tuple(sorted(self.versions.items())), self.kernels

    def unlike(self, here: Stamp) -> str:
        """Compare with the stamp of this machine, `here`; return text that names a difference, "" if there is none."""
        if self.gpu != here.gpu:
            return f"measured on {self.gpu or 'no GPU'}, this is {here.gpu or 'no GPU'}"
        made = "measured" if self.gpu else "written"
        for name in {**here.versions, **self.versions}:
            if self.versions.get(name) != here.versions.get(name):
                return f"{made} with {name} {self.versions.get(name)}, installed is {here.versions.get(name)}"
        return "" if self.kernels == here.kernels else f"{made} with other sources of the kernels"


def stamp_of(gpu: str, driver: str = "") -> Stamp:
    """Make the stamp of measurements made now on a GPU; with `gpu` "", the stamp of a preference.

    Args:
        gpu: the GPU's name.
        driver: the driver's CUDA version, as text.
    """
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    if not gpu:
        return Stamp("", {"glulam": __version__}, "", date, "")
    return Stamp(gpu, toolchain.code_versions(), toolchain.sources_hash("cute_kernels")[:16], date, driver)


@dataclasses.dataclass(frozen=True)
class Point:
    """Measured times of a problem's kernels at one number of rows an expert.

    Attributes:
        rows_per_expert: the number of rows an expert.
        chosen, shipped: names of the fastest kernel, and of the kernel that ships for this problem.
        gain: (shipped kernel's time) / (chosen kernel's time), from a separate run of only these two.
        us: {kernel's name: {routing's name: microseconds}} of every kernel that took part.
    """

    rows_per_expert: float
    chosen: str
    shipped: str
    gain: float
    us: Us

    def __post_init__(self) -> None:
        if not 1 <= self.rows_per_expert <= MOST_ROWS:
            raise ValueError(f"rows_per_expert is {self.rows_per_expert}, not a number from 1 to {MOST_ROWS:.0f}")
        if not all(self.us.values()):
            raise ValueError("a kernel has no times")
        if len({frozenset(times) for times in self.us.values()}) > 1:
            raise ValueError("a point's kernels have times of different routings")
        for name in ("chosen", "shipped"):
            if getattr(self, name) not in self.us:
                raise ValueError(f"the {name} kernel of a point has no times")

    def mean_us(self, name: str) -> float | None:
        """Return the geometric mean of a kernel's times over the routings, in microseconds; None: not measured."""
        if name not in self.us:
            return None
        return math.exp(sum(math.log(us) for us in self.us[name].values()) / len(self.us[name]))


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """An interrupted run of the tuner.

    Attributes:
        asked: the run's options as JSON.
        rows: the numbers of rows an expert that it has measured.
    """

    asked: str
    rows: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A problem with its kernels and their times at several numbers of rows; or a preference, which has no times.

    Attributes:
        problem: the fields that identify the problem (`layer_of`); for a preference, the description of a family.
        kernels: {kernel's name: spec}.
        points: times of the kernels, ascending by rows.
        unfinished: the tuner's run for this problem, if it was interrupted; else None.
        others: descriptions of kernels that only another version knows.
    """

    problem: dict[str, Any]
    kernels: dict[str, Spec]
    points: tuple[Point, ...] = ()
    unfinished: Unfinished | None = None
    others: tuple[dict[str, Any], ...] = ()

    @property
    def key(self) -> str:
        return json.dumps(self.problem, sort_keys=True)


@dataclasses.dataclass(frozen=True)
class _Written:
    """A `Layer` as a file stores it, with descriptions of kernels instead of specs."""

    problem: dict[str, Any]
    kernels: tuple[dict[str, Any], ...]
    points: tuple[Point, ...]
    unfinished: Unfinished | None


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a file: the entries (`Layer`) that hold on one GPU with one version, by `Layer.key`."""

    stamp: Stamp
    layers: dict[str, Layer]


def section(stamp: Stamp, *layers: Layer) -> Section:
    return Section(stamp, {layer.key: layer for layer in layers})


def layer_of(problem: Problem) -> dict[str, Any]:
    """Return the fields of a problem that identify its `Layer` in a table: fields that differ from their defaults.

    `rows`, `world_experts` and `invariant` are left out: they only decide among a layer's kernels.
    """
    deciding = "rows", "world_experts", "invariant"
    fields = {field.name: field.default for field in dataclasses.fields(problem) if field.name not in deciding}
    given = {name: getattr(problem, name) for name in fields}
    return {name: value for name, value in given.items() if value != fields[name]}


def layer_key(problem: Problem) -> str:
    """Return the key under which a section of a table has a problem's `Layer`."""
    return json.dumps(layer_of(problem), sort_keys=True)


def check(problem: Problem) -> None:
    """Raise ValueError if no kernel with a choice of tiles serves a problem, with any number of rows."""
    if problem.op not in shipped.TILED:
        raise ValueError(f"op is {problem.op!r}; choose one of {', '.join(shipped.TILED)}")
    for name in ("experts", "in_features", "intermediate", "out_features"):
        size = getattr(problem, name)
        if type(size) is not int or not 0 <= size <= LARGEST_SIZE:
            raise ValueError(f"{name} is {size!r}; give a whole number, at most {LARGEST_SIZE}")
        if size < 1 and name in ("experts", *shipped.WIDTHS[problem.op]):
            raise ValueError(f"{problem.op} needs {name}, got {size}")
        if name != "experts" and size % ALIGNMENT:
            raise ValueError(f"{name} is {size}; kernels need a multiple of {ALIGNMENT}")


class Content(NamedTuple):
    """The valid sections of a file, and a line of text for each thing that is wrong with the file."""

    sections: list[Section]
    wrong: list[str]


def first_of(lines: Sequence[str]) -> str:
    return lines[0] if len(lines) == 1 else f"{lines[0]} (and {len(lines) - 1} more)"


def read(path: Path) -> list[Section]:
    """Read a file; return its sections, each with the entries for one GPU and version. Nothing wrong is tolerated.

    Raises:
        ValueError: the file is no table, has another schema, or holds something that the tuner does not write. The
            message has one line.
    """
    sections, wrong = content(path)
    if wrong:
        message = f"holds what `glulam tune` does not write: {first_of(wrong)}"
        raise ValueError(f"the tuned table {records.shown(path)} {message}")
    return sections


def content(path: Path) -> Content:
    """Read a file; return its valid sections (entries for one GPU and version), and what is wrong with the rest.

    Raises:
        ValueError: the file is no table, or has another schema. The message has one line.
    """
    try:
        return _parsed(records.read(path))
    except ValueError as error:
        raise ValueError(f"{records.shown(path)} is no table of tuned kernels: {error}") from error


def _parsed(data: dict[str, Any]) -> Content:
    if data.get("format") not in FORMATS:
        raise ValueError("not written by `glulam tune`")
    if (data["format"], data.get("schema")) != (FORMAT, SCHEMA):
        schema = records.brief(data.get("schema"))
        raise ValueError(f"another version of Glulam wrote it: its schema is {schema}, this one reads {SCHEMA}")
    if data.keys() != {"format", "schema", "sections"} or not isinstance(data["sections"], list):
        raise ValueError("it has other fields than format, schema and a list of sections")
    found = Content([], [])
    for number, each in enumerate(data["sections"], 1):
        try:
            found.sections.append(_section(found, each, f"section {number}"))
        except ValueError as error:
            found.wrong.append(f"section {number}: {error}")
    return found


def _section(found: Content, data: Any, where: str) -> Section:
    """Convert a section's JSON. Wrong layers are left out, and each adds a line to `found.wrong`.

    Args:
        found: the sections read so far, and the lines about what is wrong.
        data: the section's JSON.
        where: the section's name in messages.

    Raises:
        ValueError: the whole section is wrong.
    """
    if not isinstance(data, dict) or data.keys() != {"stamp", "layers"}:
        raise ValueError("it is no object of a stamp and layers")
    stamp = records.typed("its stamp", data["stamp"], Stamp)
    if any(other.stamp.holds_for == stamp.holds_for for other in found.sections):
        raise ValueError("it has the stamp of an earlier one")
    if not isinstance(data["layers"], list):
        raise ValueError(f"layers is a {type(data['layers']).__name__}, not a list")
    layers: dict[str, Layer] = {}
    is_ours = not stamp.unlike(stamp_of(stamp.gpu))
    for number, each in enumerate(data["layers"], 1):
        try:
            layer = _layer(records.typed("it", each, _Written), stamp, is_ours)
            if layers.setdefault(layer.key, layer) is not layer:
                raise ValueError("its problem is that of an earlier one")
        except ValueError as error:
            found.wrong.append(f"{where}, layer {number}: {error}")
    return Section(stamp, layers)


def _layer(data: _Written, stamp: Stamp, is_ours: bool) -> Layer:
    """Convert a stored layer to a `Layer`.

    Args:
        data: the stored layer.
        stamp: the stamp of its section.
        is_ours: True: this version wrote it, so its problem and kernels are known, and are checked. False: they are
            kept as descriptions.

    Raises:
        ValueError: the layer is wrong.
    """
    points = tuple(sorted(data.points, key=lambda point: point.rows_per_expert))
    if len({point.rows_per_expert for point in points}) < len(points):
        raise ValueError("two points have the same number of rows")
    if not is_ours:
        return Layer(data.problem, {}, points, data.unfinished, data.kernels)
    kernels = [specs.described(each) for each in data.kernels]
    if stamp.gpu:
        _check_families(_problem(data.problem), kernels)
    elif points or [shipped.family_of(spec) for spec in kernels] != [specs.described(data.problem)]:
        raise ValueError("its kernel is of another form than it says, or it has points")
    named = {spec.name: spec for spec in kernels}
    if other := [point.chosen for point in points if point.chosen not in named]:
        raise ValueError(f"no kernel is described that is named {other[0]}")
    return Layer(data.problem, named, points, data.unfinished)


def _problem(data: dict[str, Any]) -> Problem:
    """Make a problem with 0 rows from the fields that `layer_of` returns. Raises ValueError for other fields."""
    problem: Problem = records.typed("its problem", {"rows": 0, **data}, Problem)
    check(problem)
    if layer_of(problem) != data:
        raise ValueError("its problem names rows, or what is so by default")
    return problem


def _check_families(problem: Problem, kernels: Sequence[Spec]) -> None:
    """Raise ValueError if a kernel cannot serve a problem."""
    families = {arch: shipped.families_of(problem, arch) for arch in {spec.arch for spec in kernels}}
    for spec in kernels:
        if shipped.family_of(spec) not in families[spec.arch]:
            raise ValueError(f"{spec.name} is of another form than its problem, {problem.op} of {problem.dtype}")


def preference(spec: Spec) -> Section:
    """Make the section that stores the preference for a kernel."""
    return section(stamp_of(""), Layer(to_dict(shipped.family_of(spec)), {spec.name: spec}))


def merged(sections: Iterable[Section]) -> list[Section]:
    """Merge sections whose stamps are equal except for date and driver.

    If two sections have times at the same number of rows, the later section's times are kept.
    """
    result: dict[tuple[Any, ...], Section] = {}
    for each in sorted(sections, key=lambda each: each.stamp.date):
        known = result.get(each.stamp.holds_for)
        layers = dict(known.layers) if known else {}
        for key, layer in each.layers.items():
            layers[key] = _both(layers[key], layer) if key in layers else layer
        result[each.stamp.holds_for] = Section(each.stamp, layers)
    return list(result.values())


def _both(old: Layer, new: Layer) -> Layer:
    if not new.points:  # a preference, or a run that measured nothing
        return new if not old.points else old
    points = {point.rows_per_expert: point for point in (*old.points, *new.points)}
    others = tuple(each for each in old.others if each not in new.others)
    ascending = tuple(points[rows] for rows in sorted(points))
    return Layer(new.problem, {**old.kernels, **new.kernels}, ascending, new.unfinished, others + new.others)


def text(sections: Sequence[Section]) -> str:
    """Return a file's content: JSON, one line for each point."""
    return _indented({"format": FORMAT, "schema": SCHEMA, "sections": [_to_dict(each) for each in sections]}) + "\n"


def _to_dict(section: Section) -> dict[str, Any]:
    layers = [
        {
            "problem": layer.problem,
            "kernels": [*(to_dict(spec) for spec in layer.kernels.values()), *layer.others],
            "points": [dataclasses.asdict(point) for point in layer.points],
            "unfinished": layer.unfinished and dataclasses.asdict(layer.unfinished),
        }
        for layer in section.layers.values()
    ]
    return {"stamp": dataclasses.asdict(section.stamp), "layers": layers}


def _indented(value: Any, depth: int = 0) -> str:
    """Return JSON text in which each value that contains no list takes one line. `depth`: levels around the value."""
    indent = " " * (depth + 1)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(indent + _indented(item, depth + 1) for item in value) + "\n" + " " * depth + "]"
    if isinstance(value, dict) and any(isinstance(item, list) for item in value.values()):
        items = (f"{indent}{json.dumps(name)}: {_indented(item, depth + 1)}" for name, item in value.items())
        return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"
    return json.dumps(value)


def write(path: Path, sections: Sequence[Section], read: Callable[[Path], list[Section]] = read) -> None:
    """Add sections to a file. A lock protects against other processes that write the same file.

    Args:
        path: the file.
        sections: the sections to add. If the file has times at the same rows, the times of the later date stay.
        read: function that returns the sections that the file has already, or raises.

    Raises:
        OSError: the file cannot be written.
        Others: the errors of `read`.
    """
    folders.make(path.parent)
    with locks.locked(path.with_name(f".{path.name}.lock")):
        known = read(path) if os.path.lexists(path) else []
        records.write(path, text(merged([*known, *sections])))
