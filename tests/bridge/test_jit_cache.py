"""The JIT's disk cache: shared between processes, and intact after processes are killed or fail."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.specs import GroupedMmSpec
from ffi_bridge import CompileError, host, jit, loader, sources, toolchain, verification
from ffi_bridge import cache as cache_module
from toys import HERE, REPOSITORY, TOY_TRACER, library_in, rewrite, wait_until

SPEC = GroupedMmSpec("float16")
# TVM-FFI imports torch where it can: 1.3 s a process, for nothing that is asked here.
GET = (
    "import sys; sys.modules['torch'] = None\n"
    "from toys import TOY_TRACER; from test_jit_cache import SPEC; from ffi_bridge import jit\n"
    "function = jit.get(SPEC, tracer=TOY_TRACER); assert 'cutlass' not in sys.modules; print(type(function).__name__)"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, with nothing cached in memory. Each traced spec adds a line to traced.log beside it."""
    monkeypatch.setenv(jit.ENV_CACHE, str(tmp_path / "cache"))
    monkeypatch.setenv("TOY_LOG", str(tmp_path / "traced.log"))
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(loader, "_loaded", {})
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cache that holds SPEC, and its traced.log. Shared by tests, which must not change it: use
    `filled` for that.
    """
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(jit.ENV_CACHE, str(folder / "cache"))
        patch.setenv("TOY_LOG", str(folder / "traced.log"))
        patch.setattr(jit, "_functions", {})
        patch.setattr(loader, "_loaded", {})
        jit.get(SPEC, tracer=TOY_TRACER)
    return folder


@pytest.fixture
def filled(cache: Path, made: Path) -> Path:
    """The test's own cache folder that holds SPEC, traced once."""
    shutil.copytree(made, cache.parent, dirs_exist_ok=True)
    return cache


def _traced(cache: Path) -> int:
    log = cache.with_name("traced.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def _process(**environment: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(REPOSITORY), str(HERE), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-c", GET],
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _entry(cache: Path) -> Path:
    return cache / jit.cache_key(SPEC, TOY_TRACER)


def _inner(cache: Path) -> Path:
    return _entry(cache) / "sm_90a"


def test_a_kernel_is_compiled_once_and_found_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = jit.get(SPEC, tracer=TOY_TRACER)
    assert jit.get(SPEC, tracer=TOY_TRACER) is function
    monkeypatch.setattr(jit, "_functions", {})
    monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled again"))
    jit.get(SPEC, tracer=TOY_TRACER)
    assert _traced(cache) == 1


def test_an_entry_is_a_bundle_of_its_own(filled: Path) -> None:
    described = verification.verify(_inner(filled), "sm_90a", cache_module.sources_of(SPEC, TOY_TRACER), SPEC)
    assert list(described.functions) == [SPEC.name]
    leftovers = {path.name for path in filled.iterdir()} - {_entry(filled).name}
    assert leftovers == {cache_module.lock_of(filled, _entry(filled).name).name, ".glulam-cache", "objects"}


def test_the_key_covers_what_changes_the_code_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    key = jit.cache_key(SPEC, TOY_TRACER)
    assert key.startswith(f"{SPEC.name}-")
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    monkeypatch.chdir("/")
    assert jit.cache_key(SPEC, TOY_TRACER) == key
    others = {jit.cache_key(GroupedMmSpec(), TOY_TRACER), jit.cache_key(SPEC, "toy_kernels:fail")}
    with monkeypatch.context() as patch:
        patch.setattr(sources.Sources, "hash_of", lambda known, module: "other")
        others.add(jit.cache_key(SPEC, TOY_TRACER))
    with monkeypatch.context() as patch:
        patch.setattr(toolchain, "COMPILES_WITH", {toolchain.DSL: ("4.9",)})
        others.add(jit.cache_key(SPEC, TOY_TRACER))
    with monkeypatch.context() as patch:
        patch.setattr(host, "here", lambda: host.HOSTS["x86_64"]._replace(baseline="x86-64-v3"))
        others.add(jit.cache_key(SPEC, TOY_TRACER))
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_makers", lambda: "other options, or another compile process")
        others.add(jit.cache_key(SPEC, TOY_TRACER))
    assert len(others - {key}) == 6
    with monkeypatch.context() as patch:  # what runs a kernel is not what compiled it
        older = {**toolchain.versions(), toolchain.DSL: "4.7.1", toolchain.TVM_FFI: "0.1.9"}
        patch.setattr(toolchain, "versions", lambda: older)
        assert jit.cache_key(SPEC, TOY_TRACER) == key


def test_two_processes_at_once_compile_once(cache: Path) -> None:
    processes = [_process(), _process()]
    for process in processes:
        output, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        assert output.strip() == "Function"
    assert _traced(cache) == 1


def test_a_killed_compile_leaves_nothing_that_matters(cache: Path) -> None:
    victim = _process(TOY_HANG="1")
    wait_until(lambda: _traced(cache) == 1)
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=60)
    assert not _entry(cache).exists()

    (abandoned,) = cache.glob(".glulam-compile-*")
    jit.get(SPEC, tracer=TOY_TRACER)
    assert library_in(_inner(cache))
    assert abandoned.exists()  # it could be another key's compile, running now

    for folder in (*abandoned.iterdir(), abandoned):
        os.utime(folder, (0, 0))
    jit.get(GroupedMmSpec(), tracer=TOY_TRACER)
    assert not abandoned.exists()


@pytest.mark.parametrize("damage", ["flipped", "emptied", "manifest"])
def test_a_damaged_entry_is_put_aside_and_rebuilt(filled: Path, damage: str) -> None:
    library = library_in(_inner(filled))
    sound = library.read_bytes()
    target = library.with_name("manifest.json") if damage == "manifest" else library
    rewrite(target, bytes([sound[0] ^ 1]) + sound[1:] if damage == "flipped" else b"")

    process = _process()
    output, error = process.communicate(timeout=120)
    assert process.returncode == 0, error
    assert "damaged bundle" in error
    assert "rebuilding it" in error
    assert _traced(filled) == 1, "linked again, from the object that is kept beside"
    assert library.read_bytes() == sound
    assert _entry(filled).with_name(f"{_entry(filled).name}.damaged").is_dir()


def test_half_an_entry_is_none(cache: Path) -> None:
    _inner(cache).mkdir(parents=True)
    jit.get(SPEC, tracer=TOY_TRACER)
    assert _traced(cache) == 1
    assert library_in(_inner(cache))


def test_a_cache_that_cannot_be_made_costs_a_warning(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(jit.ENV_CACHE, str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match=f"for this process alone; set {jit.ENV_CACHE}"):
        function = jit.get(SPEC, tracer=TOY_TRACER)
    assert callable(function)
    assert jit.get(SPEC, tracer=TOY_TRACER) is function
    assert _traced(cache) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where it likes")
def test_a_read_only_cache_is_read(cache: Path) -> None:
    jit.get(SPEC, tracer=TOY_TRACER)
    cache.chmod(0o555)
    try:
        output, error = _process().communicate(timeout=120)
        assert (output.strip(), error) == ("Function", "")
        with pytest.warns(RuntimeWarning, match="cannot be used"):
            jit.get(GroupedMmSpec(), tracer=TOY_TRACER)
    finally:
        cache.chmod(0o755)


def _refuse_linking_in(cache: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    link = jit.build.link

    def refuse(objects: Iterable[Path], library: Path, machine: host.Host) -> dict[str, list[str]]:
        if library.is_relative_to(cache):
            raise CompileError(f"ld: final link failed: {words}")
        return link(objects, library, machine)

    monkeypatch.setattr(jit.build, "link", refuse)


@pytest.mark.parametrize("words", ["No space left on device", "Bus error"])
def test_a_full_cache_costs_a_warning(cache: Path, monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    """A linker tells a full disk in its own words, which may be none: then the disk itself is asked."""
    temporary = tempfile.TemporaryFile

    def full(*arguments: Any, **named: Any) -> Any:
        if named.get("dir") == cache:
            raise OSError(errno.ENOSPC, "No space left on device")
        return temporary(*arguments, **named)

    _refuse_linking_in(cache, monkeypatch, words)
    if words == "Bus error":
        monkeypatch.setattr(tempfile, "TemporaryFile", full)
    with pytest.warns(RuntimeWarning, match="cannot be used .*No space left on device"):
        assert callable(jit.get(SPEC, tracer=TOY_TRACER))
    assert _traced(cache) == 1, "the object was kept before the disk was full"
    assert not list(cache.glob(".glulam-compile-*"))


def test_a_linker_that_fails_on_a_disk_with_space_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_linking_in(cache, monkeypatch, "undefined symbol")
    with pytest.raises(CompileError, match="final link failed"):
        jit.get(SPEC, tracer=TOY_TRACER)
    assert _traced(cache) == 1


def test_a_failed_compile_names_the_spec_and_leaves_no_entry(cache: Path) -> None:
    with pytest.raises(CompileError, match=f"{SPEC.name}: ValueError: no kernel for"):
        jit.get(SPEC, tracer="toy_kernels:fail")
    assert not list(cache.glob("**/sm_90a"))


def test_slow_code_is_compiled_with_a_warning(cache: Path) -> None:
    with pytest.warns(RuntimeWarning, match=f"slower than it need be: {SPEC.name}: C7517"):
        jit.get(SPEC, tracer="toy_kernels:trace_serialised")


def test_the_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(jit.ENV_CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jit.cache_root() == tmp_path / "glulam" / "kernels"
