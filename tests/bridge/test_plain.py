"""$GLULAM_PLAIN: a kernel compiled without a construct is never used in place of one compiled with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cute_kernels import plain
from cute_kernels.architectures import ARCHS, CONSTRUCTS
from cute_kernels.sm100.configs import LARGE
from cute_kernels.specs import GroupedMmSpec
from cute_kernels.tiles import SpecError
from ffi_bridge import BundleOutdated, cache, toolchain, verification
from ffi_bridge.build import build, find
from glulam.command import cli
from toys import TOY_TRACER

MM = GroupedMmSpec(tile=LARGE, arch="sm_100a")
ON_HOPPER = GroupedMmSpec()


def _plain(monkeypatch: pytest.MonkeyPatch, *constructs: str) -> None:
    monkeypatch.setenv(plain.ENV, ",".join(constructs))


def test_names_are_taken_in_any_order_and_for_architectures_that_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plain.avoided() == ()
    monkeypatch.setenv(plain.ENV, " rows ,tmem_loads,")
    found = {arch: plain.plain_in(arch) for arch in ARCHS if plain.plain_in(arch)}
    assert found == dict.fromkeys(("sm_100a", "sm_103a"), ("tmem_loads", "rows"))


def test_an_unknown_name_is_told_with_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    _plain(monkeypatch, "rows", "columns")
    with pytest.raises(SpecError, match=re.escape("'columns'; choose among: tmem_loads, rows")):
        plain.plain_in("sm_100a")


def test_each_choice_has_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, on_hopper = set(), set()
    for constructs in ((), *((name,) for name in CONSTRUCTS), tuple(CONSTRUCTS)):
        _plain(monkeypatch, *constructs)
        keys.add(cache.cache_key(MM))
        on_hopper.add(cache.cache_key(ON_HOPPER))
    assert (len(keys), len(on_hopper)) == (len(CONSTRUCTS) + 2, 1)


def test_a_bundle_is_used_only_as_it_was_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    _plain(monkeypatch, "rows")
    out, sources = tmp_path / "out", {"toy_kernels": toolchain.sources_hash("toy_kernels")}
    assert build([MM], out, jobs=1, progress=False, tracer=TOY_TRACER).plain == ["rows"]
    assert verification.verify(out / MM.arch, MM.arch, sources).plain == ["rows"]
    for other in ((), ("tmem_loads",)):
        _plain(monkeypatch, *other)
        told = f"built with {plain.ENV}='rows', and now it is {plain.ENV}='{','.join(other)}'; set it as it was, or run"
        with pytest.raises(BundleOutdated, match=re.escape(told)):
            verification.verify(out / MM.arch, MM.arch, sources)
        assert find([MM], out) is None
    assert build([MM], out, jobs=1, progress=False, tracer=TOY_TRACER).plain == ["tmem_loads"]


def test_info_shows_what_a_bundle_is_built_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENV_CACHE, str(tmp_path / "cache"))
    _plain(monkeypatch, "rows")
    name = "layer_combine_bf16_sm_100a"
    shown = CliRunner().invoke(cli.app, ["build", "--arch", MM.arch, "--only", name, "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    shown = CliRunner().invoke(cli.app, ["info", "--arch", MM.arch, "--bundle", str(tmp_path / "out")])
    assert "plain     rows ($GLULAM_PLAIN)" in shown.output
