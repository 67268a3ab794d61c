"""Cache folders that other users can write: no file outside is written, and no file that others replaced is linked."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
from typer.testing import CliRunner

from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import (
    build,
    cache,
    folders,
    jit,
    loader,
    locks,
    objects,
    scratch,
    stamps,
    toolchain,
    verification,
)
from ffi_bridge.worker import Worker
from glulam.choose import known, table
from glulam.choose.shipped import family_of
from glulam.command import cli
from toys import REPOSITORY, TOY_SPECS, TOY_TRACER

ARCH = "sm_90a"
SPEC = GroupedMmSpec("float16")
OTHER = GroupedMmSpec("float16", transpose_w=True)
STAMP = (ARCH, "NVIDIA H200", "ab" * 32)
STRANGER = 65534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away and becomes another user")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root folder of an empty cache; the folder exists."""
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(loader, "_loaded", {})
    known.forget()
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file of the user's in a private folder; fails the test if the file or the folder changes."""
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    file = folder / "precious"
    file.write_text("years of work")
    file.chmod(0o600)
    yield file
    assert file.read_text() == "years of work" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and os.listdir(folder) == ["precious"]


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@contextlib.contextmanager
def _umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


class TestStamps:
    @pytest.mark.parametrize("part", ["validated", f"validated/{ARCH}", "stamp"])
    def test_a_link_is_not_followed(self, root: Path, precious: Path, part: str) -> None:
        stamp = stamps.leave(*STAMP)
        shutil.rmtree(root / "validated")
        place = stamp if part == "stamp" else root / part
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(precious if part == "stamp" else precious.parent)
        if part == "stamp":  # it is replaced
            assert stamps.leave(*STAMP) == stamp and not stamp.is_symlink() and stamps.is_there(*STAMP)
        else:
            for attempt in (lambda: stamps.leave(*STAMP), lambda: stamps.check_place(ARCH)):
                with pytest.raises(PermissionError, match="no stamp can be left in .*is a link.*GLULAM_CACHE_DIR"):
                    attempt()
            assert not stamps.is_there(*STAMP)

    def test_a_stamp_that_a_link_leads_to_does_not_count(self, root: Path, tmp_path: Path) -> None:
        stamps.leave(*STAMP)
        (root / "validated").rename(tmp_path / "clone")
        (root / "validated").symlink_to(tmp_path / "clone")
        assert not stamps.is_there(*STAMP)

    @pytest.mark.parametrize("content", ["", "FAILED", "`glulam validate` passed on a NVIDIA H200", "{}and more"])
    def test_its_text_is_read(self, root: Path, content: str) -> None:
        stamp = stamps.leave(*STAMP)
        text = stamp.read_text()
        stamp.write_text(content.format(text))
        assert not stamps.is_there(*STAMP)
        stamp.write_text(text)
        assert stamps.is_there(*STAMP)

    @AS_ROOT
    @pytest.mark.parametrize("part", ["validated", f"validated/{ARCH}"])
    def test_another_users_folder_is_refused(self, root: Path, part: str) -> None:
        root.chmod(0o1777)
        (root / "validated" / ARCH).mkdir(parents=True)
        os.chown(root / part, STRANGER, STRANGER)
        with pytest.raises(PermissionError, match="is another user's"):
            stamps.leave(*STAMP)
        assert not list(root.rglob("*.stamp"))

    @AS_ROOT
    def test_another_users_stamp_is_replaced_and_does_not_count(self, root: Path) -> None:
        stamp = stamps.leave(*STAMP)
        os.chown(stamp, STRANGER, STRANGER)
        assert not stamps.is_there(*STAMP)
        stamps.leave(*STAMP)
        assert stamps.is_there(*STAMP) and stamp.stat().st_uid == 0

    @pytest.mark.parametrize("mask", [0, 0o077])
    def test_the_umask_does_not_matter(self, root: Path, mask: int) -> None:
        with _umask(mask):
            stamp = stamps.leave(*STAMP)
        assert [_mode(path) for path in (stamp, stamp.parent, stamp.parent.parent)] == [0o644, 0o755, 0o755]
        assert os.listdir(stamp.parent) == [stamp.name]


def test_validate_refuses_a_place_for_stamps_before_any_function_runs(
    root: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate = importlib.import_module("glulam.command.validate")
    monkeypatch.setattr(validate.gpus, "cuda_index", lambda *_: 0)
    monkeypatch.setattr(validate, "_arch_of", lambda index: ARCH)
    monkeypatch.setattr(validate, "verify", lambda *_: SimpleNamespace(functions={}, versions={}, sha256="ab" * 32))
    monkeypatch.setattr(validate.profiles, "matching", lambda *_: [])
    monkeypatch.setattr(validate, "_machine", lambda *_: SimpleNamespace(gpu="NVIDIA H200"))
    monkeypatch.setattr(validate, "outcomes", lambda *_: pytest.fail("a function ran"))
    (root / "validated").symlink_to(precious.parent)
    result = CliRunner().invoke(cli.app, ["validate"])
    assert result.exit_code == 1 and "no stamp can be left in" in result.output


def _shared_root(root: Path) -> None:
    root.chmod(0o775)


def _shared_parent(root: Path) -> None:
    root.parent.chmod(0o777)


def _strangers_sticky(root: Path) -> None:
    root.chmod(0o1777)
    os.chown(root, STRANGER, STRANGER)


def _strangers_parent(root: Path) -> None:
    os.chown(root.parent, STRANGER, STRANGER)


UNSAFE: list[Any] = [
    _shared_root,
    _shared_parent,
    pytest.param(_strangers_sticky, marks=AS_ROOT),
    pytest.param(_strangers_parent, marks=AS_ROOT),
]


class TestCompiling:
    @pytest.fixture
    def linked(self, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        """List that gets the paths of each linked library and of the objects linked into it."""
        places: list[Path] = []
        link = build.link

        def spy(parts: Any, library: Path, machine: Any) -> dict[str, list[str]]:
            parts = list(parts)
            places.extend(path.resolve() for path in (library, *parts))
            return link(parts, library, machine)

        monkeypatch.setattr(build, "link", spy)
        return places

    @pytest.mark.parametrize("share", UNSAFE)
    def test_nothing_is_made_where_others_rename(
        self, root: Path, tmp_path: Path, linked: list[Path], share: Callable[[Path], None]
    ) -> None:
        share(root)
        assert not folders.only_ours(root)
        jit.get(SPEC, tracer=TOY_TRACER)
        assert linked and not any(path.is_relative_to(tmp_path) for path in linked)
        assert not any(path.exists() for path in linked), "what was made elsewhere is removed"
        assert cache.find(SPEC, TOY_TRACER) is not None, "the finished kernel is kept"
        entry = root / cache.cache_key(SPEC, TOY_TRACER)
        assert [_mode(path) for path in (entry, entry / ARCH)] == [0o755, 0o755]
        assert {_mode(path) for path in (entry / ARCH).iterdir()} == {0o644}
        assert objects.Store(TOY_TRACER).take(SPEC, tmp_path), "and so is its object"
        assert not list(root.rglob(".glulam-compile-*"))

    def test_a_bundle_is_not_made_where_others_rename(self, root: Path, tmp_path: Path, linked: list[Path]) -> None:
        out = tmp_path / "open" / "bundles"
        out.mkdir(parents=True)
        out.parent.chmod(0o777)
        for specs in (TOY_SPECS[:1], TOY_SPECS[1:]):
            made = build.build(specs, out, jobs=1, progress=False, tracer=TOY_TRACER, allowed={})
            assert linked and not any(path.is_relative_to(out) for path in linked)
            assert sorted(os.listdir(out / ARCH)) == sorted([made.library, "manifest.json"])
            assert os.listdir(out) == [ARCH] and _mode(out / ARCH / made.library) == 0o644
        sources = {"toy_kernels": toolchain.sources_hash("toy_kernels")}
        assert verification.verify(out / ARCH, ARCH, sources) == made

    def test_a_sticky_folder_of_this_users_or_roots_is_safe(self, root: Path, linked: list[Path]) -> None:
        root.chmod(0o1777)
        jit.get(SPEC, tracer=TOY_TRACER)
        assert linked and all(path.is_relative_to(root) for path in linked)

    def test_a_link_to_a_cache_is_judged_by_where_it_leads(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: list[Path]
    ) -> None:
        (tmp_path / "open").mkdir()
        (tmp_path / "open").chmod(0o777)
        (tmp_path / "open" / "link").symlink_to(root)
        monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "open" / "link"))
        jit.get(SPEC, tracer=TOY_TRACER)
        assert linked and all(path.is_relative_to(root) for path in linked)
        assert (root / cache.cache_key(SPEC, TOY_TRACER) / ARCH).is_dir()

    def test_a_place_for_temporary_files_that_others_write_is_not_taken(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "temporary").mkdir()
        (tmp_path / "temporary").chmod(0o777)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
        _shared_root(root)
        with scratch.private_scratch(root, ".glulam-compile-") as work:
            assert not work.is_relative_to(tmp_path)
            assert _mode(work) == 0o700

    @AS_ROOT
    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_an_exchanged_folder_is_not_written(
        self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
    ) -> None:
        """Another user puts a folder in the place of one that was made just now, while a kernel is published."""
        _shared_root(root)
        strangers: list[int] = []
        mkdir, made = os.mkdir, 0

        def exchange(name: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            nonlocal made
            mkdir(name, mode, dir_fd=dir_fd)
            if dir_fd is not None and os.readlink(f"/proc/self/fd/{dir_fd}").startswith(str(root)):
                made += str(name) != "objects"
                if made == depth:
                    os.rename(name, f"{name}.aside", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
                    mkdir(name, 0o777, dir_fd=dir_fd)
                    os.chown(name, STRANGER, STRANGER, dir_fd=dir_fd)
                    strangers.append(os.open(name, os.O_RDONLY, dir_fd=dir_fd))

        made_before = tmp_path / "made" / ARCH
        made_before.mkdir(parents=True)
        (made_before / "library").write_text("code")
        monkeypatch.setattr(os, "mkdir", exchange)
        with pytest.raises(PermissionError, match="was exchanged by another user"):
            scratch.install(_nested(made_before.parent), root / "entry", ".glulam-compile-")
        (stranger,) = strangers
        assert os.listdir(stranger) == []
        os.close(stranger)
        assert not (root / "entry").exists()

    def test_the_compile_process_does_not_import_from_its_folder(self, tmp_path: Path) -> None:
        for name in ("json", "platform", "ffi_bridge", "cute_kernels"):
            (tmp_path / f"{name}.py").write_text("import os; os._exit(9)")
        with Worker(tmp_path, TOY_TRACER) as worker:
            assert worker.compile(SPEC).object_file.is_file()


def _nested(made: Path) -> Path:
    """Move an entry into a scratch folder of its own, as a compile leaves it; return its new folder."""
    work = made.with_name("work")
    work.mkdir()
    return made.rename(work / "entry")


class TestFolders:
    @pytest.mark.parametrize("mask", [0, 0o002])
    def test_what_is_made_is_not_writable_for_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int
    ) -> None:
        monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "new" / "cache"))
        monkeypatch.setattr(jit, "_functions", {})
        out = tmp_path / "bundles" / "here"
        known.forget()
        with _umask(mask):
            known.prefer(SPEC)
            jit.get(SPEC, tracer=TOY_TRACER)
            build.build(TOY_SPECS[:1], out, jobs=1, progress=False, tracer=TOY_TRACER, allowed={})
        made = [path for top in ("new", "bundles") for path in (tmp_path / top, *(tmp_path / top).rglob("*"))]
        assert {"objects", "preferred", "here", ".kernels.json.lock"} <= {path.name for path in made}
        assert [path for path in made if _mode(path) & 0o022] == []

    @pytest.mark.parametrize(("mode", "lock"), [(0o755, 0o644), (0o775, 0o664), (0o1777, 0o666)])
    def test_a_lock_is_as_shared_as_its_folder(self, root: Path, mode: int, lock: int) -> None:
        root.chmod(mode)
        with _umask(0), locks.locked(root / "00.lock"):
            assert _mode(root / "00.lock") == lock

    def test_a_stricter_umask_is_kept(self, tmp_path: Path) -> None:
        with _umask(0o077):
            folders.make(tmp_path / "a" / "b")
        assert _mode(tmp_path / "a") == _mode(tmp_path / "a" / "b") == 0o700

    def test_a_folder_that_cannot_be_made_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for place in (tmp_path / "file", tmp_path / "file" / "inner", Path("/proc/none/inner")):
            with pytest.raises(OSError):
                folders.make(place)
        folders.make(tmp_path)

    def test_objects_exchanged_for_a_link_leave_what_it_leads_to(
        self, root: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root.chmod(0o775)
        mkdir = os.mkdir

        def exchange(name: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
            mkdir(name, mode, dir_fd=dir_fd)
            if Path(name).name == "objects":
                (root / "objects").rename(root / "aside")
                (root / "objects").symlink_to(precious.parent)

        monkeypatch.setattr(os, "mkdir", exchange)
        store = objects.Store(TOY_TRACER)
        with pytest.warns(RuntimeWarning, match="objects are not kept"), store.alone(SPEC):
            pass


class TestPreferences:
    """Preferences need the same trusted owner and mode as kernels, and are opened relative to the checked folder."""

    @pytest.fixture
    def preferred(self, root: Path) -> Path:
        known.write_preference(SPEC)
        return root / known.FOLDER

    @pytest.mark.parametrize("part", ["", known.FILE])
    @pytest.mark.parametrize("mode", [0o020, 0o002])
    def test_what_others_can_write_is_neither_read_nor_written(self, preferred: Path, part: str, mode: int) -> None:
        path = preferred / part
        path.chmod(path.stat().st_mode | mode)
        content = (preferred / known.FILE).read_bytes()
        held = known.read_preferences()
        assert not held.layers and len(held.ignored) == 1
        assert str(path) in held.ignored[0] and "or others can write it (`chmod go-w` mends that" in held.ignored[0]
        with pytest.raises(OSError, match=f"{preferred / known.FILE} cannot be written: .*others can write it"):
            known.write_preference(SPEC)
        assert known.clear_preferences() == 0 and (preferred / known.FILE).read_bytes() == content
        path.chmod(path.stat().st_mode & ~0o022)
        assert known.read_preferences().layers and known.clear_preferences() == 1

    @AS_ROOT
    @pytest.mark.parametrize("part", ["", known.FILE])
    def test_another_users_are_neither_read_nor_written(self, preferred: Path, part: str) -> None:
        os.chown(preferred / part, STRANGER, STRANGER)
        held = known.read_preferences()
        assert not held.layers and "belongs to another user" in held.ignored[0]
        with pytest.raises(OSError, match="cannot be written: .*belongs to another user"):
            known.write_preference(SPEC)
        with pytest.warns(RuntimeWarning, match="preferred in this process alone .*belongs to another user"):
            known.prefer(SPEC)

    @pytest.mark.parametrize("step", ["glob", "FileLock", "mkstemp", "replace"])
    def test_a_folder_that_is_exchanged_meanwhile_is_not_reached(
        self, preferred: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        """Another user who may rename in the cache puts a folder of his in the place of the one that was checked."""
        preferred.parent.chmod(0o777)
        theirs = preferred.parent / "theirs"
        theirs.mkdir()
        (theirs / known.FILE).write_text(table.text([table.preference(GroupedMmSpec())]))
        before, exchanged = {path.name: path.read_bytes() for path in theirs.iterdir()}, []
        owner = {"glob": Path, "FileLock": filelock, "mkstemp": tempfile, "replace": os}[step]
        original = getattr(owner, step)

        def exchange(*arguments: Any, **named: Any) -> Any:
            if not exchanged:
                exchanged.append(preferred.rename(preferred.with_name("aside")))
                theirs.rename(preferred)
            return original(*arguments, **named)

        monkeypatch.setattr(owner, step, exchange)
        if step == "glob":
            assert known.read_preferences().preferred == {family_of(SPEC): SPEC}
        else:
            known.write_preference(OTHER)
        assert exchanged and {path.name: path.read_bytes() for path in preferred.iterdir()} == before


class TestForeignFiles:
    @pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"mine": 1}'])
    def test_a_foreign_file_in_the_place_of_preferences_stays(self, root: Path, content: bytes) -> None:
        file = known.folder() / known.FILE
        file.parent.mkdir()
        file.write_bytes(content)
        told = f"preferred in this process alone .{file} cannot be written: `glulam compile` did not write it; move"
        with pytest.warns(RuntimeWarning, match=told):
            known.prefer(SPEC)
        assert file.read_bytes() == content

    @pytest.mark.parametrize("exists", [True, False])
    def test_nor_is_a_link_in_its_place_followed_or_replaced(
        self, root: Path, tmp_path: Path, precious: Path, exists: bool
    ) -> None:
        file = known.folder() / known.FILE
        file.parent.mkdir()
        target = precious if exists else tmp_path / "none"
        file.symlink_to(target)
        with pytest.warns(RuntimeWarning, match="did not write it"):
            known.prefer(SPEC)
        assert file.readlink() == target and exists == target.exists()

    def test_a_lock_with_content_is_not_emptied(self, root: Path) -> None:
        lock = cache.lock_of(root, cache.cache_key(SPEC, TOY_TRACER))
        lock.write_text("years of work")
        with pytest.warns(RuntimeWarning, match=f"{lock} is no lock file, it has content; move it elsewhere"):
            jit.get(SPEC, tracer=TOY_TRACER)
        assert lock.read_text() == "years of work"

    @pytest.mark.parametrize("place", [os.symlink, os.link, shutil.copy])
    def test_a_table_is_not_locked_by_a_foreign_file(
        self, tmp_path: Path, precious: Path, place: Callable[[Path, Path], object]
    ) -> None:
        place(precious, tmp_path / ".all.json.lock")
        with pytest.raises(PermissionError, match=r"\.all\.json\.lock is no (plain|lock) file"):
            table.write(tmp_path / "all.json", [])
        assert (tmp_path / ".all.json.lock").read_text() == "years of work"
        assert not (tmp_path / "all.json").exists()

    def test_a_table_exchanged_for_a_link_leaves_what_it_leads_to(
        self, tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mkstemp = tempfile.mkstemp

        def exchange(*arguments: Any, **named: Any) -> tuple[int, str]:
            handle, made = mkstemp(*arguments, **named)
            os.rename(made, f"{made}.aside")
            os.symlink(precious, made)
            return handle, made

        monkeypatch.setattr(tempfile, "mkstemp", exchange)
        table.write(tmp_path / "all.json", [])

    def test_no_release_of_filelock_that_follows_links_is_allowed(self) -> None:
        lowest = re.findall(r'"filelock>=([0-9.]+)"', (REPOSITORY / "pyproject.toml").read_text())
        assert len(lowest) == 2, "to build, and to run"
        assert all(tuple(map(int, version.split("."))) >= (3, 20, 3) for version in lowest)

    def test_every_lock_is_guarded(self) -> None:
        sources = [*(REPOSITORY / "ffi_bridge").rglob("*.py"), *(REPOSITORY / "python").rglob("*.py")]
        assert [file.stem for file in sources if "FileLock(" in file.read_text()] == [locks.__name__.rpartition(".")[2]]


@contextlib.contextmanager
def _as_stranger() -> Iterator[None]:
    os.setegid(STRANGER)
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def open_root() -> Iterator[Path]:
    """A folder of root's that everybody can enter and write, so that others may rename its content."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@AS_ROOT
def test_another_user_publishes_into_a_folder_of_roots(open_root: Path, tmp_path: Path) -> None:
    with _as_stranger():
        assert not folders.only_ours(open_root)
        with scratch.private_scratch(open_root, ".glulam-compile-") as work:
            (work / "entry" / ARCH).mkdir(parents=True)
            (work / "entry" / ARCH / "library").write_text("code")
            scratch.install(work / "entry", open_root / "kernel", ".glulam-compile-")
    assert (open_root / "kernel" / ARCH / "library").read_text() == "code"
    assert (open_root / "kernel").stat().st_uid == STRANGER and os.listdir(open_root) == ["kernel"]


@AS_ROOT
def test_roots_stamp_counts_for_another_user_and_not_the_other_way_round(
    open_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_root.chmod(0o1777)
    monkeypatch.setenv(cache.ENV_CACHE, str(open_root))
    stamps.leave(*STAMP)
    with _as_stranger():
        assert stamps.is_there(*STAMP)
        with pytest.raises(PermissionError):
            stamps.check_place(ARCH)
    shutil.rmtree(open_root / "validated")
    with _as_stranger():
        stamps.leave(*STAMP)
        assert stamps.is_there(*STAMP)
    assert not stamps.is_there(*STAMP)
