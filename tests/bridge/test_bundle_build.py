"""Building bundles: reproducible bytes, refused kernels, and no half-written bundle after a failure."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cute_kernels.chains import stages_of
from cute_kernels.sm90.configs import shipped_specs
from cute_kernels.specs import GroupedMmSpec, from_dict
from ffi_bridge import (
    BundleBusy,
    BundleForeign,
    CompileError,
    ToolchainError,
    build,
    cache,
    manifest,
    profiles,
    scratch,
    toolchain,
    verification,
)
from ffi_bridge import target as targets
from ffi_bridge.compiler import KernelArtifact
from ffi_bridge.resources import KernelResources
from toys import HERE, REPOSITORY, TOY_SPECS, TOY_TRACER, files_of, library_in, linked_as, rewrite, wait_until

SPEC = TOY_SPECS[0]
ARCH = "sm_90a"
MANIFEST = "sm_90a/manifest.json"


def _build(specs: list, out: Path, tracer: str = TOY_TRACER, allowed: dict | None = None) -> manifest.Manifest:
    return build.build(specs, out, jobs=1, progress=False, tracer=tracer, allowed=allowed or {})


def test_manifest_describes_the_library(toy_bundle: Path) -> None:
    described = manifest.read(toy_bundle / "sm_90a")
    assert list(described.functions) == sorted(spec.name for spec in TOY_SPECS)
    assert [from_dict(f.spec) for f in described.functions.values()] == sorted(TOY_SPECS, key=lambda s: s.name)
    library = library_in(toy_bundle / ARCH)
    assert (described.library, described.size) == (library.name, library.stat().st_size)
    assert library.name == f"libglulam_sm_90a-{described.sha256[:16]}.so"
    assert described.versions == toolchain.versions()
    assert None not in described.versions.values()
    assert described.host == "x86-64-v2"
    launched = {name: len(f.kernels) for name, f in described.functions.items()}
    assert launched == {spec.name: 2 if spec.op == "grouped_wgrad" else 1 for spec in TOY_SPECS}
    kernels = [kernel for f in described.functions.values() for kernel in f.kernels]
    assert all(0 < kernel.registers <= 255 and kernel.dynamic_smem == 512 for kernel in kernels)


def test_library_exports_the_specs_names_and_nothing_else(toy_bundle: Path) -> None:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library_in(toy_bundle / ARCH)], capture_output=True, text=True, check=True
    ).stdout
    exported = {line.split()[-1] for line in listing.splitlines()}
    assert exported == {f"__tvm_ffi_{spec.name}" for spec in TOY_SPECS}


def test_twice_is_the_same_bytes_anywhere_in_any_order(toy_bundle: Path, tmp_path: Path) -> None:
    """Another folder for the sources, another for the output, two processes, reversed order, another umask."""
    elsewhere = tmp_path / "a checkout elsewhere"
    elsewhere.mkdir()
    shutil.copy(HERE / "toy_kernels.py", elsewhere)
    script = (
        "import sys; from ffi_bridge import build; from toys import TOY_SPECS, TOY_TRACER\n"
        "build.build(TOY_SPECS[::-1], sys.argv[1], jobs=2, progress=False, tracer=TOY_TRACER, allowed={})"
    )
    path = os.pathsep.join([str(elsewhere), str(REPOSITORY), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7", "CUTE_DSL_LINEINFO": "1"}
    environment[cache.ENV_CACHE] = str(tmp_path / "cache")  # an empty one: all is compiled again
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out")], check=True, env=environment, cwd=elsewhere, umask=0o077
    )
    assert files_of(tmp_path / "out") == files_of(toy_bundle)


def test_library_holds_no_path_of_this_machine(toy_bundle: Path) -> None:
    content = library_in(toy_bundle / ARCH).read_bytes()
    for trace in (HERE, toy_bundle, Path.home(), toolchain.runtime_library().parent):
        assert str(trace).encode() not in content
    assert b"toy_kernels" not in content


@pytest.mark.parametrize(("variant", "complaint"), [("spilling", "spills"), ("serialised", "C7517")])
def test_refuses_slow_code_unless_allowed_by_name(variant: str, complaint: str, tmp_path: Path) -> None:
    tracer = f"toy_kernels:trace_{variant}"
    with pytest.raises(CompileError) as refused:
        _build([SPEC], tmp_path, tracer, allowed={"another": (complaint,)})
    assert f"{SPEC.name}: {complaint}" in str(refused.value)
    assert "ALLOWED_DIAGNOSTICS" in str(refused.value)
    assert list(tmp_path.iterdir()) == []

    kernel = _build([SPEC], tmp_path, tracer, allowed={SPEC.name: (complaint,)}).functions[SPEC.name].kernels[0]
    assert kernel.complaints == (complaint,)


@pytest.mark.parametrize(
    ("tracer", "words"),
    [
        ("toy_kernels:fail", ("ValueError: no kernel for", "toy_kernels.py:")),
        ("toy_kernels:die", ("ended by SIGABRT",)),
        ("toy_kernels:absent", ("AttributeError",)),
    ],
)
def test_a_failure_names_the_spec_and_leaves_the_old_bundle(
    bundle_copy: Path, tracer: str, words: tuple[str, ...]
) -> None:
    before = files_of(bundle_copy)
    with pytest.raises(CompileError) as failure:
        _build([SPEC], bundle_copy, tracer=tracer)
    assert all(each in str(failure.value) for each in (SPEC.name, *words))
    assert files_of(bundle_copy) == before
    assert [entry.name for entry in bundle_copy.iterdir()] == ["sm_90a"]


def test_a_build_replaces_the_old_bundle(bundle_copy: Path) -> None:
    _build([SPEC], bundle_copy)
    assert list(json.loads((bundle_copy / MANIFEST).read_text())["functions"]) == [SPEC.name]
    assert [entry.name for entry in bundle_copy.iterdir()] == ["sm_90a"]
    assert library_in(bundle_copy / ARCH).name == manifest.read(bundle_copy / ARCH).library, "the old one is gone"


def _hanging_build(out: Path) -> subprocess.Popen[str]:
    """Start a process that builds in `out` and hangs while it compiles; return once compiling has begun."""
    log = out.with_name("traced.log")
    script = (
        "import sys; from ffi_bridge import build; from toys import TOY_SPECS, TOY_TRACER\n"
        "build.build(TOY_SPECS[:1], sys.argv[1], jobs=1, progress=False, tracer=TOY_TRACER, allowed={})"
    )
    path = os.pathsep.join([str(REPOSITORY), str(HERE), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "TOY_HANG": "1", "TOY_LOG": str(log)}
    environment[cache.ENV_CACHE] = str(out.with_name("cache"))
    process = subprocess.Popen([sys.executable, "-c", script, str(out)], env=environment, text=True)
    try:
        wait_until(log.exists)
    except BaseException:
        process.kill()
        raise
    return process


def test_a_second_build_is_told_at_once_and_a_dead_one_is_no_obstacle(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files_of(bundle_copy)
    first = _hanging_build(bundle_copy)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(build, "compile_all", lambda *_: pytest.fail("compiled"))
            with pytest.raises(BundleBusy, match=f"another process is building a bundle in {bundle_copy}; wait until"):
                _build([SPEC], bundle_copy)
        assert files_of(bundle_copy) == before
    finally:
        first.kill()
        first.wait()
    assert list(_build([SPEC], bundle_copy).functions) == [SPEC.name]


def _quick_bundle(folder: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> manifest.Manifest:
    """Build a bundle whose library is `content`, without compiling or linking; for tests that never load it."""
    folder.mkdir()
    monkeypatch.setattr(build, "link", linked_as(content))
    artifact = KernelArtifact(SPEC.name, folder / "kernel.o", (KernelResources("kernel", 1, 0, 0, 0, 0),))
    sources = {"toy_kernels": toolchain.sources_hash("toy_kernels")}
    return build.write_bundle(folder, ARCH, [SPEC], [artifact], sources)


def test_a_reader_meets_a_whole_bundle_at_every_moment(
    bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new bundle takes the old one's place between any two steps of whoever reads it."""
    target = bundle_copy / ARCH
    made = iter(range(1000))

    def replaced_before(step: str) -> None:
        original = getattr(verification, step)

        def replace_first(*arguments: object) -> object:
            monkeypatch.setattr(verification, step, original)
            new = tmp_path / f"new{next(made)}"
            targets.publish(new, target, _quick_bundle(new, new.name.encode(), monkeypatch))
            return original(*arguments)

        monkeypatch.setattr(verification, step, replace_first)

    for step in ("read", "_check_versions", "_check_host", "_check_sources", "opened_library", "hash_of"):
        replaced_before(step)
        found = verification.verify(target, ARCH)
        assert (target / found.library).exists() == (step != "hash_of"), "that one had the old library open already"
    assert len(list(target.iterdir())) == 2


def test_readers_beside_a_builder_find_no_fault(
    bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bundle_copy / ARCH
    ready = [tmp_path / f"new{i}" for i in range(100)]
    manifests = [_quick_bundle(new, new.name.encode(), monkeypatch) for new in ready]
    seen = set()

    def publish() -> None:
        for new, described in zip(ready, manifests, strict=True):
            targets.publish(new, target, described)

    with ThreadPoolExecutor(1) as pool:
        builder = pool.submit(publish)
        while True:
            seen.add(verification.verify(target, ARCH).sha256)
            if builder.done():
                break
        builder.result()
    assert seen and verification.verify(target, ARCH) == manifests[-1]


OTHERS = {
    "another program's manifest": (manifest.FILE, b'{"arch": "sm_90a", "format": "webpack"}'),
    "notes": (manifest.FILE, b"years of work"),
    "a list": (manifest.FILE, b"[]"),
    "a manifest that only begins like ours": (manifest.FILE, b'{\n "arch": "sm_90a",\n "license": "MIT"\n}'),
    "a library without a digest": ("libglulam_sm_90a.so", b"years of work"),
    "a library of another content": (f"libglulam_sm_90a-{'0' * 16}.so", b"years of work"),
}


@pytest.mark.parametrize("beside_a_bundle", [True, False])
@pytest.mark.parametrize("name", OTHERS)
def test_what_glulam_did_not_write_is_named_before_compiling_and_stays(
    bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, beside_a_bundle: bool
) -> None:
    file, content = OTHERS[name]
    out = bundle_copy if beside_a_bundle else tmp_path / "out"
    (out / ARCH).mkdir(parents=True, exist_ok=True)
    (out / ARCH / file).write_bytes(content)
    before = files_of(out)
    with monkeypatch.context() as patch:
        patch.setattr(build, "compile_all", lambda *_: pytest.fail("compiled"))
        with pytest.raises(BundleForeign, match=f"{out / ARCH / file} would be replaced or removed, but .*; move it"):
            _build([SPEC], out)
    new = tmp_path / "new"
    with pytest.raises(BundleForeign, match=str(out / ARCH / file)):
        targets.publish(new, out / ARCH, _quick_bundle(new, b"a library", monkeypatch))
    assert files_of(out) == before


@pytest.mark.parametrize("name", [manifest.FILE, "libglulam_sm_90a.so"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
def test_what_is_no_file_stays(bundle_copy: Path, name: str, make: Callable[[Path], None]) -> None:
    path = bundle_copy / ARCH / name
    path.unlink(missing_ok=True)
    make(path)
    before = path.lstat()
    with pytest.raises(BundleForeign, match=f"{path} would be replaced or removed, but it cannot be read"):
        _build([SPEC], bundle_copy)
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)


def _cut(share: float) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / manifest.FILE, int((folder / manifest.FILE).stat().st_size * share))


def _older(folder: Path) -> None:
    """Rewrite a bundle in the form of schema 1, whose library's name has no content hash."""
    data = json.loads((folder / manifest.FILE).read_text())
    library_in(folder).rename(folder / "libglulam_sm_90a.so")
    (folder / manifest.FILE).write_text(json.dumps({**data, "schema": 1, "library": "libglulam_sm_90a.so"}))


REMAINS: dict[str, Callable[[Path], object]] = {
    "an older version's": _older,
    "half a manifest": _cut(0.5),
    "the first bytes of a manifest": _cut(0.01),
    "an empty manifest": _cut(0),
    "no manifest": lambda folder: (folder / manifest.FILE).unlink(),
    "a damaged library": lambda folder: rewrite(library_in(folder), b"cut"),
    "no library": lambda folder: library_in(folder).unlink(),
}


@pytest.mark.parametrize("name", REMAINS)
def test_what_is_left_of_a_bundle_is_replaced(bundle_copy: Path, name: str) -> None:
    REMAINS[name](bundle_copy / ARCH)
    described = _build([SPEC], bundle_copy)
    assert sorted(files_of(bundle_copy)) == sorted([described.library, manifest.FILE])


@pytest.mark.parametrize("steps", [1, 2])
def test_a_build_that_was_killed_while_it_published_is_repeatable(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Killed after its library was moved, and after its manifest was."""
    replace, unlink, done = os.replace, Path.unlink, 0

    def step(place: Path) -> None:
        nonlocal done
        if place.parent == bundle_copy / ARCH:
            if done == steps:
                raise KeyboardInterrupt
            done += 1

    def replace_or_die(source: Path, place: Path) -> None:
        step(place)
        replace(source, place)

    def unlink_or_die(place: Path, missing_ok: bool = False) -> None:
        step(place)
        unlink(place, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_or_die)
        patch.setattr(Path, "unlink", unlink_or_die)
        with pytest.raises(KeyboardInterrupt):
            _build([SPEC], bundle_copy)
    assert len(files_of(bundle_copy)) == 3, "two libraries"
    for specs in ([SPEC], TOY_SPECS[:2]):
        described = _build(specs, bundle_copy)
        assert sorted(files_of(bundle_copy)) == sorted([described.library, manifest.FILE])


def _full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _says(words: str) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise CompileError(f"the tool failed:\n{words}\nmore words")

    return fail


@pytest.mark.parametrize(
    ("place", "name", "step"),
    [
        (scratch.tempfile, "mkdtemp", _full),
        (build, "compile_all", _full),
        (build, "compile_all", _says("LLVM ERROR: IO failure on output stream: No space left on device")),
        (build, "link", _says("ld: final link failed: No space left on device")),
        (build, "link", _says("Disk quota exceeded")),
        (build.manifests.os, "fsync", _full),
        (build.os, "replace", _full),
    ],
    ids=["scratch", "compile", "compiler", "linker", "quota", "sync", "replace"],
)
def test_a_full_disk_is_one_line_and_replaces_nothing(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch, place: object, name: str, step: Callable[..., None]
) -> None:
    before = files_of(bundle_copy)
    monkeypatch.setattr(place, name, step)
    with pytest.raises(OSError, match=f"No space left on device; free some space, or build .*{bundle_copy}") as told:
        _build([SPEC], bundle_copy)
    assert told.value.errno == errno.ENOSPC and "\n" not in str(told.value)
    assert files_of(bundle_copy) == before
    assert [entry.name for entry in bundle_copy.iterdir()] == [ARCH]


def test_a_place_that_others_can_write_is_refused_before_compiling(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "compile_all", lambda *_: pytest.fail("compiled"))
    for folder in (bundle_copy / ARCH, bundle_copy):
        folder.chmod(0o775)
        with pytest.raises(BundleForeign, match=f"others can write {folder} "):
            _build([SPEC], bundle_copy)


def test_what_a_build_makes_does_not_depend_on_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        _build([SPEC], tmp_path / "out")
    finally:
        os.umask(before)
    sources = {"toy_kernels": toolchain.sources_hash("toy_kernels")}
    assert verification.verify(tmp_path / "out" / ARCH, ARCH, sources)


@pytest.mark.parametrize(("command", "why"), [
    ("no-such-compiler -O2", "'no-such-compiler' is not on PATH; install gcc or clang, or set CC"),
    ('gcc "', "CC is 'gcc \"', which is no command .No closing quotation.; set CC to"),
])  # fmt: skip
def test_no_c_compiler_is_said_before_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, why: str
) -> None:
    monkeypatch.setenv("CC", command)
    monkeypatch.setattr(build, "compile_all", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ToolchainError, match=why):
        _build(TOY_SPECS, tmp_path)


def test_a_compiler_of_another_version_is_said_before_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {**toolchain.versions(), toolchain.DSL: "4.8.0"}
    monkeypatch.setattr(toolchain, "versions", lambda: found)
    monkeypatch.setattr(build, "compile_all", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ToolchainError, match="4.8.0 is installed, kernels are compiled with 4.8.1; run `pip install"):
        _build(TOY_SPECS, tmp_path)


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none at all"):
        _build([], tmp_path)
    with pytest.raises(ValueError, match="same name"):
        _build([GroupedMmSpec(), GroupedMmSpec()], tmp_path)
    with pytest.raises(ValueError, match="arch='sm_75' has no kernels; choose one of: sm_90a, sm_100a"):
        profiles.shipped_specs("sm_75")


def test_shipped_specs_are_those_of_the_architectures_table() -> None:
    assert profiles.shipped_specs("sm_90a") == shipped_specs()
    stages = {stage.name for spec in shipped_specs() for stage in stages_of(spec)}
    assert set(profiles.allowed_diagnostics("sm_90a")) <= stages
