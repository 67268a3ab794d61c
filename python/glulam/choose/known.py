"""What is known here of kernels for problems: what `glulam.compile` prefers, then what tuned tables say.

Preferences lie in the folder `preferred` of the kernels' cache, a file for each family of kernels, named by it and
replaced as a whole, so that any number of processes may write and read. Tables are the files at the places that
$GLULAM_TUNED names, or else in the folder `tuned` of the user's configuration of glulam. Files are read when the first
kernel is chosen, once; one warning names each that is passed over. A kernel that this machine has not compiled is
passed over as well: choosing never compiles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.specs import Spec, to_dict

from ..problem import Problem
from . import loadable, records, table
from .estimates import interpolated
from .shipped import families_like, family_of
from .table import Layer, Point

ENV_TUNED = "GLULAM_TUNED"
FOLDER = "preferred"
FORMATS = (table.FORMAT, "glulam-preferred")  # the second is that of earlier versions
NAME = re.compile(r"[a-z0-9_]+-[0-9a-f]{16}\.json")
CLEAR = "run `glulam cache clear --preferred`"
REACH = 2.0
"""How far beyond the fewest and the most rows that were tuned their kernels are taken, as a factor."""
NOISE = 0.01
"""Between tuned numbers of rows, another kernel than the shipped one must be faster by this share."""


class Held(NamedTuple):
    """Layers that hold, each with its file: preferences by their family, others by `Layer.key`; and a line for each
    thing that was passed over.
    """

    layers: dict[Any, tuple[Layer, Path]]
    ignored: tuple[str, ...]


_held: dict[str, Held] = {}
"""What was read, by the GPU's name; preferences under the empty one."""
_ours: dict[Spec, Spec] = {}
"""What this process prefers, by family. It certainly can be loaded."""
_absent: set[Spec] = set()
_lock = threading.Lock()


def folder() -> Path:
    """Where preferences are."""
    from ffi_bridge.cache import cache_root

    return cache_root() / FOLDER


def locations() -> list[Path]:
    """Files and folders that tables are searched in: those of $GLULAM_TUNED, separated as in PATH, else the user's."""
    chosen = os.environ.get(ENV_TUNED)
    if chosen is not None:
        return [Path(place) for place in chosen.split(os.pathsep) if place]
    import platformdirs

    return [platformdirs.user_config_path("glulam") / "tuned"]


def tables() -> list[Path]:
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


def _path(family: Spec) -> Path:
    digest = hashlib.sha256(json.dumps(to_dict(family), sort_keys=True).encode()).hexdigest()
    return folder() / f"{family.op}-{digest[:16]}.json"


def _preferences() -> list[Path]:
    """Whatever has the ending of a preference. A folder that is a link is somebody else's."""
    return [] if os.path.islink(folder()) else sorted(folder().glob("*.json"))


def _certainly_ours(path: Path) -> dict[str, Any]:
    """What is in a file that `glulam compile` wrote, of whatever version. Raises ValueError."""
    if os.path.islink(path):
        raise ValueError("it is a symbolic link")
    data = records.read(path)
    if not NAME.fullmatch(path.name) or data.get("format") not in FORMATS:
        raise ValueError("`glulam compile` did not write it")
    return data


def _preference(path: Path) -> tuple[Spec, Layer]:
    """A family and the layer that names its kernel. Raises ValueError, in one line with a remedy, where `compile` of
    this version did not write the file.
    """
    remedy = "remove it"
    try:
        data = _certainly_ours(path)
        remedy = CLEAR
        if (data["format"], data.get("schema")) != (table.FORMAT, table.SCHEMA):
            raise ValueError("another version of Glulam wrote it than is installed")
        sections, wrong = table.parsed(data)
        wrong += [why for each in sections if (why := each.stamp.unlike(table.stamp_of("")))]
        layers = [layer for each in sections for layer in each.layers.values()]
        if wrong or len(layers) != 1:
            raise ValueError(table.first_of(wrong or ["it has other layers than one"]))
        (spec,) = layers[0].kernels.values()
        if path.name != _path(family_of(spec)).name:
            raise ValueError(f"a preference of this form is named {_path(family_of(spec)).name}")
        return family_of(spec), layers[0]
    except ValueError as error:
        raise ValueError(f"the preference {records.shown(path)} is ignored: {error}; {remedy}") from error


def read_preferences() -> Held:
    """What the folder of preferences has now."""
    layers: dict[Any, tuple[Layer, Path]] = {}
    ignored = []
    for path in _preferences():
        try:
            family, layer = _preference(path)
            layers[family] = layer, path
        except ValueError as error:
            ignored.append(str(error))
    return Held(layers, tuple(ignored))


def read_tables(gpu: str) -> Held:
    """What the tables have now for a GPU of this name."""
    here = table.stamp_of(gpu)
    layers: dict[Any, tuple[Layer, Path]] = {}
    ignored: list[str] = []
    for path in tables():
        try:
            sections, wrong = table.content(path)
        except ValueError as error:
            ignored.append(f"{error}; it is ignored, remove it")
            continue
        fitting = [each for each in sections if gpu and not each.stamp.unlike(here)]
        for each in fitting:
            layers.update({key: (layer, path) for key, layer in each.layers.items()})
        name = f"the tuned table {records.shown(path)} is ignored"
        if sections and not fitting:
            ignored.append(f"{name}: {sections[-1].stamp.unlike(here)}; run `glulam tune` here")
        elif wrong:
            why = f"which `glulam tune` did not write: {table.first_of(wrong)}; tune anew into another file"
            ignored.append(f"{name} in part, {why}")
    return Held(layers, tuple(ignored))


def _known(gpu: str = "") -> Held:
    """What tables said of a GPU when it was first asked for, or without a name the preferences."""
    if gpu not in _held:
        with _lock:
            if gpu not in _held:
                held = read_tables(gpu) if gpu else read_preferences()
                for line in held.ignored:
                    warnings.warn(line, RuntimeWarning, stacklevel=6)
                _held[gpu] = held
    return _held[gpu]


def ignored(gpu: str = "") -> tuple[str, ...]:
    """A line for each thing that was passed over."""
    return (*_known().ignored, *(_known(gpu).ignored if gpu else ()))


def forget() -> None:
    """Forget what this process knows; files are read again when the next kernel is chosen."""
    for each in (_held, _ours, _absent):
        each.clear()


def ignore_preferences() -> None:
    """Leave aside what earlier processes preferred, for as long as this one runs: benchmarks measure what ships."""
    _held[""] = Held({}, ())


def prefer(spec: Spec, keep: bool = True) -> None:
    """Let `spec` serve every problem of its family, whatever the number of rows, here and, with `keep`, in later
    processes as well.

    Where it serves this process alone, a warning says so, and later ones go on with what they preferred.
    """
    family = family_of(spec)
    _ours[family] = spec
    path, why_not = _path(family), "its kernel was not kept"
    if keep:
        try:
            return records.write(path, table.text([table.preference(spec)]))
        except OSError as error:
            why_not = f"{records.shown(path)} cannot be written: {error.strerror}"
    warnings.warn(f"{spec.name} is preferred in this process alone ({why_not})", RuntimeWarning, stacklevel=3)


def clear_preferences() -> int:
    """Forget all preferences, here and on disk: files that `compile` wrote, of whatever version. Returns how many were
    removed.

    Raises:
        OSError: one cannot be removed.
    """
    removed = 0
    for path in _preferences():
        try:
            _certainly_ours(path)
        except ValueError:
            continue
        path.unlink(missing_ok=True)
        removed += 1
    forget()
    return removed


def _is_there(spec: Spec, otherwise: str) -> bool:
    """Whether a kernel can be had without compiling; a warning says once what happens otherwise."""
    if spec in _absent:
        return False
    if loadable.is_loadable(spec):
        return True
    _absent.add(spec)
    warnings.warn(otherwise, RuntimeWarning, stacklevel=6)
    return False


def preferred(problem: Problem, shipped: Spec) -> Spec | None:
    """What a user prefers for a problem that `shipped` serves otherwise: for its very activation and layout, else for
    several.
    """
    if not _ours and not _known().layers:  # making the families, up to six, takes longer
        return None
    found = map(_preferred, families_like(shipped, problem))
    return next((spec for spec in found if spec), None)


def _preferred(family: Spec) -> Spec | None:
    if family not in _ours and family in _known().layers:
        (spec,) = _known().layers[family][0].kernels.values()
        otherwise = (
            f"the preferred kernel {spec.name} is not in the cache of this version of Glulam, the shipped one serves; "
            f"compile it again with `glulam.compile`, or {CLEAR}"
        )
        if _is_there(spec, otherwise):
            _ours[family] = spec
    return _ours.get(family)


class Tuned(NamedTuple):
    """A kernel for a problem, its time, the shipped one's where that is known, and the file that says so."""

    spec: Spec
    us: float
    shipped_us: float | None
    path: Path


def tuned(problem: Problem, gpu: str) -> tuple[Layer, Path] | None:
    """What tables say of a problem, whatever its rows, and the file that says so; None where they have no word of it.

    `gpu`: the GPU's name; without one no table holds.
    """
    layers = _known(gpu).layers if gpu else {}
    return layers.get(table.layer_key(problem)) if layers else None


def fastest(told: tuple[Layer, Path], problem: Problem, shipped: Spec) -> Tuned | None:
    """The kernel that a layer gives its problem; None where it has none, or none that can be had without compiling.

    `shipped`: what serves the problem otherwise.
    """
    layer, path = told
    ranked = _ranked(layer, shipped.name, max(problem.rows, 1) / problem.experts)
    for name, us in ranked:
        otherwise = (
            f"the tuned kernel {name} is not compiled on this machine, the next best serves; "
            "run `glulam compile --tuned`"
        )
        if (spec := layer.kernels.get(name)) and _is_there(spec, otherwise):
            return Tuned(spec, us, dict(ranked).get(shipped.name), path)
    return None


def _ranked(layer: Layer, shipped: str, average: float) -> list[tuple[str, float]]:
    """Kernels that were chosen near a number of rows, and the shipped one, with their times there; best first."""
    if not layer.points:
        return []
    left = next((p for p in reversed(layer.points) if p.rows_per_expert <= average), layer.points[0])
    right = next((p for p in layer.points if p.rows_per_expert >= average), layer.points[-1])
    if left is right and not 1 / REACH <= average / left.rows_per_expert <= REACH:
        return []
    times = {name: _between(left, right, name, average) for name in (left.chosen, right.chosen, shipped)}
    # At a measured number of rows, or beyond all, what was chosen there is chosen again.
    handicap = {left.chosen: 0.0} if left is right else {shipped: 1 - NOISE}
    known = [(name, us) for name, us in times.items() if us is not None]
    return sorted(known, key=lambda timed: timed[1] * handicap.get(timed[0], 1.0))


def _between(left: Point, right: Point, name: str, average: float) -> float | None:
    y0, y1 = left.mean_us(name), right.mean_us(name)
    if y0 is None or y1 is None:
        return None
    return interpolated(average, (left.rows_per_expert, y0), (right.rows_per_expert, y1))


def tuned_specs(gpu: str) -> list[Spec]:
    """Every kernel that a table for this GPU chooses somewhere."""
    layers = [layer for layer, _ in _known(gpu).layers.values()] if gpu else []
    return list(dict.fromkeys(layer.kernels[point.chosen] for layer in layers for point in layer.points))


def every(gpu: str = "") -> Iterator[Spec]:
    """All that calls may get without compiling."""
    yield from filter(None, map(_preferred, {**_ours, **_known().layers}))
    yield from filter(loadable.is_loadable, tuned_specs(gpu))
