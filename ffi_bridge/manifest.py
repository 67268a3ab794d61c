"""The manifest: what a bundle's library contains, what it was built from, and what it needs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import toolchain
from .errors import BundleDamaged, BundleForeign, BundleMissing, BundleOutdated
from .resources import KernelResources

FORMAT = "glulam-bundle"
SCHEMA = 1
FILE = "manifest.json"
REMEDY = "run `glulam build`"


@dataclasses.dataclass(frozen=True)
class Function:
    """One exported function: its spec as a dict, and the resources of each device kernel that it launches."""

    spec: dict[str, Any]
    kernels: tuple[KernelResources, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One architecture's bundle.

    Attributes:
        arch: architecture of every kernel, as "sm_90a".
        library: file name of the shared library, beside the manifest.
        sha256: of the library's bytes, hexadecimal.
        size: of the library, in bytes.
        versions: of Glulam, the DSL and TVM-FFI, by distribution name.
        sources: hash of the kernels' sources, by top-level package.
        functions: by export symbol, sorted.
    """

    arch: str
    library: str
    sha256: str
    size: int
    versions: dict[str, str | None]
    sources: dict[str, str]
    functions: dict[str, Function]

    def write(self, folder: Path) -> None:
        """Writes `folder`/manifest.json; the same manifest gives the same bytes."""
        data = {"format": FORMAT, "schema": SCHEMA, **dataclasses.asdict(self)}
        (folder / FILE).write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")


def library_name(arch: str) -> str:
    return f"libglulam_{arch}.so"


def file_hash(path: Path) -> str:
    """sha256 of a file's bytes, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BundleMissing(f"no bundle: {path} does not exist; {REMEDY}") from None
    except (OSError, ValueError) as error:
        raise BundleDamaged(f"damaged bundle: {path} cannot be read ({error}); {REMEDY}") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise BundleForeign(f"foreign bundle: {path} was not written by `glulam build`; {REMEDY}")
    return data


def read(folder: Path) -> Manifest:
    """Reads `folder`/manifest.json.

    Raises:
        BundleMissing: there is none.
        BundleForeign: it is not a manifest of Glulam's.
        BundleOutdated: its schema is not the one that this version reads.
        BundleDamaged: it does not parse.
    """
    path = folder / FILE
    data = _read_json(path)
    if data.get("schema") != SCHEMA:
        raise BundleOutdated(
            f"outdated bundle: {path} has manifest schema {data.get('schema')!r}, this Glulam reads {SCHEMA}; {REMEDY}"
        )
    try:
        functions = {
            name: Function(entry["spec"], tuple(KernelResources.from_dict(k) for k in entry["kernels"]))
            for name, entry in data["functions"].items()
        }
        fields = {f.name: data[f.name] for f in dataclasses.fields(Manifest)}
        return Manifest(**{**fields, "functions": functions})
    except (KeyError, TypeError, AttributeError) as error:
        raise BundleDamaged(f"damaged bundle: {path} is incomplete ({error!r}); {REMEDY}") from error


def _check_versions(manifest: Manifest, folder: Path) -> None:
    """An unknown version (a package that is a bare folder) is not held against the bundle."""
    for name, present in toolchain.versions().items():
        built = manifest.versions.get(name)
        if built and present and built != present:
            raise BundleOutdated(
                f"outdated bundle: {folder} was built with {name} {built}, installed is {present}; "
                f"{REMEDY}, or install {name}=={built}"
            )


def _check_sources(manifest: Manifest, folder: Path, sources: Mapping[str, str]) -> None:
    for package, built in manifest.sources.items():
        if (sources.get(package) or toolchain.sources_hash(package)) != built:
            raise BundleOutdated(
                f"outdated bundle: {folder} was built from other sources of {package} than the installed; {REMEDY}"
            )


def _check_library(manifest: Manifest, folder: Path) -> None:
    path = folder / manifest.library
    try:
        present = file_hash(path)
    except OSError as error:
        raise BundleDamaged(f"damaged bundle: {path} cannot be read ({error.strerror}); {REMEDY}") from error
    if present != manifest.sha256:
        raise BundleDamaged(
            f"damaged bundle: {path} has sha256 {present[:12]}, its manifest says {manifest.sha256[:12]}; {REMEDY}"
        )


def verify(folder: Path, arch: str, sources: Mapping[str, str] | None = None) -> Manifest:
    """The manifest of the bundle in `folder`, after every check that needs no loading.

    Args:
        sources: hashes of packages' sources that the caller took just now; others are taken here.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: what does not fit, and the command that mends it.
    """
    manifest = read(folder)
    if manifest.arch != arch or manifest.library != library_name(arch):
        raise BundleForeign(f"foreign bundle: {folder} is for {manifest.arch}, wanted {arch}; {REMEDY}")
    _check_versions(manifest, folder)
    _check_sources(manifest, folder, sources or {})
    _check_library(manifest, folder)
    return manifest
