"""Write a bundle as a kernel of the Hugging Face hub, for the package `kernels`: a folder with a repository's files.

    <out>/build/tvm-ffi01-cu130-x86_64-linux/    a variant: the kernel for one TVM-FFI, CUDA and kind of CPU
        metadata.json       name, dependencies, GPUs, hashes of the other files
        __init__.py         a copy of `hub_package.py`
        functions.json      names and arguments of the library's functions
        libglulam_*.so      the bundle's library, unchanged

The hub's kernel has the library's functions but none of Glulam's operators, since a kernel of the hub may import only
torch and a few other packages.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from cute_kernels.architectures import capability
from cute_kernels.chains import signature_of
from cute_kernels.specs import from_dict

from . import hub_package, toolchain, verification
from . import manifest as manifests
from .host import Host, here, of_baseline
from .manifest import Manifest

NAME = "glulam"
VERSION = 1
"""Version of the kernel's interface, which the hub's users ask for; it rises when the functions' arguments change."""
CUDA = (13, 0)
"""CUDA version of the DSL's run-time library; the hub takes a variant for this and later minor versions."""
DEPENDS = ["nvidia-cutlass-dsl", "tvm-ffi"]
LICENSE = "Apache-2.0"


def variant(machine: Host) -> str:
    """Return the name of a variant's folder, such as "tvm-ffi01-cu130-x86_64-linux".

    The name has the oldest TVM-FFI, the CUDA version and the kind of CPU that the variant runs with.
    """
    ffi = "".join(toolchain.RUNS_WITH[toolchain.TVM_FFI].oldest.split(".")[:2])
    return f"tvm-ffi{ffi}-cu{CUDA[0]}{CUDA[1]}-{machine.machine}-linux"


def gpus(arch: str) -> str:
    """Return the hub's name of an architecture, such as "9.0a" for sm_90a; "9.0" also means later minor versions."""
    major, minor = capability(arch)
    return f"{major}.{minor}{'a' if arch.endswith('a') else ''}"


def write(bundle: Path, arch: str, out: Path) -> Path:
    """Write a variant of the hub's kernel: a bundle's library for one architecture, with the files that the hub needs.

    Args:
        bundle: the folder that holds <arch>/, the library and its manifest. The library's host code may be for another
            kind of machine than this one.
        arch: the architecture, for example "sm_90a".
        out: the folder that gets the repository's files.

    Returns:
        The new folder <out>/build/<variant>; see the module's docstring for the files in it.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: the bundle would not load on the kind of machine
            that its library is for.
        FileExistsError: <out>/build/<variant> exists already.
        OSError: the folder cannot be written.
    """
    source = bundle / arch
    machine = of_baseline(manifests.read(source).host) or here()
    manifest = verification.check(source, arch, machine=machine)
    folder = out / "build" / variant(machine)
    folder.mkdir(parents=True)
    with verification.opened_library(source, manifest) as handle:
        (folder / manifest.library).write_bytes(os.pread(handle, manifest.size, 0))  # the file that was hashed
    shutil.copyfile(str(hub_package.__file__), folder / "__init__.py")
    functions = {
        name: list(signature_of(from_dict(function.spec)).names) for name, function in manifest.functions.items()
    }
    _write_json(folder / "functions.json", {"library": manifest.library, "functions": functions})
    _write_json(folder / "metadata.json", _metadata(manifest, folder))
    return folder


def _metadata(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """Return the content of metadata.json, which the package `kernels` reads.

    Args:
        manifest: the bundle's manifest.
        folder: the variant's folder, which already has all files except metadata.json.
    """
    hashes = {file.name: hashlib.sha256(file.read_bytes()).digest() for file in sorted(folder.iterdir())}
    return {
        "name": NAME,
        "id": f"_{NAME}_{manifest.arch}_{manifest.sha256[:8]}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": DEPENDS,
        "backend": {"type": "cuda", "archs": [gpus(manifest.arch)]},
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(digest).decode() for name, digest in hashes.items()},
        },
    }


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
