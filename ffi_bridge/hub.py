"""A bundle as a kernel of the Hugging Face hub, which the package `kernels` loads: a repository's files, in a folder.

    <out>/build/tvm-ffi01-cu130-x86_64-linux/
        metadata.json       name, what it depends on, GPUs, hashes of the other files
        __init__.py         `hub_package.py`
        functions.json      names and arguments of the library's functions
        libglulam_*.so      the library of the bundle, as it is

It has the kernels' functions, and no operators: a hub's kernel may import nothing but torch and few other packages.
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

from . import hub_package, toolchain
from . import manifest as manifests
from .host import HOSTS
from .manifest import Manifest

NAME = "glulam"
VERSION = 1
"""Of the kernel's interface: the hub's users ask for one by number, which rises when functions' arguments change."""
CUDA = (13, 0)
"""What the DSL's run-time library is of; the hub takes a variant for this and later minor versions."""
DEPENDS = ["nvidia-cutlass-dsl", "tvm-ffi"]
LICENSE = "Apache-2.0"


def variant(manifest: Manifest) -> str:
    """The name of the folder of a bundle: TVM-FFI, CUDA and CPU that it is for."""
    ffi = "".join(toolchain.RUNS_WITH[toolchain.TVM_FFI].oldest.split(".")[:2])
    (machine,) = [host.machine for host in HOSTS.values() if host.baseline == manifest.host]
    return f"tvm-ffi{ffi}-cu{CUDA[0]}{CUDA[1]}-{machine}-linux"


def gpus(arch: str) -> str:
    """An architecture as the hub names it: 9.0a of sm_90a, and of a portable one all later minor versions."""
    major, minor = capability(arch)
    return f"{major}.{minor}{'a' if arch.endswith('a') else ''}"


def write(bundle: Path, arch: str, out: Path) -> Path:
    """Write a bundle's library for an architecture into a repository's folder; return the variant's folder.

    Args:
        bundle: the bundle's root. Its host code may be for another machine.

    Raises:
        BundleMissing, BundleForeign, BundleOutdated, BundleDamaged: the bundle is not one that could be loaded there.
        FileExistsError: `out` has this variant already.
        OSError: it cannot be written.
    """
    source = bundle / arch
    machine = next((host for host in HOSTS.values() if host.baseline == manifests.read(source).host), None)
    manifest = manifests.check(source, arch, machine=machine)
    folder = out / "build" / variant(manifest)
    folder.mkdir(parents=True)
    with manifests.opened_library(source, manifest) as handle:
        (folder / manifest.library).write_bytes(os.pread(handle, manifest.size, 0))  # of the file that was hashed
    shutil.copyfile(str(hub_package.__file__), folder / "__init__.py")
    functions = {
        name: list(signature_of(from_dict(function.spec)).names) for name, function in manifest.functions.items()
    }
    _write_json(folder / "functions.json", {"library": manifest.library, "functions": functions})
    _write_json(folder / "metadata.json", _metadata(manifest, folder))
    return folder


def _metadata(manifest: Manifest, folder: Path) -> dict[str, Any]:
    """What `kernels` reads of a variant; `folder` has its other files."""
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
