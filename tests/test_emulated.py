"""Device code without a GPU: the product's own functions, called from PyTorch and run in a PTX emulator.

Each function is checked as `glulam validate` does: against float64, with NaN after the groups and canaries around its
outputs. The first run compiles the functions; objects are stored in the user's cache ($GLULAM_EMULATOR_CACHE).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

import pytest
import torch
from emulator import validated
from emulator.emulated_gpu import EmulatedGpu, installed
from emulator.faults import Fault
from emulator.launch import Emulator, ptx_of
from support import fake_mxfp8
from support.criterion import assert_close
from support.gradients import check_gradients, leaves, transposed_back, transposed_leaves
from support.inputs import gradient, make_case
from support.rank_layers import BF16, assert_like_one, cast, inputs, layers, ranks_of, weights_of
from torch import Tensor

import glulam
from cute_kernels.architectures import capability
from cute_kernels.dtypes import WIDE_DTYPES
from cute_kernels.layer.kernels import RANK_KERNELS
from cute_kernels.specs import LayerSpec, QuantizeMxfp8Spec, Spec
from cute_kernels.tiles import TileConfig
from ffi_bridge import profiles
from glulam.choose import kernels
from glulam.choose.problem import Problem
from glulam.choose.shipped import shipped_choice, spec_on
from glulam.host.experts import GateUp
from glulam.layer.choices import moe_of_choices
from glulam.validate import child
from glulam.validate.catalogue import trials_of
from glulam.validate.inputs import Size

Trials = list[Sequence[Tensor]]
"""The results of each trial."""

TINY = validated.SMALL._replace(rows=20, experts=3, kinds=("Zipf", "uniform"), inter=64, in_blocks=128)
ONE_OF_EACH = (
    "grouped_mm_bf16_nt_*", "grouped_mm_bf16_nn_t*", "grouped_mm_f16_nt_*", "grouped_glu_bf16_gated_blocked_*",
    "grouped_glu_bf16_gated_strided_preact_*", "grouped_mlp_bf16_ungated_*", "grouped_dglu_bf16_swiglu_concat_t*",
    "grouped_dglu_bf16_clamped_swiglu_interleaved_nt_*", "grouped_mlp_bf16_situ_*",
    "grouped_dglu_bf16_situ_interleaved_t*", "grouped_wgrad_bf16_bf16_*", "grouped_wgrad_bf16_f32_*",
    "grouped_mm_mxfp4w_bf16_nt_*", "grouped_mm_mxfp4w_bf16_nn_*", "grouped_mm_mxfp8w_bf16_nn_*",
    "grouped_mm_nvfp4w_bf16_nn_*", "grouped_mm_fp8blockw_bf16_nn_*", "grouped_mlp_mxfp8w_*_gated_*",
    "grouped_mlp_mxfp4w_*_gated_*", "grouped_mlp_mxfp4_bf16_gated_*",
    "grouped_mlp_mxfp8exact_*_gated_*", "grouped_mlp_mxfp8_bf16_gated_*", "grouped_dglu_mxfp8_bf16_swiglu_*",
    "fold_mxfp8_bf16_row_*", "quantize_mxfp8_bf16_row_*", "quantize_mxfp8_bf16_both_*", "quantize_mxfp4_bf16_*",
    "layer_route_e128_*", "layer_router_bf16_e128_*", "layer_sort_e128_*", "layer_permute_bf16_*",
    "layer_combine_bf16_*", "layer_gate_bf16_*", "layer_gate_backward_bf16_*", "layer_route_backward_*",
    "layer_row_weights_backward_*", "mhc_sinkhorn_n4_*",
    "mhc_sinkhorn_backward_n4_*", "mhc_pre_bf16_n4_*", "mhc_pre_backward_bf16_n4_*", "mhc_post_mix_bf16_n4_*",
    "mhc_post_mix_backward_bf16_n4_*", "mhc_aggregate_backward_bf16_n4_*", "mhc_boundary_bf16_n4_*",
    "mhc_boundary_backward_bf16_n4_*",
)  # fmt: skip


def _chosen(arch: str, patterns: Sequence[str] = ONE_OF_EACH) -> list[Spec]:
    """Return the function with the smallest tile of each family that an architecture ships."""
    shipped = profiles.shipped_specs(arch, "full")
    found = []
    for pattern in patterns:
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


@pytest.mark.parametrize(("emulated", "spec"), _of("sm_90a", _chosen("sm_90a")), indirect=["emulated"])
def test_a_function_of_each_family(emulated: EmulatedGpu, spec: Spec) -> None:
    assert validated.try_function(emulated, spec, TINY, most=1).trials == 1


@pytest.mark.emulator
@pytest.mark.parametrize(("emulated", "spec"), _of("sm_90a", _chosen("sm_90a")), indirect=["emulated"])
def test_without_rows_after_the_groups_nothing_unwritten_is_read(emulated: EmulatedGpu, spec: Spec) -> None:
    """So that initcheck is clean; `test_sanitize.py` shows what is read of such rows."""
    assert validated.unwritten_by(emulated, spec, TINY._replace(has_tail=False), most=1) == {}


# The portable kernels, of one source, as several architectures' -------------------------------------------------------

MOST_TRIALS = 4
BUILDS = ("sm_90", "sm_80", "sm_100")
OTHER_BUILDS = ("sm_90", "sm_86", "sm_89", "sm_120")
SOME_OF_EACH = (
    "grouped_mm_bf16_nt_*", "grouped_mlp_mxfp4w_*_gated_*", "grouped_wgrad_bf16_bf16_*", "quantize_mxfp8_bf16_row_*",
    "layer_route_e128_*", "layer_route_backward_*", "layer_combine_bf16_*", "mhc_pre_backward_bf16_n4_*",
    "mhc_post_mix_backward_bf16_n4_*",
)  # fmt: skip
D_BIAS, D_NORM_WEIGHT = 4, 8
ROUNDED_OTHERWISE = {
    "mhc_post_mix_backward_bf16_n4": {D_BIAS: 4 * torch.finfo(torch.float32).eps},
    "mhc_boundary_backward_bf16_n4": {D_NORM_WEIGHT: 4 * torch.finfo(torch.float32).eps},
}
"""Results whose bits in Blackwell's builds are not sm_90's, and the allowed error over the result's largest value.

d_bias is the sum of d[i] * h_post[i] over n = 4 streams and all tokens, in float32. For sm_90 the compiler fuses mul
and add to fma.rn.f32, which rounds once; for Blackwell the add is packed (add.f32x2), and mul.f32 rounds each product
before it. That kernel's other sums of such products are rounded to 16 bits afterwards, which hides it. d_norm_weight is
such a sum, too; in a single small trial its bits may be the same."""


def _builds(archs: Sequence[str], patterns: Sequence[str] = ONE_OF_EACH) -> list[object]:
    """Return one test parameter per family: its function's specs, one for each architecture."""
    return [
        pytest.param(specs, id=_family(specs[0]))
        for specs in zip(*(_chosen(arch, patterns) for arch in archs), strict=True)
    ]


def _family(spec: Spec) -> str:
    return spec.name.removesuffix(f"_{spec.arch}")


def _unlike(results: Trials, wanted: Trials) -> dict[tuple[int, int], float]:
    """Return the largest error, relative to the largest value, of each result whose bytes differ, by (trial, place)."""
    found = {}
    for trial, (made, others) in enumerate(zip(results, wanted, strict=True)):
        for place, (one, other) in enumerate(zip(made, others, strict=True)):
            if one.dtype != other.dtype or not torch.equal(_bytes(one), _bytes(other)):
                error = (one.double() - other.double()).abs().max() / other.double().abs().max()
                found[trial, place] = float(error)
    return found


def _bytes(result: Tensor) -> Tensor:
    return result.contiguous().view(-1).view(torch.uint8)


def _check_builds(specs: Sequence[Spec], size: Size, most: int) -> None:
    """Check that each build passes the same trials, with the same bytes, those after the last group included."""
    first, *others = [_tried(spec, size, most) for spec in specs]
    assert first
    for spec, results in zip(specs[1:], others, strict=True):
        is_blackwell = capability(spec.arch) >= (10, 0)
        allowed = ROUNDED_OTHERWISE.get(_family(spec), {}) if is_blackwell else {}
        unlike = _unlike(results, first)
        places = {place for _, place in unlike}
        assert places <= allowed.keys(), f"{spec.name}: results {unlike} have other bits"
        assert most == 1 or places == allowed.keys(), (
            f"{spec.name}: results {allowed.keys() - places} have sm_90's bits"
        )
        assert all(error <= allowed[place] for (_, place), error in unlike.items()), f"{spec.name}: {unlike}"


def _tried(spec: Spec, size: Size, most: int) -> Trials:
    with installed(spec.arch) as gpu:
        return validated.try_function(gpu, spec, size, most).results


@pytest.mark.parametrize("specs", _builds(BUILDS))
def test_builds_of_a_function_of_each_family_are_right_and_alike(specs: Sequence[Spec]) -> None:
    _check_builds(specs, TINY, most=1)


@pytest.mark.emulator
@pytest.mark.parametrize("specs", _builds(BUILDS))
def test_more_trials_of_builds(specs: Sequence[Spec]) -> None:
    _check_builds(specs, validated.SMALL, MOST_TRIALS)


@pytest.mark.emulator
@pytest.mark.parametrize("specs", _builds(OTHER_BUILDS, SOME_OF_EACH))
def test_builds_for_other_gpus(specs: Sequence[Spec]) -> None:
    _check_builds(specs, TINY, most=1)


@pytest.mark.emulator
@pytest.mark.parametrize(("arch", "sibling"), [("sm_86", "sm_80"), ("sm_89", "sm_80"), ("sm_120", "sm_100")])
def test_a_build_has_the_ptx_of_its_sibling(arch: str, sibling: str) -> None:
    """Names and target aside; except for one kernel, in which the compiler repeats a comparison or reuses it."""
    pairs = zip(*(_chosen(each, SOME_OF_EACH) for each in (arch, sibling)), strict=True)
    unlike = [spec.name for spec, other in pairs if ptx_of(spec) != ptx_of(other)]
    assert unlike == [f"mhc_pre_backward_bf16_n4_{arch}"]


def test_other_bits_are_found() -> None:
    ones, others = torch.ones(4), torch.tensor([1.0, 1.0, 1.0, -2.0])
    assert not _unlike([[ones, others]], [[ones, others]])
    assert _unlike([[ones, ones]], [[ones, others]]) == {(0, 1): 1.5}
    assert _unlike([[-torch.zeros(1)]], [[torch.zeros(1)]]).keys() == {(0, 0)}
    assert not _unlike([[torch.tensor([torch.nan])]], [[ones[:1]]])[0, 0] <= 1e9


def test_a_function_is_called_by_name() -> None:
    """With tensors of torch and of numpy, and tensors for addresses."""
    x = torch.randn(33, 96, generator=torch.Generator().manual_seed(0))
    out = torch.full_like(x, torch.nan)
    function = Emulator("sm_80").function(QuantizeMxfp8Spec("float32", arch="sm_80", rounded=True))
    function(x=x.numpy(), out=out, offs=torch.tensor([20, 30], dtype=torch.int32), num_groups=2)
    assert torch.equal(out[:30], fake_mxfp8.rounded_rows(x[:30]).float())


def _untold(op: str) -> Spec:
    """Return an operator's portable function with a tile of 16 rows, which the dispatcher uses only if it was compiled
    or tuned for.
    """
    problem = Problem(op, "bfloat16", 64, 4, 72, intermediate=96, activation="swiglu", save_preact=op == "grouped_glu")
    spec = shipped_choice(problem, "sm_90").spec
    return dataclasses.replace(spec, tile=dataclasses.replace(spec.tile, m=16))


@pytest.mark.parametrize("op", ["grouped_glu", "grouped_dglu"])
def test_tiles_that_do_not_ship(op: str) -> None:
    """Groups of several tiles: none may write what is another's."""
    with installed("sm_90", check_races=True) as gpu:
        assert validated.try_function(gpu, _untold(op), most=1).trials == 1


@pytest.mark.parametrize("rows", [64, 128])
def test_a_backward_by_index_on_every_height(rows: int) -> None:
    """No tile of 64 rows ships. Two warps gather rows, one fewer than the other."""
    generator = torch.Generator().manual_seed(rows)
    dy, h, w2 = (torch.randn(*shape, generator=generator).to(BF16) for shape in ((50, 136), (110, 144), (3, 136, 72)))
    offs, rows_of_dy = torch.tensor([70, 70, 110]).int(), torch.randint(0, 50, (110,), generator=generator).int()
    call = {"offs": offs, "rows": rows_of_dy}
    exact = glulam.grouped_dglu(dy.double(), w2.double(), h.double(), **call)
    wanted = glulam.grouped_dglu(dy, w2, h, **call)
    with installed("sm_90a", check_races=True) as gpu:
        problem = Problem("grouped_dglu", "bfloat16", 110, 3, 136, intermediate=72, activation="swiglu", gathers=True)
        spec = spec_on(problem, "sm_90a", TileConfig(rows, 128, 64))
        child.prefer(spec)
        made = glulam.grouped_dglu(dy, w2, h, **call)
        assert gpu.fake.specs == [spec]
    for results in zip(made[:2], exact[:2], wanted[:2], strict=True):
        assert_close(*results, rows=110)


@pytest.mark.parametrize("tokens", [9, 520], ids=["one launch", "two launches"])
def test_choices_by_a_map_of_experts(tokens: int) -> None:
    """Ids below, above and in the map, whose values are places in any order, -1 and places of nobody."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-2, 17, (tokens, 4), generator=generator)
    ids[1] = 2**32
    weights, experts = torch.rand(tokens, 4, generator=generator), 10
    expert_map = torch.tensor([3, -1, 0, 9, 10, 5, -7, 1, 2, 2**31 - 1, 8, 7, -1, 3], dtype=torch.int32)
    for given in (ids, ids.clamp(max=20).int()):
        wanted = glulam.Routing.from_topk(given, weights, experts, expert_map=expert_map)
        with installed("sm_90a", check_races=True) as gpu:
            made = glulam.Routing.from_topk(given, weights, experts, expert_map=expert_map)
            assert "layer_sort_e128_sm_90a" in gpu.called
            assert bool(gpu.fake.launches[-1]["workspace"]) == (tokens > 9)
        assert made.offs.equal(wanted.offs) and made.row_of.equal(wanted.row_of)
        end = int(made.offs[-1])
        assert made.token_of_row[:end].equal(wanted.token_of_row[:end])
        assert made.weight_of_row[:end].equal(wanted.weight_of_row[:end])
        assert 0 < end < ids.numel() and (wanted.row_of[1] < 0).all()


def test_a_layer_sorts_choices_by_a_map_of_experts() -> None:
    """In one call; the same bits as of ids that are places."""
    generator = torch.Generator().manual_seed(0)
    x, w1, w2 = (torch.randn(*shape, generator=generator) for shape in ((9, 64), (6, 64, 64), (6, 64, 32)))
    given = [x.to(BF16), (w1 / 8).to(BF16), (w2 / 8).to(BF16)]
    ids, weights = torch.randint(-1, 9, (9, 3), generator=generator), torch.rand(9, 3, generator=generator)
    places = torch.tensor([5, -1, 0, 2, 9, 3, 1, 4, -1, -1], dtype=torch.int32)  # and of ids 8 and -1

    def layer(ids: Tensor, **options: Any) -> Tensor:
        with torch.no_grad():
            return moe_of_choices(given[0], ids, weights, 6, *given[1:], **options)

    exact = layer(places[ids])
    with installed("sm_90a") as gpu:
        made, wanted = layer(ids, expert_map=places[:8]), layer(places[ids])
        assert "layer_place_e256_sm_90a" in gpu.called
    assert made.equal(wanted) and exact.abs().max() > 1
    torch.testing.assert_close(made, exact, rtol=2e-2, atol=2e-2)


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
    with pytest.raises(validated.Wrong, match="bytes after a result|largest error|not finite"):
        validated.try_function(emulated, spec, TINY, most=1)


# The whole table ------------------------------------------------------------------------------------------------------

WHOLE = ("sm_90a", "sm_90")
WRITES_ALIKE = "mhc_pre_*"
"""Functions with mhc_project: where its slice of the weight is short, several threads write its last vector, all the
same numbers. The race check does not look at numbers."""
EVERY = [case for arch in WHOLE for case in _of(arch, profiles.shipped_specs(arch, "full"))]


def _tried_elsewhere(arch: str) -> set[Spec]:
    """Return functions that no operator of one GPU calls, which `test_ranks` and `test_a_function_is_called_by_name`
    test.
    """
    between_gpus = {LayerSpec(kernel, dtype, arch=arch) for kernel in RANK_KERNELS for dtype in WIDE_DTYPES}
    return between_gpus | {QuantizeMxfp8Spec("float32", arch=arch, rounded=True)}


@pytest.mark.emulator
@pytest.mark.parametrize(("emulated", "spec"), EVERY, indirect=["emulated"])
def test_every_function(emulated: EmulatedGpu, spec: Spec) -> None:
    """Its first trial; a function without any is called by another, see below."""
    tried = validated.try_function(emulated, spec, TINY, most=1)
    assert not tried.trials or spec.name in tried.called


@pytest.mark.emulator
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("arch", "spec"), [case for arch in WHOLE for case in _of(arch, _chosen(arch))])
def test_more_trials_of_a_function_of_each_family(arch: str, spec: Spec, seed: int) -> None:
    """By other schedules than above, one of them with the race check."""
    check_races = seed == 1 and not fnmatch(spec.name, WRITES_ALIKE)
    with installed(arch, seed=seed, check_races=check_races) as gpu:
        assert validated.try_function(gpu, spec, most=MOST_TRIALS).trials


@pytest.mark.emulator
@pytest.mark.parametrize("emulated", WHOLE, indirect=True)
def test_none_is_missed(emulated: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function without trials is called by the first trial of one that has some; here formulas do its work."""
    monkeypatch.setattr(kernels, "find", emulated.fake.find)
    arch, called = emulated.emulator.arch, set[str]()
    shipped = profiles.shipped_specs(arch, "full")
    for spec in shipped:
        if next(trials_of(spec, TINY), None):
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


@pytest.mark.emulator
@pytest.mark.parametrize("emulated", WHOLE, indirect=True)
@pytest.mark.parametrize("form", ["packed", "lists", "GateUp", "transposed", "recompute"])
def test_a_training_step(emulated: EmulatedGpu, form: str) -> None:
    """Planned, and planned anew for lists whose tables are known: gradients by the criterion, tails NaN."""
    case = make_case([5, 0, 17, 1], 64, 64, tail=3)
    dy = gradient(case)
    given = transposed_leaves(case) if form == "transposed" else leaves(case)
    arguments: dict[str, Any] = dict(given)
    if form == "lists":
        listed = {n: [one.detach().requires_grad_() for one in given[n]] for n in ("w1", "w2", "b1", "b2")}
        arguments.update(listed)
    elif form == "GateUp":
        arguments["w1"] = GateUp(*(half.detach().clone().requires_grad_() for half in given["w1"].chunk(2, 1)))
    options = {"recompute": form == "recompute", "transpose_w": form == "transposed"}
    trained = {n: value if isinstance(value, (list, tuple)) else (value,) for n, value in arguments.items()}
    for _ in range(2):
        y = glulam.grouped_mlp(**arguments, offs=case.offs, **options)
        flat = iter(torch.autograd.grad(y, [one for parts in trained.values() for one in parts], dy))
        got = {name: [next(flat) for _ in parts] for name, parts in trained.items()}
    whole = {n: parts[0] if len(parts) == 1 else torch.stack(parts) for n, parts in got.items() if n != "w1"}
    whole["w1"] = (
        torch.cat(got["w1"], 1) if form == "GateUp" else torch.stack(got["w1"]).view(4, *got["w1"][0].shape[-2:])
    )
    check_gradients(case, dy, transposed_back(whole) if form == "transposed" else whole)
