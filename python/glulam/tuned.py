"""Tables that the tuner wrote: for a layer, which kernel was fastest on a GPU, at several numbers of rows.

They are JSON files at the places that $GLULAM_TUNED names, or else in the folder `tuned` of the user's configuration
of glulam. A file has sections, each with a stamp: the GPU, the versions and the kernels' sources that its times hold
for. A section for another GPU or version is passed over, and a warning says so once. Files are read when the first
kernel is chosen, once. The choice is a pure function of what the host knows, and it never compiles: a kernel that this
machine has not compiled is passed over as well.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cute_kernels.specs import Spec, from_dict, to_dict
from cute_kernels.tiles import SpecError
from ffi_bridge import toolchain

from . import loadable

if TYPE_CHECKING:
    from .dispatch import Problem

ENV_TUNED = "GLULAM_TUNED"
FORMAT, SCHEMA = "glulam-tuned", 1
REACH = 2.0
"""How far beyond the fewest and the most rows that were tuned their kernels are taken, as a factor."""
NOISE = 0.01
"""Between tuned numbers of rows, another kernel than the shipped one must be faster by this share."""

Us = dict[str, dict[str, float]]  # by the kernel's name and the routing's


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What times hold for: the GPU's name, the versions that bundles must agree with, a hash of the kernels' source."""

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
        for name, version in self.versions.items():
            if version != here.versions.get(name):
                return f"measured with {name} {version}, installed is {here.versions.get(name)}"
        return "" if self.kernels == here.kernels else "measured with other sources of the kernels"


def stamp_of(gpu: str, driver: str = "") -> Stamp:
    """The stamp of what is measured now on a GPU of this name."""
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return Stamp(gpu, toolchain.versions(), toolchain.sources_hash("cute_kernels")[:16], date, driver)


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
    """One problem at several numbers of rows, ascending. `kernels`: the specs behind the names."""

    problem: dict[str, Any]
    kernels: dict[str, Spec]
    points: tuple[Point, ...]


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


def locations() -> list[Path]:
    """Files and folders that are searched: those of $GLULAM_TUNED, separated as in PATH, else the user's folder."""
    chosen = os.environ.get(ENV_TUNED)
    if chosen is not None:
        return [Path(place) for place in chosen.split(os.pathsep) if place]
    import platformdirs

    return [platformdirs.user_config_path("glulam") / "tuned"]


def files() -> list[Path]:
    found = (sorted(place.glob("*.json")) if place.is_dir() else [place] for place in locations())
    return [path for paths in found for path in paths if path.is_file()]


def read(path: Path) -> list[Section]:
    """The sections of a file. Raises ValueError, in one line, where it is no table or of another schema."""
    try:
        data = json.loads(path.read_text())
        if data["format"] != FORMAT:
            raise ValueError("not written by `glulam tune`")
        if data["schema"] != SCHEMA:
            raise ValueError(f"it has schema {data['schema']!r}, this Glulam reads {SCHEMA}")
        return [_section(section) for section in data["sections"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of tuned kernels: {error!r}") from error


def _section(data: dict[str, Any]) -> Section:
    layers = [
        Layer(
            layer["problem"],
            {spec.name: spec for spec in _specs(layer["kernels"])},
            tuple(sorted((Point(**point) for point in layer["points"]), key=lambda point: point.rows_per_expert)),
        )
        for layer in data["layers"]
    ]
    return Section(Stamp(**data["stamp"]), {key_of(layer.problem): layer for layer in layers})


def _specs(described: Iterable[dict[str, Any]]) -> Iterable[Spec]:
    """Those that this version knows; a section of another one may hold others."""
    for spec in described:
        with contextlib.suppress(SpecError):
            yield from_dict(spec)


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
    return Layer(new.problem, {**old.kernels, **new.kernels}, tuple(points[rows] for rows in sorted(points)))


def text(sections: Sequence[Section]) -> str:
    """A file's content: JSON, a point a line."""
    return (
        _indented({"format": FORMAT, "schema": SCHEMA, "sections": [_to_dict(section) for section in sections]}) + "\n"
    )


def _to_dict(section: Section) -> dict[str, Any]:
    layers = [
        {
            "problem": layer.problem,
            "kernels": [to_dict(spec) for spec in layer.kernels.values()],
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
    """Adds sections to a file, which other processes may be doing as well. Raises ValueError where it is no table."""
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f".{path.name}.lock")):
        known = read(path) if path.exists() else []
        new = path.with_name(f".{path.name}.new")
        new.write_text(text(merged([*known, *sections])))
        new.replace(path)


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
            sections = read(path)
        except ValueError as error:
            ignored.append(f"{error}; it is ignored")
            continue
        here = stamp_of(gpu)
        fitting = [section for section in sections if not section.stamp.unlike(here)]
        for section in fitting:
            layers.update({key: (layer, path) for key, layer in section.layers.items()})
        if sections and not fitting:
            why = sections[-1].stamp.unlike(here)
            ignored.append(f"the tuned table {path} is ignored: {why}; run `glulam tune` here")
    return Tables(layers, tuple(ignored))


def forget() -> None:
    """Read the tables anew when the next kernel is chosen."""
    _tables.clear()
    _absent.clear()


def lookup(problem: Problem, shipped: Spec, gpu: str) -> Tuned | None:
    """The kernel that tables give a problem; None where they have none, or none that can be had without compiling.

    Args:
        shipped: what serves it otherwise.
        gpu: the GPU's name; without one no table holds.
    """
    layers = tables(gpu).layers if gpu else {}
    found = layers.get(key_of(question(problem))) if layers else None
    if found is None:
        return None
    layer, path = found
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
