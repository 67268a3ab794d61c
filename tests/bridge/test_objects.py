"""The store of compiled objects, addressed by content: each compiled once, stored as soon as it is compiled, and
checked before linking.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cute_kernels import stages
from cute_kernels.specs import GroupedMmSpec, Spec
from ffi_bridge import BundleForeign, CompileError, build, cache, jit, loader, manifest, objects, sources
from ffi_bridge.compiler import KernelArtifact
from glulam.command import cli
from toys import HERE, MANY_SPECS, REPOSITORY, TOY_SPECS, TOY_TRACER, files_of, object_key, wait_until

ARCH = "sm_90a"
SPEC = TOY_SPECS[0]
OTHER = GroupedMmSpec("float16")
STRANGER = 54321


def _names(specs: list[Spec]) -> list[str]:
    return [spec.name for spec in specs]


def _build(specs: list[Spec], out: Path, tracer: str | None = TOY_TRACER) -> dict[str, bytes]:
    """Build a bundle with one compile process; return every file of it, by name."""
    build.build(specs, out, jobs=1, progress=False, tracer=tracer, allowed={})
    return files_of(out)


def _entry(root: Path, spec: Spec = SPEC) -> Path:
    return root / "objects" / object_key(spec)


def _object(root: Path, spec: Spec = SPEC) -> Path:
    return _entry(root, spec) / ARCH / "glulam_sm_90a.o"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root folder of an empty cache."""
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(loader, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture
def log(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line for each traced spec, in any process."""
    monkeypatch.setenv("TOY_LOG", str(root.with_name("traced.log")))
    return root.with_name("traced.log")


def _traced(log: Path) -> list[str]:
    """Return the names of specs traced since the last call."""
    names = log.read_text().split() if log.exists() else []
    log.unlink(missing_ok=True)
    return names


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the objects of TOY_SPECS. Shared by tests, which must not change it: use `stored` for that."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.ENV_CACHE, str(folder / "cache"))
        _build(TOY_SPECS, folder / "out")
    return folder / "cache"


@pytest.fixture
def stored(root: Path, made: Path) -> Path:
    """Root folder of the test's own cache with the objects of TOY_SPECS."""
    return shutil.copytree(made, root)


class Copier:
    """Stand-in for a compile process: copies objects of `made`, and records the names of the requested ones."""

    def __init__(self, made: Path, names: list[str], tracer: str | None) -> None:
        self._made, self._names = made, names
        self.sources = sources.of(sources.package_of(tracer))

    def __enter__(self) -> Copier:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def compile(self, spec: Spec, into: Path) -> KernelArtifact:
        self._names.append(spec.name)
        if spec not in TOY_SPECS:
            raise CompileError("nothing to copy")
        kernels = manifest.read(_entry(self._made, spec) / ARCH).functions[spec.name].kernels
        return KernelArtifact(spec.name, shutil.copy(_object(self._made, spec), into / f"{spec.name}.o"), kernels)


@pytest.fixture
def copied(root: Path, made: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace compile processes by `Copier`s; names of the specs that builds and the JIT had compiled."""
    names: list[str] = []
    for module in (build, jit):
        monkeypatch.setattr(module, "Worker", lambda directory, tracer=None, **_: Copier(made, names, tracer))
    return names


def _process(specs: str, out: Path, **environment: str) -> subprocess.Popen[str]:
    """Start another process that builds `specs`, a Python expression, in folder `out`."""
    script = (
        "import sys; from ffi_bridge import build; from toys import MANY_SPECS, TOY_SPECS, TOY_TRACER\n"
        f"build.build({specs}, sys.argv[1], jobs=1, progress=False, tracer=TOY_TRACER, allowed={{}})"
    )
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "python"), str(HERE), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", script, str(out)],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_for(process: subprocess.Popen[str]) -> None:
    _, error = process.communicate(timeout=240)
    assert process.returncode == 0, error


def test_a_second_build_compiles_nothing_and_makes_the_same_bytes(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _build(TOY_SPECS, tmp_path / "first")
    assert _traced(log) == _names(TOY_SPECS)
    monkeypatch.setattr(build, "Worker", lambda *_, **__: pytest.fail("started a compile process"))
    assert _build(TOY_SPECS[::-1], tmp_path / "second") == first


KINDS = {
    "__init__.py": "",
    "stages.py": (
        "FORMULAS, READS_FORMULAS = 'kinds.formulas', 'kinds.activation'\n"
        "def tracer_of(spec):\n    return f'kinds.{spec.op}:trace'\n"
        "def formulas_of(spec):\n    return ()\n"
    ),
    "shared.py": "import os\nfrom pathlib import Path\nfrom toy_kernels import trace\n",
    "grouped_mm.py": (
        "from .shared import Path, os, trace as trace_toy\n"
        "def trace(spec):\n"
        "    if edit := os.environ.get('EDIT'):\n"
        "        Path(__file__).with_name(edit).write_text('x = 1\\n')\n"
        "    return trace_toy(spec)\n"
    ),
    "epilogue.py": "",
    "grouped_glu.py": (
        "def trace(spec):\n    from . import epilogue\n    from .shared import trace\n    return trace(spec)\n"
    ),
    "grouped_wgrad.py": "from toy_kernels import trace\n",
}


@pytest.fixture
def kinds(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-in for the kernels' package, with one module per operator that traces it and logs its own name."""
    folder = tmp_path / "packages" / "kinds"
    folder.mkdir(parents=True)
    for name, content in KINDS.items():
        (folder / name).write_text(content)
    monkeypatch.syspath_prepend(folder.parent)
    for name in ("kinds", "kinds.stages"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sources, "stages", importlib.import_module("kinds.stages"))
    return folder


def _edit(file: Path, line: str = "edited = True") -> None:
    file.write_text(f"{file.read_text()}{line}\n")


def test_an_edit_compiles_what_can_reach_it(kinds: Path, tmp_path: Path, copied: list[str]) -> None:
    mm, glu, mlp = _names(TOY_SPECS)
    _build(TOY_SPECS, tmp_path / "out", None)
    assert copied == [mm, glu, mlp]
    edits = {"epilogue.py": [glu], "shared.py": [glu, mm], "grouped_wgrad.py": [mlp], "stages.py": []}
    for edited, reached in edits.items():
        copied.clear()
        _edit(kinds / edited)
        _build(TOY_SPECS, tmp_path / "out", None)
        assert sorted(copied) == sorted(reached), edited
    copied.clear()
    for name, content in KINDS.items():
        (kinds / name).write_text(content)
    _build(TOY_SPECS, tmp_path / "out", None)
    assert not copied, "the objects from before the edits"


def test_comments_and_docstrings_compile_nothing(kinds: Path, tmp_path: Path, copied: list[str]) -> None:
    before = _build(TOY_SPECS, tmp_path / "out", None)
    copied.clear()
    for name in KINDS:
        _edit(kinds / name, "# a comment")
    (kinds / "shared.py").write_text('"""A docstring."""\n\n' + KINDS["shared.py"].replace("import os", "import  os"))
    assert _build(TOY_SPECS, tmp_path / "out", None).keys() == before.keys()
    assert not copied


def test_what_is_edited_while_it_is_compiled_is_not_kept(
    kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can say which of the two versions the compile process read."""
    monkeypatch.setenv("EDIT", "epilogue.py")
    assert _build([SPEC], tmp_path / "out", None), "no file of its own"
    monkeypatch.setenv("EDIT", "shared.py")
    with pytest.raises(
        CompileError, match=f"{OTHER.name}: its sources were edited while it was compiled; run this again"
    ):
        _build([OTHER], tmp_path / "out", None)
    assert [found.name.rpartition("-")[0] for found in objects.entries()] == [SPEC.name]


def test_a_compile_process_that_began_before_an_edit_serves_no_more(kinds: Path, made: Path) -> None:
    worker: Any = Copier(made, [], None)
    _edit(kinds / "grouped_wgrad.py")
    assert callable(jit.get(SPEC, worker=worker))
    with pytest.raises(CompileError, match="its sources were edited"):
        jit.get(TOY_SPECS[2], worker=worker)


def test_an_interrupted_build_goes_on_where_it_was(root: Path, log: Path, tmp_path: Path, toy_bundle: Path) -> None:
    last = TOY_SPECS[2]
    victim = _process("TOY_SPECS", tmp_path / "out", TOY_HANG=last.name)
    wait_until(lambda: log.exists() and last.name in log.read_text())
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=60)
    assert _traced(log) == _names(TOY_SPECS) and not (tmp_path / "out" / ARCH).exists()
    assert [_object(root, spec).exists() for spec in TOY_SPECS] == [True, True, False]
    assert _build(TOY_SPECS, tmp_path / "out") == files_of(toy_bundle)
    assert _traced(log) == [last.name]


def test_a_failure_keeps_what_was_compiled_before_it(tmp_path: Path, copied: list[str]) -> None:
    with pytest.raises(CompileError, match="nothing to copy"):
        _build([SPEC, OTHER], tmp_path / "out")
    copied.clear()
    _build(TOY_SPECS[:2], tmp_path / "out")
    assert copied == _names(TOY_SPECS[1:2])


def test_builds_at_once_compile_each_object_once(log: Path, tmp_path: Path) -> None:
    out = [tmp_path / "first", tmp_path / "second"]
    processes = [_process(specs, folder) for specs, folder in zip(("MANY_SPECS", "MANY_SPECS[::-1]"), out, strict=True)]
    for process in processes:
        _wait_for(process)
    assert sorted(_traced(log)) == sorted(_names(MANY_SPECS))
    assert files_of(out[0]) == files_of(out[1])


def test_a_build_does_what_it_can_while_another_compiles(log: Path, tmp_path: Path) -> None:
    hanging = _process("TOY_SPECS[:1]", tmp_path / "first", TOY_HANG=SPEC.name)
    try:
        wait_until(log.exists)
        second = _process("TOY_SPECS", tmp_path / "second")
        wait_until(lambda: len(list(objects.entries())) == 2 or second.poll() is not None)
        assert second.poll() is None, "it waits for the last"
    finally:
        hanging.kill()
        hanging.communicate()
    _wait_for(second)
    assert _traced(log) == _names([SPEC, *TOY_SPECS[1:], SPEC]), "what the other left undone is compiled"


def test_the_jit_links_what_a_build_compiled(tmp_path: Path, copied: list[str]) -> None:
    _build(TOY_SPECS, tmp_path / "out")
    copied.clear()
    assert callable(jit.get(SPEC, tracer=TOY_TRACER)) and not copied


def test_a_build_links_what_the_jit_compiled(tmp_path: Path, copied: list[str]) -> None:
    jit.get(SPEC, tracer=TOY_TRACER)
    assert copied == [SPEC.name]
    _build(TOY_SPECS, tmp_path / "out")
    assert copied == _names(TOY_SPECS)


def test_a_refused_kernel_is_refused_again_without_compiling(log: Path, tmp_path: Path) -> None:
    for compiled in ([SPEC.name], []):
        with pytest.raises(CompileError, match=f"{SPEC.name}: spills"):
            _build([SPEC], tmp_path / "out", "toy_kernels:trace_spilling")
        assert _traced(log) == compiled


def _flip(root: Path) -> None:
    content = bytearray(_object(root).read_bytes())
    content[len(content) // 2] ^= 1
    _object(root).write_bytes(content)


def _describe(root: Path, **changes: object) -> None:
    file = _entry(root) / ARCH / manifest.FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def _lead_elsewhere(root: Path) -> None:
    _object(root).rename(root / "elsewhere.o")
    _object(root).symlink_to(root / "elsewhere.o")


def _replace_by_a_fifo(root: Path) -> None:
    _object(root).unlink()
    os.mkfifo(_object(root))


def _replace_by_anothers(root: Path) -> None:
    shutil.rmtree(_entry(root))
    _entry(root, TOY_SPECS[1]).rename(_entry(root))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": _flip,
    "cut off": lambda root: os.truncate(_object(root), 100),
    "no object": lambda root: _object(root).unlink(),
    "no manifest": lambda root: (_entry(root) / ARCH / manifest.FILE).unlink(),
    "no folder": lambda root: shutil.rmtree(_entry(root) / ARCH),
    "a library's name": lambda root: _describe(root, library="libglulam_sm_90a.so"),
    "a way out": lambda root: _describe(root, library="../../../../thesis"),
    "other sources": lambda root: _describe(root, sources={"this": "0" * 64}),
    "no kernels": lambda root: _describe(root, functions={}),
    "deep": lambda root: (_entry(root) / ARCH / manifest.FILE).write_text("[" * 100_000),
    "another's": _replace_by_anothers,
    "object that others write": lambda root: _object(root).chmod(0o666),
    "folder that others write": lambda root: _entry(root).chmod(0o777),
    "link": _lead_elsewhere,
    "fifo": _replace_by_a_fifo,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_sound_is_not_linked(
    stored: Path, tmp_path: Path, toy_bundle: Path, copied: list[str], damage: str
) -> None:
    """Nor left, unless somebody put other things than an object's there."""
    (tmp_path / "thesis").write_text("years of work")
    DAMAGES[damage](stored)
    stays = damage in ("link", "fifo")
    with contextlib.ExitStack() as stack:
        if stays:
            told = f"objects are not kept in {stored}/objects .it holds other things than a kernel"
            stack.enter_context(pytest.warns(RuntimeWarning, match=told))
        assert _build(TOY_SPECS, tmp_path / "out") == files_of(toy_bundle)
    assert SPEC.name in copied
    assert (objects.Store(TOY_TRACER).take(SPEC, tmp_path) is None) == stays
    assert (tmp_path / "thesis").read_text() == "years of work"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("part", ["", ARCH, f"{ARCH}/manifest.json", f"{ARCH}/glulam_sm_90a.o"])
def test_another_users_object_is_not_linked(
    stored: Path, tmp_path: Path, toy_bundle: Path, copied: list[str], part: str
) -> None:
    os.chown(_entry(stored) / part, STRANGER, STRANGER)
    with contextlib.ExitStack() as stack:
        if not part:
            stack.enter_context(pytest.warns(RuntimeWarning, match="not kept .*it belongs to another user"))
        assert _build(TOY_SPECS, tmp_path / "out") == files_of(toy_bundle)
    assert copied == [SPEC.name]
    assert _entry(stored).stat().st_uid == (0 if part else STRANGER), "what is another's stays"


def _fail(error: Exception) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


@pytest.mark.parametrize("hindrance", ["a file in the way", "a full disk", "no locks"])
def test_a_cache_that_cannot_be_used_costs_one_warning(
    root: Path, tmp_path: Path, toy_bundle: Path, copied: list[str], monkeypatch: pytest.MonkeyPatch, hindrance: str
) -> None:
    if hindrance == "a file in the way":
        root.write_text("in the way")
    elif hindrance == "a full disk":
        monkeypatch.setattr(objects, "private_scratch", _fail(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
    else:
        monkeypatch.setattr(cache, "exclusive", _fail(NotImplementedError("no locks here")))
    with pytest.warns(RuntimeWarning, match=f"objects are not kept in {root}/objects.* set {cache.ENV_CACHE}") as told:
        assert _build(TOY_SPECS, tmp_path / "out") == files_of(toy_bundle)
    assert len(told) == 1 and copied == _names(TOY_SPECS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it likes")
def test_a_read_only_cache_is_read(stored: Path, tmp_path: Path, copied: list[str]) -> None:
    for folder in (stored / "objects", stored):
        folder.chmod(0o555)
    try:
        _build(TOY_SPECS, tmp_path / "out")
    finally:
        for folder in (stored, stored / "objects"):
            folder.chmod(0o755)
    assert not copied


@pytest.mark.usefixtures("copied")
def test_a_shared_cache_shares_its_objects_folder(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    root.chmod(0o1777)
    _build([SPEC], tmp_path / "out")
    assert (root / "objects").stat().st_mode & 0o7777 == 0o1777
    assert _entry(root).stat().st_mode & 0o022 == 0


def test_objects_do_not_depend_on_the_umask(tmp_path: Path, copied: list[str]) -> None:
    before = os.umask(0o002)
    try:
        for out in ("out", "again"):
            _build([SPEC], tmp_path / out)
    finally:
        os.umask(before)
    assert copied == [SPEC.name]


def _age(entry: Path, days: float) -> None:
    then = time.time() - days * 86400
    os.utime(entry, (then, then))


def test_what_no_build_uses_is_removed_in_the_end(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept() -> list[Spec]:
        return [spec for spec in TOY_SPECS if _entry(stored, spec).exists()]

    used, unused, young = TOY_SPECS
    thesis = stored / "objects" / "thesis"
    thesis.mkdir()
    for path, days in ((_entry(stored), 40), (_entry(stored, unused), 31), (_entry(stored, young), 29), (thesis, 99)):
        _age(path, days)
    _build([used], tmp_path / "out")
    assert kept() == [used, young], "what a build took is used"
    monkeypatch.setattr(objects, "MAX_BYTES", _object(stored, used).stat().st_size)
    _build([used], tmp_path / "out")
    assert kept() == [used] and thesis.is_dir()


def test_what_a_process_works_on_is_not_removed(stored: Path, tmp_path: Path) -> None:
    _age(_entry(stored), 31)
    with objects.Store(TOY_TRACER).alone(SPEC):
        _build(TOY_SPECS[1:], tmp_path / "out")
    assert _entry(stored).exists()


def test_long_compiles_come_first(stored: Path) -> None:
    sizes = {spec: _object(stored, spec).stat().st_size for spec in TOY_SPECS}
    longest = sorted(TOY_SPECS, key=lambda spec: -sizes[spec])
    assert objects.Store(TOY_TRACER).longest_first([*TOY_SPECS, OTHER]) == [OTHER, *longest]


def test_the_command_counts_and_clears_objects(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*arguments: str) -> str:
        return CliRunner().invoke(cli.app, ["cache", *arguments]).output

    monkeypatch.setattr(stages, "tracer_of", lambda spec: TOY_TRACER)
    outdated, damaged, sound = TOY_SPECS
    _entry(stored, outdated).rename(_entry(stored).with_name(f"{outdated.name}-{'0' * 16}"))
    os.truncate(_object(stored, damaged), 100)
    for command in ("list", "verify"):
        assert f"3 objects for builds in {stored}/objects (0.0 MB): 1 sound, 1 outdated, 1 damaged" in run(command)
    assert sound.name not in run("list"), "they are not listed one by one"
    assert f"damaged: {_entry(stored, damaged).name}: damaged bundle" in run("verify")
    assert "outdated: " not in run("verify")
    assert "removed 0 kernels (0 KB), 0 preferences, 2 objects" in run("clear", "--outdated")
    assert [found.spec for found in objects.entries()] == [sound]
    assert ", 0 objects" in run("clear", "--preferred") and ", 1 objects" in run("clear")
    assert not list(objects.entries())


def test_an_object_is_no_kernel_to_load(stored: Path) -> None:
    with pytest.raises(BundleForeign, match="no library of sm_90a"):
        cache.load(_entry(stored), SPEC, TOY_TRACER)
