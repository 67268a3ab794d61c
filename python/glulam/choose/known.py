"""Sources of kernels on this machine besides the shipped ones: preferences of `glulam.compile`, and tuned tables.

Both are files in the format of `table`. Preferences are in the folder `preferred` of the kernels' cache. The tuner's
tables are where $GLULAM_TUNED says, else in the folder `tuned` of the user's configuration of glulam. Files are read
once, when the first kernel is chosen; each file that is ignored gets a warning. Choosing never compiles, so a kernel
that is not compiled on this machine is passed over.

The cache may be shared, so preferences must pass the same checks as its kernels (`trust`): folder and file belong to
this user or to root, and nobody else can write them. Files are opened relative to the folder as it was when it was
checked, so that nobody can exchange the folder in between.
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
NAME = re.compile(rf"{re.escape(FILE)}|[a-z0-9_]+-[0-9a-f]{{16}}\.json")  # earlier versions: the second
CLEAR = "run `glulam cache clear --preferred`"
NOT_OURS = "`glulam compile` did not write it"
DISTRUSTED = "belongs to another user, or others can write it (`chmod go-w` mends that if it is yours)"
REACH = 2.0
"""Tuned kernels also serve row counts outside of the tuned range: down to least / REACH, and up to greatest * REACH."""
NOISE = 0.01
"""Between two tuned numbers of rows, a kernel replaces the shipped kernel only if it is faster by this share."""


class Held(NamedTuple):
    """All entries that hold for this machine, of the tuned tables or of the files of preferences.

    An entry is a `table.Layer`: a problem without its number of rows, with its kernels and, in a tuned table, their
    times. Entries lie in the sections of a file (table.py). A section holds if its stamp (GPU, versions) matches.

    Attributes:
        layers: {`Layer.key`: (the entry, the file that has it)}.
        ignored: a line of text for each file, or part of a file, that is ignored.
    """

    layers: dict[str, tuple[Layer, Path]]
    ignored: tuple[str, ...]

    @property
    def preferred(self) -> dict[Spec, Spec]:
        """Return {family (spec without tiles): preferred kernel}. Only for a Held that was read from preferences."""
        return {family_of(spec): spec for layer, _ in self.layers.values() for spec in layer.kernels.values()}


_held: dict[str, Held] = {}
"""Everything read so far: tuned tables by the GPU's name, and preferences under the key ""."""
_preferred: dict[Spec, Spec] = {}
"""{family (a spec without its tiles): preferred kernel}, both from disk and from this process."""
_loadable: dict[Spec, bool] = {}
"""{kernel: result of `_is_there`}; True for all kernels that this process preferred."""
_lock = threading.Lock()


def folder() -> Path:
    """Return the folder of preferences."""
    from ffi_bridge.cache import cache_root  # with what compiles: not needed by `import glulam`

    return cache_root() / FOLDER


_REACHED = re.compile(r"/proc/self/fd/[0-9]+")


@contextlib.contextmanager
def _opened(make: bool = False) -> Iterator[Path]:
    """Check and open the folder of preferences; yield a path to the opened folder (/proc/self/fd/N).

    The path leads to the folder that was checked, even if somebody puts another folder in its place meanwhile.

    Args:
        make: True: make the folder if it is missing.

    Raises:
        BundleForeign: another user owns the folder, or may write it.
        OSError: it is missing, is a link, or cannot be opened or made.
    """
    root = folder().parent
    if make:
        folders.make(root)
    with trust.inside(root, FOLDER, make=make) as at:
        yield Path(f"/proc/self/fd/{at}")


def _by_folder_name(text: str) -> str:
    """Return `text`, a message, with the folder's own name in place of the /proc/self/fd path that `_opened` yields."""
    return _REACHED.sub(lambda _: records.shown(folder()), text)


def locations() -> list[Path]:
    """Return the files and folders to search for tuned tables.

    They are the paths in $GLULAM_TUNED, separated as in PATH. If it is not set: the folder `tuned` of the user's
    configuration of glulam.
    """
    chosen = os.environ.get(ENV_TUNED)
    if chosen is not None:
        return [Path(place) for place in chosen.split(os.pathsep) if place]
    import platformdirs

    return [platformdirs.user_config_path("glulam") / "tuned"]


def absent() -> str:
    """Return the paths in $GLULAM_TUNED that do not exist, as text; "": all exist, or the variable is not set."""
    lost = [records.shown(place) for place in locations() if ENV_TUNED in os.environ and not os.path.lexists(place)]
    return f"${ENV_TUNED} names {', '.join(lost)}, which does not exist" if lost else ""


def tables() -> list[Path]:
    """Return the files to read as tuned tables: *.json in the folders of `locations`, and locations that are files.

    Locations that cannot be listed for another reason are returned too, so that reading them reports the error.
    """
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
    """Return the *.json files of the folder `place`; each may hold preferences, which is checked when it is read."""
    return sorted(place.glob("*.json"))


def _fault(path: Path) -> str:
    """Return text that says why a file is not read as preferences; "": some version of `glulam compile` wrote it."""
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
    """Read the preferences that are on disk now."""
    try:
        with _opened() as place:
            held = _preferences_in(place)
    except BundleForeign:
        why = f"the folder {DISTRUSTED}"
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # a link is not ours
            return Held({}, ())
        why = str(error.strerror)
    else:
        layers = {key: (layer, folder() / path.name) for key, (layer, path) in held.layers.items()}
        return Held(layers, tuple(map(_by_folder_name, held.ignored)))
    return Held({}, (f"the preferences in {records.shown(folder())} are ignored: {why}; remove the folder",))


def _preferences_in(place: Path) -> Held:
    faults = {path: _fault(path) for path in _preferences(place)}
    lines = [
        f"the preference {records.shown(path)} is ignored: {why}; remove it" for path, why in faults.items() if why
    ]
    held = _read([path for path, why in faults.items() if not why], "", (CLEAR, CLEAR, CLEAR))
    return Held(held.layers, (*lines, *held.ignored))


def read_tables(gpu: str) -> Held:
    """Read the tuned tables that are on disk now, for a GPU of this name."""
    return _read(tables(), gpu, ("remove it", "run `glulam tune` here", "tune anew into another file"))


def _read(paths: Iterable[Path], gpu: str, remedies: tuple[str, str, str]) -> Held:
    """Read tables, and keep the layers whose stamp matches this machine.

    Args:
        paths: the files.
        gpu: the GPU's name; "" for preferences.
        remedies: three texts that say what to do about a file that is no table, about a table of another GPU or
            version, and about a table that is wrong in part.
    """
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
    """Return the tuned tables of a GPU, or for "" the preferences. They are read at the first call."""
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
    """Return a line for each preference, and for each table of this GPU, that is ignored or wrong in part."""
    return (*_known().ignored, *(_known(gpu).ignored if gpu else ()))


def forget() -> None:
    """Forget everything read so far; files are read again when the next kernel is chosen."""
    for each in (_held, _preferred, _loadable):
        each.clear()


def ignore_preferences() -> None:
    """Ignore the preferences on disk in this process, so that benchmarks measure the shipped kernels."""
    _held[""] = Held({}, ())


def _sections(path: Path, dropped: str = "") -> list[Section]:
    """Return the sections of the file of preferences `path`, without the preference for the kernel named `dropped`.

    A section has the preferences of one version of Glulam.

    Raises:
        OSError: `glulam compile` did not write the file, or others can write it, so it must not be replaced.
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
    """Make `spec` the preferred kernel for every problem that its family serves, with any number of rows.

    A family is all kernels that differ only in their tiles (`shipped.family_of`).

    If the preference cannot be stored, a warning says so, and later processes keep their earlier preference.

    Args:
        spec: the kernel.
        keep: True: store the preference for later processes. False: prefer the kernel only in this process, because it
            could not be kept on disk.
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
    """Store on disk, for later processes, that `spec` is the preferred kernel of its family (`shipped.family_of`).

    Raises:
        OSError: the preferences cannot be written, and stay as they were.
    """
    _rewrite(FILE, [table.preference(spec)])


def _rewrite(name: str, added: list[Section], dropped: str = "") -> None:
    """Add sections to the file of preferences with this name, and drop the preference for the kernel `dropped`.

    Raises:
        OSError: the file cannot be written, and stays as it was.
    """
    try:
        with _opened(make=True) as place:
            table.write(place / name, added, functools.partial(_sections, dropped=dropped))
    except (BundleForeign, OSError, NotImplementedError) as error:  # the last: a file system without locks
        why = getattr(error, "strerror", None) or _by_folder_name(str(error))
        if isinstance(error, BundleForeign):
            why = f"its folder {DISTRUSTED}"
        elif os.path.islink(folder()):
            why = "its folder is a link, which is never read"
        raise OSError(f"{records.shown(folder() / name)} cannot be written: {why}") from error


def drop_preference(name: str) -> bool:
    """Drop the preference for the kernel of this name, in this process and on disk. The kernel itself stays.

    Returns:
        True if there was such a preference.

    Raises:
        OSError: the preferences cannot be written, and stay as they were.
    """
    paths = {path for layer, path in read_preferences().layers.values() if name in layer.kernels}
    for path in paths:
        _rewrite(path.name, [], dropped=name)
    forget()
    return bool(paths)


def _count(path: Path) -> int:
    """Return the number of preferences in a file, damaged ones included; 1 if the file cannot be read as a table."""
    with contextlib.suppress(ValueError):
        sections, wrong = table.content(path)
        return sum(len(section.layers) for section in sections) + len(wrong)
    return 1


def clear_preferences() -> int:
    """Drop all preferences, in this process and on disk: all files that any version of `compile` wrote.

    Returns:
        The number of preferences removed.

    Raises:
        OSError: a file cannot be removed.
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
    """Return True if a kernel can be loaded without compiling; else warn once, with the text `otherwise`."""
    if (found := _loadable.get(spec)) is None:
        found = _loadable[spec] = loadable.is_loadable(spec)
        if not found:
            warnings.warn(otherwise, RuntimeWarning, stacklevel=6)
    return found


def preferred(problem: Problem, shipped: Spec) -> Spec | None:
    """Return the kernel that a user prefers for a problem; None: the user prefers none.

    A kernel for exactly the problem's activation and gate layout comes before a kernel that serves several.

    Args:
        problem: the problem.
        shipped: the shipped spec that serves the problem without a preference.
    """
    _known()
    if not _preferred:  # making the families, up to six, takes longer
        return None
    return next(_preferred_of(families_like(shipped, problem)), None)


def _preferred_of(families: Iterable[Spec]) -> Iterator[Spec]:
    """Yield the preferred kernels of these families (specs without tiles) that can be loaded without compiling."""
    for spec in [spec for family in families if (spec := _preferred.get(family)) is not None]:
        otherwise = (
            f"the preferred kernel {spec.name} is not in the cache of this version of Glulam, the shipped one serves; "
            f"compile it again with `glulam.compile`, or run `glulam cache forget {spec.name}`"
        )
        if _is_there(spec, otherwise):
            yield spec


class Tuned(NamedTuple):
    """A kernel that a tuned table names for a problem.

    Attributes:
        spec: the kernel.
        us: its time in microseconds, the mean over the routings.
        shipped_us: the shipped kernel's time. None: the table lacks it.
        path: the table's file.
    """

    spec: Spec
    us: float
    shipped_us: float | None
    path: Path


def tuned(problem: Problem, gpu: str) -> tuple[Layer, Path] | None:
    """Find a problem's layer (`table.Layer`, times of its kernels at several numbers of rows) in the tuned tables.

    Args:
        problem: the problem; its number of rows does not matter.
        gpu: the GPU's name. "": no table holds.

    Returns:
        (layer, the table's file); None if no table has such a layer.
    """
    layers = _known(gpu).layers if gpu else {}
    return layers.get(table.layer_key(problem)) if layers else None


def fastest(found: tuple[Layer, Path], problem: Problem, shipped: Spec) -> Tuned | None:
    """Return the kernel of a tuned table that is fastest at a problem's number of rows, among the usable ones.

    A kernel is usable if it can be loaded without compiling and, for a batch-invariant problem, has the right
    accumulation order. None: no kernel is usable, or the table has no times near this number of rows.

    Args:
        found: the problem's layer and its file (result of `tuned`).
        problem: the problem, with its rows.
        shipped: the shipped spec that serves the problem without a table.
    """
    layer, path = found
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
    """Rank kernels by their interpolated times at `average` rows an expert; return (name, us), best first.

    The candidates are the kernels that were fastest at the two measured points around `average`, and the shipped
    kernel. The list is empty if the layer has no points near `average` (see `REACH`).

    Args:
        layer: a problem's kernels with their measured times.
        shipped: the shipped kernel's name.
        average: rows an expert.
    """
    if not layer.points:
        return []
    left = next((p for p in reversed(layer.points) if p.rows_per_expert <= average), layer.points[0])
    right = next((p for p in layer.points if p.rows_per_expert >= average), layer.points[-1])
    if left is right and not 1 / REACH <= average / left.rows_per_expert <= REACH:
        return []
    times = {name: _between(left, right, name, average) for name in (left.chosen, right.chosen, shipped)}
    # At a measured point, or outside the measured range, the point's chosen kernel always ranks first (factor 0).
    # Between two points a kernel must beat the shipped one by NOISE.
    handicap = {left.chosen: 0.0} if left is right else {shipped: 1 - NOISE}
    known = [(name, us) for name, us in times.items() if us is not None]
    return sorted(known, key=lambda timed: timed[1] * handicap.get(timed[0], 1.0))


def _between(left: Point, right: Point, name: str, average: float) -> float | None:
    y0, y1 = left.mean_us(name), right.mean_us(name)
    if y0 is None or y1 is None:
        return None
    return interpolated(average, (left.rows_per_expert, y0), (right.rows_per_expert, y1))


def tuned_specs(gpu: str) -> list[Spec]:
    """Return every kernel that a tuned table for this GPU names as the fastest for some number of rows."""
    layers = [layer for layer, _ in _known(gpu).layers.values()] if gpu else []
    return list(dict.fromkeys(layer.kernels[point.chosen] for layer in layers for point in layer.points))


def all_loadable(gpu: str = "") -> Iterator[Spec]:
    """Yield the preferred and tuned kernels that calls may get: those that can be loaded without compiling.

    gpu: the GPU's name, whose tables count.
    """
    _known()
    yield from _preferred_of(list(_preferred))
    yield from filter(loadable.is_loadable, tuned_specs(gpu))
