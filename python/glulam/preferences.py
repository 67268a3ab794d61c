"""Kernels that `compile` was asked for: one a form, whatever the number of rows, for this process and later ones.

Each is a file in the folder `preferred` of the kernels' cache, named by its form and replaced as a whole, so that any
number of processes may write and read. It holds for the version of Glulam that wrote it, since another one may cut or
name kernels in other ways. The folder is read when the first kernel is chosen, once. A file that is not what `compile`
writes is passed over with one warning. So is a kernel that is not in the cache any more: choosing never compiles.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from cute_kernels.specs import Spec, to_dict
from ffi_bridge import __version__

from . import loadable, records, validity
from .shipped_kernels import form as form_of

FOLDER = "preferred"
FORMAT, SCHEMA = "glulam-preferred", 2
NAME = re.compile(r"[a-z0-9_]+-[0-9a-f]{16}\.json")
CLEAR = "run `glulam cache clear --preferred`"


class Stored(NamedTuple):
    """What is on disk: kernels by form, each with its file; and a line for every file that was passed over."""

    specs: dict[Spec, tuple[Spec, Path]]
    ignored: tuple[str, ...]


_ours: dict[Spec, Spec] = {}
"""By form, those of this process, which certainly can be loaded."""
_stored: Stored | None = None
"""Those of earlier processes, less what was asked for already; None before the folder is read."""
_lock = threading.Lock()


def folder() -> Path:
    from ffi_bridge.cache import cache_root

    return cache_root() / FOLDER


def _path(form: Spec) -> Path:
    digest = hashlib.sha256(json.dumps(to_dict(form), sort_keys=True).encode()).hexdigest()
    return folder() / f"{form.op}-{digest[:16]}.json"


def prefer(form: Spec, spec: Spec, keep: bool = True) -> None:
    """Let `spec` serve every problem of a form, here and, with `keep`, in later processes as well.

    Where it serves this process alone, a warning says so, and later ones go on with what they preferred.
    """
    _ours[form] = spec
    path, why_not = _path(form), "its kernel was not kept"
    told = {"format": FORMAT, "schema": SCHEMA, "glulam": __version__, "form": to_dict(form), "spec": to_dict(spec)}
    if keep:
        try:
            return records.write(path, json.dumps(told))
        except OSError as error:
            why_not = f"{records.shown(path)} cannot be written: {error.strerror}"
    warnings.warn(f"{spec.name} is preferred in this process alone ({why_not})", RuntimeWarning, stacklevel=4)


def _files() -> list[Path]:
    """Whatever has the ending of a preference. A folder that is a link is somebody else's."""
    return [] if os.path.islink(folder()) else sorted(folder().glob("*.json"))


def _read(path: Path) -> tuple[Spec, Spec]:
    """Form and spec in a file. Raises ValueError, in one line with a remedy, where `compile` of this version did not
    write it.
    """
    remedy = "remove it"
    try:
        data = _content(path)
        remedy = CLEAR
        if (data.get("schema"), data.get("glulam")) != (SCHEMA, __version__):
            raise ValueError(f"another version of Glulam wrote it than the installed {__version__}")
        records.require_fields("it", data, ("format", "schema", "glulam", "form", "spec"))
        form, spec = (validity.described(data[name]) for name in ("form", "spec"))
        if form_of(spec) != form:
            raise ValueError(f"{spec.name} is of another form than the file says")
        if path.name != _path(form).name:
            raise ValueError(f"a preference of this form is named {_path(form).name}")
        return form, spec
    except ValueError as error:
        raise ValueError(f"the preference {records.shown(path)} is ignored: {error}; {remedy}") from error


def _content(path: Path) -> dict[str, Any]:
    """What is in a file that is certainly one of ours. Raises ValueError."""
    if os.path.islink(path):
        raise ValueError("it is a symbolic link")
    data = records.read(path)
    if not NAME.fullmatch(path.name) or data.get("format") != FORMAT:
        raise ValueError("`glulam compile` did not write it")
    return data


def stored() -> Stored:
    """What is in the folder now."""
    specs: dict[Spec, tuple[Spec, Path]] = {}
    ignored = []
    for path in _files():
        try:
            form, spec = _read(path)
            specs[form] = spec, path
        except ValueError as error:
            ignored.append(str(error))
    return Stored(specs, tuple(ignored))


def _known() -> Stored:
    """What was in the folder when it was first asked for. What was passed over is warned of."""
    global _stored
    with _lock:
        if _stored is None:
            _stored = stored()
            for line in _stored.ignored:
                warnings.warn(line, RuntimeWarning, stacklevel=5)
        return _stored


def ignored() -> tuple[str, ...]:
    """A line for each file that was passed over."""
    return _known().ignored


def are_any() -> bool:
    """Whether `of` may find anything: making the forms to ask it for, up to six, takes longer than this."""
    return bool(_ours or _known().specs)


def of(form: Spec) -> Spec | None:
    """The kernel that is preferred for a form, if it can be had without compiling."""
    if form in _ours:
        return _ours[form]
    found = _known().specs.pop(form, None)
    if found is None:
        return None
    spec, _ = found
    if loadable.is_loadable(spec):
        _ours[form] = spec
        return spec
    warnings.warn(
        f"the preferred kernel {spec.name} is not in the cache of this version of Glulam, the shipped one serves; "
        f"compile it again with `glulam.compile`, or {CLEAR}",
        RuntimeWarning,
        stacklevel=4,
    )
    return None


def every() -> list[Spec]:
    """All that can be had without compiling."""
    return [spec for form in {**_ours, **_known().specs} if (spec := of(form))]


def clear() -> int:
    """Forget all, here and on disk: files that `compile` wrote, of whatever version. Returns how many were removed.

    Raises:
        OSError: one cannot be removed.
    """
    removed = 0
    for path in _files():
        try:
            _content(path)
        except ValueError:
            continue
        path.unlink(missing_ok=True)
        removed += 1
    forget()
    return removed


def ignore() -> None:
    """Leave aside what earlier processes preferred, for as long as this one runs: benchmarks measure what ships."""
    global _stored
    _stored = Stored({}, ())


def forget() -> None:
    """Forget what this process knows; files are read again."""
    global _stored
    _ours.clear()
    _stored = None
