"""grouped_mlp in MXFP8 on a GPU: every recipe, activation, routing and kind of argument against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.inputs import Case, make_case, poisoned
from support.mxfp8_mlp import RECIPES, check, prepared
from support.routing import catalogue, ends, one_takes_all

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import GATED
from glulam.formats import prepared as prepared_weights

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16
EXPERTS, HIDDEN, INTER = 6, 352, 224  # multiples of 32, not of 64 or 128
FEW, MANY = [5, 0, 64, 1, 0, 40], [130, 0, 257, 64, 1, 300]
DTYPES = {
    "mxfp8": [BF16, F16], "mxfp8_exact": [BF16], "mxfp8_weight_only": [BF16], "mxfp4": [BF16, F16],
    "mxfp4_weight_only": [BF16],
}  # fmt: skip
RECIPES_AND_DTYPES = [(recipe, dtype) for recipe in RECIPES for dtype in DTYPES[recipe]]


def case(sizes: list[int], form: tuple[str, str] = ("swiglu", "concat"), dtype: torch.dtype = BF16) -> Case:
    return make_case(sizes, HIDDEN, INTER, gated=form[0] in GATED, tail=70, dtype=dtype, device="cuda")


def weights_of(c: Case, recipe: str) -> tuple[Any, Any]:
    return prepared(c.w1, recipe), prepared(c.w2, recipe)


@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few rows", "many rows"])
@pytest.mark.parametrize(("recipe", "dtype"), RECIPES_AND_DTYPES)
@pytest.mark.parametrize("form", activation_forms(), ids="-".join)
def test_every_activation(recipe: str, dtype: torch.dtype, form: tuple[str, str], sizes: list[int]) -> None:
    c = case(sizes, form, dtype)
    weights = weights_of(c, recipe)
    out = poisoned(c.x.shape[0], HIDDEN, c.x, padding=8)
    options = {"activation": form[0], "glu_layout": form[1], "recipe": recipe, **c.addends}
    glulam.grouped_mlp(c.x, *weights, offs=c.offs, out=out, **options)
    check(c, out, recipe, weights, form=form, **c.addends)
    assert bool(out[c.rows :].isnan().all()), "the tail was written"


@pytest.mark.parametrize("rows", [96, 1500])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("routing", catalogue(96, EXPERTS))
def test_every_routing(recipe: str, routing: str, rows: int) -> None:
    c = case(catalogue(rows, EXPERTS)[routing])
    weights = weights_of(c, recipe)
    for groups in ({"offs": c.offs}, {"splits": c.splits()}, {"splits": c.splits(torch.int64)}, {"splits": c.sizes}):
        out = poisoned(c.x.shape[0], HIDDEN, c.x)
        glulam.grouped_mlp(c.x, *weights, recipe=recipe, out=out, **groups)
        check(c, out, recipe, weights)
        assert bool(out[c.rows :].isnan().all()), "the tail was written"


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("hidden", "inter"), [(32, 32), (736, 1504), (1504, 736), (2048, 96), (64, 2880)])
def test_sizes_that_no_tile_divides(recipe: str, hidden: int, inter: int) -> None:
    for sizes in ([3, 0, 70], [200, 1, 333]):
        c = make_case(sizes, hidden, inter, tail=5, device="cuda")
        weights = weights_of(c, recipe)
        check(c, glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe), recipe, weights)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("out_features", [32, 96, 512])
def test_results_of_another_width(recipe: str, out_features: int) -> None:
    c = case(MANY)
    c.w2 = torch.randn(EXPERTS, out_features, INTER, device="cuda").mul(INTER**-0.5).to(BF16)
    weights = weights_of(c, recipe)
    check(c, glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe), recipe, weights)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact"])
@pytest.mark.parametrize("block", ["1x32", "1x128"])
@pytest.mark.parametrize("scale_layout", ["plain", "swizzled"])
@pytest.mark.parametrize("sizes", [FEW, MANY], ids=["few rows", "many rows"])
def test_rows_in_mxfp8(recipe: str, block: str, scale_layout: str, sizes: list[int]) -> None:
    c = case(sizes)
    x = glulam.quantize_mxfp8(c.x, block=block, scale_layout=scale_layout)  # the tail is NaN
    weights = weights_of(c, recipe)
    c.x = x.dequantize()
    y = glulam.grouped_mlp(x, *weights, offs=c.offs, recipe=recipe, **c.addends)
    assert y.dtype == BF16
    check(c, y, recipe, weights, **c.addends)


def test_rows_in_mxfp8_are_what_the_call_itself_makes_of_them() -> None:
    c = case(MANY)
    weights = weights_of(c, "mxfp8")
    x = glulam.quantize_mxfp8(c.x, block="1x128")
    y, z = (glulam.grouped_mlp(v, *weights, offs=c.offs, recipe="mxfp8") for v in (c.x, x))
    assert same_bits(y[: c.rows], z[: c.rows])


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("listed", [False, True])
def test_16_bit_weights(recipe: str, listed: bool) -> None:
    c = case(FEW)
    w1, w2, b1, b2 = (list(t) if listed else t for t in (c.w1, c.w2, c.b1, c.b2))
    wanted = glulam.grouped_mlp(c.x, *weights_of(c, recipe), offs=c.offs, b1=c.b1, b2=c.b2, recipe=recipe)
    for _ in range(2):
        y = glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, b1=b1, b2=b2, recipe=recipe)
        assert same_bits(y[: c.rows], wanted[: c.rows])
    with torch.no_grad():
        c.w1.mul_(2)
    y = glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, b1=b1, b2=b2, recipe=recipe)
    check(c, y, recipe, weights_of(c, recipe), b1=c.b1, b2=c.b2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_one_row_no_rows_many_experts(recipe: str) -> None:
    c = make_case([0, 1, 0], HIDDEN, INTER, device="cuda")
    weights = weights_of(c, recipe)
    x, out = (t.as_strided((1, HIDDEN), (1, 1)) for t in (c.x, poisoned(1, HIDDEN, c.x)))
    check(c, glulam.grouped_mlp(x, *weights, offs=c.offs, recipe=recipe, out=out), recipe, weights)
    c = make_case([0, 0, 0], HIDDEN, INTER, device="cuda")
    assert glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe).shape == (0, HIDDEN)
    c = make_case([e % 3 for e in range(512)], 64, 32, device="cuda")
    weights = weights_of(c, recipe)
    check(c, glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe), recipe, weights)


@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_far_apart(recipe: str) -> None:
    """A scale of another row, expert or block of 128 is a wrong result by powers of two."""
    c = case(MANY)
    powers = torch.exp2(torch.arange(c.x.shape[0], device="cuda") * 7 % 41 - 20.0)
    c.x = (c.x.float() * powers[:, None]).to(BF16)
    c.w1 = (c.w1.float() * torch.exp2(torch.arange(c.w1.shape[1], device="cuda") * 5 % 13 - 6.0)[:, None]).to(BF16)
    c.w2 = (c.w2.float() * torch.exp2(torch.arange(HIDDEN, device="cuda") * 5 % 13 - 6.0)[:, None]).to(BF16)
    weights = weights_of(c, recipe)
    y = glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe, activation="reglu")
    check(c, y, recipe, weights, form=("reglu", "concat"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_deterministic(recipe: str) -> None:
    c = case(MANY)
    weights = weights_of(c, recipe)
    first, second = (glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe) for _ in range(2))
    assert same_bits(first[: c.rows], second[: c.rows])


@pytest.mark.parametrize("warm", [False, True], ids=["first call captured", "called before"])
@pytest.mark.parametrize("rows", [300, 1200])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_replay_equals_eager(recipe: str, rows: int, warm: bool) -> None:
    count = 8
    c = make_case([rows // count] * count, HIDDEN, INTER, tail=rows % count, device="cuda")
    c.x.nan_to_num_(nan=0.5)
    weights, offs = weights_of(c, recipe), c.offs
    quantised = glulam.quantize_mxfp8(c.x, block="1x128")
    inputs = [c.x] if recipe.endswith("weight_only") else [c.x, quantised]
    outs = [torch.full_like(c.x, 7.0) for _ in inputs]

    def run(results: list[torch.Tensor]) -> None:
        for x, out in zip(inputs, results, strict=True):
            glulam.grouped_mlp(x, *weights, offs=offs, recipe=recipe, out=out)

    if warm:
        run(outs)
    for w in weights if recipe == "mxfp4_weight_only" else ():  # else prepared by a call before
        w.prepare_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(outs)
    others = {**catalogue(rows - 11, count), "first takes all": one_takes_all(rows, count, 0)}
    for routing, sizes in others.items():
        offs.copy_(torch.tensor(ends(sizes), dtype=torch.int32))
        for out in outs:
            out.fill_(7.0)
        graph.replay()
        eager = [torch.full_like(c.x, 7.0) for _ in inputs]
        run(eager)
        for got, wanted in zip(outs, eager, strict=True):
            assert same_bits(got, wanted), routing


def test_weights_first_seen_under_capture() -> None:
    c = case(FEW)
    offs = c.offs
    glulam.grouped_mlp(c.x, *weights_of(c, "mxfp8"), offs=offs, recipe="mxfp8")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(glulam.CaptureError, match="once with it before capturing"), torch.cuda.graph(graph):
        glulam.grouped_mlp(c.x, c.w1, c.w2, offs=offs, recipe="mxfp8")
    torch.cuda.synchronize()


def test_captured_16_bit_weights_outlive_a_change() -> None:
    """A graph goes on with the weights that it was captured with; an eager call sees the new ones."""
    c = case(FEW)
    call = {"offs": c.offs, "recipe": "mxfp8"}
    before, out = glulam.grouped_mlp(c.x, c.w1, c.w2, **call), torch.zeros_like(c.x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        glulam.grouped_mlp(c.x, c.w1, c.w2, out=out, **call)
    c.w2.mul_(2)
    after = glulam.grouped_mlp(c.x, c.w1, c.w2, **call)
    torch.full((64 << 20,), torch.nan, device="cuda")  # over what may have been freed
    graph.replay()
    assert same_bits(out[: c.rows], before[: c.rows]) and not same_bits(after[: c.rows], before[: c.rows])


def test_on_a_stream_of_its_own() -> None:
    c = case(MANY)
    for recipe in RECIPES:
        wanted = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=recipe)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            late = c.x * 1
            got = glulam.grouped_mlp(late, c.w1, c.w2, offs=c.offs, recipe=recipe)
        torch.cuda.current_stream().wait_stream(stream)
        assert same_bits(got[: c.rows], wanted[: c.rows])


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled(recipe: str) -> None:
    torch.compiler.reset()
    c = case(FEW)
    weights = weights_of(c, recipe)
    call = lambda x: glulam.grouped_mlp(x * 1, *weights, offs=c.offs, recipe=recipe)  # noqa: E731
    got = torch.compile(call, backend="aot_eager", fullgraph=True)(c.x)
    assert same_bits(got[: c.rows], call(c.x)[: c.rows])


def test_one_call_of_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising x and both GEMMs; mxfp8_exact has one more, which rounds x."""
    c, calls = case(FEW), []
    kept = glulam.choose.kernels.find

    def find(spec: Any) -> Any:
        kernel = kept(spec)
        return kernel._replace(function=lambda *a: (calls.append(spec.op), kernel.function(*a)))

    weights = {recipe: weights_of(c, recipe) for recipe in RECIPES}
    monkeypatch.setattr(glulam.choose.kernels, "find", find)
    glulam.host.plans.forget_plans()
    for recipe in RECIPES:
        calls.clear()
        glulam.grouped_mlp(c.x, *weights[recipe], offs=c.offs, recipe=recipe)
        assert calls == ["quantize_mxfp8"] * (recipe == "mxfp8_exact") + ["grouped_mlp"]
    glulam.host.plans.forget_plans()


def test_no_call_waits_for_the_device() -> None:
    c = case(FEW)
    weights = {recipe: weights_of(c, recipe) for recipe in RECIPES}
    offs = c.offs
    try:
        for mode in ("default", "error"):
            torch.cuda.set_sync_debug_mode(mode)
            for recipe in RECIPES:
                glulam.grouped_mlp(c.x, *weights[recipe], offs=offs, recipe=recipe)
                glulam.grouped_mlp(c.x, c.w1, c.w2, offs=offs, recipe=recipe)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact", "mxfp8_weight_only"])
def test_writes_through_data_are_seen_in_evaluation(recipe: str, packed: bool) -> None:
    """By calls on any stream; a captured graph keeps the weights of its capture."""
    options = {"recipe": recipe, "packed": packed, "dtype": BF16, "device": "cuda"}
    mlp = glulam.nn.GroupedMLP(4, 128, 64, **options).eval()
    x, offs = torch.randn(64, 128, device="cuda").to(BF16), torch.tensor([16, 16, 40, 64], device="cuda").int()
    before, graph = mlp(x, offs=offs), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = mlp(x, offs=offs)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for parameter in mlp.parameters():
                parameter.data.mul_(0.5)
            after, wanted = mlp(x, offs=offs), copy.deepcopy(mlp)(x, offs=offs)
        stream.synchronize()
        assert same_bits(after, wanted) and not same_bits(after, before)
    graph.replay()
    assert same_bits(captured, before)


def test_near_bf16_at_a_models_size() -> None:
    """Qwen3-30B-A3B's experts, a few of them: MXFP8's own rounding and nothing else."""
    experts, hidden, inter, rows = 16, 2048, 768, 4096
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(rows, hidden, device="cuda", generator=generator).to(BF16)
    w1 = (torch.randn(experts, 2 * inter, hidden, device="cuda", generator=generator) * hidden**-0.5).to(BF16)
    w2 = (torch.randn(experts, hidden, inter, device="cuda", generator=generator) * inter**-0.5).to(BF16)
    splits = torch.full((experts,), rows // experts, dtype=torch.int32, device="cuda")
    wanted = glulam.grouped_mlp(x, w1, w2, splits=splits).float()
    for recipe, expected in (("mxfp8", 0.066), ("mxfp8_exact", 0.066), ("mxfp8_weight_only", 0.047)):
        y = glulam.grouped_mlp(x, w1, w2, splits=splits, recipe=recipe).float()
        assert float((y - wanted).norm() / wanted.norm()) == pytest.approx(expected, rel=0.1), recipe
    prepared_weights.PREPARED.clear()
