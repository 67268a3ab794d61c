"""Kernels that `compile` was asked for: one a form, whatever the number of rows, for this process and later ones.

Each is a file in the folder `preferred` of the kernels' cache, replaced as a whole, so that any number of processes may
write and read. The folder is read when the first kernel is chosen, once. A kernel that is not in the cache any more,
or was made by another version, is passed over: choosing never compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from cute_kernels.specs import Spec, from_dict, to_dict
from cute_kernels.tiles import SpecError

from . import loadable

FOLDER = "preferred"
FORMAT, SCHEMA = "glulam-preferred", 1

_ours: dict[Spec, Spec] = {}
"""By form, those of this process, which certainly can be loaded."""
_stored: dict[Spec, Spec] | None = None
"""By form, those of earlier processes that nobody asked for yet; None before the folder is read."""
_lock = threading.Lock()


def folder() -> Path:
    from ffi_bridge.cache import cache_root

    return cache_root() / FOLDER


def _path(form: Spec) -> Path:
    digest = hashlib.sha256(json.dumps(to_dict(form), sort_keys=True).encode()).hexdigest()
    return folder() / f"{form.op}-{digest[:16]}.json"


def prefer(form: Spec, spec: Spec) -> None:
    """Let `spec` serve every problem of a form. Where the file cannot be written, a warning says so."""
    _ours[form] = spec
    path = _path(form)
    try:
        _write(path, json.dumps({"format": FORMAT, "schema": SCHEMA, "form": to_dict(form), "spec": to_dict(spec)}))
    except OSError as error:
        warnings.warn(
            f"{path} cannot be written ({error}): {spec.name} is preferred in this process alone",
            RuntimeWarning,
            stacklevel=3,
        )


def _write(path: Path, text: str) -> None:
    """The whole file or nothing of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, made = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    try:
        with open(handle, "w") as file:
            file.write(text)
        os.chmod(made, 0o644)
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise


def stored() -> Iterator[tuple[Path, Spec, Spec]]:
    """File, form and spec of every preference on disk; what does not parse, or is of another version, is left out."""
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, SpecError):
            data = json.loads(path.read_text())
            if (data["format"], data["schema"]) == (FORMAT, SCHEMA):
                yield path, from_dict(data["form"]), from_dict(data["spec"])


def of(form: Spec) -> Spec | None:
    """The kernel that is preferred for a form, if it can be had without compiling."""
    global _stored
    if _stored is None:
        with _lock:
            _stored = _stored if _stored is not None else {form: spec for _, form, spec in stored()}
    if form in _ours:
        return _ours[form]
    if form not in _stored:
        return None
    spec = _stored.pop(form)
    if loadable.is_loadable(spec):
        _ours[form] = spec
        return spec
    warnings.warn(
        f"the preferred kernel {spec.name} is not in the cache of this version of Glulam, the shipped one serves; "
        "compile it again with `glulam.compile`, or run `glulam cache clear --preferred`",
        RuntimeWarning,
        stacklevel=4,
    )
    return None


def every() -> list[Spec]:
    """All that can be had without compiling."""
    return [spec for form in {**_ours, **{form: spec for _, form, spec in stored()}} if (spec := of(form))]


def clear() -> int:
    """Forget all, here and on disk. Returns how many files were removed."""
    paths = [path for path, _, _ in stored()]
    for path in paths:
        path.unlink(missing_ok=True)
    forget()
    return len(paths)


def ignore() -> None:
    """Leave aside what earlier processes preferred, for as long as this one runs: benchmarks measure what ships."""
    global _stored
    _stored = {}


def forget() -> None:
    """Forget what this process knows; files are read again."""
    global _stored
    _ours.clear()
    _stored = None
