"""The manifest of a bundle: what its library contains, what it was built from, and what it needs to run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from . import trust
from .errors import BundleDamaged, BundleForeign, BundleMissing, BundleOutdated, remedy
from .resources import KernelResources

FORMAT = "glulam-bundle"
SCHEMA = 2
FILE = "manifest.json"
LIBRARY = re.compile(r"libglulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)(-[0-9a-f]{16})?\.so")
OBJECT = re.compile(r"glulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)\.o")
"""Pattern for the file name of an object that is not linked yet.

Each object has a manifest of its own. Its fields `library`, `sha256` and `size` describe the object file.
"""
TEXT = re.compile(r"glulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)\.(ptx|mlir)")
"""Pattern for the name of a text (PTX or MLIR) beside an object that was compiled with `keep_ptx`."""

_MAX_BYTES = 64 << 20
_MAX_DIGITS = 18
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Function:
    """The manifest's record of one exported function.

    Attributes:
        spec: the function's spec as a dict.
        kernels: the resources of each device kernel. Empty for a chain.
        stages: for a chain, the names of the functions that it calls. Empty otherwise.
    """

    spec: dict[str, Any]
    kernels: tuple[KernelResources, ...]
    stages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The description of one architecture's bundle.

    Attributes:
        arch: architecture of every kernel, for example "sm_90a".
        library: file name of the shared library, which lies beside the manifest.
        sha256: hash of the library's bytes, hexadecimal.
        size: bytes of the library.
        host: baseline of the CPUs for which host code was made, for example "x86-64-v2".
        needs: by distribution name (DSL and TVM-FFI), the symbols that the library takes from that run-time library.
        versions: by distribution name, the versions of Glulam, the DSL and TVM-FFI that made the library. None:
            unknown. Glulam's version must equal the installed one; the other two are information.
        sources: hashes of the kernels' sources by name. A bundle records one hash, for the kernels' package. A cache
            entry records the hashes that `cache.sources_of` returns, for the tracers and the modules of the compile
            process.
        functions: the functions by export symbol, sorted.
        texts: by suffix, the sha256 (hexadecimal) of each text that is kept beside an object; usually empty.
        plain: language constructs that the kernels avoid (`cute_kernels/plain.py`); usually empty.
    """

    arch: str
    library: str
    sha256: str
    size: int
    host: str
    needs: dict[str, list[str]]
    versions: dict[str, str | None]
    sources: dict[str, str]
    functions: dict[str, Function]
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    plain: list[str] = dataclasses.field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Write `folder`/manifest.json and sync it to the disk; equal manifests give equal bytes."""
        data = {"format": FORMAT, "schema": SCHEMA, **dataclasses.asdict(self)}
        for name in _OPTIONAL_FIELDS:
            if not data[name]:
                del data[name]
        with (folder / FILE).open("w") as file:
            file.write(json.dumps(data, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o644)


def library_name(arch: str, sha256: str) -> str:
    """Return the file name of a bundle's library.

    The name has part of the content's hash, so that a new library never replaces one that a manifest describes.
    """
    return f"libglulam_{arch}-{sha256[:16]}.so"


def object_name(arch: str) -> str:
    """Return the file name of an object for an architecture; OBJECT matches it."""
    return f"glulam_{arch}.o"


def text_name(arch: str, suffix: str) -> str:
    """Return the file name of a text for an architecture; TEXT matches it. `suffix`: ".ptx" or ".mlir"."""
    return f"glulam_{arch}{suffix}"


def hash_of(handle: int) -> str:
    """Return the sha256 (hexadecimal) of an open file, from its current position on. `handle`: the descriptor."""
    digest = hashlib.sha256()
    while chunk := os.read(handle, _CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


# Checks of each field's value. Texts are plain ASCII, since messages and tables quote them.


def _text(pattern: str) -> Callable[[Any], bool]:
    """Return a check that a value is a string that matches a pattern as a whole."""
    matches = re.compile(pattern, re.ASCII).fullmatch
    return lambda value: type(value) is str and matches(value) is not None


def _count(value: Any) -> bool:
    """Return True if a value is an integer of at least 0."""
    return type(value) is int and value >= 0


def _object(names: Callable[[Any], bool], values: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check that a value is a JSON object (a dict) whose names and values pass the given checks."""
    return lambda value: type(value) is dict and all(names(n) and values(v) for n, v in value.items())


def _list(items: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check that a value is a list whose items pass a check."""
    return lambda value: type(value) is list and all(map(items, value))


def _record(**fields: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check that a value is a JSON object of exactly these fields. `fields`: a check for each value."""
    checks = tuple(fields.items())
    return lambda value: (
        type(value) is dict and value.keys() == fields.keys() and all(check(value[name]) for name, check in checks)
    )


_SYMBOL, _NAME = _text(r"\w{1,255}"), _text(r"[\w.\-]{1,100}")
_VERSION, _HASH = _text(r"[\w.+!\-]{1,100}"), _text(r"[0-9a-f]{64}")
_KERNEL = _record(
    name=_text(r"[!-~]{1,4096}"),
    registers=_count,
    spill_stores=_count,
    spill_loads=_count,
    static_smem=_count,
    dynamic_smem=_count,
    diagnostics=_list(_text(r"C[0-9]{4}")),
)
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "arch": _text(r"sm_[0-9]{1,4}[a-z]?"),
    "library": _text(r"[!-~]{1,255}"),
    "sha256": _HASH,
    "size": _count,
    "host": _NAME,
    "needs": _object(_NAME, _list(_SYMBOL)),
    "versions": _object(_NAME, lambda version: version is None or _VERSION(version)),
    "sources": _object(_NAME, _HASH),
    "functions": _object(
        _SYMBOL, _record(spec=lambda spec: type(spec) is dict, kernels=_list(_KERNEL), stages=_list(_SYMBOL))
    ),
}
_OPTIONAL_FIELDS = {"texts": _object(_text(r"\.(ptx|mlir)"), _HASH), "plain": _list(_text(r"[a-z_]{1,100}"))}


def damaged(path: Path, what: str, cause: Exception | None = None) -> NoReturn:
    """Raise BundleDamaged for the file `path`. `what`: its defect as a predicate, for example "is incomplete"."""
    raise BundleDamaged(f"damaged bundle: {path} {what}; {remedy(path)}") from cause


def shown(value: Any) -> str:
    """Return a value from a file for a message: one line of printable ASCII, at most 60 characters."""
    return ascii(value)[:60] if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _integer(digits: str) -> int:
    """Parse a number of a JSON file. Raises ValueError if it has too many digits."""
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object's pairs as a dict. Raises ValueError if a name occurs twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice in one object")
    return found


def _constant(name: str) -> NoReturn:
    """Refuse NaN and infinities, which Python's JSON parser would accept. Raises ValueError."""
    raise ValueError(f"{name} is no number")


def content_of(path: Path, required: trust.Trust | None = None) -> bytes:
    """Return the bytes of a bundle's file.

    Args:
        path: <root>/<arch>/<name>.
        required: requirements on owners and permissions. None: those for a bundle that is loaded.

    Raises:
        BundleMissing: the file does not exist.
        BundleForeign: the requirements are not met.
        BundleDamaged: the file cannot be read, or has more than 64 MiB.
    """
    try:
        with trust.opened(path, required) as handle, open(handle, "rb", closefd=False) as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise BundleMissing(f"no bundle: {path} does not exist; {remedy(path)}") from None
    except OSError as error:
        damaged(path, f"cannot be read ({error.strerror or error})", error)
    if len(content) > _MAX_BYTES:
        damaged(path, f"has more than {_MAX_BYTES >> 20} MB")
    return content


def _read_json(path: Path, required: trust.Trust | None) -> dict[str, Any]:
    """Return the JSON object in a manifest's file.

    Args:
        path, required: the file and the requirements on its owner and permissions, as for `content_of`.

    Raises:
        BundleMissing, BundleForeign, BundleDamaged: `content_of` cannot read the file.
        BundleForeign: the file is not a manifest of Glulam.
        BundleDamaged: the file is not JSON, or has oversized numbers or a name twice.
    """
    content = content_of(path, required)
    try:
        data = json.loads(content, object_pairs_hook=_once, parse_int=_integer, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        damaged(path, f"cannot be read ({error})", error)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        message = f"foreign bundle: {path} was not written by `glulam build`; move it elsewhere, then {remedy(path)}"
        raise BundleForeign(message)
    return data


def read(folder: Path, required: trust.Trust | None = None) -> Manifest:
    """Read `folder`/manifest.json and check that every field has its declared type and form.

    Args:
        folder: the bundle's folder.
        required: requirements on the file's owner and permissions. None: those for a bundle that is loaded.

    Raises:
        BundleMissing: there is no manifest.
        BundleForeign: the file is not a manifest of Glulam, or another user may have written it.
        BundleOutdated: this version of Glulam does not read the manifest's schema.
        BundleDamaged: the file cannot be read, or a field is absent, unknown or malformed.
    """
    path = folder / FILE
    data = _read_json(path, required)
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise BundleOutdated(
            f"outdated bundle: {path} has manifest schema {shown(schema)}, this Glulam reads {SCHEMA}; {remedy(path)}"
        )
    if absent := _FIELDS.keys() - data.keys():
        damaged(path, f"is incomplete: it has no {min(absent)}")
    if odd := data.keys() - _FIELDS.keys() - _OPTIONAL_FIELDS.keys() - {"format", "schema"}:
        damaged(path, f"has a field {shown(min(odd))}, which no manifest has")
    for name, fits in (*_FIELDS.items(), *_OPTIONAL_FIELDS.items()):
        if name in data and not fits(data[name]):
            damaged(path, f"has {name} of another form than a manifest's: {shown(data[name])}")
    functions = {
        name: Function(entry["spec"], tuple(map(KernelResources.from_dict, entry["kernels"])), tuple(entry["stages"]))
        for name, entry in data["functions"].items()
    }
    fields = {name: data[name] for name in (*_FIELDS, *_OPTIONAL_FIELDS) if name in data}
    return Manifest(**{**fields, "functions": functions})
