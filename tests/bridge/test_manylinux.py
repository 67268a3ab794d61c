"""The wheel's platform tag: computed from the library's ELF data, with an error if that cannot be read."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ffi_bridge import ToolchainError, manylinux, toolchain
from toys import library_in

Link = Callable[..., Path]


@pytest.fixture
def link(tmp_path: Path) -> Link:
    """Return a function that compiles C source to a shared library, with extra compiler arguments."""

    def make(name: str, source: str, *arguments: object) -> Path:
        library, file = tmp_path / f"{name}.so", tmp_path / f"{name}.c"
        file.write_text(source)
        flags = ["-shared", "-fPIC", "-O1", "-fno-builtin", "-Wl,--as-needed"]
        subprocess.run([*toolchain.c_compiler(), *flags, "-o", library, file, *arguments], check=True)
        return library

    return make


def _wheel(*tags: str) -> str:
    return "Wheel-Version: 1.0\n" + "".join(f"Tag: cp311-cp311-{tag}\n" for tag in tags)


def test_a_bundle_gets_the_highest_tag_of_the_wheels_that_it_needs(
    toy_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = library_in(toy_bundle / "sm_90a")
    assert manylinux.tag([library], "x86_64") == "manylinux_2_28_x86_64"
    wheels = {
        "libtvm_ffi.so": _wheel("manylinux_2_24_x86_64", "manylinux_2_28_x86_64"),
        "libcute_dsl_runtime.so": _wheel("manylinux2014_x86_64"),
    }
    monkeypatch.setattr(manylinux, "_wheel_of", lambda path: wheels[path.name])
    assert manylinux.tag([library], "aarch64") == "manylinux_2_24_aarch64"


def test_a_symbol_of_a_newer_glibc_raises_the_tag(link: Link) -> None:
    plain = link("plain", "int f(void) { return 1; }")
    newer = link("newer", "double exp(double); double f(double x) { return exp(x); }", "-lm")  # a new exp came in 2.29
    assert manylinux.tag([plain], "x86_64") == "manylinux_2_17_x86_64"
    assert manylinux.tag([newer], "x86_64") == manylinux.tag([plain, newer], "x86_64") == "manylinux_2_29_x86_64"


def test_versions_are_numbers() -> None:
    described = "Version References:\n  required from libc.so.6:\n"
    for name in ("GLIBC_2.9", "GLIBC_2.14", "GLIBC_2.2.5"):
        described += f"    0x06969194 0x00 03 {name}\n"
    assert manylinux.needed_glibc(described) == (2, 14)


@pytest.mark.parametrize("name", ["GLIBC_PRIVATE", "GLIBC_ABI_DT_RELR", "GLIBCXX_3.4.21"])
def test_what_asks_for_more_than_a_version_of_glibc_has_no_tag(name: str) -> None:
    described = f"    0x06969194 0x00 03 GLIBC_2.14\n    0x06969194 0x00 02 {name}\n"
    with pytest.raises(ToolchainError, match=f"ask for {name}, not"):
        manylinux.needed_glibc(described)


def test_a_library_that_no_wheel_brings_has_no_tag(link: Link) -> None:
    other = link("libother", "int g(void) { return 1; }")
    library = link("mine", "int g(void); int f(void) { return g(); }", other, f"-Wl,-rpath,{other.parent}")
    with pytest.raises(ToolchainError, match="no wheel that it depends on brings .*libother.so"):
        manylinux.tag([library], "x86_64")


def test_a_wheel_without_a_tag_of_its_own_gives_none() -> None:
    with pytest.raises(ToolchainError, match="without a manylinux tag"):
        manylinux.oldest_tag(_wheel("linux_x86_64"))


def test_a_library_from_no_wheel_has_no_tag(toy_bundle: Path, link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "tvm_ffi_library", lambda: link("libtvm_ffi", "int f(void) { return 1; }"))
    with pytest.raises(ToolchainError, match=r"libtvm_ffi\.so comes from no installed wheel"):
        manylinux.tag([library_in(toy_bundle / "sm_90a")], "x86_64")


def test_without_objdump_the_error_says_what_to_install(
    toy_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (compiler := tmp_path / "cc").write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="no objdump, which reads what was linked; install binutils, or set CC"):
        manylinux.tag([library_in(toy_bundle / "sm_90a")], "x86_64")


def test_what_is_no_library_is_an_error(tmp_path: Path) -> None:
    (file := tmp_path / "libglulam_none.so").write_text("text")
    with pytest.raises(ToolchainError, match="objdump reads no libglulam_none.so"):
        manylinux.tag([file], "x86_64")
