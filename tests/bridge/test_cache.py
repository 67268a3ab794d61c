"""The cache of compiled kernels: its entries, and files that killed processes leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cute_kernels import stages
from cute_kernels.specs import GroupedMlpSpec, GroupedMmSpec
from ffi_bridge import build, cache, jit, loader, manifest
from ffi_bridge.worker import Worker
from glulam.choose import known
from glulam.command import cli
from toys import HERE, REPOSITORY, TOY_SPECS, TOY_TRACER, library_in, rewrite

SPEC, OTHER, CHAIN = GroupedMmSpec("float16"), GroupedMmSpec(), GroupedMlpSpec()
RANKS = 8
RANK = (
    "import sys; sys.modules['torch'] = None\n"  # TVM-FFI would import it: 2 s for nothing here
    "from toys import TOY_TRACER; from cute_kernels.specs import GroupedMmSpec; from ffi_bridge import jit\n"
    "jit.get(GroupedMmSpec('float16'), tracer=TOY_TRACER)"
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root folder of an empty cache with the toy kernels' keys."""
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "traced.log"))
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(stages, "tracer_of", lambda spec: TOY_TRACER)
    known.forget()
    return tmp_path / "cache"


@pytest.fixture
def entry(root: Path) -> Path:
    """Cache folder of SPEC's compiled kernel; OTHER's kernel is cached beside it."""
    with Worker(root.parent, TOY_TRACER) as worker:
        for spec in (OTHER, SPEC):
            jit.get(spec, tracer=TOY_TRACER, worker=worker)
    return root / cache.cache_key(SPEC, TOY_TRACER)


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["cache", *arguments])


def _library(entry: Path) -> Path:
    return library_in(entry / "sm_90a")


def _states() -> dict[str, str]:
    return {found.name: found.state for found in cache.entries()}


def test_one_worker_serves_several_specs(entry: Path) -> None:
    assert set(_states().values()) == {"sound"} and len(_states()) == 2
    assert {found.spec for found in cache.entries()} == {SPEC, OTHER}
    assert not list(entry.parent.glob(".glulam-compile-*"))


def test_entries_tell_what_is_wrong(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _library(entry)
    rewrite(library, library.read_bytes()[:-1])
    assert _states()[entry.name] == "damaged"
    with pytest.warns(RuntimeWarning, match="rebuilding it"):
        monkeypatch.setattr(jit, "_functions", {})
        monkeypatch.setattr(loader, "_loaded", {})
        jit.get(SPEC, tracer=TOY_TRACER)
    assert (_states()[entry.name], _states()[f"{entry.name}.damaged"]) == ("sound", "aside")
    entry.rename(entry.with_name(f"{SPEC.name}-0123456789abcdef"))
    assert _states()[f"{SPEC.name}-0123456789abcdef"] == "outdated"


def _state_with(entry: Path, functions: dict[str, Any]) -> tuple[str, str]:
    """Rewrite the entry's manifest with these functions; return the state and the problem that the cache reports for
    it.
    """
    file = entry / "sm_90a" / manifest.FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "functions": functions}))
    (found,) = cache.entries()
    return found.state, found.problem


def test_a_chain_that_changed_is_outdated(root: Path) -> None:
    """What belongs to it are the stages that it had when it was made."""
    jit.get(CHAIN, tracer=TOY_TRACER)
    entry = root / cache.cache_key(CHAIN, TOY_TRACER)
    assert _states() == {entry.name: "sound"}
    functions = json.loads((entry / "sm_90a" / manifest.FILE).read_text())["functions"]
    chain, stage = functions[CHAIN.name], functions[CHAIN.fc2.name]
    entry = entry.rename(entry.with_name(f"{CHAIN.name}-0123456789abcdef"))

    more = {**functions, CHAIN.name: {**chain, "stages": [*chain["stages"], "gone"]}, "gone": stage}
    state, problem = _state_with(entry, more)
    assert state == "outdated" and "compiled with other options, versions or sources" in problem
    renamed = {**more, CHAIN.name: {**more[CHAIN.name], "spec": {"op": "gone"}}}
    state, problem = _state_with(entry, renamed)
    assert state == "outdated" and "of a kernel that this Glulam does not have" in problem
    state, problem = _state_with(entry, {**renamed, "another": stage})
    assert state == "damaged" and "holds other functions than its name says" in problem
    assert "removed 1 kernels" in _run("clear", "--outdated").output and not _states()


def test_list_verify_and_clear(entry: Path) -> None:
    known.prefer(SPEC)
    listed = _run("list")
    assert listed.exit_code == 0 and f"{SPEC.name} " in listed.output and "preferred" in listed.output
    assert _run("verify").exit_code == 0 and "2 sound, 0 outdated, 0 damaged" in _run("verify").output

    _library(entry).unlink()
    verified = _run("verify")
    assert verified.exit_code == 1 and f"damaged: {entry.name}: damaged bundle" in verified.output
    assert "; compile it again, or run `glulam cache clear --outdated`\n" in verified.output
    cleared = _run("clear", "--outdated")
    assert "removed 1 kernels" in cleared.output and "0 preferences" in cleared.output
    assert list(_states().values()) == ["sound"]

    assert "removed 0 kernels" in _run("clear", "--preferred").output
    assert list(_states().values()) == ["sound"] and not known.read_preferences().layers
    assert "removed 1 kernels" in _run("clear").output and not _states()
    assert _run("list").exit_code == 0


def test_an_entry_in_the_making_is_not_removed(entry: Path) -> None:
    import filelock

    with filelock.FileLock(cache.lock_of(entry.parent, entry.name)):
        cache.clear()
    assert _states() == {entry.name: "sound"}


def test_what_was_not_removed_is_not_reported(entry: Path) -> None:
    import filelock

    with filelock.FileLock(cache.lock_of(entry.parent, entry.name)):
        assert [found.spec for found in cache.clear()] == [OTHER]
        assert "removed 0 kernels" in _run("clear").output


def _others_files(root: Path) -> set[Path]:
    """Create a user's own files beside and inside cache folders, and links to a folder elsewhere. Return every file and
    link target, none of which cleaning may remove.
    """
    key = f"{SPEC.name}-{'0' * 15}"
    thesis = root.parent / "thesis"
    (thesis / "sm_90a").mkdir(parents=True)
    files = [
        root / "my-thesis" / "chapter",
        root / "data-2024" / "manifest.json",
        root / "notes-0123456789abcdef" / "sm_90a" / "manifest.json",
        root / f"{key}A" / "sm_90a" / "manifest.json",  # no such digit
        root / f"{key}0" / "notes",
        root / f"{key}1" / "sm_90a" / "notes",
        root / f"{key}2" / "sm_90a" / "objects" / "manifest.json",
        root / f"{key}3" / "sm_100a" / "manifest.json",
        root / f"{key}4",
        root / ".compile-theirs" / "notes",
        root / ".glulam-compile-theirs" / "notes",
        thesis / "manifest.json",
        thesis / "sm_90a" / "manifest.json",
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("years of work")
    for inner in (f"{key}5", f"{key}6.damaged"):
        (root / inner / "sm_90a").mkdir(parents=True)
        (root / inner / "sm_90a" / "manifest.json").symlink_to(thesis / "manifest.json")
    (root / f"{key}7").mkdir()
    (root / f"{key}7" / "sm_90a").symlink_to(thesis / "sm_90a")
    (root / f"{key}8").symlink_to(thesis)
    for folder in [root, *root.iterdir()]:
        if folder.name.startswith((".compile-", ".glulam-compile-")):
            os.utime(folder, (0, 0))
    return {path for path in root.parent.rglob("*") if "theirs" in path.name or path in files or path.is_symlink()}


def test_clear_removes_kernels_and_nothing_else(entry: Path) -> None:
    others = _others_files(entry.parent)
    assert len(others) > 15
    assert {found.spec for found in cache.entries()} == {SPEC, OTHER}
    assert "2 kernels in" in _run("verify").output
    assert "removed 2 kernels" in _run("clear").output
    assert not entry.exists() and all(os.path.lexists(path) for path in others)


def test_a_folder_that_glulam_did_not_make_is_not_taken_for_a_cache(root: Path) -> None:
    """Its own kernels are told by their manifests; what only looks like half of one is somebody's."""
    (root / f"{SPEC.name}-{'0' * 16}" / "sm_90a").mkdir(parents=True)
    (root / "notes").touch()
    assert not list(cache.entries()) and not cache.clear()
    jit.get(SPEC, tracer=TOY_TRACER)
    assert not (root / cache.MARKER).exists()
    assert [found.spec for found in cache.clear()] == [SPEC]
    assert (root / f"{SPEC.name}-{'0' * 16}" / "sm_90a").is_dir()


def test_a_cache_of_an_earlier_version_is_adopted(entry: Path) -> None:
    (entry.parent / cache.MARKER).unlink()
    (entry.parent / "preferred").mkdir()
    assert {found.spec for found in cache.entries()} == {SPEC, OTHER}
    cache.make_root(entry.parent)
    assert (entry.parent / cache.MARKER).is_file()


def test_an_entry_that_cannot_be_read_is_one_line(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = Path.iterdir

    def refuse(folder: Path) -> object:
        if folder == entry:
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    verified = _run("verify")
    assert verified.exit_code == 1 and f"damaged: {entry.name}: cannot be read (Permission denied)" in verified.output
    assert _run("list").exit_code == 0
    cleared = _run("clear").output
    assert "removed 1 kernels" in cleared and f"kernel cache: {entry} stays (Permission denied)" in cleared


def test_a_cache_that_cannot_be_read_is_one_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> object:
        raise PermissionError(13, "Permission denied")

    root.mkdir()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.warns(RuntimeWarning, match=rf"{root} cannot be read \(Permission denied\); set GLULAM_CACHE_DIR"):
        assert not list(cache.entries())


def test_an_entry_put_aside_is_cleared_under_the_lock_of_its_key(entry: Path) -> None:
    entry.rename(entry.with_name(f"{entry.name}.damaged"))
    assert sorted(found.state for found in cache.clear(states=("aside",))) == ["aside"]
    locks = set(entry.parent.glob("*.lock"))
    assert locks == {cache.lock_of(entry.parent, cache.cache_key(spec, TOY_TRACER)) for spec in (SPEC, OTHER)}


def test_a_folder_in_an_entrys_place_is_not_removed(root: Path) -> None:
    """What a compile finds in the place of its kernel is put aside or left, never removed unless it is an entry's."""
    key = root / cache.cache_key(SPEC, TOY_TRACER)
    key.mkdir(parents=True)
    (key / "chapter").write_text("years of work")
    with pytest.warns(RuntimeWarning, match="it holds other things than a kernel.*for this process alone"):
        assert callable(jit.get(SPEC, tracer=TOY_TRACER))
    assert (key / "chapter").read_text() == "years of work"


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
    assert not list(cache.entries())


def test_a_killed_build_is_swept_by_the_next(tmp_path: Path) -> None:
    """Its folder is told by name and marker; folders of others stay, however old and whatever they are called."""
    names = (".glulam-build-old", ".glulam-build-young", ".glulam-build-another's", ".build-theirs", ".old-theirs")
    old, young, unmarked, *theirs = (tmp_path / name for name in names)
    for folder in (old, young, unmarked, *theirs):
        (folder / "objects").mkdir(parents=True)
    for folder in (old, young, *theirs):
        (folder / ".glulam-scratch").touch()
    link = tmp_path / ".glulam-build-link"
    link.symlink_to(theirs[0])
    for folder in (old, unmarked, *theirs):
        for path in (folder / "objects", folder):
            os.utime(path, (0, 0))
    build.build(TOY_SPECS[:1], tmp_path, jobs=1, progress=False, tracer=TOY_TRACER, allowed={})
    assert {path.name for path in tmp_path.iterdir()} == {*names, link.name, "sm_90a"} - {old.name}
    assert all((folder / "objects").is_dir() for folder in (young, unmarked, *theirs))
