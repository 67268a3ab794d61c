"""The manifest: what a bundle's library contains, what it was built from, and what it needs."""

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
"""Top-level packages whose sources a bundle is made of, unless the caller names others; a file never names any."""
LIBRARY = re.compile(r"libglulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)(-[0-9a-f]{16})?\.so")
OBJECT = re.compile(r"glulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)\.o")
"""What an object that is not linked yet is called; its manifest says of it what a bundle's says of the library."""
TEXT = re.compile(r"glulam_(?P<arch>sm_[0-9]{1,4}[a-z]?)\.(ptx|mlir)")
"""The name of a text that lies beside an object that was compiled with `keep_ptx`."""

_MAX_BYTES = 64 << 20
_MAX_DIGITS = 18
_CHUNK = 1 << 20

_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class Function:
    """One exported function.

    Attributes:
        spec: as a dict.
        kernels: the resources of each device kernel of a stage.
        stages: of a chain, the names of the functions that it calls.
    """

    spec: dict[str, Any]
    kernels: tuple[KernelResources, ...]
    stages: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One architecture's bundle.

    Attributes:
        arch: architecture of every kernel, as "sm_90a".
        library: file name of the shared library, beside the manifest.
        sha256: of the library's bytes, hexadecimal.
        size: of the library, in bytes.
        host: the CPUs that its host code is for, as "x86-64-v2".
        needs: symbols that the library takes from the DSL's run-time library and from TVM-FFI's, by distribution name.
        versions: of Glulam, the DSL and TVM-FFI that made it, by distribution name. The last two are information.
        sources: hashes of the kernels' sources, by what they are of: a package, or a tracer and what compiles it.
        functions: by export symbol, sorted.
        texts: sha256 of each text that was kept beside an object, hexadecimal, by suffix; usually empty.
        plain: constructs that its kernels do without (`cute_kernels/plain.py`); usually empty.
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
        """Writes `folder`/manifest.json to the disk; the same manifest gives the same bytes."""
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
    """Named by its content: a new library never takes the place of one that a manifest describes."""
    return f"libglulam_{arch}-{sha256[:16]}.so"


def object_name(arch: str) -> str:
    """What OBJECT takes for the object of an architecture."""
    return f"glulam_{arch}.o"


def text_name(arch: str, suffix: str) -> str:
    """The name that TEXT matches for an architecture. suffix: ".ptx" or ".mlir"."""
    return f"glulam_{arch}{suffix}"


def hash_of(handle: int) -> str:
    """sha256 of an open file from where it stands, hexadecimal."""
    digest = hashlib.sha256()
    while chunk := os.read(handle, _CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


# What each field may hold. Texts are plain ASCII, since messages and tables quote them.


def _text(pattern: str) -> Callable[[Any], bool]:
    matches = re.compile(pattern, re.ASCII).fullmatch
    return lambda value: type(value) is str and matches(value) is not None


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _object(names: Callable[[Any], bool], values: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is dict and all(names(n) and values(v) for n, v in value.items())


def _list(items: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is list and all(map(items, value))


def _record(**fields: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """An object of exactly these fields."""
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
    raise BundleDamaged(f"damaged bundle: {path} {what}; {remedy(path)}") from cause


def _shown(value: Any) -> str:
    """A value out of a file, for a message: one line, without what a terminal would act on."""
    return ascii(value)[:60] if value is None or isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice in one object")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _content(path: Path, asked: trust.Trust | None = None) -> bytes:
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
    """Reads `folder`/manifest.json; every field has its declared type and form.

    Args:
        asked: whose it may be; default, as for a bundle that is loaded.

    Raises:
        BundleMissing: there is none.
        BundleForeign: it is not a manifest of Glulam's, or another user may have written it.
        BundleOutdated: its schema is not the one that this version reads.
        BundleDamaged: it cannot be read, or a field is absent, unknown or of another form.
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
    """That the run-time libraries' versions are in range is `toolchain`'s to check, whatever the bundle."""
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
    if manifest.needs.keys() != toolchain.RUNS_WITH.keys():
        _damaged(folder / FILE, f"has needs of {_names(manifest.needs)} instead of {_names(toolchain.RUNS_WITH)}")


def _check_host(manifest: Manifest, folder: Path, machine: host.Host) -> None:
    others = [other for other in host.HOSTS.values() if other.baseline == manifest.host != machine.baseline]
    if others and machine == host.here():
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
    asked = list(plain.plain_in(manifest.arch))
    if manifest.plain != asked:
        built, wanted = (f"{plain.ENV}={','.join(each)!r}" for each in (manifest.plain, asked))
        raise BundleOutdated(
            f"outdated bundle: {folder} was built with {built}, and now it is {wanted}; set it as it was, or "
            f"{remedy(folder)}"
        )


def _names(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names))[:200] or "nothing"


def _check_sources(manifest: Manifest, folder: Path, sources: Mapping[str, str] | None) -> None:
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
    """Every kernel is for the manifest's architecture. Of a chain, the specs of its stages say so."""
    for name, function in manifest.functions.items():
        specs = [function.spec, *(value for value in function.spec.values() if isinstance(value, dict))]
        for arch in (spec["arch"] for spec in specs if "arch" in spec):
            if arch != manifest.arch:
                raise BundleForeign(
                    f"foreign bundle: {folder / FILE} is for {manifest.arch}, but its function {name} is for "
                    f"{_shown(arch)}; {remedy(folder)}"
                )


def _check_function(manifest: Manifest, folder: Path, spec: Spec) -> None:
    wanted = {one.name: to_dict(one) for one in (spec, *stages_of(spec))}
    if {name: function.spec for name, function in manifest.functions.items()} != wanted:
        _damaged(folder / FILE, f"describes other functions than {spec.name} and its stages")


def _check_specs(manifest: Manifest, folder: Path) -> None:
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
    form: re.Pattern[str] = LIBRARY,
    machine: host.Host | None = None,
) -> Manifest:
    """The manifest in `folder` after every check that needs the manifest alone; arguments and errors as of `verify`.

    machine: which host code is to be for; default, this one.
    """
    manifest = read(folder)
    if manifest.arch != arch:
        raise BundleForeign(f"foreign bundle: {folder} is for {manifest.arch}, wanted {arch}; {remedy(folder)}")
    library = form.fullmatch(manifest.library)
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
    """A descriptor of the very library that `manifest` describes: owner, mode, size and hash are those of this file.

    Raises:
        BundleForeign: another user may have written it.
        BundleDamaged: it cannot be read or is another one.
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
    """The text of a suffix that `manifest` describes.

    Raises:
        BundleForeign: another user may have written it.
        BundleDamaged: it was not kept, cannot be read or has another hash.
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
    form: re.Pattern[str] = LIBRARY,
) -> _Result:
    """`use` of the folder and its checked manifest; again where a build replaced the bundle in between."""
    while True:
        manifest = check(folder, arch, sources, spec, form)
        try:
            return use(folder, manifest)
        except BundleDamaged:
            if check(folder, arch, sources, spec, form).sha256 == manifest.sha256:
                raise


def _looked_at(folder: Path, manifest: Manifest) -> Manifest:
    _check_specs(manifest, folder)  # for who shows them: 10 ms for the shipped ones, which loading does not need
    with opened_library(folder, manifest):
        return manifest


def verify(
    folder: Path,
    arch: str,
    sources: Mapping[str, str] | None = None,
    spec: Spec | None = None,
    form: re.Pattern[str] = LIBRARY,
) -> Manifest:
    """The manifest of the bundle in `folder`, after every check that needs no loading.

    Args:
        sources: hashes of exactly what the bundle is to be made of, by the names that `Manifest.sources` has; default,
            those of PACKAGES now.
        spec: the one function that the bundle is to hold; default, any.
        form: what its library is called, LIBRARY or OBJECT.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: what does not fit, and the command that mends it.
    """
    return checked(_looked_at, folder, arch, sources, spec, form)
