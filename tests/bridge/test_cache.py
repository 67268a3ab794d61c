"""What is in the cache of compiled kernels, and what killed processes leave behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import build, cache, jit, loader
from ffi_bridge.worker import Worker
from glulam import cli, preferences
from toys import HERE, REPOSITORY, TOY_SPECS, TOY_TRACER

SPEC, OTHER = GroupedMmSpec("float16"), GroupedMmSpec()
RANKS = 8
RANK = (
    "import sys; sys.modules['torch'] = None\n"  # TVM-FFI would import it: 2 s for nothing here
    "from toys import TOY_TRACER; from cute_kernels.specs import GroupedMmSpec; from ffi_bridge import jit\n"
    "jit.get(GroupedMmSpec('float16'), tracer=TOY_TRACER)"
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache whose keys are those of toy kernels."""
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "traced.log"))
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(loader, "_loaded", {})
    key = cache.cache_key
    monkeypatch.setattr(cache, "cache_key", lambda spec, tracer=TOY_TRACER, *sources: key(spec, tracer, *sources))
    preferences.forget()
    return tmp_path / "cache"


@pytest.fixture
def entry(root: Path) -> Path:
    """The folder of SPEC's kernel, compiled; OTHER's is beside it."""
    with Worker(root.parent, TOY_TRACER) as worker:
        for spec in (OTHER, SPEC):
            jit.get(spec, tracer=TOY_TRACER, worker=worker)
    return root / cache.cache_key(SPEC)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["cache", *arguments])


def _library(entry: Path) -> Path:
    return entry / "sm_90a" / "libglulam_sm_90a.so"


def _states() -> dict[str, str]:
    return {found.name: found.state for found in cache.entries()}


def test_one_worker_serves_several_specs(entry: Path) -> None:
    assert set(_states().values()) == {"sound"} and len(_states()) == 2
    assert {found.spec for found in cache.entries()} == {SPEC, OTHER}
    assert not list(entry.parent.glob(".compile-*"))


def test_entries_tell_what_is_wrong(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _library(entry)
    content = library.read_bytes()
    library.unlink()  # this process has it mapped: another file takes its place
    library.write_bytes(content[:-1])
    assert _states()[entry.name] == "damaged"
    with pytest.warns(RuntimeWarning, match="rebuilding it"):
        monkeypatch.setattr(jit, "_functions", {})
        monkeypatch.setattr(loader, "_loaded", {})
        jit.get(SPEC, tracer=TOY_TRACER)
    assert (_states()[entry.name], _states()[f"{entry.name}.damaged"]) == ("sound", "aside")
    entry.rename(entry.with_name(f"{SPEC.name}-0123456789abcdef"))
    assert _states()[f"{SPEC.name}-0123456789abcdef"] == "outdated"


def test_list_verify_and_clear(entry: Path) -> None:
    preferences.prefer(SPEC, SPEC)
    listed = _run("list")
    assert listed.exit_code == 0 and f"{SPEC.name} " in listed.output and "preferred" in listed.output
    assert _run("verify").exit_code == 0 and "2 sound, 0 outdated, 0 damaged" in _run("verify").output

    _library(entry).unlink()
    verified = _run("verify")
    assert verified.exit_code == 1 and f"damaged: {entry.name}: damaged bundle" in verified.output
    cleared = _run("clear", "--outdated")
    assert "removed 1 kernels" in cleared.output and "0 preferences" in cleared.output
    assert list(_states().values()) == ["sound"]

    assert "removed 0 kernels" in _run("clear", "--preferred").output
    assert list(_states().values()) == ["sound"] and not preferences.stored().specs
    assert "removed 1 kernels" in _run("clear").output and not _states()
    assert _run("list").exit_code == 0


def test_an_entry_in_the_making_is_not_removed(entry: Path) -> None:
    import filelock

    with filelock.FileLock(entry.with_name(f"{entry.name}.lock")):
        cache.clear()
    assert _states() == {entry.name: "sound"}


def test_an_empty_cache(root: Path) -> None:
    assert _run("list").exit_code == _run("verify").exit_code == _run("clear").exit_code == 0
    assert not root.exists()


def test_ranks_that_start_together_compile_once(root: Path) -> None:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "python"), str(HERE), *filter(None, sys.path)])
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
        for _ in range(RANKS)
    ]
    for rank in ranks:
        _, error = rank.communicate(timeout=120)
        assert rank.returncode == 0, error
    assert (root.parent / "traced.log").read_text().splitlines() == [SPEC.name]


def test_a_refused_kernel_is_not_kept(root: Path) -> None:
    with pytest.raises(build.CompileError, match="C7517.*refused"):
        jit.get(SPEC, tracer="toy_kernels:trace_serialised", strict=True)
    assert not [path for path in root.iterdir() if path.suffix != ".lock"]


def test_a_killed_build_is_swept_by_the_next(tmp_path: Path) -> None:
    old, young, attic = (tmp_path / name for name in (".build-old", ".build-young", ".old-old"))
    for folder in (old, young, attic):
        (folder / "objects").mkdir(parents=True)
    for folder in (old, attic):
        for path in (folder / "objects", folder):
            os.utime(path, (0, 0))
    build.build(TOY_SPECS[:1], tmp_path, jobs=1, progress=False, tracer=TOY_TRACER, allowed={})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".build-young", "sm_90a"]
