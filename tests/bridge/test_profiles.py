"""Profiles: the specs that each one builds, and the profile that errors name for a missing kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cute_kernels.sm90 import configs
from cute_kernels.specs import Spec
from ffi_bridge import BundleMissing, build, manifest, profiles, verification
from ffi_bridge.loader import load
from glulam.command.cli import app
from toys import TOY_SPECS, TOY_TRACER

ARCH = "sm_90a"


def names(profile: str) -> set[str]:
    return {spec.name for spec in profiles.all_stages(profiles.shipped_specs(ARCH, profile))}


def test_a_profile_holds_the_smaller_ones() -> None:
    demo, bf16, full = map(names, configs.PROFILES)
    assert demo < bf16 < full and len(demo) == 6
    assert {name for name in full - bf16 if "f16" not in name} == set()


def test_patterns_take_some_of_a_profile() -> None:
    some = profiles.shipped_specs(ARCH, "full", ["grouped_mm_f16_*", "mhc_pre_bf16_*"])
    assert {spec.op for spec in some} == {"grouped_mm", "mhc"} and len(some) == 9


@pytest.mark.parametrize(
    ("profile", "only", "message"),
    [("small", [], "choose one of: demo, bf16, full"), ("bf16", ["*_f16_*"], r"only='\*_f16_\*' matches no function")],
)
def test_what_is_none_is_refused(profile: str, only: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profiles.shipped_specs(ARCH, profile, only)


@pytest.mark.parametrize("profile", configs.PROFILES)
def test_a_kernel_that_a_bundle_lacks_is_said_to_be_in_the_smallest_profile_that_has_it(
    toy_bundle: Path, profile: str
) -> None:
    smaller = configs.PROFILES[: configs.PROFILES.index(profile)]
    toys = {spec.name for spec in TOY_SPECS}
    name = min(names(profile) - toys - set().union(*map(names, smaller)))
    command = f"glulam build --arch {ARCH} --profile {profile} --out {toy_bundle}"
    with pytest.raises(BundleMissing, match=f"'{profile}' has it: run `{command}`"):
        load(ARCH, toy_bundle).function(name)


class TestKeep:
    def build(self, monkeypatch: pytest.MonkeyPatch, specs: list[Spec], out: Path, *more: str) -> list[int]:
        """Run `glulam build`, which must succeed; return the number of functions of each bundle built."""
        built: list[int] = []
        original = build.build

        def toy_build(wanted: list[Spec], root: Path, jobs: int | None, machine: str) -> manifest.Manifest:
            built.append(len(wanted))
            return original(wanted, root, jobs, progress=False, tracer=TOY_TRACER, allowed={}, machine=machine)

        with monkeypatch.context() as patch:
            patch.setattr(verification, "PACKAGES", ("toy_kernels",))
            patch.setattr(profiles, "shipped_specs", lambda arch, profile, only: specs)
            patch.setattr(build, "build", toy_build)
            result = CliRunner().invoke(app, ["build", "--arch", ARCH, "--jobs", "1", "--out", str(out), *more])
        assert result.exit_code == 0, result.output
        return built

    def test_a_bundle_that_has_these_functions_stays(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.build(monkeypatch, TOY_SPECS, tmp_path, "--keep") == [3]
        assert self.build(monkeypatch, TOY_SPECS[:1], tmp_path, "--keep") == []
        assert len(manifest.read(tmp_path / ARCH).functions) == 3

    def test_one_that_lacks_some_is_built_anew(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.build(monkeypatch, TOY_SPECS[:1], tmp_path, "--keep") == [1]
        assert self.build(monkeypatch, TOY_SPECS, tmp_path, "--keep") == [3]

    def test_without_it_a_build_makes_what_it_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.build(monkeypatch, TOY_SPECS, tmp_path) == [3]
        assert self.build(monkeypatch, TOY_SPECS[:1], tmp_path) == [1]
