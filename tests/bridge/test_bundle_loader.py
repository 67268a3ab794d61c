"""Loading bundles: all checks run before any code of the library is executed."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ffi_bridge import (
    BundleDamaged,
    BundleError,
    BundleForeign,
    BundleMissing,
    BundleOutdated,
    ToolchainError,
    host,
    load,
    loader,
    toolchain,
)
from ffi_bridge.errors import remedy
from toys import HERE, REPOSITORY, TOY_SPECS, library_in, rewrite

Damage = Callable[[Path], Any]


def _edit(**changes: Any) -> Damage:
    def edit(folder: Path) -> None:
        file = folder / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return edit


def _drop(key: str) -> Damage:
    def drop(folder: Path) -> None:
        file = folder / "manifest.json"
        data = json.loads(file.read_text())
        del data[key]
        file.write_text(json.dumps(data))

    return drop


def _text(text: str) -> Damage:
    return lambda folder: (folder / "manifest.json").write_text(text)


def _flip(position: int) -> Damage:
    def flip(folder: Path) -> None:
        library = library_in(folder)
        content = bytearray(library.read_bytes())
        content[position] ^= 1
        rewrite(library, content)

    return flip


def _truncate(folder: Path) -> None:
    library = library_in(folder)
    rewrite(library, library.read_bytes()[:-1])


def _versions(**changes: str) -> Damage:
    changed = {name.replace("_", "-"): version for name, version in changes.items()}
    return _edit(versions={**toolchain.versions(), **changed})


def _of_another_architecture(folder: Path) -> None:
    """Make a bundle for sm_80 claim sm_90a, in its manifest and in its library's file name."""
    file = folder / "manifest.json"
    head, functions = file.read_text().split('"functions"', 1)
    others = functions.replace('"arch": "sm_90a"', '"arch": "sm_80"')
    file.write_text(f'{head}"functions"{others}')


CASES: dict[str, tuple[Damage, type[BundleError], str]] = {
    "no folder": (lambda f: f.rename(f.parent / "aside"), BundleMissing, "does not exist"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), BundleMissing, "manifest.json does not exist"),
    "no library": (lambda f: library_in(f).unlink(), BundleDamaged, ".so cannot be read (No such file"),
    "a flipped bit in the header": (_flip(4), BundleDamaged, "has sha256"),
    "a flipped bit at the end": (_flip(-1), BundleDamaged, "has sha256"),
    "truncated": (_truncate, BundleDamaged, "bytes, its manifest says"),
    "manifest is no JSON": (lambda f: (f / "manifest.json").write_bytes(b"\xff{"), BundleDamaged, "cannot be read"),
    "manifest is a list": (lambda f: (f / "manifest.json").write_text("[]"), BundleForeign, "was not written by"),
    "another program's manifest": (_edit(format="webpack"), BundleForeign, "was not written by `glulam build`"),
    "manifest lacks its functions": (_drop("functions"), BundleDamaged, "is incomplete: it has no functions"),
    "manifest lacks its hash": (_drop("sha256"), BundleDamaged, "it has no sha256"),
    "functions of a wrong type": (_edit(functions=[1]), BundleDamaged, "functions of another form"),
    "another architecture": (_edit(arch="sm_100a"), BundleForeign, "is for sm_100a, wanted sm_90a"),
    "functions for another architecture": (_of_another_architecture, BundleForeign, "is for 'sm_80'"),
    "a library elsewhere": (_edit(library="../../evil.so"), BundleForeign, "foreign bundle"),
    "a later schema": (_edit(schema=3), BundleOutdated, "has manifest schema 3, this Glulam reads 2"),
    "no schema": (_drop("schema"), BundleOutdated, "has manifest schema None"),
    "another Glulam": (_versions(glulam="0.0.9"), BundleOutdated, "was built with glulam 0.0.9, installed is"),
    "another host": (
        _edit(host="x86-64-v4"),
        BundleOutdated,
        "is for x86-64-v4 CPUs, this Glulam builds for x86-64-v2",
    ),
    "a host of another form": (_edit(host=["x86-64-v2"]), BundleDamaged, "has host of another form"),
    "no needs": (_edit(needs={}), BundleDamaged, "has needs of nothing instead of apache-tvm-ffi"),
    "needs of another form": (_edit(needs={toolchain.DSL: "printf"}), BundleDamaged, "has needs of another form"),
    "versions of another form": (_edit(versions=[]), BundleDamaged, "has versions of another form"),
    "sources of another form": (_edit(sources=[]), BundleDamaged, "has sources of another form"),
    "no versions": (_edit(versions={}), BundleDamaged, "has versions of nothing instead of apache-tvm-ffi"),
    "no sources": (_edit(sources={}), BundleDamaged, "has sources of nothing instead of toy_kernels"),
    "one more field": (_edit(extra=1), BundleDamaged, "has a field 'extra', which no manifest has"),
    "a size that is true": (_edit(size=True), BundleDamaged, "has size of another form than a manifest's: True"),
    "another size": (_edit(size=1), BundleDamaged, "bytes, its manifest says 1"),
    "a hash that is none": (_edit(sha256="A" * 64), BundleDamaged, "has sha256 of another form"),
    "an architecture elsewhere": (_edit(arch="../sm_90a"), BundleDamaged, "has arch of another form"),
    "a schema that is true": (_edit(schema=True), BundleOutdated, "has manifest schema True"),
    "a terminal's commands": (_edit(arch="\x1b[2J\n"), BundleDamaged, r"'\x1b[2J\n'"),
    "a name twice": (_text('{"format": 1, "format": 2}'), BundleDamaged, "a name twice in one object"),
    "nested deeply": (_text("[" * 100_000), BundleDamaged, "cannot be read (maximum recursion depth"),
    "a huge number": (_text('{"size": ' + "9" * 5000 + "}"), BundleDamaged, "a number of 5000 digits"),
    "a huge file": (lambda f: os.truncate(f / "manifest.json", 65 << 20), BundleDamaged, "has more than 64 MB"),
    "no number": (_edit(size=float("nan")), BundleDamaged, "NaN is no number"),
    "other sources": (_edit(sources={"toy_kernels": "0" * 64}), BundleOutdated, "other sources of toy_kernels"),
}


@pytest.fixture
def sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if any shared library is loaded."""
    monkeypatch.setattr(loader, "_open_library", lambda path, needs: pytest.fail(f"executed {path}"))
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **_: pytest.fail(f"executed {arguments}"))


def test_a_remedy_builds_where_the_bundle_is_looked_for() -> None:
    inside, other = Path("/site/glulam/_bundle"), Path("/my bundles")
    assert remedy(inside / "sm_90a" / "manifest.json") == "run `glulam build --arch sm_90a`"
    anew = remedy(other / "sm_80", " --profile full")
    assert anew == "run `glulam build --arch sm_80 --profile full --out '/my bundles'`"
    assert remedy(other / "sm_80", elsewhere=True) == "run `glulam build --arch sm_80`"
    assert remedy(other) == "run `glulam build`"


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("case", CASES)
def test_a_bad_bundle_is_named_with_its_remedy_and_never_executed(bundle_copy: Path, case: str) -> None:
    damage, kind, words = CASES[case]
    damage(bundle_copy / "sm_90a")
    with pytest.raises(kind) as refused:
        load("sm_90a", bundle_copy)
    message = str(refused.value)
    assert words in message
    assert f"run `glulam build --arch sm_90a --out {bundle_copy}`" in message
    assert str(bundle_copy / "sm_90a") in message
    assert "\n" not in message


@pytest.mark.usefixtures("sealed")
def test_the_seal_sees_a_sound_bundle(bundle_copy: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"executed .*libglulam_sm_90a-[0-9a-f]{16}\.so"):
        load("sm_90a", bundle_copy)


@pytest.mark.usefixtures("sealed")
def test_an_unknown_architecture_is_missing(bundle_copy: Path) -> None:
    with pytest.raises(BundleMissing, match="sm_100a"):
        load("sm_100a", bundle_copy)


def test_a_sound_bundle_loads_once(bundle_copy: Path) -> None:
    bundle = load("sm_90a", bundle_copy)
    assert load("sm_90a", str(bundle_copy)) is bundle
    assert bundle.names() == sorted(spec.name for spec in TOY_SPECS)
    assert bundle.has(TOY_SPECS[0].name)
    assert not bundle.has("grouped_mm_of_another_world")
    with pytest.raises(BundleMissing, match=r"no function 'grouped_mm_of_another_world' .*glulam\.compile"):
        bundle.function("grouped_mm_of_another_world")


def test_functions_check_their_arguments(toy_bundle: Path) -> None:
    """Proof without a GPU that these are the compiled functions: they see the tensors and refuse their device."""
    torch = pytest.importorskip("torch")
    x = torch.ones(8)
    for spec in TOY_SPECS:
        function = load("sm_90a", toy_bundle).function(spec.name)
        with pytest.raises(ValueError, match="device_type=cuda"):
            function(x, x, x, 0)


def test_an_error_is_not_remembered(bundle_copy: Path) -> None:
    _edit(schema=3)(bundle_copy / "sm_90a")
    with pytest.raises(BundleOutdated):
        load("sm_90a", bundle_copy)
    _edit(schema=2)(bundle_copy / "sm_90a")
    assert load("sm_90a", bundle_copy).names()


def test_the_versions_that_built_a_bundle_are_information(bundle_copy: Path) -> None:
    _versions(nvidia_cutlass_dsl="4.7.1", apache_tvm_ffi="0.1.9")(bundle_copy / "sm_90a")
    assert load("sm_90a", bundle_copy).names()


RANGES = [
    (toolchain.DSL, ("4.7.1", "4.7.2.post1", "4.8.0", "4.8.1"), ("4.6.3", "4.7.0", "4.9.0", "4.10.0", "5")),
    (toolchain.TVM_FFI, ("0.1.9", "0.1.10", "0.1.14.post1", "0.1.15.post2"), ("0.1.8.post2", "0.2.0rc1", "1.0")),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], None]:
    def install(package: str, version: str | None) -> None:
        found = {**toolchain.versions(), package: version}
        monkeypatch.setattr(toolchain, "versions", lambda: found)

    return install


@pytest.mark.parametrize(("package", "version"), [(package, v) for package, inside, _ in RANGES for v in inside])
def test_any_version_of_the_range_loads(
    bundle_copy: Path, installed: Callable[[str, str | None], None], package: str, version: str
) -> None:
    installed(package, version)
    assert load("sm_90a", bundle_copy).names()


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize(("package", "version"), [(package, v) for package, _, outside in RANGES for v in outside])
def test_a_version_outside_the_range_is_named_with_its_remedy(
    bundle_copy: Path, installed: Callable[[str, str | None], None], package: str, version: str
) -> None:
    installed(package, version)
    find = toolchain.runtime_library if package == toolchain.DSL else toolchain.tvm_ffi_library
    with pytest.raises(ToolchainError) as refused:
        find()
    wanted = toolchain.RUNS_WITH[package]
    assert f"{package} {version} is installed, Glulam runs with {wanted}; run `pip install" in str(refused.value)
    assert re.search(rf'pip install "{package}(\[cu13\])?{wanted}"', str(refused.value))


def test_an_unknown_version_is_judged_by_its_symbols(
    bundle_copy: Path, installed: Callable[[str, str | None], None]
) -> None:
    """A host may hold the DSL's libraries as a bare folder that declares no version."""
    installed(toolchain.DSL, None)
    assert load("sm_90a", bundle_copy).names()


@pytest.mark.parametrize("package", toolchain.RUNS_WITH)
def test_a_library_that_lacks_a_symbol_is_named(bundle_copy: Path, package: str) -> None:
    library = toolchain.runtime_library() if package == toolchain.DSL else toolchain.tvm_ffi_library()
    manifest = json.loads((bundle_copy / "sm_90a" / "manifest.json").read_text())
    manifest["needs"][package] += ["_cudaOfAnotherWorld"]
    _edit(**manifest)(bundle_copy / "sm_90a")
    with pytest.raises(ToolchainError) as refused:
        load("sm_90a", bundle_copy)
    version = toolchain.versions()[package]
    said = f"{library} of {package} {version} has no _cudaOfAnotherWorld, which the kernels need; run `pip install"
    assert str(refused.value).startswith(said)


def test_the_manifest_lists_what_the_library_takes_of_either(toy_bundle: Path) -> None:
    needs = json.loads((toy_bundle / "sm_90a" / "manifest.json").read_text())["needs"]
    listing = subprocess.run(
        ["nm", "-D", "--undefined-only", library_in(toy_bundle / "sm_90a")], capture_output=True, text=True, check=True
    ).stdout
    undefined = {line.split()[1] for line in listing.splitlines() if line.split()[0] == "U" and "@" not in line}
    assert undefined == {symbol for symbols in needs.values() for symbol in symbols}
    assert "_cudaLaunchKernelEx" in needs[toolchain.DSL]
    assert "TVMFFIErrorSetRaisedFromCStr" in needs[toolchain.TVM_FFI]


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize(
    ("machine", "flags", "words"),
    [
        (
            "x86_64",
            "fpu sse sse2 pni ssse3 cx16 lahf_lm",
            "but this machine's lacks popcnt, sse4_1, sse4_2; run Glulam on",
        ),
        ("aarch64", "", "but this machine is aarch64; run Glulam on a machine that has one, install the wheel for"),
        ("riscv64", "", "but this machine is riscv64; run Glulam on"),
    ],
)
def test_a_cpu_below_the_baseline_is_refused_in_one_line(
    bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, flags: str, words: str
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: {flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(host, "_CPUINFO", str(tmp_path / "cpuinfo"))
    monkeypatch.setattr(host.platform, "machine", lambda: machine)
    monkeypatch.setattr(host, "unfit", host.unfit.__wrapped__)
    with pytest.raises(BundleForeign, match=f"needs an x86-64-v2 CPU, {words}") as refused:
        load("sm_90a", bundle_copy)
    assert "\n" not in str(refused.value)


def test_a_cpu_that_says_nothing_of_itself_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_CPUINFO", str(tmp_path / "absent"))
    monkeypatch.setattr(host.platform, "machine", lambda: "x86_64")
    assert host.unfit.__wrapped__() == ""


def test_search_order(bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(loader.ENV_BUNDLE, raising=False)
    packaged = loader.bundle_root()
    assert (packaged.name, packaged.parent.name) == ("_bundle", "glulam")
    monkeypatch.setenv(loader.ENV_BUNDLE, str(bundle_copy))  # read at the call
    assert load("sm_90a").folder == bundle_copy / "sm_90a"
    assert loader.bundle_root(tmp_path) == tmp_path


def test_no_runtime_library(bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "package_folders", lambda name: [])
    with pytest.raises(ToolchainError, match=r"nvidia-cutlass-dsl is not installed; run `pip install"):
        toolchain.runtime_library()
    monkeypatch.setattr(toolchain, "package_folders", lambda name: [tmp_path])
    with pytest.raises(ToolchainError, match="has no CUDA 13 run-time library"):
        toolchain.runtime_library()


def test_versions_of_a_bare_folder_are_read_from_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise toolchain.importlib.metadata.PackageNotFoundError(name)

    installed = toolchain.versions()
    monkeypatch.setattr(toolchain.importlib.metadata, "version", absent)
    assert toolchain.versions.__wrapped__() == installed


def _modules_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return set(done.stdout.split())


def test_importing_the_bridge_imports_nothing_heavy() -> None:
    heavy = {"torch", "cutlass", "tvm_ffi", "numpy", "rich", "filelock", "platformdirs", "ffi_bridge.compiler"}
    assert not heavy & _modules_after("import ffi_bridge")
    assert not heavy - {"ffi_bridge.compiler"} & _modules_after("import ffi_bridge.build, ffi_bridge.jit")


def test_loading_and_verifying_imports_no_compiler(toy_bundle: Path) -> None:
    path = [str(HERE)]
    modules = _modules_after(
        f"sys.path += {path!r}; sys.modules['torch'] = None\n"
        "import ffi_bridge; from ffi_bridge.toolchain import sources_hash\n"
        f"sources = {{'toy_kernels': sources_hash('toy_kernels')}}\n"
        f"b = ffi_bridge.load('sm_90a', {str(toy_bundle)!r}, sources)\n"
        "[b.function(name) for name in b.names()]"
    )
    assert "tvm_ffi" in modules
    assert not {"cutlass", "ffi_bridge.compiler", "rich"} & modules
