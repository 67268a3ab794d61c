"""`glulam validate`: trials check what they claim, wrong kernels are found, and hanging or crashing processes are
survived.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import fake_gpu as fakes
from support import processes
from support.fake_gpu import FakeGpu, reference
from support.trials import try_out
from torch import Tensor
from typer.testing import CliRunner

from cute_kernels.chains import stages_of
from cute_kernels.layer.kernels import RANK_KERNELS
from cute_kernels.specs import GroupedGluSpec, GroupedMmSpec, LayerSpec, QuantizeMxfp8Spec, Spec, to_dict
from ffi_bridge import BundleMissing, profiles, stamps
from glulam import UnsupportedDevice
from glulam.choose import known
from glulam.command import bundle, cli, doctor
from glulam.distributed import neighbours
from glulam.host import device
from glulam.host.plans import forget_plans
from glulam.validate import child, judge, run
from glulam.validate.catalogue import trials_of
from glulam.validate.child import Wrong
from glulam.validate.guards import CANARY, Guards, untouched
from glulam.validate.report import Machine, passes, report
from glulam.validate.run import FAILED, PASSED, UNREACHED, Outcome, outcome_of

pytest_plugins = ["support.fixtures"]
ARCH = "sm_80"
SHIPPED = profiles.shipped_specs(ARCH, "bf16")
MACHINE = Machine("NVIDIA A100", "8.0", ARCH, "ab" * 32, {"torch": "2.11", "driver": None})


def named(*beginnings: str) -> list[Spec]:
    found = [spec for spec in SHIPPED for begin in beginnings if spec.name.startswith(begin)]
    assert len(found) >= len(beginnings)
    return found


SOME = named(
    "grouped_mm_bf16_nn_t16", "grouped_mm_bf16_nn_halves_t128", "grouped_glu_bf16_gated_strided_preact_t128",
    "grouped_mlp_bf16_ungated_t16", "grouped_dglu_bf16_clamped_swiglu_interleaved_nt",
    "grouped_dglu_bf16_clamped_swiglu_concat_t128x128x64_c1x1_warps__nn", "grouped_wgrad_bf16_f32",
    "quantize_mxfp8_bf16_both", "quantize_mxfp4_f32", "layer_route_e128", "layer_router_bf16_e128", "layer_sort_e128",
    "layer_permute_bf16", "layer_combine_f32", "layer_route_backward", "layer_row_weights_backward",
    "mhc_post_mix_bf16_n2", "mhc_pre_backward_bf16_n4", "mhc_sinkhorn_n8",
)  # fmt: skip


@pytest.mark.parametrize("spec", SOME, ids=lambda spec: spec.name)
def test_right_kernels_pass_their_trials(spec: Spec, a100: FakeGpu) -> None:
    child.prefer(spec)
    trials = list(trials_of(spec))
    assert len({trial.what for trial in trials}) == len(trials) > 0
    for trial in trials:
        with torch.no_grad():
            try_out(trial)
    assert spec in a100.specs


def test_every_function_is_called(a100: FakeGpu) -> None:
    """By its own first trial, or by another function that launches it. Between GPUs there is no trial."""
    called: set[Spec] = set()
    for spec in SHIPPED:
        trial = next(trials_of(spec), None)
        if trial is not None:
            known.forget()
            forget_plans()
            child.prefer(spec)
            del a100.specs[:]
            with torch.no_grad():
                trial.call(trial.given)
            assert spec in a100.specs, spec.name
            called |= {stage for each in a100.specs for stage in (each, *stages_of(each))}
    uncalled = {spec for spec in (*SHIPPED, *profiles.all_stages(SHIPPED)) if spec not in called}
    of_no_call = {QuantizeMxfp8Spec("float32", arch=ARCH, rounded=True)}
    between_gpus = {LayerSpec(kernel, dtype, arch=ARCH) for kernel in RANK_KERNELS for dtype in ("bfloat16", "float32")}
    assert uncalled == between_gpus | of_no_call


def _one_column_off(c: Any) -> None:
    c.y[:, 1] = c.y[:, 0]


def _behind_the_groups(c: Any) -> None:
    c.y[-1] = 0


def _beside(c: Any) -> None:
    width = c.y.shape[1]
    fakes.memory(c.y.data_ptr() + c.y.nbytes, width, dtype=c.y.dtype).zero_()


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (_one_column_off, "largest error"),
        (_behind_the_groups, "rows after the groups were written"),
        (_beside, "bytes after a result or workspace"),
    ],
)
def test_a_wrong_kernel_is_found(
    mistake: Callable[[Any], None], message: str, a100: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = fakes._STAGES[GroupedMmSpec]

    def wrong(spec: Spec, c: SimpleNamespace) -> None:
        right(spec, c)
        mistake(c)

    monkeypatch.setitem(fakes._STAGES, GroupedMmSpec, wrong)
    trial = next(trials_of(named("grouped_mm_bf16_nt_t128")[0]))
    with torch.no_grad(), Guards() as guards:
        made = trial.call(trial.given)
    beside = guards.complaint()
    with reference(), pytest.raises(Wrong, match=message):
        child.check_results(trial, made)
        raise Wrong(beside)


class TestJudge:
    EXACT = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ROUNDED = EXACT.bfloat16()

    def test_rounding_passes(self) -> None:
        assert judge.complaint(self.ROUNDED, self.EXACT, self.ROUNDED) == ""

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda got: got * 0, "largest error is 1 "),
            (lambda got: got.index_fill(1, torch.tensor([7]), 0.0), "largest error"),
            (lambda got: got.index_fill(1, torch.tensor([7]), torch.nan), "not finite"),
            (lambda got: got[:4], r"\[4, 64\], not"),
            (lambda got: got.float(), "float32"),
        ],
    )
    def test_what_is_wrong_is_said(self, change: Callable[[Tensor], Tensor], message: str) -> None:
        assert re.search(message, judge.complaint(change(self.ROUNDED), self.EXACT, self.ROUNDED))

    def test_a_small_row_counts_as_much(self) -> None:
        scale = torch.tensor([1.0, 1e-3, 1, 1, 1])[:, None]
        exact, got = self.EXACT * scale, (self.EXACT * scale).bfloat16()
        got[1, 0] += 1e-3
        assert "largest error" in judge.complaint(got, exact, exact.bfloat16())

    def test_a_rule_that_decides_nothing_is_no_rule(self) -> None:
        assert "nothing is decided" in judge.complaint(self.ROUNDED, self.EXACT, self.ROUNDED + 1)

    def test_bytes_are_equal(self) -> None:
        ids = torch.arange(9, dtype=torch.int32)
        assert judge.complaint(ids, ids, ids) == "" and judge.complaint(ids, ids, ids + 1)
        one, other = torch.ones(2, 32).to(torch.float8_e4m3fn), torch.full((2, 32), 2.0).to(torch.float8_e4m3fn)
        assert "64 of its 64 bytes differ" in judge.complaint(one, other, other)


def test_new_memory_lies_between_canaries(fake_gpu: FakeGpu) -> None:
    with Guards() as guards:
        made = torch.empty(3, 5, dtype=torch.bfloat16)
        other = made.new_empty(4, dtype=torch.int64)
    assert untouched(made) and untouched(other) and made.isnan().all() and not guards.complaint()
    made.zero_()
    other.zero_()
    assert not guards.complaint()
    made.as_strided((1,), (1,), made.storage_offset() - 1).zero_()
    assert "2 bytes before a result or workspace of 30 bytes" in guards.complaint()
    assert CANARY == 0xFF


class Doubled(torch.autograd.Function):
    """Multiplication by 2 whose gradient lies in new memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        made = torch.empty_like(gradient)
        assert untouched(made)
        made.copy_(2 * gradient).as_strided((1,), (1,), made.storage_offset() + made.numel()).zero_()
        return made


def test_memory_of_a_backward_lies_between_canaries(fake_gpu: FakeGpu) -> None:
    makers = torch.empty, torch.empty_like, Tensor.new_empty
    x = torch.ones(3, requires_grad=True)
    with Guards() as guards, torch.enable_grad():
        Doubled.apply(x).backward(torch.ones(3))
    assert "4 bytes after a result or workspace of 12 bytes" in guards.complaint()
    assert makers == (torch.empty, torch.empty_like, Tensor.new_empty) and "new_empty" not in vars(Tensor)


class TestProcesses:
    def test_what_one_says(self) -> None:
        assert outcome_of("f", processes.passes, ()) == Outcome("f", PASSED, "2 calls", frozenset(("a", "b")))
        assert outcome_of("f", processes.fails, ()) == Outcome("f", FAILED, "it is wrong (the second call)")

    def test_one_that_hangs_is_killed(self) -> None:
        assert outcome_of("f", processes.hangs, (), 2.0) == Outcome(
            "f", FAILED, "it took more than 2 s (the first call)"
        )

    def test_one_that_dies(self) -> None:
        assert outcome_of("f", processes.dies, ()) == Outcome("f", FAILED, "its process ended with -6 (the first call)")

    def test_without_a_gpu_every_function_fails_and_says_why(self) -> None:
        spec = SHIPPED[0]
        functions = {spec.name: SimpleNamespace(spec={})}
        (outcome,) = run.outcomes(SimpleNamespace(functions=functions), 0, [spec])  # type: ignore[arg-type]
        assert outcome.state == FAILED and outcome.detail.endswith("(its start)")


@pytest.mark.parametrize(("of_chain", "of_stage"), [(PASSED, PASSED), (FAILED, UNREACHED)])
def test_a_stage_passes_with_a_function_that_launches_it(
    of_chain: str, of_stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (chain,) = named("grouped_mlp_mxfp8w_bf16_gated_blocked_t128")
    stage = next(spec for spec in stages_of(chain) if isinstance(spec, GroupedGluSpec))
    functions = {spec.name: SimpleNamespace(spec=to_dict(spec)) for spec in (stage, chain)}
    monkeypatch.setattr(run, "outcome_of", lambda name, *_: Outcome(name, of_chain, "", frozenset((chain.name,))))
    found = list(run.outcomes(SimpleNamespace(functions=functions), 0, [stage, chain]))  # type: ignore[arg-type]
    assert [(one.name, one.state) for one in found] == [(chain.name, of_chain), (stage.name, of_stage)]


class TestReport:
    def test_none_failed(self) -> None:
        text = report(MACHINE, [Outcome("f", PASSED, "2 calls"), Outcome("g", PASSED, "2 calls")])
        assert passes([Outcome("f", PASSED, ""), Outcome("g", UNREACHED, "")])
        assert not passes([Outcome("g", UNREACHED, "")]) and not passes([Outcome("f", FAILED, "")])
        assert "validate`: passed" in text and "2 passed" in text and "NVIDIA A100" in text
        assert "ab" * 32 in text and "driver ?" in text

    def test_what_did_not(self) -> None:
        bad = [Outcome(f"f{i}", FAILED, "one | two\nthree") for i in range(1000)]
        text = report(MACHINE, [Outcome("g", PASSED, "2 calls"), *bad])
        assert "validate`: failed" in text and "| f0 | failed | one \\| two three |" in text and "800 more" in text
        assert len(text) < 65536


class TestStamps:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GLULAM_CACHE_DIR", str(tmp_path / "cache"))

    def test_a_stamp_is_of_one_gpu_and_one_library(self) -> None:
        before = os.umask(0)
        try:
            stamps.leave(ARCH, "NVIDIA A100", "ab")
        finally:
            os.umask(before)
        assert stamps.is_there(ARCH, "NVIDIA A100", "ab")
        for other in (("sm_86", "NVIDIA A100", "ab"), (ARCH, "NVIDIA A30", "ab"), (ARCH, "NVIDIA A100", "ac")):
            assert not stamps.is_there(*other)

    def test_what_others_can_write_is_no_stamp(self) -> None:
        file = stamps.leave(ARCH, "NVIDIA A100", "ab")
        for path in (file, file.parent):
            path.chmod(path.stat().st_mode | 0o020)
            assert not stamps.is_there(ARCH, "NVIDIA A100", "ab")
            path.chmod(path.stat().st_mode & ~0o020)
        target = file.rename(file.with_suffix(".elsewhere"))
        file.symlink_to(target)
        assert not stamps.is_there(ARCH, "NVIDIA A100", "ab")


class TestStates:
    """Messages about a GPU model that we never ran, before and after its kernels are validated."""

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GLULAM_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.delenv("GLULAM_ARCH", raising=False)
        monkeypatch.delenv(device.ENV_UNVALIDATED, raising=False)
        properties = SimpleNamespace(name="NVIDIA A100", major=8, minor=0, multi_processor_count=108)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(device.verification, "check", lambda *_: SimpleNamespace(sha256="ab"))
        device.gpu.cache_clear()

    def test_calls_are_refused_until_it_is_validated(self) -> None:
        assert device.state_of("sm_90a", "NVIDIA H200") == "tested"
        assert device.state_of(ARCH, "NVIDIA A100") == "built, never run"
        with pytest.raises(UnsupportedDevice, match=r"A100.*sm_80.*built, never run.*`glulam validate`"):
            device.gpu(0)
        stamps.leave(ARCH, "NVIDIA A100", "ab")
        assert device.state_of(ARCH, "NVIDIA A100") == "validated here"
        assert device.gpu(0).arch == ARCH

    def test_a_stamp_says_nothing_of_kernels_between_gpus(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert "built, never run" in neighbours._untested(0)
        stamps.leave(ARCH, "NVIDIA A100", "ab")
        assert "never run on a NVIDIA A100" in neighbours._untested(0)
        monkeypatch.setenv(device.ENV_UNVALIDATED, "1")
        assert neighbours._untested(0) == ""

    def test_or_allowed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(device.ENV_UNVALIDATED, "1")
        assert device.gpu(0) == device.Gpu("NVIDIA A100", ARCH, 108)

    def test_another_bundle_has_no_stamp(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stamps.leave(ARCH, "NVIDIA A100", "ab")

        def missing(*_: Any) -> None:
            raise BundleMissing("none")

        monkeypatch.setattr(device.verification, "check", missing)
        assert device.state_of(ARCH, "NVIDIA A100") == "built, never run"


NAMES = {
    (7, 5): "NVIDIA T4", (8, 6): "NVIDIA A10", (8, 9): "NVIDIA L4", (9, 0): "NVIDIA H200", (10, 0): "NVIDIA B200",
    (10, 3): "NVIDIA B300",
}  # fmt: skip


class TestWhichBundleServes:
    """Choice between the bundles of a GPU's architectures, by the validation state of their kernels."""

    @pytest.fixture(autouse=True)
    def machine(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        def check(folder: Path, arch: str) -> Any:
            if not (folder / device.manifest.FILE).is_file():
                raise BundleMissing("none")
            return SimpleNamespace(sha256=arch)

        monkeypatch.setenv("GLULAM_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("GLULAM_BUNDLE", str(tmp_path / "bundle"))
        monkeypatch.delenv("GLULAM_ARCH", raising=False)
        monkeypatch.setenv(device.ENV_UNVALIDATED, "0")
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(device.verification, "check", check)
        device.gpu.cache_clear()
        yield
        device.gpu.cache_clear()

    @pytest.fixture
    def install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
        """Return a function that installs a GPU of a compute capability, bundles and validation stamps."""

        def installed(found: tuple[int, int], bundles: str, validated: str = "") -> None:
            properties = SimpleNamespace(name=NAMES[found], major=found[0], minor=found[1], multi_processor_count=148)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: found)
            for arch in bundles.split():
                (tmp_path / "bundle" / arch).mkdir(parents=True)
                (tmp_path / "bundle" / arch / device.manifest.FILE).touch()
            for arch in validated.split():
                stamps.leave(arch, NAMES[found], arch)

        return installed

    @pytest.mark.parametrize(
        ("found", "bundles", "validated", "arch", "passed_over"),
        [
            ((10, 0), "", "", "sm_100", "sm_100a"),
            ((10, 0), "sm_100", "", "sm_100", "sm_100a"),
            ((10, 0), "sm_100a sm_100", "", "sm_100", "sm_100a"),
            ((10, 0), "sm_100a sm_100", "sm_100", "sm_100", "sm_100a"),
            ((10, 0), "sm_100a sm_100", "sm_100a", "sm_100a", ""),
            ((10, 0), "sm_100a sm_100", "sm_100a sm_100", "sm_100a", ""),
            ((10, 0), "sm_100a", "", "sm_100a", ""),
            ((10, 3), "sm_100a sm_100", "sm_100a", "sm_100", "sm_103a"),
            ((10, 3), "sm_103a sm_100", "sm_103a", "sm_103a", ""),
            ((8, 6), "", "", "sm_86", ""),
            ((8, 6), "sm_80", "", "sm_80", ""),
            ((8, 6), "sm_86 sm_80", "", "sm_86", ""),
            ((8, 6), "sm_86 sm_80", "sm_80", "sm_80", "sm_86"),
            ((8, 9), "sm_86 sm_80", "", "sm_86", ""),
            ((9, 0), "", "", "sm_90a", ""),
            ((9, 0), "sm_90", "", "sm_90", ""),
            ((9, 0), "sm_90a sm_90", "", "sm_90a", ""),
        ],
    )
    def test_native_kernels_serve_once_they_are_tested_or_validated(
        self, install: Callable[..., None], found: tuple[int, int], bundles: str, validated: str, arch: str,
        passed_over: str,
    ) -> None:  # fmt: skip
        install(found, bundles, validated)
        assert device.arch_of(found, NAMES[found]) == arch
        assert device.passed_over(found, arch, NAMES[found]) == passed_over

    def test_a_stamp_of_another_gpu_does_not_count(self, install: Callable[..., None]) -> None:
        install((10, 0), "sm_100a sm_100")
        stamps.leave("sm_100a", "NVIDIA GB200", "sm_100a")
        assert device.arch_of((10, 0), "NVIDIA B200") == "sm_100"
        assert device.arch_of((10, 0), "NVIDIA GB200") == "sm_100a"

    def test_calls_that_native_kernels_alone_could_serve_are_refused(self, install: Callable[..., None]) -> None:
        install((10, 0), "sm_100a")
        with pytest.raises(UnsupportedDevice, match=r"B200.*sm_100a.*built, never run.*`glulam validate`"):
            device.gpu(0)

    def test_that_kernels_may_be_unvalidated_does_not_choose_them(
        self, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install((10, 0), "sm_100a sm_100")
        monkeypatch.setenv(device.ENV_UNVALIDATED, "1")
        assert device.gpu(0) == device.Gpu("NVIDIA B200", "sm_100", 148, "sm_100a")

    def test_a_variable_names_one_whatever_is_known_of_it(
        self, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        install((10, 0), "sm_100a sm_100", "sm_100")
        monkeypatch.setenv("GLULAM_ARCH", "sm_100a")
        with pytest.raises(UnsupportedDevice, match=r"sm_100a.*built, never run"):
            device.gpu(0)
        stamps.leave("sm_100a", "NVIDIA B200", "sm_100a")
        monkeypatch.setenv("GLULAM_ARCH", "sm_100")
        assert device.gpu(0) == device.Gpu("NVIDIA B200", "sm_100", 148)

    @pytest.mark.parametrize(
        ("found", "bundles", "validated", "arch"),
        [
            ((10, 0), "", "", "sm_100"),
            ((10, 0), "sm_100a", "", "sm_100"),
            ((10, 0), "sm_100a", "sm_100a", "sm_100a"),
            ((8, 6), "sm_86 sm_80", "sm_80", "sm_86"),
            ((7, 5), "", "", "sm_90a"),
        ],
    )
    def test_a_build_makes_no_native_kernels_that_nobody_asked_for(
        self, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, found: tuple[int, int], bundles: str,
        validated: str, arch: str,
    ) -> None:  # fmt: skip
        install(found, bundles, validated)
        monkeypatch.setattr(bundle, "find_gpu", lambda torch: doctor.Gpu(NAMES[found], found, None))
        assert bundle.archs_here() == [arch]

    @pytest.mark.parametrize(("state", "serves"), [(PASSED, "sm_100a"), (FAILED, "sm_100")])
    def test_validating_by_name_lets_native_kernels_serve(
        self, install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: str, serves: str
    ) -> None:
        def verify(folder: Path, arch: str) -> Any:
            specs = profiles.shipped_specs(arch, "demo")
            functions = {spec.name: SimpleNamespace(spec=to_dict(spec)) for spec in specs}
            return SimpleNamespace(
                functions=functions, versions={}, sha256=device.verification.check(folder, arch).sha256
            )

        def outcomes(manifest: Any, index: int, specs: list[Spec], *_: Any) -> Iterator[Outcome]:
            assert {spec.arch for spec in specs} == {"sm_100a"} and device.gpu(index).arch == "sm_100a"
            yield from (Outcome(spec.name, state, "") for spec in specs)

        install((10, 0), "sm_100a sm_100", "sm_100")
        assert device.gpu(0).arch == "sm_100"
        device.gpu.cache_clear()
        validate = importlib.import_module("glulam.command.validate")
        monkeypatch.setattr(validate.gpus, "cuda_index", lambda *_: 0)
        monkeypatch.setattr(validate, "verify", verify)
        monkeypatch.setattr(validate, "outcomes", outcomes)
        with monkeypatch.context() as patch:
            patch.setenv("GLULAM_ARCH", "sm_100a")
            result = CliRunner().invoke(cli.app, ["validate", "--out", str(tmp_path / "report.md")])
        assert result.exit_code == (state == FAILED), result.output
        assert "NVIDIA B200, compute capability 10.0, kernels of sm_100a" in (tmp_path / "report.md").read_text()
        monkeypatch.setenv(device.ENV_UNVALIDATED, "0")
        device.gpu.cache_clear()
        assert device.gpu(0).arch == serves
