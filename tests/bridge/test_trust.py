"""Trusted bundles: owned by this user or root, writable by nobody else; and no file is opened twice."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cute_kernels import stages
from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import BundleDamaged, BundleForeign, cache, jit, load, loader, manifest, toolchain, verification
from glulam.command import cli
from toys import TOY_SPECS, TOY_TRACER, library_in, rewrite

ARCH = "sm_90a"
SPEC = GroupedMmSpec("float16")
STRANGER = 54321

# Runs when it is loaded, as a constructor would.
TELLTALE = "static void __attribute__((constructor)) ran(void) { __builtin_trap(); } int other; "


@pytest.fixture
def strange(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes files belong to another user: by chown as root, else by faking this process' user
    id.
    """

    def give_away(*paths: Path) -> None:
        if os.geteuid():
            monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
        else:
            for path in paths:
                os.chown(path, STRANGER, STRANGER)

    return give_away


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with SPEC's kernel. Shared by tests, which must not change it: use `entry` for that."""
    root = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.ENV_CACHE, str(root))
        for module, known in ((jit, "_functions"), (loader, "_loaded")):
            patch.setattr(module, known, {})
        jit.get(SPEC, tracer=TOY_TRACER)
    return root


@pytest.fixture
def entry(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of SPEC's kernel in the test's own cache."""
    monkeypatch.setenv(cache.ENV_CACHE, str(shutil.copytree(made, tmp_path / "cache")))
    monkeypatch.setattr(stages, "tracer_of", lambda spec: TOY_TRACER)
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(loader, "_loaded", {})
    return tmp_path / "cache" / cache.cache_key(SPEC, TOY_TRACER)


@pytest.fixture
def sealed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if any library is loaded, after the fixtures it uses are made."""
    for needed in {"entry", "bundle_copy"} & set(request.fixturenames):
        request.getfixturevalue(needed)
    monkeypatch.setattr(loader, "_open_library", lambda path, needs: pytest.fail(f"executed {path}"))


def _part(folder: Path, part: str) -> Path:
    """Return the path of a part of the bundle in `folder`/<arch>: "root", "arch", "manifest" or "library"."""
    inner = folder / ARCH
    return {"root": folder, "arch": inner, "manifest": inner / manifest.FILE, "library": library_in(inner)}[part]


def _edit(folder: Path, **changes: Any) -> None:
    file = folder / ARCH / manifest.FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


PARTS = ["root", "arch", "manifest", "library"]


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_what_others_can_write_is_not_loaded(bundle_copy: Path, part: str, mode: int) -> None:
    path = _part(bundle_copy, part)
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(BundleForeign, match=rf"others can write {path} \(mode 0\d\d\d\); run `chmod go-w`"):
        load(ARCH, bundle_copy)
    with pytest.raises(BundleForeign):
        verification.verify(bundle_copy / ARCH, ARCH)


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("part", PARTS)
def test_another_users_bundle_is_not_loaded(bundle_copy: Path, part: str, strange: Callable[..., None]) -> None:
    strange(_part(bundle_copy, part))
    with pytest.raises(BundleForeign, match=r"belongs to uid \d+, neither to this user \(uid \d+\) nor to root; run"):
        load(ARCH, bundle_copy)


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("part", ["arch", "manifest", "library"])
def test_a_symbolic_link_is_not_followed(bundle_copy: Path, tmp_path: Path, part: str) -> None:
    path = _part(bundle_copy, part)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleDamaged, match="cannot be read"):
        load(ARCH, bundle_copy)


def test_the_folder_that_a_user_names_may_be_a_link(bundle_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "current").symlink_to(bundle_copy)
    assert load(ARCH, tmp_path / "current").names()


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("part", ["manifest", "library"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["fifo", "folder"])
def test_what_is_no_file_is_not_waited_for(bundle_copy: Path, part: str, make: Callable[[Path], None]) -> None:
    path = _part(bundle_copy, part)
    path.unlink()
    make(path)
    with pytest.raises(BundleDamaged, match=rf"{path} cannot be read \(.*is no regular file\)"):
        load(ARCH, bundle_copy)


@pytest.fixture
def packaged(bundle_copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a package `glulam` that contains a bundle."""
    package = tmp_path / "site" / "glulam"
    package.mkdir(parents=True)
    bundle_copy.rename(package / "_bundle")
    find = toolchain.package_folders
    monkeypatch.setattr(toolchain, "package_folders", lambda name: [package] if name == "glulam" else find(name))
    monkeypatch.delenv(loader.ENV_BUNDLE, raising=False)
    return package


def test_a_packaged_bundle_is_as_good_as_the_python_files_beside_it(
    packaged: Path, strange: Callable[..., None]
) -> None:
    """Containers often run as root over a checkout of another user, and a umask of 002 is common."""
    strange(packaged, *packaged.rglob("*"))
    for path in (packaged, packaged / "_bundle", packaged / "_bundle" / ARCH):
        path.chmod(0o775)
    assert load(ARCH).names()


@pytest.mark.usefixtures("sealed")
def test_a_packaged_bundle_is_no_better_than_the_python_files(packaged: Path, strange: Callable[..., None]) -> None:
    packaged.chmod(0o755)
    (packaged / "_bundle" / ARCH).chmod(0o777)
    with pytest.raises(BundleForeign, match="others can write"):
        load(ARCH)
    (packaged / "_bundle" / ARCH).chmod(0o755)
    if os.geteuid() == 0:  # else there is nobody to give it to
        strange(library_in(packaged / "_bundle" / ARCH))
        with pytest.raises(BundleForeign, match="belongs to uid"):
            load(ARCH)


def _planted(entry: Path, tmp_path: Path, **changes: Any) -> None:
    """Put an attacker's library into an entry, with a manifest that describes it and has these changes."""
    (tmp_path / "telltale.c").write_text(TELLTALE)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", "telltale.so", "telltale.c"], cwd=tmp_path, check=True)
    content = (tmp_path / "telltale.so").read_bytes()
    rewrite(library_in(entry / ARCH), content)
    _edit(entry, sha256=hashlib.sha256(content).hexdigest(), size=len(content), **changes)


@pytest.mark.parametrize("part", ["root", "arch", "manifest", "library"])
@pytest.mark.parametrize("has_marker", [True, False])
def test_verify_says_why_a_foreign_entry_is_not_loaded(
    entry: Path, strange: Callable[..., None], part: str, has_marker: bool
) -> None:
    if not has_marker:
        (entry.parent / cache.MARKER).unlink()
    strange(_part(entry, part))
    told = CliRunner().invoke(cli.app, ["cache", "verify"])
    line = next(line for line in told.output.splitlines() if line.startswith(f"damaged: {entry.name}: "))
    assert told.exit_code == 1 and "belongs to uid" in line


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_clear_leaves_a_foreign_entry(entry: Path, strange: Callable[..., None]) -> None:
    (entry.parent / cache.MARKER).unlink()
    strange(entry)
    told = CliRunner().invoke(cli.app, ["cache", "clear"])
    assert "removed 0 kernels" in told.output and f"{entry} stays (it belongs to another user)" in told.output
    assert library_in(entry / ARCH).exists()


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize("part", PARTS)
def test_a_planted_entry_is_neither_loaded_nor_called_sound(
    entry: Path, tmp_path: Path, part: str, strange: Callable[..., None]
) -> None:
    _planted(entry, tmp_path)
    assert [found.state for found in cache.entries()] == ["damaged"], "it has no function of the kernel's name"
    strange(_part(entry, part))
    assert cache.find(SPEC, TOY_TRACER) is None
    (found,) = cache.entries()
    assert found.state == "damaged" and "belongs to uid" in found.problem


@pytest.mark.usefixtures("sealed")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"versions": {}}, "has versions of nothing instead of apache-tvm-ffi, glulam, nvidia-cutlass-dsl"),
        ({"sources": {}}, "has sources of nothing instead of ffi_bridge.compiler, toy_kernels.trace"),
        (
            {"sources": {"antigravity": "0" * 64}},
            "has sources of antigravity instead of ffi_bridge.compiler, toy_kernels.trace",
        ),
        ({"functions": {}}, "describes other functions"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_entry_names_all_that_it_is_made_of(
    entry: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    _planted(entry, tmp_path, **changes)
    assert cache.find(SPEC, TOY_TRACER) is None
    with pytest.raises(BundleDamaged, match=words):
        verification.verify(entry / ARCH, ARCH, cache.sources_of(SPEC, TOY_TRACER), SPEC)
    assert [found.state for found in cache.entries()] == ["damaged"]


@pytest.mark.usefixtures("sealed")
def test_an_entry_under_another_entrys_name_is_not_loaded(entry: Path) -> None:
    """Where others can write the cache's folder, they can rename what lies in it."""
    other = GroupedMmSpec()
    entry.rename(entry.with_name(cache.cache_key(other, TOY_TRACER)))
    assert cache.find(other, TOY_TRACER) is None
    assert [found.state for found in cache.entries()] == ["damaged"]
    entry.with_name(cache.cache_key(other, TOY_TRACER)).rename(entry.with_name(f"{SPEC.name}-{'0' * 16}"))
    assert [found.state for found in cache.entries()] == ["outdated"]


def test_a_linked_entry_is_neither_counted_nor_removed(entry: Path, tmp_path: Path) -> None:
    """Nor written: it serves, since what it leads to passes every check."""
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert not list(cache.entries()) and not cache.clear()
    assert library_in(tmp_path / "elsewhere" / ARCH) and entry.is_symlink()
    assert cache.find(SPEC, TOY_TRACER) is not None
    (tmp_path / "elsewhere").chmod(0o777)
    loader._loaded.clear()
    assert cache.find(SPEC, TOY_TRACER) is None


def test_the_root_of_a_cache_may_be_shared(entry: Path) -> None:
    entry.parent.chmod(0o1777)
    assert cache.find(SPEC, TOY_TRACER) is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_entry_is_left_and_the_kernel_serves_one_process(
    entry: Path, strange: Callable[..., None]
) -> None:
    strange(entry)
    before = library_in(entry / ARCH).stat()
    with pytest.warns(RuntimeWarning, match=r"cannot be used .*belongs to uid .*for this process alone"):
        assert callable(jit.get(SPEC, tracer=TOY_TRACER))
    assert library_in(entry / ARCH).stat() == before


def test_an_entry_that_others_could_write_is_made_anew(entry: Path) -> None:
    (entry / ARCH).chmod(0o777)
    with pytest.warns(RuntimeWarning, match=r"others can write .*rebuilding it"):
        jit.get(SPEC, tracer=TOY_TRACER)
    assert sorted(found.state for found in cache.entries()) == ["aside", "sound"]


def test_entries_do_not_depend_on_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path))
    monkeypatch.setattr(jit, "_functions", {})
    before = os.umask(0o002)
    try:
        jit.get(SPEC, tracer=TOY_TRACER)
    finally:
        os.umask(before)
    assert cache.find(SPEC, TOY_TRACER) is not None


def test_a_lock_that_leads_elsewhere_is_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases of filelock empty the file that they open."""
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_functions", {})
    thesis = tmp_path / "thesis"
    thesis.write_text("years")
    (tmp_path / "cache").mkdir()
    for place in (os.symlink, os.link):
        lock = cache.lock_of(tmp_path / "cache", cache.cache_key(SPEC, TOY_TRACER))
        place(thesis, lock)
        with pytest.warns(RuntimeWarning, match="is no plain file; remove it"):
            jit.get(SPEC, tracer=TOY_TRACER)
        assert thesis.read_text() == "years"
        lock.unlink()
        monkeypatch.setattr(jit, "_functions", {})


def test_a_manifest_names_no_package_that_is_imported(bundle_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To find a submodule, Python imports what it is in: `this` prints the Zen of Python."""
    sys.modules.pop("this", None)
    for sources in ({"this.x": "0" * 64}, {"toy_kernels": "0" * 64, "this.x": "0" * 64}):
        _edit(bundle_copy, sources=sources)
        with pytest.raises(BundleDamaged, match=r"has sources of .*this\.x"):
            load(ARCH, bundle_copy)
    assert "this" not in sys.modules


def test_the_bytes_that_were_hashed_are_those_that_run(bundle_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that takes the library's place after the check is not loaded."""
    hashed = manifest.hash_of

    def swap(handle: int) -> str:
        found = hashed(handle)
        rewrite(library_in(bundle_copy / ARCH), b"something else")
        return found

    monkeypatch.setattr(verification, "hash_of", swap)
    bundle = load(ARCH, bundle_copy)
    assert callable(bundle.function(TOY_SPECS[0].name))


def test_loading_leaves_no_descriptor_and_no_folder(bundle_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    mkdtemp = loader.tempfile.mkdtemp
    monkeypatch.setattr(loader.tempfile, "mkdtemp", lambda **named: made.append(mkdtemp(**named)) or made[-1])
    load(ARCH, bundle_copy)
    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(loader, "_loaded", {})
    load(ARCH, bundle_copy)
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert len(made) == 2 and not any(os.path.exists(folder) for folder in made)


@pytest.mark.parametrize("lack", ["temporary folder", "/proc"])
def test_a_machine_that_lacks_something_loads_all_the_same(
    bundle_copy: Path, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    def refuse(**_: Any) -> str:
        raise FileNotFoundError("no usable temporary directory")

    if lack == "/proc":
        monkeypatch.setattr(Path, "symlink_to", lambda link, target: os.symlink("/nowhere", link))
    else:
        monkeypatch.setattr(loader.tempfile, "mkdtemp", refuse)
    assert callable(load(ARCH, bundle_copy).function(TOY_SPECS[0].name))


def test_a_library_without_its_function_is_damaged(bundle_copy: Path) -> None:
    """The manifest's hash is right: whoever wrote both left one out."""
    data = json.loads((bundle_copy / ARCH / manifest.FILE).read_text())
    _edit(bundle_copy, functions={**data["functions"], SPEC.name: data["functions"][TOY_SPECS[0].name]})
    bundle = load(ARCH, bundle_copy)
    with pytest.raises(BundleDamaged, match=rf"{library_in(bundle_copy / ARCH)} has no function {SPEC.name}; run"):
        bundle.function(SPEC.name)


def test_an_entry_without_its_function_is_made_anew(entry: Path, toy_bundle: Path) -> None:
    content = library_in(toy_bundle / ARCH).read_bytes()  # of other functions
    rewrite(library_in(entry / ARCH), content)
    _edit(entry, sha256=hashlib.sha256(content).hexdigest(), size=len(content))
    (found,) = cache.entries()
    assert found.state == "damaged" and f"has no function {SPEC.name}" in found.problem
    with pytest.raises(BundleDamaged, match=f"has no function {SPEC.name}"):
        cache.load(entry, SPEC, TOY_TRACER)
    with pytest.warns(RuntimeWarning, match="rebuilding it"):
        assert callable(jit.get(SPEC, tracer=TOY_TRACER))
    assert sorted(found.state for found in cache.entries()) == ["aside", "sound"]


def test_a_library_that_does_not_load_is_damaged(bundle_copy: Path) -> None:
    rewrite(library_in(bundle_copy / ARCH), b"no library")
    _edit(bundle_copy, sha256=hashlib.sha256(b"no library").hexdigest(), size=10)
    with pytest.raises(
        BundleDamaged, match=r"does not load here \(.*\); run `glulam build --arch sm_90a --out .*`"
    ) as refused:
        load(ARCH, bundle_copy)
    assert "\n" not in str(refused.value)
