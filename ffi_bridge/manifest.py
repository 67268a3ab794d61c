"""The manifest of a bundle: what its library contains, what it was built from, and what it needs to run."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from cute_kernels import plain
from cute_kernels.chains import stages_of
from cute_kernels.specs import Spec, from_dict, to_dict

from . import host, toolchain, trust
from .errors import BundleDamaged, BundleForeign, BundleMissing, BundleOutdated, remedy
from .resources import KernelResources

FORMAT = "glulam-bundle"
SCHEMA = 2
FILE = "manifest.json"
PACKAGES = ("cute_kernels",)
"""Top-level packages whose sources are compared with `Manifest.sources`, unless the caller gives other sources.

A manifest's own list of packages is never used to choose what is compared.
"""
LIBRARY = re.compile(r"libglulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)(-[0-9a-f]{16})?\.so")
OBJECT = re.compile(r"glulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)\.o")
"""Pattern for the name of an object that is not linked yet. Its manifest describes it as a bundle's describes a
library.
"""
TEXT = re.compile(r"glulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)\.(ptx|mlir)")
"""Pattern for the name of a text (PTX or MLIR) beside an object that was compiled with `keep_ptx`."""

_MAX_BYTES = 64 << 20
_MAX_DIGITS = 18
_CHUNK = 1 << 20

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Function:
    """One exported function.

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
            unknown. Only Glulam's must equal the installed one; the other two are information.
        sources: hashes of the kernels' sources by name: a package, or a tracer's name and the compiling module's name.
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
    """Return the name of an object of an architecture, which OBJECT matches."""
    return f"glulam_{arch}.o"


def text_name(arch: str, suffix: str) -> str:
    """Return the name of a text of an architecture, which TEXT matches. `suffix`: ".ptx" or ".mlir"."""
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


def _damaged(path: Path, what: str, cause: Exception | None = None) -> NoReturn:
    """Raise BundleDamaged. `what`: the defect of the file `path`, as a predicate."""
    raise BundleDamaged(f"damaged bundle: {path} {what}; {remedy(path)}") from cause


def _shown(value: Any) -> str:
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


def _content(path: Path, asked: trust.Trust | None = None) -> bytes:
    """Return the bytes of a bundle's file.

    Args:
        path: <root>/<arch>/<name>.
        asked: requirements on owners and permissions. None: those for a bundle that is loaded.

    Raises:
        BundleMissing: the file does not exist.
        BundleForeign: the requirements are not met.
        BundleDamaged: the file cannot be read, or has more than 64 MiB.
    """
    try:
        with trust.opened(path, asked) as handle, open(handle, "rb", closefd=False) as file:
            content = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        raise BundleMissing(f"no bundle: {path} does not exist; {remedy(path)}") from None
    except OSError as error:
        _damaged(path, f"cannot be read ({error.strerror or error})", error)
    if len(content) > _MAX_BYTES:
        _damaged(path, f"has more than {_MAX_BYTES >> 20} MB")
    return content


def _read_json(path: Path, asked: trust.Trust | None) -> dict[str, Any]:
    """Return the JSON object in a manifest's file; arguments and errors of `_content`.

    Raises:
        BundleForeign: the file is not a manifest of Glulam.
        BundleDamaged: the file is not JSON, or has oversized numbers or a name twice.
    """
    content = _content(path, asked)
    try:
        data = json.loads(content, object_pairs_hook=_once, parse_int=_integer, parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        _damaged(path, f"cannot be read ({error})", error)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        told = f"foreign bundle: {path} was not written by `glulam build`; move it elsewhere, then {remedy(path)}"
        raise BundleForeign(told)
    return data


def read(folder: Path, asked: trust.Trust | None = None) -> Manifest:
    """Read `folder`/manifest.json and check that every field has its declared type and form.

    Args:
        folder: the bundle's folder.
        asked: requirements on the file's owner and permissions. None: those for a bundle that is loaded.

    Raises:
        BundleMissing: there is no manifest.
        BundleForeign: the file is not a manifest of Glulam, or another user may have written it.
        BundleOutdated: this version of Glulam does not read the manifest's schema.
        BundleDamaged: the file cannot be read, or a field is absent, unknown or malformed.
    """
    path = folder / FILE
    data = _read_json(path, asked)
    schema = data.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise BundleOutdated(
            f"outdated bundle: {path} has manifest schema {_shown(schema)}, this Glulam reads {SCHEMA}; {remedy(path)}"
        )
    if absent := _FIELDS.keys() - data.keys():
        _damaged(path, f"is incomplete: it has no {min(absent)}")
    if odd := data.keys() - _FIELDS.keys() - _OPTIONAL_FIELDS.keys() - {"format", "schema"}:
        _damaged(path, f"has a field {_shown(min(odd))}, which no manifest has")
    for name, fits in (*_FIELDS.items(), *_OPTIONAL_FIELDS.items()):
        if name in data and not fits(data[name]):
            _damaged(path, f"has {name} of another form than a manifest's: {_shown(data[name])}")
    functions = {
        name: Function(entry["spec"], tuple(map(KernelResources.from_dict, entry["kernels"])), tuple(entry["stages"]))
        for name, entry in data["functions"].items()
    }
    fields = {name: data[name] for name in (*_FIELDS, *_OPTIONAL_FIELDS) if name in data}
    return Manifest(**{**fields, "functions": functions})


def _check_versions(manifest: Manifest, folder: Path) -> None:
    """Check that the bundle was built with this version of Glulam.

    Whether the versions of the run-time libraries are in range does not depend on the bundle: `toolchain` checks that.
    """
    installed = toolchain.versions()
    if manifest.versions.keys() != installed.keys():
        _damaged(folder / FILE, f"has versions of {_names(manifest.versions)} instead of {_names(installed)}")
    for name in toolchain.EQUAL:
        if manifest.versions[name] != installed[name]:
            raise BundleOutdated(
                f"outdated bundle: {folder} was built with {name} {manifest.versions[name]}, "
                f"installed is {installed[name]}; {remedy(folder)}"
            )


def _check_needs(manifest: Manifest, folder: Path) -> None:
    """Raise BundleDamaged unless the manifest lists needs of exactly the two run-time libraries."""
    if manifest.needs.keys() != toolchain.RUNS_WITH.keys():
        _damaged(folder / FILE, f"has needs of {_names(manifest.needs)} instead of {_names(toolchain.RUNS_WITH)}")


def _check_host(manifest: Manifest, folder: Path, machine: host.Host) -> None:
    """Check that the bundle's host code is for `machine` and, if that is this machine, that its CPU is not too old."""
    is_other = host.of_baseline(manifest.host) not in (None, machine)
    if is_other and machine == host.here():
        raise BundleForeign(
            f"foreign bundle: {folder} needs an {manifest.host} CPU, but this machine is {platform.machine()}; run "
            f"Glulam on a machine that has one, install the wheel for {platform.machine()}, or {remedy(folder)}"
        )
    if manifest.host != machine.baseline:
        raise BundleOutdated(
            f"outdated bundle: {folder} is for {manifest.host} CPUs, this Glulam builds for {machine.baseline}; "
            f"{remedy(folder)}"
        )
    if machine == host.here() and (why := host.unfit()):
        raise BundleForeign(
            f"foreign bundle: {folder} needs an {machine.baseline} CPU, but {why}; run Glulam on a machine that has one"
        )


def _check_plain(manifest: Manifest, folder: Path) -> None:
    """Raise BundleOutdated if the kernels avoid other language constructs than those that the environment names now."""
    asked = list(plain.plain_in(manifest.arch))
    if manifest.plain != asked:
        built, wanted = (f"{plain.ENV}={','.join(each)!r}" for each in (manifest.plain, asked))
        raise BundleOutdated(
            f"outdated bundle: {folder} was built with {built}, and now it is {wanted}; set it as it was, or "
            f"{remedy(folder)}"
        )


def _names(names: Mapping[str, Any]) -> str:
    """Return sorted names as a text of at most 200 characters, for a message."""
    return ", ".join(sorted(names))[:200] or "nothing"


def _check_sources(manifest: Manifest, folder: Path, sources: Mapping[str, str] | None) -> None:
    """Raise BundleOutdated unless the hashes of the sources are `sources` (None: those of PACKAGES now)."""
    wanted = {package: toolchain.sources_hash(package) for package in PACKAGES} if sources is None else sources
    if manifest.sources.keys() != wanted.keys():
        _damaged(folder / FILE, f"has sources of {_names(manifest.sources)} instead of {_names(wanted)}")
    for package, present in wanted.items():
        if manifest.sources[package] != present:
            raise BundleOutdated(
                f"outdated bundle: {folder} was built from other sources of {package} than the installed; "
                f"{remedy(folder)}"
            )


def _check_archs(manifest: Manifest, folder: Path) -> None:
    """Raise BundleForeign unless every function, and every stage of a chain, is for the manifest's architecture."""
    for name, function in manifest.functions.items():
        specs = [function.spec, *(value for value in function.spec.values() if isinstance(value, dict))]
        for arch in (spec["arch"] for spec in specs if "arch" in spec):
            if arch != manifest.arch:
                raise BundleForeign(
                    f"foreign bundle: {folder / FILE} is for {manifest.arch}, but its function {name} is for "
                    f"{_shown(arch)}; {remedy(folder)}"
                )


def _check_function(manifest: Manifest, folder: Path, spec: Spec) -> None:
    """Raise BundleDamaged unless the manifest has exactly the function of `spec` and its stages."""
    wanted = {one.name: to_dict(one) for one in (spec, *stages_of(spec))}
    if {name: function.spec for name, function in manifest.functions.items()} != wanted:
        _damaged(folder / FILE, f"describes other functions than {spec.name} and its stages")


def _check_specs(manifest: Manifest, folder: Path) -> None:
    """Raise BundleDamaged unless every function's spec can be read and has the name of the function."""
    for name, function in manifest.functions.items():
        try:
            described = from_dict(function.spec).name
        except Exception as error:  # a spec's own checks expect a program's mistakes, not a file's
            _damaged(folder / FILE, f"gives {name} a spec that is none", error)
        if described != name:
            _damaged(folder / FILE, f"gives {name} the spec of another function")


def check(
    folder: Path,
    arch: str,
    sources: Mapping[str, str] | None = None,
    spec: Spec | None = None,
    pattern: re.Pattern[str] = LIBRARY,
    machine: host.Host | None = None,
) -> Manifest:
    """Return the manifest in `folder` after every check that does not read the library.

    Args:
        folder, arch, sources, spec, pattern: see `verify`.
        machine: the machine for which host code must be. None: this machine.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: see `verify`.
    """
    manifest = read(folder)
    if manifest.arch != arch:
        raise BundleForeign(f"foreign bundle: {folder} is for {manifest.arch}, wanted {arch}; {remedy(folder)}")
    library = pattern.fullmatch(manifest.library)
    if library is None or library["arch"] != arch:
        named = _shown(manifest.library)
        raise BundleForeign(f"foreign bundle: {folder / FILE} names {named}, no library of {arch}; {remedy(folder)}")
    _check_archs(manifest, folder)
    _check_versions(manifest, folder)
    _check_host(manifest, folder, machine or host.here())
    _check_plain(manifest, folder)
    _check_needs(manifest, folder)
    _check_sources(manifest, folder, sources)
    if spec:
        _check_function(manifest, folder, spec)
    return manifest


@contextlib.contextmanager
def opened_library(folder: Path, manifest: Manifest) -> Iterator[int]:
    """Open the library that `manifest` describes, check it, and yield its descriptor.

    Owner, mode, size and hash are checked on the open file, so they hold for the bytes that the descriptor reads.

    Raises:
        BundleForeign: another user may have written the file.
        BundleDamaged: the file cannot be read, or is not the library that the manifest describes.
    """
    path = folder / manifest.library
    with contextlib.ExitStack() as stack:
        try:
            handle = stack.enter_context(trust.opened(path))
            size = os.fstat(handle).st_size
            present = hash_of(handle) if size == manifest.size else ""
        except OSError as error:
            _damaged(path, f"cannot be read ({error.strerror or error})", error)
        if size != manifest.size:
            _damaged(path, f"has {size} bytes, its manifest says {manifest.size}")
        if present != manifest.sha256:
            _damaged(path, f"has sha256 {present[:12]}, its manifest says {manifest.sha256[:12]}")
        yield handle


def read_text(folder: Path, manifest: Manifest, suffix: str) -> bytes:
    """Return the content of the text with a suffix (".ptx" or ".mlir") that `manifest` describes.

    Raises:
        BundleMissing: the file does not exist.
        BundleForeign: another user may have written the file.
        BundleDamaged: the manifest has no such text, the file cannot be read, or it has another hash.
    """
    path = folder / text_name(manifest.arch, suffix)
    content = _content(path)
    if hashlib.sha256(content).hexdigest() != manifest.texts.get(suffix):
        _damaged(path, "has another sha256 than its manifest says")
    return content


def checked(
    use: Callable[[Path, Manifest], _Result],
    folder: Path,
    arch: str,
    sources: Mapping[str, str] | None = None,
    spec: Spec | None = None,
    pattern: re.Pattern[str] = LIBRARY,
) -> _Result:
    """Return use(folder, manifest), with the checked manifest of the bundle in `folder`.

    If a build replaces the bundle during `use`, the new bundle is checked and used instead.

    Args:
        use: the function to call; it raises BundleDamaged if files do not fit the manifest.
        folder, arch, sources, spec, pattern: see `verify`.
    """
    while True:
        manifest = check(folder, arch, sources, spec, pattern)
        try:
            return use(folder, manifest)
        except BundleDamaged:
            if check(folder, arch, sources, spec, pattern).sha256 == manifest.sha256:
                raise


def _looked_at(folder: Path, manifest: Manifest) -> Manifest:
    """Return the manifest after checking every function's spec and the library, for callers that show a bundle."""
    _check_specs(manifest, folder)  # for who shows them: 10 ms for the shipped ones, which loading does not need
    with opened_library(folder, manifest):
        return manifest


def verify(
    folder: Path,
    arch: str,
    sources: Mapping[str, str] | None = None,
    spec: Spec | None = None,
    pattern: re.Pattern[str] = LIBRARY,
) -> Manifest:
    """Return the manifest of the bundle in `folder` after every check that is possible without loading the library.

    Args:
        folder: the bundle's folder.
        arch: the architecture that the bundle must be for.
        sources: the hashes that `Manifest.sources` must equal. None: the present hashes of PACKAGES.
        spec: the only function, besides its stages, that the bundle must hold. None: any functions.
        pattern: pattern for the library's name: LIBRARY for bundles, OBJECT for objects.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: the message names the mismatch and the command that
            mends it.
    """
    return checked(_looked_at, folder, arch, sources, spec, pattern)
