"""Tables that the tuner wrote: for a layer, which kernel was fastest on a GPU, at several numbers of rows.

They are JSON files at the places that $GLULAM_TUNED names, or else in the folder `tuned` of the user's configuration
of glulam. A file has sections, each with a stamp: the GPU, the versions and the kernels' sources that its times hold
for. A section for another GPU or version is passed over, and a warning says so once. So is what the tuner does not
write, as a kernel of another form than its layer's: a file may come from anybody. Files are read when the first kernel
is chosen, once. The choice is a pure function of what the host knows, and it never compiles: a kernel that this machine
has not compiled is passed over as well.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.specs import Spec, to_dict
from cute_kernels.tiles import SpecError
from ffi_bridge import toolchain

from . import loadable, records, shipped_kernels, validity
from .problem import Problem

ENV_TUNED = "GLULAM_TUNED"
FORMAT, SCHEMA = "glulam-tuned", 1
REACH = 2.0
"""How far beyond the fewest and the most rows that were tuned their kernels are taken, as a factor."""
NOISE = 0.01
"""Between tuned numbers of rows, another kernel than the shipped one must be faster by this share."""
WIDTHS = {
    "grouped_mm": ("in_features", "out_features"),
    "grouped_glu": ("in_features", "intermediate"),
    "grouped_mlp": ("in_features", "intermediate", "out_features"),
    "grouped_dglu": ("in_features", "intermediate"),
    "grouped_wgrad": ("in_features", "out_features"),
}
"""Those that a problem of an operator cannot do without."""
ALIGNMENT = 8
LARGEST_SIZE = 2**31 - 1
MOST_ROWS = 2.0**26

Us = dict[str, dict[str, float]]  # by the kernel's name and the routing's


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What times hold for: the GPU's name, the versions that code depends on, a hash of the kernels' source."""

    gpu: str
    versions: dict[str, str | None]
    kernels: str
    date: str = ""
    driver: str = ""

    @property
    def holds_for(self) -> tuple[Any, ...]:
        return self.gpu, tuple(sorted(self.versions.items())), self.kernels

    def unlike(self, here: Stamp) -> str:
        """How this differs from what is here; empty where times hold here."""
        if self.gpu != here.gpu:
            return f"measured on {self.gpu}, this is {here.gpu or 'no GPU'}"
        for name in {**here.versions, **self.versions}:
            if self.versions.get(name) != here.versions.get(name):
                return f"measured with {name} {self.versions.get(name)}, installed is {here.versions.get(name)}"
        return "" if self.kernels == here.kernels else "measured with other sources of the kernels"


def stamp_of(gpu: str, driver: str = "") -> Stamp:
    """The stamp of what is measured now on a GPU of this name."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Stamp(gpu, toolchain.code_versions(), toolchain.sources_hash("cute_kernels")[:16], date, driver)


@dataclasses.dataclass(frozen=True)
class Point:
    """What was measured at one number of rows an expert.

    chosen, shipped: names of kernels. gain: the shipped one's time over the chosen one's, in a run of the two alone.
    us: microseconds of every kernel that took part, by routing.
    """

    rows_per_expert: float
    chosen: str
    shipped: str
    gain: float
    us: Us

    def mean_us(self, name: str) -> float | None:
        """The geometric mean over the routings; None of a kernel that took no part."""
        if name not in self.us:
            return None
        return math.exp(sum(math.log(us) for us in self.us[name].values()) / len(self.us[name]))


@dataclasses.dataclass(frozen=True)
class Layer:
    """One problem at several numbers of rows, ascending.

    kernels: the specs behind the names. others: descriptions of kernels that only another version knows.
    """

    problem: dict[str, Any]
    kernels: dict[str, Spec]
    points: tuple[Point, ...]
    others: tuple[dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Section:
    """What was measured on one GPU with one version; layers by `key_of` their problems."""

    stamp: Stamp
    layers: dict[str, Layer]


def question(problem: Problem) -> dict[str, Any]:
    """What tells a problem from others but for its rows: its fields that are not their defaults."""
    fields = {field.name: field.default for field in dataclasses.fields(problem)}
    given = {name: getattr(problem, name) for name in fields if name != "rows"}
    return {name: value for name, value in given.items() if value != fields[name]}


def key_of(question: dict[str, Any]) -> str:
    return json.dumps(question, sort_keys=True)


def check(problem: Problem) -> None:
    """Raises ValueError where no kernel that has a tile serves a problem, whatever its rows."""
    if problem.op not in validity.TILED:
        raise ValueError(f"op is {problem.op!r}; choose one of {', '.join(validity.TILED)}")
    for name in ("experts", "in_features", "intermediate", "out_features"):
        size = getattr(problem, name)
        if type(size) is not int or not 0 <= size <= LARGEST_SIZE:
            raise ValueError(f"{name} is {size!r}; give a whole number, at most {LARGEST_SIZE}")
        if size < 1 and name in ("experts", *WIDTHS[problem.op]):
            raise ValueError(f"{problem.op} needs {name}, got {size}")
        if name != "experts" and size % ALIGNMENT:
            raise ValueError(f"{name} is {size}; kernels need a multiple of {ALIGNMENT}")


def locations() -> list[Path]:
    """Files and folders that are searched: those of $GLULAM_TUNED, separated as in PATH, else the user's folder."""
    chosen = os.environ.get(ENV_TUNED)
    if chosen is not None:
        return [Path(place) for place in chosen.split(os.pathsep) if place]
    import platformdirs

    return [platformdirs.user_config_path("glulam") / "tuned"]


def files() -> list[Path]:
    """Whatever is to be read, and what of `locations` is neither a file nor a folder that can be listed."""
    found: list[Path] = []
    for place in locations():
        try:
            found += sorted(path for path in place.iterdir() if path.suffix == ".json")
        except FileNotFoundError:
            continue
        except OSError:
            found.append(place)
    return found


class Content(NamedTuple):
    """What a file holds, and of what it holds beside that, what is wrong with it."""

    sections: list[Section]
    wrong: list[str]


def read(path: Path) -> list[Section]:
    """The sections of a file.

    Raises:
        ValueError: in one line: it is no table, of another schema, or holds something that the tuner does not write.
    """
    sections, wrong = content(path)
    if wrong:
        raise ValueError(
            f"the tuned table {records.shown(path)} holds what `glulam tune` does not write: {_first(wrong)}"
        )
    return sections


def content(path: Path) -> Content:
    """What a file holds. Raises ValueError, in one line, where it is no table or of another schema."""
    try:
        data = records.read(path)
        if data.get("format") != FORMAT:
            raise ValueError("not written by `glulam tune`")
        if data.get("schema") != SCHEMA:
            raise ValueError(f"its schema is {records.brief(data.get('schema'))}, this Glulam reads {SCHEMA}")
        records.require_fields("it", data, ("format", "schema", "sections"))
        found = Content([], [])
        for number, section in enumerate(records.require_list("sections", data["sections"]), 1):
            _add_section(found, section, f"section {number}")
        return found
    except ValueError as error:
        raise ValueError(f"{records.shown(path)} is no table of tuned kernels: {error}") from error


def _first(lines: Sequence[str]) -> str:
    return lines[0] if len(lines) == 1 else f"{lines[0]} (and {len(lines) - 1} more)"


def _add_section(found: Content, data: Any, where: str) -> None:
    layers: dict[str, Layer] = {}
    try:
        records.require_fields("it", data, ("stamp", "layers"))
        stamp = _stamp(data["stamp"])
        if any(section.stamp.holds_for == stamp.holds_for for section in found.sections):
            raise ValueError("it has the stamp of an earlier one")
        described = records.require_list("layers", data["layers"])
    except ValueError as error:
        found.wrong.append(f"{where}: {error}")
        return
    is_ours = not stamp.unlike(stamp_of(stamp.gpu))
    for number, each in enumerate(described, 1):
        try:
            layer = _layer(each, is_ours)
            if layers.setdefault(key_of(layer.problem), layer) is not layer:
                raise ValueError("its problem is that of an earlier one")
        except ValueError as error:
            found.wrong.append(f"{where}, layer {number}: {error}")
    found.sections.append(Section(stamp, layers))


def _stamp(data: Any) -> Stamp:
    records.require_fields("its stamp", data, [field.name for field in dataclasses.fields(Stamp)])
    for name in ("gpu", "kernels", "date", "driver"):
        records.require_text(name, data[name])
    if not isinstance(data["versions"], dict):
        raise ValueError("versions are no object")
    for name, version in data["versions"].items():
        records.require_text("a package's name", name)
        if version is not None:
            records.require_text(f"the version of {name}", version)
    return Stamp(**data)


def _layer(data: Any, is_ours: bool) -> Layer:
    """`is_ours`: written by this version, whose problems and kernels are known. Raises ValueError."""
    records.require_fields("it", data, ("problem", "kernels", "points"))
    described = records.require_list("kernels", data["kernels"])
    others: list[dict[str, Any]] = []
    if is_ours:
        kernels = _kernels(described, _problem(data["problem"]))
    else:
        _check_foreign(data["problem"])
        kernels, others = _known_kernels(described)
    points = sorted(map(_point, records.require_list("points", data["points"])), key=lambda p: p.rows_per_expert)
    if len({point.rows_per_expert for point in points}) < len(points):
        raise ValueError("two points have the same number of rows")
    if is_ours and (other := [point.chosen for point in points if point.chosen not in kernels]):
        raise ValueError(f"no kernel is described that is named {other[0]}")
    return Layer(data["problem"], kernels, tuple(points), tuple(others))


def _problem(data: Any) -> Problem:
    """The problem, of no rows, whose `question` this is. Raises ValueError."""
    fields = {field.name: field for field in dataclasses.fields(Problem) if field.name != "rows"}
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    if not isinstance(data, dict) or not data.keys() >= set(required) or not data.keys() <= fields.keys():
        raise ValueError(f"its problem has other fields than {', '.join(required)} and options")
    for name, value in data.items():
        if type(value).__name__ != fields[name].type:
            raise ValueError(f"{name} is a {type(value).__name__}, not of type {fields[name].type}")
    problem = Problem(rows=0, **data)
    check(problem)
    if question(problem) != data:
        raise ValueError("its problem names what is so by default")
    return problem


def _kernels(described: Sequence[Any], problem: Problem) -> dict[str, Spec]:
    """By name, kernels that can serve the problem. Raises ValueError where one cannot."""
    specs = [validity.described(each) for each in described]
    forms = {arch: shipped_kernels.forms_of(problem, arch) for arch in {spec.arch for spec in specs}}
    for spec in specs:
        if shipped_kernels.form(spec) not in forms[spec.arch]:
            raise ValueError(f"{spec.name} is of another form than its problem, {problem.op} of {problem.dtype}")
    return {spec.name: spec for spec in specs}


def _check_foreign(problem: Any) -> None:
    """A problem of another version: what telling of it needs. Raises ValueError."""
    if not isinstance(problem, dict) or not problem.keys() >= {"op", "dtype", "experts", "in_features"}:
        raise ValueError("its problem lacks op, dtype, experts or in_features")
    for name, value in problem.items():
        records.require_text("a field's name", name)
        if type(value) not in (int, bool):
            records.require_text(name, value)


def _known_kernels(described: Sequence[Any]) -> tuple[dict[str, Spec], list[dict[str, Any]]]:
    """Those that this version knows, and the descriptions of others, which go back into the file as they are."""
    known, others = {}, []
    for each in described:
        try:
            spec = validity.described(each)
            known[spec.name] = spec
        except SpecError:
            if not isinstance(each, dict) or any(isinstance(value, list) for value in each.values()):
                raise
            others.append(each)
    return known, others


def _point(data: Any) -> Point:
    records.require_fields("a point", data, [field.name for field in dataclasses.fields(Point)])
    rows = records.require_number("rows_per_expert", data["rows_per_expert"], least=1.0, most=MOST_ROWS)
    gain = records.require_number("gain", data["gain"])
    us = {name: _times(times) for name, times in _objects("us", data["us"])}
    if len({frozenset(times) for times in us.values()}) > 1:
        raise ValueError("a point's kernels have times of different routings")
    for name in ("chosen", "shipped"):
        if records.require_text(name, data[name]) not in us:
            raise ValueError(f"the {name} kernel of a point has no times")
    return Point(rows, data["chosen"], data["shipped"], gain, us)


def _times(data: Any) -> dict[str, float]:
    times = {name: records.require_number("a time", us) for name, us in _objects("a kernel's times", data)}
    if not times:
        raise ValueError("a kernel has no times")
    return times


def _objects(what: str, data: Any) -> list[tuple[str, Any]]:
    """The items of an object whose names can be shown. Raises ValueError."""
    if not isinstance(data, dict):
        raise ValueError(f"{what} is a {type(data).__name__}, not an object")
    return [(records.require_text("a name", name), value) for name, value in data.items()]


def merged(sections: Iterable[Section]) -> list[Section]:
    """One section for each stamp; where two have a point at the same number of rows, the later one's."""
    result: dict[tuple[Any, ...], Section] = {}
    for section in sorted(sections, key=lambda section: section.stamp.date):
        known = result.get(section.stamp.holds_for)
        layers = dict(known.layers) if known else {}
        for key, layer in section.layers.items():
            layers[key] = _both(layers[key], layer) if key in layers else layer
        result[section.stamp.holds_for] = Section(section.stamp, layers)
    return list(result.values())


def _both(old: Layer, new: Layer) -> Layer:
    points = {point.rows_per_expert: point for point in (*old.points, *new.points)}
    others = [each for each in old.others if each not in new.others]
    ascending = tuple(points[rows] for rows in sorted(points))
    return Layer(new.problem, {**old.kernels, **new.kernels}, ascending, (*others, *new.others))


def text(sections: Sequence[Section]) -> str:
    """A file's content: JSON, a point a line."""
    return (
        _indented({"format": FORMAT, "schema": SCHEMA, "sections": [_to_dict(section) for section in sections]}) + "\n"
    )


def _to_dict(section: Section) -> dict[str, Any]:
    layers = [
        {
            "problem": layer.problem,
            "kernels": [*(to_dict(spec) for spec in layer.kernels.values()), *layer.others],
            "points": [dataclasses.asdict(point) for point in layer.points],
        }
        for layer in section.layers.values()
    ]
    return {"stamp": dataclasses.asdict(section.stamp), "layers": layers}


def _indented(value: Any, depth: int = 0) -> str:
    """JSON, one line for whatever holds no list of objects."""
    indent = " " * (depth + 1)
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(indent + _indented(item, depth + 1) for item in value) + "\n" + " " * depth + "]"
    if isinstance(value, dict) and any(isinstance(item, list) for item in value.values()):
        items = (f"{indent}{json.dumps(name)}: {_indented(item, depth + 1)}" for name, item in value.items())
        return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"
    return json.dumps(value)


def write(path: Path, sections: Sequence[Section]) -> None:
    """Adds sections to a file, which other processes may be doing as well. Raises ValueError, as `read` does."""
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        known = read(path) if path.exists() else []
        records.write(path, text(merged([*known, *sections])))


class Tuned(NamedTuple):
    """A kernel for a problem, its time, the shipped one's where that is known, and the file that says so."""

    spec: Spec
    us: float
    shipped_us: float | None
    path: Path


class Tables(NamedTuple):
    """What holds for a GPU: layers by key, each with its file; and a line for everything that was passed over."""

    layers: dict[str, tuple[Layer, Path]]
    ignored: tuple[str, ...]


_tables: dict[str, Tables] = {}
_absent: set[Spec] = set()
_lock = threading.Lock()


def tables(gpu: str) -> Tables:
    """The tables for a GPU of this name, read once a process. What is passed over is warned of, once."""
    if gpu not in _tables:
        with _lock:
            if gpu not in _tables:
                _tables[gpu] = _read_for(gpu)
                for line in _tables[gpu].ignored:
                    warnings.warn(line, RuntimeWarning, stacklevel=5)
    return _tables[gpu]


def _read_for(gpu: str) -> Tables:
    layers: dict[str, tuple[Layer, Path]] = {}
    ignored: list[str] = []
    for path in files():
        try:
            sections, wrong = content(path)
        except ValueError as error:
            ignored.append(f"{error}; it is ignored, remove it")
            continue
        here = stamp_of(gpu)
        fitting = [section for section in sections if not section.stamp.unlike(here)]
        for section in fitting:
            layers.update({key: (layer, path) for key, layer in section.layers.items()})
        if sections and not fitting:
            why = sections[-1].stamp.unlike(here)
            ignored.append(f"the tuned table {records.shown(path)} is ignored: {why}; run `glulam tune` here")
        elif wrong:
            ignored.append(
                f"the tuned table {records.shown(path)} is ignored in part, which `glulam tune` did not write: "
                f"{_first(wrong)}; tune anew into another file"
            )
    return Tables(layers, tuple(ignored))


def forget() -> None:
    """Read the tables anew when the next kernel is chosen."""
    _tables.clear()
    _absent.clear()


def layer(problem: Problem, gpu: str) -> tuple[Layer, Path] | None:
    """What tables say of a problem, whatever its rows, and the file that says so; None where they have no word of it.

    `gpu`: the GPU's name; without one no table holds.
    """
    layers = tables(gpu).layers if gpu else {}
    return layers.get(key_of(question(problem))) if layers else None


def fastest(told: tuple[Layer, Path], problem: Problem, shipped: Spec) -> Tuned | None:
    """The kernel that a layer gives its problem; None where it has none, or none that can be had without compiling.

    `shipped`: what serves the problem otherwise.
    """
    layer, path = told
    ranked = _ranked(layer, shipped.name, max(problem.rows, 1) / problem.experts)
    known = dict(ranked)
    for name, us in ranked:
        spec = layer.kernels.get(name)
        if spec is not None and _is_there(spec):
            return Tuned(spec, us, known.get(shipped.name), path)
    return None


def _is_there(spec: Spec) -> bool:
    if spec in _absent:
        return False
    if loadable.is_loadable(spec):
        return True
    _absent.add(spec)
    warnings.warn(
        f"the tuned kernel {spec.name} is not compiled on this machine, the next best serves; "
        "run `glulam compile --tuned`",
        RuntimeWarning,
        stacklevel=6,
    )
    return False


def _ranked(layer: Layer, shipped: str, average: float) -> list[tuple[str, float]]:
    """Kernels that were chosen near a number of rows, and the shipped one, with their times there; best first."""
    below = [point for point in layer.points if point.rows_per_expert <= average]
    above = [point for point in layer.points if point.rows_per_expert >= average]
    if below and above:
        left, right = below[-1], above[0]
    else:
        left = right = (below or above or [None])[-1 if below else 0]  # type: ignore[list-item]
        if left is None or not 1 / REACH <= average / left.rows_per_expert <= REACH:
            return []
    times = {name: _between(left, right, name, average) for name in (left.chosen, right.chosen, shipped)}
    handicap = {shipped: 1 - NOISE}
    if left is right:  # measured here: what was chosen is
        handicap = {left.chosen: 0.0}
    return sorted(
        ((name, us) for name, us in times.items() if us is not None),
        key=lambda timed: timed[1] * handicap.get(timed[0], 1.0),
    )


def _between(left: Point, right: Point, name: str, average: float) -> float | None:
    """Linear in logarithms."""
    y0, y1 = left.mean_us(name), right.mean_us(name)
    if y0 is None or y1 is None:
        return None
    x0, x1 = left.rows_per_expert, right.rows_per_expert
    share = math.log(average / x0) / math.log(x1 / x0) if x1 > x0 else 0.0
    return math.exp(math.log(y0) * (1 - share) + math.log(y1) * share)


def specs(gpu: str) -> list[Spec]:
    """Every kernel that a table for this GPU chooses somewhere."""
    chosen = {
        layer.kernels[point.chosen]: None
        for layer, _ in tables(gpu).layers.values()
        for point in layer.points
        if point.chosen in layer.kernels
    }
    return list(chosen)
