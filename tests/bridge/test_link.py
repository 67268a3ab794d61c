"""Linking: refuses libraries that have an instruction above the CPU baseline or cannot be disassembled."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ffi_bridge import CompileError, ToolchainError, link, toolchain
from toys import library_in

ARCH = "sm_90a"
LONG = "void f(double *x) { for (int i = 0; i < 4096; ++i) x[i] += 1; }"
BITS = "unsigned f(unsigned x) { return __builtin_clz(x); }"
SWAP = "unsigned f(unsigned *x) { return __builtin_bswap32(*x); }"
TRAILING = "unsigned f(unsigned x) { return __builtin_ctz(x); }"
PAIR = 'void f(double *x) { asm volatile("addq $1, (%0)\\nvzeroupper" :: "r"(x)); }'


def _object(folder: Path, source: str, *flags: str) -> Path:
    compiled = folder / "host.o"
    command = [*toolchain.c_compiler(), "-x", "c", "-O3", "-fPIC", "-c", *flags, "-o", str(compiled), "-"]
    subprocess.run(command, input=source, text=True, check=True)
    return compiled


@pytest.fixture(params=["objdump", "llvm-objdump"])
def disassembler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which(request.param)
    if found is None:
        pytest.skip(f"no {request.param} here")
    theirs = toolchain.binary_tool
    monkeypatch.setattr(
        toolchain, "binary_tool", lambda name, machine=None: found if name == "objdump" else theirs(name)
    )


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize(
    ("source", "flags", "instruction"),
    [
        (LONG, ["-mavx"], r"v\w+ .*%ymm"),
        (LONG, ["-mavx512f", "-mprefer-vector-width=512"], r"v\w+ .*%[yz]mm"),
        (BITS, ["-mlzcnt"], "lzcnt"),
        (SWAP, ["-mmovbe"], "movbe"),
        ("unsigned f(unsigned x, unsigned y) { return ~x & y; }", ["-mbmi"], "andn"),
        ("unsigned f(unsigned x, int n) { return x << n; }", ["-mbmi2"], "shlx"),
        (PAIR, [], "vzeroupper"),
    ],
    ids=["avx", "avx512", "lzcnt", "movbe", "bmi", "bmi2", "after another"],
)
def test_code_for_newer_cpus_is_refused_and_named(
    tmp_path: Path, source: str, flags: list[str], instruction: str
) -> None:
    with pytest.raises(CompileError, match=rf"^lib\.so is not for every x86-64-v2 CPU: it has .*\b{instruction}"):
        link.link([_object(tmp_path, source, *flags)], tmp_path / "lib.so")


@pytest.mark.usefixtures("disassembler")
@pytest.mark.parametrize("source", [LONG, BITS, SWAP, TRAILING])
def test_code_of_the_baseline_is_taken(tmp_path: Path, source: str) -> None:
    needs = link.link([_object(tmp_path, source, "-march=x86-64-v2")], tmp_path / "lib.so")
    assert needs == {toolchain.DSL: [], toolchain.TVM_FFI: []}


@pytest.mark.usefixtures("disassembler")
def test_compiled_host_code_is_for_the_baseline_whichever_cpu_compiled_it(toy_bundle: Path) -> None:
    link.check_instructions(library_in(toy_bundle / ARCH))


def test_a_library_that_cannot_be_disassembled_is_not_taken_for_sound(tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_text("no library")
    with pytest.raises(CompileError, match=r"the instructions of lib\.so cannot be checked: .*objdump says"):
        link.check_instructions(tmp_path / "lib.so")


def test_a_machine_without_binutils_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (compiler := tmp_path / "cc").write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match="no objdump, which reads what was linked; install binutils, or set CC"):
        toolchain.binary_tool("objdump")
