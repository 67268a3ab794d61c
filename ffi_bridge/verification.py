"""Checks of a bundle or object against its manifest, this machine and the installed sources, before it is loaded.

In signatures, `folder` is the folder that holds manifest.json and the library or object.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from cute_kernels import plain
from cute_kernels.chains import stages_of
from cute_kernels.specs import Spec, from_dict, to_dict

from . import host, toolchain, trust
from .errors import BundleDamaged, BundleForeign, BundleOutdated, remedy
from .manifest import FILE, LIBRARY, Manifest, content_of, damaged, hash_of, read, shown, text_name

PACKAGES = ("cute_kernels",)
"""Top-level packages whose sources are compared with `Manifest.sources`, unless the caller gives other sources.

A manifest's own list of packages is never used to choose what is compared.
"""

_Result = TypeVar("_Result")


def _names(names: Mapping[str, Any]) -> str:
    """Return sorted names as a text of at most 200 characters, for a message."""
    return ", ".join(sorted(names))[:200] or "nothing"


def _check_versions(manifest: Manifest, folder: Path) -> None:
    """Check that the bundle was built with this version of Glulam.

    Whether the versions of the run-time libraries are in range does not depend on the bundle: `toolchain` checks that.
    """
    installed = toolchain.versions()
    if manifest.versions.keys() != installed.keys():
        damaged(folder / FILE, f"has versions of {_names(manifest.versions)} instead of {_names(installed)}")
    for name in toolchain.EQUAL:
        if manifest.versions[name] != installed[name]:
            raise BundleOutdated(
                f"outdated bundle: {folder} was built with {name} {manifest.versions[name]}, "
                f"installed is {installed[name]}; {remedy(folder)}"
            )


def _check_needs(manifest: Manifest, folder: Path) -> None:
    """Raise BundleDamaged unless the manifest's `needs` has entries for exactly the two run-time libraries."""
    if manifest.needs.keys() != toolchain.RUNS_WITH.keys():
        damaged(folder / FILE, f"has needs of {_names(manifest.needs)} instead of {_names(toolchain.RUNS_WITH)}")


def _check_host(manifest: Manifest, folder: Path, machine: host.Host) -> None:
    """Check that the bundle's host code is for `machine` and, if that is this machine, that this CPU can run the code.

    Raises:
        BundleForeign: the host code is for another kind of CPU, or this CPU is older than the baseline.
        BundleOutdated: the host code is for another baseline than this version of Glulam's.
    """
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
    """Raise BundleOutdated unless the kernels avoid exactly the language constructs that $GLULAM_PLAIN names now."""
    avoided = list(plain.plain_in(manifest.arch))
    if manifest.plain != avoided:
        built, wanted = (f"{plain.ENV}={','.join(each)!r}" for each in (manifest.plain, avoided))
        raise BundleOutdated(
            f"outdated bundle: {folder} was built with {built}, and now it is {wanted}; set it as it was, or "
            f"{remedy(folder)}"
        )


def _check_sources(manifest: Manifest, folder: Path, sources: Mapping[str, str] | None) -> None:
    """Check that the manifest records the source hashes `sources`.

    `sources` None: the hashes of the packages PACKAGES as they are installed now.

    Raises:
        BundleOutdated: a hash differs.
        BundleDamaged: the manifest names other sources.
    """
    wanted = {package: toolchain.sources_hash(package) for package in PACKAGES} if sources is None else sources
    if manifest.sources.keys() != wanted.keys():
        damaged(folder / FILE, f"has sources of {_names(manifest.sources)} instead of {_names(wanted)}")
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
                    f"{shown(arch)}; {remedy(folder)}"
                )


def _check_function(manifest: Manifest, folder: Path, spec: Spec) -> None:
    """Raise BundleDamaged unless the manifest has exactly the function of `spec` and its stages."""
    wanted = {one.name: to_dict(one) for one in (spec, *stages_of(spec))}
    if {name: function.spec for name, function in manifest.functions.items()} != wanted:
        damaged(folder / FILE, f"describes other functions than {spec.name} and its stages")


def _check_specs(manifest: Manifest, folder: Path) -> None:
    """Raise BundleDamaged unless every function's spec can be read and has the name of the function."""
    for name, function in manifest.functions.items():
        try:
            described = from_dict(function.spec).name
        except Exception as error:  # a spec's own checks expect a program's mistakes, not a file's
            damaged(folder / FILE, f"gives {name} a spec that is none", error)
        if described != name:
            damaged(folder / FILE, f"gives {name} the spec of another function")


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
        folder: the folder that holds manifest.json and the library.
        arch, sources, spec, pattern: architecture, source hashes, only function and file name that the manifest must
            have (arguments of `verify`).
        machine: the kind of machine that the host code must be for. None: this machine's.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: a check failed; the message names the mismatch.
    """
    manifest = read(folder)
    if manifest.arch != arch:
        raise BundleForeign(f"foreign bundle: {folder} is for {manifest.arch}, wanted {arch}; {remedy(folder)}")
    library = pattern.fullmatch(manifest.library)
    if library is None or library["arch"] != arch:
        named = shown(manifest.library)
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
            damaged(path, f"cannot be read ({error.strerror or error})", error)
        if size != manifest.size:
            damaged(path, f"has {size} bytes, its manifest says {manifest.size}")
        if present != manifest.sha256:
            damaged(path, f"has sha256 {present[:12]}, its manifest says {manifest.sha256[:12]}")
        yield handle


def read_text(folder: Path, manifest: Manifest, suffix: str) -> bytes:
    """Return the content of the text with a suffix (".ptx" or ".mlir") that `manifest` describes.

    Raises:
        BundleMissing: the file does not exist.
        BundleForeign: another user may have written the file.
        BundleDamaged: the manifest has no such text, the file cannot be read, or it has another hash.
    """
    path = folder / text_name(manifest.arch, suffix)
    content = content_of(path)
    if hashlib.sha256(content).hexdigest() != manifest.texts.get(suffix):
        damaged(path, "has another sha256 than its manifest says")
    return content


def checked(
    use: Callable[[Path, Manifest], _Result],
    folder: Path,
    arch: str,
    sources: Mapping[str, str] | None = None,
    spec: Spec | None = None,
    pattern: re.Pattern[str] = LIBRARY,
) -> _Result:
    """Check the manifest of the bundle in `folder`, and return use(folder, manifest).

    If a build replaces the bundle during `use`, the new bundle is checked and used instead.

    Args:
        use: the function to call; it raises BundleDamaged if files do not fit the manifest.
        folder: the folder that holds manifest.json and the library.
        arch, sources, spec, pattern: architecture, source hashes, only function and file name that the manifest must
            have (arguments of `verify`).
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
    _check_specs(manifest, folder)  # 10 ms for shipped bundles; loading skips it
    with opened_library(folder, manifest):
        return manifest


def verify(
    folder: Path,
    arch: str,
    sources: Mapping[str, str] | None = None,
    spec: Spec | None = None,
    pattern: re.Pattern[str] = LIBRARY,
) -> Manifest:
    """Return the manifest of the bundle or object in `folder`, after every check that does not load the library.

    The manifest is compared with the arguments, with this machine and with the installed versions; the library's size,
    hash and owner are compared with the manifest.

    Args:
        folder: the folder that holds manifest.json and the library.
        arch: the architecture that the manifest must name.
        sources: the source hashes that the manifest must record. None: the hashes of the packages PACKAGES as they are
            installed now.
        spec: the one function that the manifest must list, with its stages and no others. None: any functions.
        pattern: the pattern that the library's file name must match: LIBRARY (a bundle) or OBJECT (not linked).

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: the message names the mismatch and the command that
            mends it.
    """
    return checked(_looked_at, folder, arch, sources, spec, pattern)
