"""What is known here of kernels for problems: what `glulam.compile` prefers, then what tuned tables say.

Both are tables (`table`). Preferences are one in the folder `preferred` of the kernels' cache. The tuner's are at the
places that $GLULAM_TUNED names, or else in the folder `tuned` of the user's configuration of glulam. Files are read
once, when the first kernel is chosen; one warning names each that is passed over. A kernel that this machine has not
compiled is passed over as well: choosing never compiles.

The cache may be shared, so preferences are asked what its kernels are (`trust`): folder and file belong to this user or
to root, and nobody else can write them. Both are reached through the folder as it was when it was checked.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cute_kernels.specs import Spec
from ffi_bridge import BundleForeign, folders, trust

from . import loadable, records, table
from .estimates import interpolated
from .invariance import keeps_order
from .problem import Problem
from .shipped import families_like, family_of
from .table import Layer, Point, Section

ENV_TUNED = "GLULAM_TUNED"
FOLDER, FILE = "preferred", "kernels.json"
NAME = re.compile(rf"{re.escape(FILE)}|[a-z0-9_]+-[0-9a-f]{{16}}\.json")  # the second is that of earlier versions
CLEAR = "run `glulam cache clear --preferred`"
NOT_OURS = "`glulam compile` did not write it"
DISTRUSTED = "belongs to another user, or others can write it (`chmod go-w` mends that if it is yours)"
REACH = 2.0
"""How far beyond the fewest and the most rows that were tuned their kernels are taken, as a factor."""
NOISE = 0.01
"""Between tuned numbers of rows, another kernel than the shipped one must be faster by this share."""


class Held(NamedTuple):
    """Layers that hold, by `Layer.key`, each with its file; and a line for each thing that was passed over."""

    layers: dict[str, tuple[Layer, Path]]
    ignored: tuple[str, ...]

    @property
    def preferred(self) -> dict[Spec, Spec]:
        """Of preferences: kernels by family."""
        return {family_of(spec): spec for layer, _ in self.layers.values() for spec in layer.kernels.values()}


_held: dict[str, Held] = {}
"""What tables say, by the GPU's name; what is preferred under the empty one."""
_preferred: dict[Spec, Spec] = {}
"""What is preferred, by family: on disk when that was read, and since then here."""
_loadable: dict[Spec, bool] = {}
"""What was asked about kernels that do not ship by choice, and all that this process preferred."""
_lock = threading.Lock()


def folder() -> Path:
    """Where preferences are."""
    from ffi_bridge.cache import cache_root  # with what compiles: not needed by `import glulam`

    return cache_root() / FOLDER


_REACHED = re.compile(r"/proc/self/fd/[0-9]+")


@contextlib.contextmanager
def _opened(make: bool = False) -> Iterator[Path]:
    """Give a path that leads to the folder of preferences, even if others put another folder in its place.

    Raises:
        BundleForeign: another user owns the folder, or may write it.
        OSError: it is missing, is a link, or cannot be opened or made.
    """
    root = folder().parent
    if make:
        folders.make(root)
    with trust.inside(root, FOLDER, make=make) as at:
        yield Path(f"/proc/self/fd/{at}")


def _told(text: str) -> str:
    """A message in which the folder of preferences has its own name."""
    return _REACHED.sub(lambda _: records.shown(folder()), text)


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


def _preferences(place: Path) -> list[Path]:
    """Whatever has the ending of a table of preferences."""
    return sorted(place.glob("*.json"))


def _fault(path: Path) -> str:
    """Why a file is not read as preferences; empty if `glulam compile` wrote it, of whatever version."""
    if NAME.fullmatch(path.name) and not os.path.islink(path):
        try:
            with trust.ours().opened(path):
                if records.read(path).get("format") in table.FORMATS:
                    return ""
        except BundleForeign:
            return f"it {DISTRUSTED}"
        except (OSError, ValueError):
            pass
    return NOT_OURS


def read_preferences() -> Held:
    """What is preferred on disk now."""
    try:
        with _opened() as place:
            held = _preferences_in(place)
    except BundleForeign:
        why = f"the folder {DISTRUSTED}"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # what is a link is somebody else's
            return Held({}, ())
        why = str(error.strerror)
    else:
        layers = {key: (layer, folder() / path.name) for key, (layer, path) in held.layers.items()}
        return Held(layers, tuple(map(_told, held.ignored)))
    return Held({}, (f"the preferences in {records.shown(folder())} are ignored: {why}; remove the folder",))


def _preferences_in(place: Path) -> Held:
    faults = {path: _fault(path) for path in _preferences(place)}
    lines = [
        f"the preference {records.shown(path)} is ignored: {why}; remove it" for path, why in faults.items() if why
    ]
    held = _read([path for path, why in faults.items() if not why], "", (CLEAR, CLEAR, CLEAR))
    return Held(held.layers, (*lines, *held.ignored))


def read_tables(gpu: str) -> Held:
    """What the tables on disk say now for a GPU of this name."""
    return _read(tables(), gpu, ("remove it", "run `glulam tune` here", "tune anew into another file"))


def _read(paths: Iterable[Path], gpu: str, remedies: tuple[str, str, str]) -> Held:
    """remedies: for what is no table, for one of another GPU or version, for one that is wrong in part."""
    here = table.stamp_of(gpu)
    layers: dict[str, tuple[Layer, Path]] = {}
    ignored: list[str] = []
    no_table, outdated, wrong_in_part = remedies
    for path in paths:
        try:
            sections, wrong = table.content(path)
        except ValueError as error:
            ignored.append(f"{error}; it is ignored, {no_table}")
            continue
        fitting = [each for each in sections if not each.stamp.unlike(here)]
        for each in fitting:
            layers.update({key: (layer, path) for key, layer in each.layers.items()})
        name = f"the table {records.shown(path)} is ignored"
        if wrong and (fitting or not sections):
            ignored.append(f"{name} in part, which Glulam did not write: {table.first_of(wrong)}; {wrong_in_part}")
        elif sections and not fitting:
            ignored.append(f"{name}: {sections[-1].stamp.unlike(here)}; {outdated}")
    return Held(layers, tuple(ignored))


def _known(gpu: str = "") -> Held:
    """What tables said of a GPU when it was first asked for, or without a name the preferences."""
    if (held := _held.get(gpu)) is not None:
        return held
    with _lock:
        if (held := _held.get(gpu)) is None:
            held = read_tables(gpu) if gpu else read_preferences()
            for line in held.ignored:
                warnings.warn(line, RuntimeWarning, stacklevel=6)
            if not gpu:
                _preferred.update({**held.preferred, **_preferred})
            _held[gpu] = held
        return held


def ignored(gpu: str = "") -> tuple[str, ...]:
    """A line for each thing that was passed over."""
    return (*_known().ignored, *(_known(gpu).ignored if gpu else ()))


def forget() -> None:
    """Forget what this process knows; files are read again when the next kernel is chosen."""
    for each in (_held, _preferred, _loadable):
        each.clear()


def ignore_preferences() -> None:
    """Leave aside what earlier processes preferred, for as long as this one runs: benchmarks measure what ships."""
    _held[""] = Held({}, ())


def _sections(path: Path, dropped: str = "") -> list[Section]:
    """Return the sections of a file of preferences without the preference for the kernel `dropped`.

    Raises:
        OSError: `glulam compile` did not write the file, or others can have, so it is not replaced.
    """
    if why := _fault(path):
        raise FileExistsError(errno.EEXIST, f"{why}; move it elsewhere")
    with contextlib.suppress(ValueError):
        sections = table.content(path).sections
        return [
            Section(each.stamp, {key: layer for key, layer in each.layers.items() if dropped not in layer.kernels})
            for each in sections
        ]
    return []


def prefer(spec: Spec, keep: bool = True) -> None:
    """Let `spec` serve every problem of its family, whatever the number of rows, here and, with `keep`, in later
    processes as well.

    Where it serves this process alone, a warning says so, and later ones go on with what they preferred.
    """
    _preferred[family_of(spec)], _loadable[spec] = spec, True
    why_not = "its kernel was not kept"
    if keep:
        try:
            return write_preference(spec)
        except OSError as error:
            why_not = str(error)
    warnings.warn(f"{spec.name} is preferred in this process alone ({why_not})", RuntimeWarning, stacklevel=3)


def write_preference(spec: Spec) -> None:
    """Let `spec` serve every problem of its family in later processes.

    Raises:
        OSError: what is preferred cannot be written, and stays as it was.
    """
    _rewrite(FILE, [table.preference(spec)])


def _rewrite(name: str, added: list[Section], dropped: str = "") -> None:
    """Add sections to a file of preferences, and drop the preference for the kernel `dropped`. Raises OSError."""
    try:
        with _opened(make=True) as place:
            table.write(place / name, added, functools.partial(_sections, dropped=dropped))
    except (BundleForeign, OSError, NotImplementedError) as error:  # the last: a file system without locks
        why = getattr(error, "strerror", None) or _told(str(error))
        if isinstance(error, BundleForeign):
            why = f"its folder {DISTRUSTED}"
        elif os.path.islink(folder()):
            why = "its folder is a link, which is never read"
        raise OSError(f"{records.shown(folder() / name)} cannot be written: {why}") from error


def drop_preference(name: str) -> bool:
    """Drop the preference for the kernel of this name, here and on disk, and keep the kernel and all others.

    Returns:
        Whether there was one.

    Raises:
        OSError: what is preferred cannot be written, and stays as it was.
    """
    paths = {path for layer, path in read_preferences().layers.values() if name in layer.kernels}
    for path in paths:
        _rewrite(path.name, [], dropped=name)
    forget()
    return bool(paths)


def _count(path: Path) -> int:
    """How many preferences a file holds, damaged ones among them; 1 where it cannot be told."""
    with contextlib.suppress(ValueError):
        sections, wrong = table.content(path)
        return sum(len(section.layers) for section in sections) + len(wrong)
    return 1


def clear_preferences() -> int:
    """Forget all preferences, here and on disk: files that `compile` wrote, of whatever version. Returns how many were
    removed.

    Raises:
        OSError: one cannot be removed.
    """
    removed = 0
    with contextlib.suppress(BundleForeign, FileNotFoundError, NotADirectoryError), _opened() as place:
        for path in _preferences(place):
            if not _fault(path):
                removed += _count(path)
                path.unlink(missing_ok=True)
    forget()
    return removed


def _is_there(spec: Spec, otherwise: str) -> bool:
    """Whether a kernel can be had without compiling; a warning says once what happens otherwise."""
    if (found := _loadable.get(spec)) is None:
        found = _loadable[spec] = loadable.is_loadable(spec)
        if not found:
            warnings.warn(otherwise, RuntimeWarning, stacklevel=6)
    return found


def preferred(problem: Problem, shipped: Spec) -> Spec | None:
    """What a user prefers for a problem that `shipped` serves otherwise: for its very activation and layout, else for
    several.
    """
    _known()
    if not _preferred:  # making the families, up to six, takes longer
        return None
    return next(_preferred_of(families_like(shipped, problem)), None)


def _preferred_of(families: Iterable[Spec]) -> Iterator[Spec]:
    """What is preferred for families, and can be had."""
    for spec in [spec for family in families if (spec := _preferred.get(family)) is not None]:
        otherwise = (
            f"the preferred kernel {spec.name} is not in the cache of this version of Glulam, the shipped one serves; "
            f"compile it again with `glulam.compile`, or run `glulam cache forget {spec.name}`"
        )
        if _is_there(spec, otherwise):
            yield spec


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
        spec = layer.kernels.get(name)
        if spec and keeps_order(spec, problem, spec.arch) and _is_there(spec, otherwise):
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


def all_loadable(gpu: str = "") -> Iterator[Spec]:
    """All that calls may get without compiling."""
    _known()
    yield from _preferred_of(list(_preferred))
    yield from filter(loadable.is_loadable, tuned_specs(gpu))
