"""Bundles and wheels for aarch64, built on x86-64: the same device code, host code for aarch64, and matching wheel
tags.

Compiling needs no extra tool. Linking needs aarch64-linux-gnu-gcc, and running the linked code needs qemu-aarch64;
tests that need a missing tool are skipped.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from cute_kernels.specs import GroupedMlpSpec, GroupedMmSpec
from ffi_bridge import (
    BundleForeign,
    CompileError,
    ToolchainError,
    build,
    cache,
    host,
    link,
    loader,
    manifest,
    toolchain,
    verification,
)
from ffi_bridge.objects import Store
from ffi_bridge.worker import Worker
from test_wheel import _pip_wheel, _toy_checkout
from toys import ELF, REPOSITORY, TOY_SPECS, TOY_TRACER, cubin, library_in

ARM, X86 = host.named("aarch64"), host.named("x86_64")
SPEC = GroupedMmSpec()
E_MACHINE = {"x86_64": 62, "aarch64": 183}
QEMU = next(filter(None, map(shutil.which, ("qemu-aarch64-static", "qemu-aarch64"))), None)
pytestmark = pytest.mark.skipif(host.here() != X86, reason="cross-compiles from x86-64")
linking = pytest.mark.skipif(shutil.which(ARM.compiler) is None, reason=f"there is no {ARM.compiler}")
running = pytest.mark.skipif(QEMU is None, reason="there is no qemu-aarch64")


def _machine(file: bytes) -> int:
    assert file.startswith(ELF)
    number: int = struct.unpack_from("<H", file, 18)[0]
    return number


def test_objects_of_two_machines_have_the_same_device_code(tmp_path: Path) -> None:
    objects = {}
    for machine in (X86, ARM):
        (folder := tmp_path / machine.machine).mkdir()
        with Worker(folder, TOY_TRACER, machine=machine) as worker:
            objects[machine.machine] = worker.compile(SPEC).object_file.read_bytes()
    assert {name: _machine(content) for name, content in objects.items()} == E_MACHINE
    device = {cubin(content) for content in objects.values()}
    assert len(device) == 1 and _machine(device.pop()) == 190  # EM_CUDA


def test_objects_of_two_machines_are_kept_apart() -> None:
    keys = {cache.cache_key(SPEC, TOY_TRACER, machine=machine) for machine in (X86, ARM)}
    assert len(keys) == 2 and cache.cache_key(SPEC, TOY_TRACER) in keys


def test_an_object_of_another_machine_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    store = Store(TOY_TRACER, machine=ARM)
    (tmp_path / "objects").mkdir()
    with Worker(tmp_path / "objects", TOY_TRACER, machine=ARM) as worker, store.alone(SPEC):
        made = store.obtain(SPEC, tmp_path / "objects", lambda: worker).object_file.read_bytes()
    (tmp_path / "again").mkdir()
    found = store.take(SPEC, tmp_path / "again")
    assert found is not None and found.object_file.read_bytes() == made
    assert Store(TOY_TRACER).take(SPEC, tmp_path / "again") is None


def test_a_missing_compiler_is_named_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(
        ToolchainError, match=r"no C compiler for aarch64: 'aarch64-linux-gnu-gcc' is not on PATH; inst"
    ):
        build.build(TOY_SPECS, tmp_path / "out", progress=False, tracer=TOY_TRACER, machine=ARM)
    assert not (tmp_path / "out").exists()


def test_a_machine_without_host_code_is_named() -> None:
    with pytest.raises(ToolchainError, match="'sparc' is no machine .* give x86_64 or aarch64"):
        host.named("sparc")


@pytest.mark.parametrize(
    "line",
    ["cas\tw0, w1, [x2]", "ldaddal\tx1, x2, [x0]", "swpb\tw1, w2, [x0]", "stset\tw1, [x0]", "ldaprb\tw0, [x1]",
     "crc32cx\tw0, w1, x2", "aese\tv0.16b, v1.16b", "sha256h\tq0, q1, v2.4s", "sdot\tv0.4s, v1.16b, v2.16b",
     "bfdot\tv0.4s, v1.8h, v2.8h", "retaa", "ptrue\tp0.b", "ld1w\t{z0.s}, p0/z, [x0]", "fadd\tz0.s, p0/m, z0.s, z1.s"],
)  # fmt: skip
def test_instructions_of_newer_arm_cpus_are_known(line: str) -> None:
    listing = f"     4b0:\td65f03c0 \t{line}\n".encode()
    assert any(above.search(listing) for above in ARM.above)


@pytest.mark.parametrize(
    "line",
    ["bfi\tx8, x25, #32, #32", "ret", "ldp\tx29, x30, [sp], #16", "str\tq0, [sp]", "csel\tw0, w1, w2, eq", "blr\tx8",
     "stlr\tw0, [x1]", "ldaxr\tw0, [x1]", "fadd\tv0.4s, v1.4s, v2.4s", "bl\t4b0 <sha_p0>", "b.ne\t4c0", "paciasp",
     "smaddl\tx0, w1, w2, x3", "smulh\tx0, x1, x2", "br\tx16", "ldset_of\tx0", "cbz\tx0, 4b0 <z1>"],
)  # fmt: skip
def test_instructions_of_every_arm_cpu_pass(line: str) -> None:
    listing = f"     4b0:\td65f03c0 \t{line}\n".encode()
    assert not [above.pattern for above in ARM.above if above.search(listing)]


@pytest.fixture(scope="module")
def arm_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of toy kernels for aarch64, a chain of two among them."""
    folder = tmp_path_factory.mktemp("arm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "PACKAGES", ("toy_kernels",))
        specs = [*TOY_SPECS, GroupedMlpSpec()]
        build.build(specs, folder, jobs=1, progress=False, tracer=TOY_TRACER, allowed={}, machine=ARM)
    return folder


@linking
def test_a_bundle_of_another_machine_exports_its_functions_alone(arm_bundle: Path) -> None:
    library = library_in(arm_bundle / "sm_90a")
    found = manifest.read(arm_bundle / "sm_90a")
    assert _machine(library.read_bytes()) == E_MACHINE["aarch64"] and found.host == "armv8-a"
    exported = link._symbols(library, "--defined-only", ARM)
    assert exported == {f"__tvm_ffi_{name}" for name in found.functions}
    needed = {name for names in found.needs.values() for name in names}
    assert needed and all(re.match("TVMFFI|CuteDSLRT|_?cu", name) for name in needed)


@linking
def test_a_bundle_of_another_machine_is_not_loaded(arm_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "PACKAGES", ("toy_kernels",))
    with pytest.raises(
        BundleForeign, match="armv8-a CPU, but this machine is x86_64; .* the wheel for x86_64, or run "
    ):
        loader.load("sm_90a", arm_bundle)


@linking
def test_code_for_newer_arm_cpus_is_refused_and_named(tmp_path: Path) -> None:
    source = "void f(double *x) { for (int i = 0; i < 4096; ++i) x[i] += 1; }"
    command = [*toolchain.c_compiler(ARM), "-x", "c", "-O3", "-fPIC", "-march=armv8.2-a+sve", "-c", "-", "-o"]
    subprocess.run([*command, str(tmp_path / "f.o")], input=source, text=True, check=True)
    with pytest.raises(CompileError, match=r"is not for every armv8-a CPU: it has '\w+ .*\b[zp]\d+"):
        link.link([tmp_path / "f.o"], tmp_path / "lib.so", ARM)


CALLER = r"""
#include <stdio.h>
#include <stdint.h>
#include <tvm/ffi/c_api.h>

int FUNCTION(void*, const TVMFFIAny*, int32_t, TVMFFIAny*);
int main(void) {
  TVMFFIAny result = {0};
  int status = FUNCTION(NULL, NULL, 0, &result);
  printf("status %d\n", status);
  return 0;
}
"""
RUN_TIME = r"""
#include <stdint.h>
#include <stdio.h>
void TVMFFIErrorSetRaisedFromCStr(const char* kind, const char* message) { printf("%s: %s\n", kind, message); }
void TVMFFIErrorSetRaisedFromCStrParts(const char* kind, const char** parts, int32_t count) {
  printf("%s: ", kind);
  for (int32_t i = 0; i < count; i++) printf("%s", parts[i]);
  printf("\n");
}
"""


@linking
@running
@pytest.mark.parametrize("spec", [SPEC, GroupedMlpSpec()], ids=["kernel", "chain"])
def test_functions_check_their_arguments_on_that_machine(
    arm_bundle: Path, tmp_path: Path, spec: GroupedMmSpec | GroupedMlpSpec
) -> None:
    library, compiler = library_in(arm_bundle / "sm_90a"), toolchain.c_compiler(ARM)
    needs = manifest.read(arm_bundle / "sm_90a").needs
    (tmp_path / "caller.c").write_text(CALLER)
    own = re.findall(r"^\w+ (\w+)\(", RUN_TIME, re.MULTILINE)
    others = {name for names in needs.values() for name in names} - set(own)
    stubs = "".join(f"int {name}(void) {{ return 0; }}\n" for name in sorted(others))
    (tmp_path / "run_time.c").write_text(RUN_TIME + stubs)
    shared = [*compiler, "-shared", "-fPIC", "-o"]
    subprocess.run([*shared, tmp_path / "libtvm_ffi.so", tmp_path / "run_time.c"], check=True)
    subprocess.run([*shared, tmp_path / "libcute_dsl_runtime.so", "-x", "c", "/dev/null"], check=True)
    shutil.copy(library, tmp_path / library.name)
    headers, symbol = toolchain.tvm_ffi_headers(), f"__tvm_ffi_{spec.name}"
    command = [*compiler, f"-I{headers}", f"-DFUNCTION={symbol}", "-o", tmp_path / "caller", tmp_path / "caller.c"]
    command += [tmp_path / library.name, tmp_path / "libtvm_ffi.so", "-Wl,--allow-shlib-undefined"]
    subprocess.run(command, check=True)
    root = subprocess.run([*compiler, "-print-sysroot"], capture_output=True, text=True).stdout.strip()
    prefix = next(path for path in (f"{root}/usr/aarch64-linux-gnu", root) if Path(path, "lib").is_dir())
    run = [str(QEMU), "-L", prefix, "-E", f"LD_LIBRARY_PATH={tmp_path}", str(tmp_path / "caller")]
    done = subprocess.run(run, capture_output=True, text=True)
    error, status = done.stdout.splitlines()
    assert re.match("TypeError: .*(parameters|arguments)", error) and status == "status -1", done.stderr


@linking
def test_a_wheel_for_another_machine_lies_beside_this_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkout = _toy_checkout(tmp_path / "checkout")
    for machine in ("x86_64", "aarch64"):
        monkeypatch.setenv("GLULAM_MACHINE", machine)
        copy = shutil.copytree(checkout, tmp_path / machine)
        shown = _pip_wheel(copy, tmp_path / "dist")
        assert f"_{machine}.whl" in shown
    names = sorted(path.name for path in (tmp_path / "dist").glob("*.whl"))
    assert [re.sub(r"2_\d+", "2_X", name) for name in names] == [
        f"glulam-0.1.0-py3-none-manylinux_2_X_{machine}.whl" for machine in ("aarch64", "x86_64")
    ]


def test_a_wheels_machine_must_be_known(tmp_path: Path) -> None:
    environment = {**os.environ, "GLULAM_MACHINE": "sparc", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "setup.py", "--version"]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode and done.stderr.splitlines() == ["GLULAM_MACHINE is 'sparc'; give x86_64 or aarch64"]
