"""PTX text kept with an object: from the same compilation, found again with the object, and checked as strictly."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cute_kernels import stages
from cute_kernels.specs import Spec
from ffi_bridge import CompileError, cache, kept_ptx, manifest, objects
from ffi_bridge.compiler import KernelArtifact
from ffi_bridge.objects import Store
from ffi_bridge.worker import Worker
from glulam.command import cli
from toys import TOY_SPECS, TOY_TRACER, object_key

ARCH = "sm_90a"
MM, _, WGRAD = TOY_SPECS


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root folder of an empty cache."""
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with Worker(tmp_path_factory.mktemp("keeping"), TOY_TRACER, keep_ptx=True) as worker:
        yield worker


def _ptx(artifact: KernelArtifact) -> str:
    return artifact.object_file.with_suffix(".ptx").read_text()


def _names(artifact: KernelArtifact) -> list[str]:
    return sorted(kernel.name for kernel in artifact.kernels)


def _obtain(spec: Spec, into: Path, worker: Callable[[], Worker], keep_ptx: bool = True) -> KernelArtifact:
    """Get a spec's object from the store or compile it, under the store's lock as builds do; this also creates the
    store's folder.
    """
    store = Store(TOY_TRACER, keep_ptx=keep_ptx)
    with store.alone(spec):
        return store.obtain(spec, into, worker)


def _stored(root: Path, spec: Spec = MM) -> Path:
    return root / "objects" / object_key(spec, has_ptx=True) / ARCH


def _refuse() -> Worker:
    raise AssertionError("compiled again")


def test_the_same_object_comes_with_its_kernels_text(keeping: Worker, tmp_path: Path) -> None:
    with Worker(tmp_path, TOY_TRACER) as plain:
        without = [plain.compile(spec) for spec in TOY_SPECS]
    kept = [keeping.compile(spec) for spec in TOY_SPECS]
    assert [one.object_file.read_bytes() for one in kept] == [one.object_file.read_bytes() for one in without]
    assert [one.kernels for one in kept] == [one.kernels for one in without]
    assert [kept_ptx.entries(_ptx(one)) for one in kept] == [_names(one) for one in kept]
    assert [kept_ptx.launched(one.object_file.with_suffix(".mlir").read_text()) for one in kept] == list(
        map(_names, kept)
    )
    assert len(_names(kept[2])) == 2
    assert not [*tmp_path.rglob("*.ptx"), *tmp_path.rglob("*.mlir")]


def test_functions_whose_dumps_have_one_name_keep_their_own(keeping: Worker) -> None:
    """A tracer names its function alike for both, so the second overwrites the first's dump."""
    first, second = keeping.compile(MM), keeping.compile(TOY_SPECS[1])
    before = _ptx(first)
    keeping.compile(WGRAD)
    assert _ptx(first) == before and kept_ptx.entries(_ptx(second)) == _names(second)


def test_a_dump_of_other_kernels_is_refused(tmp_path: Path) -> None:
    dump = kept_ptx.Dump(tmp_path)
    artifact = KernelArtifact("toy", tmp_path / "toy.o", ())
    with pytest.raises(CompileError, match=r"toy: the compiler left 0 dumps as \*.ptx; expected 1"):
        dump.take(artifact)
    folder = Path(dump.environment["CUTE_DSL_DUMP_DIR"])
    (folder / "a.mlir").write_text("\n  func.func @f() {\n    cuda.launch_ex @kernels::@third<%1> ()\n")
    (folder / "a.ptx").write_text(".visible .entry other(\n)")
    with pytest.raises(CompileError, match=r"toy: its PTX has the kernels \['other'\]; expected its object's \[\]"):
        dump.take(artifact)
    (folder / "a.ptx").write_text("")
    with pytest.raises(CompileError, match=r"toy: its host function launches the kernels \['third'\]"):
        dump.take(artifact)
    (folder / "b.ptx").write_text("")
    with pytest.raises(CompileError, match=r"left 2 dumps as \*.ptx"):
        dump.take(artifact)
    dump.clear()
    assert not list(folder.iterdir())
    dump.remove()
    assert not folder.exists()


def test_a_stored_one_comes_back(keeping: Worker, tmp_path: Path) -> None:
    made = _obtain(MM, tmp_path, lambda: keeping)
    text = _ptx(made)
    (again := tmp_path / "again").mkdir()
    found = _obtain(MM, again, _refuse)
    assert found.object_file.read_bytes() == made.object_file.read_bytes() and found.kernels == made.kernels
    assert _ptx(found) == text


def test_keys_without_ptx_are_as_they_were(keeping: Worker, root: Path, tmp_path: Path) -> None:
    """Objects with and without PTX lie beside each other, and only the former have a field more."""
    assert object_key(MM) != object_key(MM, has_ptx=True)
    _obtain(MM, tmp_path, lambda: keeping)
    assert Store(TOY_TRACER).take(MM, tmp_path) is None
    _obtain(MM, tmp_path, lambda: keeping, keep_ptx=False)
    plain = root / "objects" / object_key(MM) / ARCH
    assert sorted(file.name for file in plain.iterdir()) == ["glulam_sm_90a.o", manifest.FILE]
    described, with_ptx = (json.loads((folder / manifest.FILE).read_text()) for folder in (plain, _stored(root)))
    assert with_ptx.keys() - described.keys() == {"texts"}


def _change(file: Path) -> None:
    file.write_text(file.read_text().replace("add", "sub", 1))


def _describe(folder: Path, texts: object) -> None:
    file = folder / manifest.FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), "texts": texts}))


DAMAGES: dict[str, Callable[[Path], object]] = {
    "changed": lambda folder: _change(folder / "glulam_sm_90a.ptx"),
    "host function changed": lambda folder: _change(folder / "glulam_sm_90a.mlir"),
    "gone": lambda folder: (folder / "glulam_sm_90a.ptx").unlink(),
    "written by others": lambda folder: (folder / "glulam_sm_90a.ptx").chmod(0o666),
    "not described": lambda folder: _describe(folder, {}),
    "described otherwise": lambda folder: _describe(folder, {".ptx": "0" * 64, ".mlir": "0" * 64}),
    "of other names": lambda folder: _describe(folder, {".so": "0" * 64}),
    "described as a number": lambda folder: _describe(folder, {".ptx": 1}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_sound_is_made_anew(damage: str, keeping: Worker, root: Path, tmp_path: Path) -> None:
    store = Store(TOY_TRACER, keep_ptx=True)
    text = _ptx(_obtain(MM, tmp_path, lambda: keeping))
    DAMAGES[damage](_stored(root))
    assert store.take(MM, tmp_path) is None
    assert _ptx(_obtain(MM, tmp_path, lambda: keeping)) == text
    assert store.take(MM, tmp_path)


def test_the_command_counts_and_clears_them(
    keeping: Worker, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "tracer_of", lambda spec: TOY_TRACER)
    for spec in (MM, WGRAD):
        _obtain(spec, tmp_path, lambda: keeping)
    _change(_stored(root, WGRAD) / "glulam_sm_90a.ptx")
    assert {entry.spec: entry.state for entry in objects.entries()} == {MM: "sound", WGRAD: "damaged"}
    run = functools.partial(CliRunner().invoke, cli.app)
    assert "2 objects" in run(["cache", "clear"]).output
    assert not list((root / "objects").glob("*_sm_90a-*"))
