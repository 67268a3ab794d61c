"""Device code without a GPU: the product's own functions, called from PyTorch, run in an emulator of PTX.

Each function is compared as `glulam validate` compares it: with float64, with NaN behind the groups, and with canaries
beside what it writes. The first run compiles what it calls; objects are kept in the user's cache
($GLULAM_EMULATOR_CACHE).
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch

import pytest
import torch
from emulator import validated
from emulator.emulated_gpu import EmulatedGpu, installed
from emulator.faults import Fault
from emulator.launch import Emulator
from emulator.more_trials import all_trials_of
from support import fake_mxfp8
from support.rank_layers import BF16, assert_like_one, cast, inputs, layers, ranks_of, weights_of

from cute_kernels.specs import RANK_KERNELS, STREAM_DTYPES, LayerSpec, QuantizeMxfp8Spec, Spec
from ffi_bridge import profiles
from glulam.choose import kernels

TINY = validated.SMALL._replace(rows=20, experts=3, kinds=("Zipf", "uniform"), inter=64, in_blocks=128)
ONE_OF_EACH = (
    "grouped_mm_bf16_nt_*", "grouped_mm_bf16_nn_t*", "grouped_mm_f16_nt_*", "grouped_glu_bf16_gated_blocked_*",
    "grouped_glu_bf16_gated_strided_preact_*", "grouped_mlp_bf16_ungated_*", "grouped_dglu_bf16_swiglu_concat_t*",
    "grouped_dglu_bf16_clamped_swiglu_interleaved_nt_*", "grouped_wgrad_bf16_bf16_*", "grouped_wgrad_bf16_f32_*",
    "grouped_mm_mxfp4w_*", "grouped_mlp_mxfp8w_*_gated_*", "grouped_mlp_mxfp4w_*_gated_*",
    "grouped_mlp_mxfp8exact_*_gated_*", "grouped_mlp_mxfp8_bf16_gated_*", "grouped_dglu_mxfp8_bf16_swiglu_*",
    "fold_mxfp8_bf16_row_*", "quantize_mxfp8_bf16_row_*", "quantize_mxfp8_bf16_both_*", "quantize_mxfp4_bf16_*",
    "layer_route_e128_*", "layer_router_bf16_e128_*", "layer_sort_e128_*", "layer_permute_bf16_*",
    "layer_combine_bf16_*", "layer_route_backward_*", "layer_row_weights_backward_*", "mhc_sinkhorn_n4_*",
    "mhc_sinkhorn_backward_n4_*", "mhc_pre_bf16_n4_*", "mhc_pre_backward_bf16_n4_*", "mhc_post_mix_bf16_n4_*",
    "mhc_post_mix_backward_bf16_n4_*", "mhc_aggregate_backward_bf16_n4_*",
)  # fmt: skip


def _chosen(arch: str) -> list[Spec]:
    """The smallest tile's function of each family that an architecture ships."""
    shipped = profiles.shipped_specs(arch, "full")
    found = []
    for pattern in ONE_OF_EACH:
        if of_family := [spec for spec in shipped if fnmatch(spec.name, pattern)]:
            found.append(min(of_family, key=_rows_of_a_tile))
    return list(dict.fromkeys(found))


def _rows_of_a_tile(spec: Spec) -> int:
    tile = getattr(spec, "tile", None) or getattr(getattr(spec, "fc1", None), "tile", None)
    return tile.m if tile else 0


@pytest.fixture
def emulated(request: pytest.FixtureRequest) -> Iterator[EmulatedGpu]:
    with installed(request.param) as gpu:
        yield gpu


def _of(arch: str, specs: list[Spec]) -> list[object]:
    return [pytest.param(arch, spec, id=spec.name) for spec in specs]


ARCHS = ("sm_90a", "sm_90", "sm_80", "sm_100")
SOME = [case for arch in ARCHS for case in _of(arch, _chosen(arch))]


@pytest.mark.parametrize(("emulated", "spec"), SOME, indirect=["emulated"])
def test_a_function_of_each_family(emulated: EmulatedGpu, spec: Spec) -> None:
    assert validated.try_function(emulated, spec, TINY, most=1).count == 1


def test_a_function_is_called_by_name() -> None:
    """With tensors of torch and of numpy, and tensors for addresses."""
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(0))
    out = torch.full_like(x, torch.nan)
    function = Emulator("sm_80").function(QuantizeMxfp8Spec("float32", arch="sm_80", rounded=True))
    function(x=x.numpy(), out=out, offs=torch.tensor([20, 30], dtype=torch.int32), num_groups=2)
    assert torch.equal(out[:30], fake_mxfp8.rounded_rows(x[:30]).float())


def test_memory_that_no_argument_has_is_a_fault() -> None:
    x, row_of, out = torch.ones(2, 8, dtype=BF16), torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 8, dtype=BF16)
    function = Emulator("sm_80").function(LayerSpec("combine", "bfloat16", arch="sm_80"))
    sizes = {"tokens": 2, "k": 1, "width": 8, "bound": 2, "stream": 0}
    function(y=x, row_of=row_of, out=out, **sizes)
    assert torch.equal(out, x)
    with pytest.raises(Fault, match="not allocated"):
        function(y=x, row_of=row_of, out=out.data_ptr(), **sizes)


@pytest.mark.parametrize("emulated", ["sm_80"], indirect=True)
def test_a_wrong_kernel_is_found(emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results that go 16 bytes too far."""
    spec = LayerSpec("combine", "bfloat16", arch="sm_80")
    run = emulated.emulator.run

    def wrong(spec: Spec, named: dict[str, object], memory: object = None) -> None:
        changed = {**named, "out": named["out"] + 16} if "out" in named else named  # type: ignore[operator]
        run(spec, changed, memory)  # type: ignore[arg-type]

    monkeypatch.setattr(emulated.emulator, "run", wrong)
    with pytest.raises(validated.Wrong, match="bytes behind a result|largest error|not finite"):
        validated.try_function(emulated, spec, TINY, most=1)


# The whole table ------------------------------------------------------------------------------------------------------

WHOLE = ("sm_90a", "sm_90")
MOST_TRIALS = 4
WRITES_ALIKE = "mhc_pre_*"
"""Functions with mhc_project: where its slice of the weight is short, several threads write its last vector, all the
same numbers. The race check does not look at numbers."""
EVERY = [case for arch in WHOLE for case in _of(arch, profiles.shipped_specs(arch, "full"))]


def _tried_elsewhere(arch: str) -> set[Spec]:
    """Functions that no operator of one GPU calls: `test_ranks`, and `test_a_function_is_called_by_name`."""
    between_gpus = {LayerSpec(kernel, dtype, arch=arch) for kernel in RANK_KERNELS for dtype in STREAM_DTYPES}
    return between_gpus | {QuantizeMxfp8Spec("float32", arch=arch, rounded=True)}


@pytest.mark.emulator
@pytest.mark.parametrize(("emulated", "spec"), EVERY, indirect=["emulated"])
def test_every_function(emulated: EmulatedGpu, spec: Spec) -> None:
    """Its first trial; a function without any is called by another, see below."""
    tried = validated.try_function(emulated, spec, TINY, most=1)
    assert not tried.count or spec.name in tried.called


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("arch", "spec"), [case for arch in WHOLE for case in _of(arch, _chosen(arch))])
def test_more_trials_of_a_function_of_each_family(arch: str, spec: Spec, seed: int) -> None:
    """By other schedules than above, one of them with the race check."""
    check_races = seed == 1 and not fnmatch(spec.name, WRITES_ALIKE)
    with installed(arch, seed=seed, check_races=check_races) as gpu:
        assert validated.try_function(gpu, spec, most=MOST_TRIALS).count


@pytest.mark.emulator
@pytest.mark.parametrize("emulated", WHOLE, indirect=True)
def test_none_is_missed(emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function without trials is called by the first trial of one that has some; here formulas do its work."""
    monkeypatch.setattr(kernels, "find", emulated.fake.find)
    arch, called = emulated.emulator.arch, set[str]()
    shipped = profiles.shipped_specs(arch, "full")
    for spec in shipped:
        if next(all_trials_of(spec, TINY), None):
            called |= validated.called_by(emulated, spec, TINY)
    every = {spec.name for spec in (*shipped, *profiles.all_stages(shipped))}
    assert every - called == {spec.name for spec in _tried_elsewhere(arch)}


@pytest.mark.emulator
@pytest.mark.parametrize("arch", WHOLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_ranks(arch: str, dtype: torch.dtype) -> None:
    """A layer over two ranks, a thread each, whose kernels write to each other's memory."""
    w1, w2 = (w.to(dtype) for w in weights_of())
    tokens = [cast(inputs(count, rank, "all"), dtype) for rank, count in enumerate((9, 4))]
    with installed(arch, patience_s=60.0):
        ranks = ranks_of(2, dtype, device="cpu")
        made = layers(ranks, tokens, w1, w2)
    assert_like_one(made, tokens, w1, w2)
