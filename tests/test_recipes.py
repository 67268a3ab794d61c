"""grouped_mlp by recipes that quantise: reference, host path on a fake GPU, refusals, prepared weights."""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import itertools
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import mxfp8_mlp as oracle
from support.checks import torch_arguments
from support.criterion import same_bits
from support.fake_gpu import FakeGpu
from support.inputs import Case, make_case, poisoned
from support.mxfp8_mlp import RECIPES, check, prepared
from support.routing import catalogue
from torch import Tensor

import glulam
from cute_kernels.architectures import ARCHS
from cute_kernels.shipped import activation_forms
from cute_kernels.sm90.configs import (
    FITTED_W8,
    HALVES_W8,
    LARGE8,
    LARGE8_W4,
    LARGE_W8,
    MEDIUM_W8,
    QUARTERS_W8,
    SLIM8_W4,
    SLIM_W8,
    SMALL8,
    SMALL_W8,
    SPLIT_W8,
    TINY8_W4,
    TINY_W8,
    second_tile,
)
from cute_kernels.specs import ACTIVATION_FORMS, GATED, LAYOUT_FORMS, GroupedMlpSpec, QuantizeMxfp8Spec
from cute_kernels.tiles import SpecError
from glulam import MXFP8Tensor, recipes
from glulam.formats import prepared as prepared_weights
from glulam.host import device as gpus
from glulam.nn.quantized_linear import LAYERS
from glulam.recipes import BF16 as BF16_RECIPE
from glulam.recipes import MXFP8, MXFP8_EXACT, Recipe

pytest_plugins = ["support.fixtures"]

SIZES = [5, 0, 17, 1, 0, 40, 8]
HIDDEN, INTER = 160, 96  # multiples of 32, not of 128
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_prepared_weights(monkeypatch: pytest.MonkeyPatch) -> prepared_weights.PreparedWeights:
    fresh = prepared_weights.PreparedWeights()
    monkeypatch.setattr(prepared_weights, "PREPARED", fresh)
    return fresh


def case(form: tuple[str, str] = ("swiglu", "concat"), **options: Any) -> Case:
    return make_case(SIZES, HIDDEN, INTER, gated=form[0] in GATED, tail=6, **options)


def weights_of(c: Case, recipe: str) -> tuple[Any, Any]:
    return prepared(c.w1, recipe), prepared(c.w2, recipe)


class TestReference:
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_every_activation(self, recipe: str, form: tuple[str, str]) -> None:
        c = case(form)
        weights = weights_of(c, recipe)
        y = glulam.grouped_mlp(
            c.x, *weights, offs=c.offs, activation=form[0], glu_layout=form[1], recipe=recipe, **c.addends
        )
        check(c, y, recipe, weights, form=form, **c.addends)

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("routing", catalogue(60, 7))
    def test_every_routing(self, recipe: str, routing: str) -> None:
        c = make_case(catalogue(60, 7)[routing], HIDDEN, INTER, tail=3)
        weights = weights_of(c, recipe)
        out = poisoned(c.x.shape[0], HIDDEN, c.x, padding=8)
        assert glulam.grouped_mlp(c.x, *weights, splits=c.sizes, recipe=recipe, out=out) is out
        check(c, out, recipe, weights)
        assert bool(out[c.rows :].isnan().all()), "the tail was written"

    @given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=6), recipe=st.sampled_from(RECIPES))
    @settings(max_examples=30)
    def test_any_sizes(self, sizes: list[int], recipe: str) -> None:
        c = make_case(sizes, 64, 32)
        weights = weights_of(c, recipe)
        check(c, glulam.grouped_mlp(c.x, *weights, splits=sizes, recipe=recipe), recipe, weights)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_it_is_near_bf16_but_not_the_same(self, recipe: str) -> None:
        c = case()
        exact = oracle.oracle.grouped_mlp(c.x, c.w1, c.w2, c.ends)[: c.rows]
        y = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=recipe)[: c.rows]
        error = float((y - exact).norm() / exact.norm())
        assert 0.01 < error < (0.3 if recipe.startswith("mxfp4") else 0.1), error

    def test_float64_computes_in_float64(self) -> None:
        c = case()
        weights = weights_of(c, "mxfp8")
        y = glulam.grouped_mlp(c.x.double(), *weights, offs=c.offs, recipe="mxfp8")
        wanted = oracle.expected(c, "mxfp8", weights)
        assert float((y - wanted)[: c.rows].abs().max() / wanted[: c.rows].abs().max()) < 1e-12

    @pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact"])
    @pytest.mark.parametrize("block", ["1x32", "1x128"])
    @pytest.mark.parametrize("scale_layout", ["plain", "swizzled"])
    def test_rows_in_mxfp8(self, recipe: str, block: str, scale_layout: str) -> None:
        c = case()
        x = glulam.quantize_mxfp8(c.x.nan_to_num(), block=block, scale_layout=scale_layout)
        again = make_case(SIZES, HIDDEN, INTER, tail=6)
        again.x = x.dequantize()
        weights = weights_of(c, recipe)
        y = glulam.grouped_mlp(x, *weights, offs=c.offs, recipe=recipe, **c.addends)
        assert y.dtype == BF16
        check(again, y, recipe, weights, **c.addends)

    def test_the_dtype_of_rows_in_mxfp8_is_that_of_what_is_16_bit(self) -> None:
        c = case(dtype=torch.float16)
        x = glulam.quantize_mxfp8(c.x.nan_to_num())
        call = {"offs": c.offs, "recipe": "mxfp8"}
        assert glulam.grouped_mlp(x, c.w1, c.w2, b1=c.b1, **call).dtype == torch.float16
        out = torch.zeros_like(c.x)
        assert glulam.grouped_mlp(x, c.w1, c.w2, out=out, **call) is out
        with pytest.raises(TypeError, match=r"b2 is torch.float16 but x is torch.bfloat16"):
            glulam.grouped_mlp(x, c.w1, c.w2, b1=c.b1.to(BF16), b2=c.b2, **call)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_no_rows(self, recipe: str) -> None:
        c = make_case([0, 0, 0], HIDDEN, INTER)
        assert glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=recipe).shape == (0, HIDDEN)
        if recipes.RECIPES[recipe].x is not None:
            x = glulam.quantize_mxfp8(c.x)
            assert glulam.grouped_mlp(x, c.w1, c.w2, offs=c.offs, recipe=recipe).shape == (0, HIDDEN)

    def test_rounding_rows_again_changes_nothing(self) -> None:
        """So that rows which came in MXFP8 need not be told apart from those that are rounded here."""
        for block in ("1x32", "1x128"):
            once = glulam.quantize_mxfp8(case().x.nan_to_num(), block=block).dequantize(BF16)
            assert torch.equal(glulam.quantize_mxfp8(once).dequantize(BF16), once)


class TestHostPath:
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("form", activation_forms(), ids="-".join)
    def test_every_activation(self, fake_gpu: FakeGpu, recipe: str, form: tuple[str, str]) -> None:
        c = case(form)
        weights = weights_of(c, recipe)
        fake_gpu.specs.clear()
        fake_gpu.launches.clear()
        options = {"activation": form[0], "glu_layout": form[1], "recipe": recipe, **c.addends}
        y = glulam.grouped_mlp(c.x, *weights, offs=c.offs, **options)
        check(c, y, recipe, weights, form=form, **c.addends)
        spec = next(s for s in fake_gpu.specs if isinstance(s, GroupedMlpSpec))
        assert spec.fc1.operands == recipe
        assert form[0] in ACTIVATION_FORMS[spec.fc1.activation] and form[1] in LAYOUT_FORMS[spec.fc1.glu_layout]
        rounds = [s for s in fake_gpu.specs if isinstance(s, QuantizeMxfp8Spec)]
        assert len(rounds) == (recipe == "mxfp8_exact") and all(s.rounded for s in rounds)
        assert len(fake_gpu.launches) == 1 + len(rounds)

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("groups", ["offs", "splits int32", "splits int64"])
    @pytest.mark.parametrize("listed", [False, True])
    def test_groups_and_biases(self, fake_gpu: FakeGpu, recipe: str, groups: str, listed: bool) -> None:
        c = case()
        given = {
            "offs": {"offs": c.offs}, "splits int32": {"splits": c.splits()},
            "splits int64": {"splits": c.splits(torch.int64)},
        }[groups]  # fmt: skip
        weights = weights_of(c, recipe)
        biases = {"b1": list(c.b1), "b2": list(c.b2)} if listed else {"b1": c.b1, "b2": c.b2}
        for _ in range(2):
            check(c, glulam.grouped_mlp(c.x, *weights, recipe=recipe, **given, **biases), recipe, weights, **biases)

    @pytest.mark.parametrize("block", ["1x32", "1x128"])
    @pytest.mark.parametrize("out_features", [HIDDEN, 64])
    def test_rows_in_mxfp8(self, fake_gpu: FakeGpu, block: str, out_features: int) -> None:
        c = case()
        c.w2 = c.w2[:, :out_features].contiguous()
        x = glulam.quantize_mxfp8(c.x.nan_to_num(), block=block)
        c.x = x.dequantize()
        weights = weights_of(c, "mxfp8")
        y = glulam.grouped_mlp(x, *weights, offs=c.offs, row_scale=c.row_scale, recipe="mxfp8")
        check(c, y, "mxfp8", weights, row_scale=c.row_scale)
        assert fake_gpu.specs[-1].quantized, "x was quantised again"  # type: ignore[union-attr]

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_one_row_and_padded_rows(self, fake_gpu: FakeGpu, recipe: str) -> None:
        c = make_case([0, 1, 0], HIDDEN, INTER)
        weights = weights_of(c, recipe)
        x, out = (t.as_strided((1, HIDDEN), (1, 1)) for t in (c.x, poisoned(1, HIDDEN, c.x)))
        check(c, glulam.grouped_mlp(x, *weights, offs=c.offs, recipe=recipe, out=out), recipe, weights)
        c = case()
        wide = torch.full((c.x.shape[0], HIDDEN + 24), torch.nan, dtype=BF16)
        wide[:, :HIDDEN] = c.x
        weights = weights_of(c, recipe)
        check(c, glulam.grouped_mlp(wide[:, :HIDDEN], *weights, offs=c.offs, recipe=recipe), recipe, weights)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_no_rows_launch_nothing(self, fake_gpu: FakeGpu, recipe: str) -> None:
        c = make_case([0, 0, 0], HIDDEN, INTER)
        weights = weights_of(c, recipe)
        fake_gpu.launches.clear()
        assert glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe).shape == (0, HIDDEN)
        assert not fake_gpu.launches

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("ready", [False, True], ids=["16-bit weights", "prepared weights"])
    def test_a_second_call_plans_nothing(
        self, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, recipe: str, ready: bool
    ) -> None:
        c = case()
        w1, w2 = weights_of(c, recipe) if ready else (c.w1, list(c.w2))
        call = lambda: glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, b1=c.b1, recipe=recipe)  # noqa: E731
        first = call()
        monkeypatch.setattr(
            glulam.calls.call.Call, "run_without_gradient", lambda *_: pytest.fail("left the fast path")
        )
        assert same_bits(call()[: c.rows], first[: c.rows])

    def test_captured_calls_have_memory_of_their_own(self, fake_gpu: FakeGpu) -> None:
        c = case()
        for recipe in RECIPES:
            weights = weights_of(c, recipe)
            glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe)
            fake_gpu.stream, fake_gpu.capturing = 7, True
            y = glulam.grouped_mlp(c.x, *weights, offs=c.offs, recipe=recipe)
            fake_gpu.stream, fake_gpu.capturing = 0, False
            check(c, y, recipe, weights)

    def test_rows_an_expert_choose_the_tile(self, fake_gpu: FakeGpu) -> None:
        weights = (512, 512, 256), (512, 256, 256)
        for recipe in RECIPES:
            limits = {TINY_W8: 11, SLIM_W8: 27, SMALL_W8: 52, FITTED_W8: 85, MEDIUM_W8: 120}
            decoded = [(1, TINY_W8), *((most, tile) for tile, most in limits.items())]
            above = zip(limits.values(), (*list(limits)[1:], LARGE_W8), strict=True)
            decoded += [(most + 0.5, tile) for most, tile in above]
            in_fp8 = {
                "mxfp8": [(1, SMALL8), (60, SMALL8), (60.5, LARGE8)],
                "mxfp4": [
                    (1, TINY8_W4), (12, TINY8_W4), (12.5, SLIM8_W4), (24, SLIM8_W4), (24.5, SMALL8), (40, SMALL8),
                    (40.5, LARGE8_W4),
                ],
            }  # fmt: skip
            for average, tile in in_fp8.get(recipe, decoded):
                told = glulam.explain("grouped_mlp", (round(512 * average), 256), *weights, recipe=recipe)
                assert isinstance(told.spec, GroupedMlpSpec) and told.spec.fc1.tile == tile
                assert told.spec.fc2.tile == second_tile(tile)
                assert told.why.endswith(tile.name)
                tiles = dict.fromkeys(tile for _, tile in in_fp8.get(recipe, decoded))
                of_few_experts = SPLIT_W8 if recipe.endswith("weight_only") else ()
                assert len(told.why_not) == len(tiles) + len(of_few_experts) - 1

    @pytest.mark.parametrize("recipe", ["mxfp8_weight_only", "mxfp4_weight_only", "mxfp8_exact"])
    def test_a_tokens_few_experts_share_the_depth(self, fake_gpu: FakeGpu, recipe: str) -> None:
        """Tiles by the slabs of 64 weight rows of FC2 that the rows can reach."""
        few, many = 256, 4096  # columns of FC2: 4 and 64 slabs
        chosen = [(1, few, QUARTERS_W8), (33, few, QUARTERS_W8), (34, few, HALVES_W8), (700, few, HALVES_W8)]
        chosen += [(2, many, QUARTERS_W8), (6, many, HALVES_W8), (7, many, TINY_W8), (800, few, SLIM_W8)]
        for rows, out, tile in chosen:
            told = glulam.explain("grouped_mlp", (rows, 256), (64, 1024, 256), (64, out, 512), recipe=recipe)
            if recipe == "mxfp8_exact" and tile in SPLIT_W8:
                tile = TINY_W8
            assert isinstance(told.spec, GroupedMlpSpec) and {told.spec.fc1.tile, told.spec.fc2.tile} == {tile}
            assert told.why.endswith(tile.name)
            of_tiny = f"{TINY_W8.name}: for at most 11 rows an expert and more than 396 slabs of weights"
            assert (of_tiny in told.why_not) == (tile in SPLIT_W8)

    def test_a_choice_by_rows_says_what_others_are_for(self, fake_gpu: FakeGpu) -> None:
        told = glulam.explain("grouped_mlp", (68, 64), (2, 64, 64), (2, 64, 32), recipe="mxfp8_exact")
        assert told.why == f"68 rows over 2 experts are 34 an expert, more than 27 and at most 52: {SMALL_W8.name}"
        assert told.why_not == (
            f"{TINY_W8.name}: for at most 11 rows an expert",
            f"{SLIM_W8.name}: for more than 11 and at most 27 rows an expert",
            f"{FITTED_W8.name}: for more than 52 and at most 85 rows an expert",
            f"{MEDIUM_W8.name}: for more than 85 and at most 120 rows an expert",
            f"{LARGE_W8.name}: for more than 120 rows an expert",
        )

    def test_out_may_not_be_x(self, fake_gpu: FakeGpu) -> None:
        c = case()
        weights = weights_of(c, "mxfp8")
        call = {"offs": c.offs, "recipe": "mxfp8"}
        glulam.grouped_mlp(c.x, *weights, out=torch.zeros_like(c.x), **call)
        with pytest.raises(ValueError, match="out overlaps x"):
            glulam.grouped_mlp(c.x, *weights, out=c.x, **call)


class TestPreparedWeights:
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("listed", [False, True])
    @pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
    def test_the_same_as_prepared_by_hand(self, recipe: str, listed: bool, dtype: torch.dtype) -> None:
        c = case()
        w1, w2 = c.w1.to(dtype), c.w2.to(dtype)
        given = (list(w1), list(w2)) if listed else (w1, w2)
        y = glulam.grouped_mlp(c.x, *given, offs=c.offs, recipe=recipe)
        wanted = glulam.grouped_mlp(c.x, prepared(w1, recipe), prepared(w2, recipe), offs=c.offs, recipe=recipe)
        assert same_bits(y[: c.rows], wanted[: c.rows])

    def test_mxfp8_weights_are_folded(self, no_prepared_weights: Any) -> None:
        c = case()
        w1, w2 = weights_of(c, "mxfp8_exact")
        wanted = glulam.grouped_mlp(
            c.x, glulam.prepare_mxfp8_weight(w1), glulam.prepare_mxfp8_weight(w2), offs=c.offs, recipe="mxfp8"
        )
        for _ in range(2):
            y = glulam.grouped_mlp(c.x, w1, w2, offs=c.offs, recipe="mxfp8")
            assert same_bits(y[: c.rows], wanted[: c.rows]) and len(no_prepared_weights) == 2

    def test_once_a_version(self, no_prepared_weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        c, made = case(), []
        prepare = prepared_weights.prepare
        monkeypatch.setattr(prepared_weights, "prepare", lambda *a, **k: made.append(a) or prepare(*a, **k))
        w1 = torch.nn.Parameter(c.w1.clone())
        call = lambda w: glulam.grouped_mlp(c.x, w, c.w2, offs=c.offs, recipe="mxfp8")  # noqa: E731
        with torch.no_grad():
            before = call(w1)
            call(w1.detach())
            call(w1.view_as(w1))
            assert len(made) == 2, "a view was prepared anew"
            w1.mul_(2)
            after = call(w1)
            assert len(made) == 3 and not same_bits(before[: c.rows], after[: c.rows])
            w1.data = torch.zeros_like(w1)
            assert not bool(call(w1)[: c.rows].any()) and len(made) == 4
            assert len(no_prepared_weights) == 2

    def test_gone_with_the_weight(self, no_prepared_weights: Any) -> None:
        c = case()
        w1 = c.w1.clone()
        glulam.grouped_mlp(c.x, w1, list(c.w2.clone()), offs=c.offs, recipe="mxfp8")
        assert len(no_prepared_weights) == 1, "the list is gone"
        view = w1[:]
        del w1
        gc.collect()
        assert len(no_prepared_weights) == 1
        del view
        gc.collect()
        assert len(no_prepared_weights) == 0

    def test_another_shape_at_the_same_place(self, no_prepared_weights: Any) -> None:
        c = make_case([3, 4], 64, 32)
        y = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe="mxfp8")
        other = c.w1.view(2, 32, 128)
        x = torch.randn(7, 128).to(BF16)
        w2 = torch.randn(2, 64, 32).to(BF16)
        assert glulam.grouped_mlp(x, other, w2, offs=c.offs, activation="silu", recipe="mxfp8").shape == (7, 64)
        assert same_bits(glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe="mxfp8"), y)

    def test_not_under_capture(self, fake_gpu: FakeGpu, no_prepared_weights: Any) -> None:
        c = case()
        call = lambda: glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe="mxfp8")  # noqa: E731
        fake_gpu.stream, fake_gpu.capturing = 7, True
        with pytest.raises(glulam.CaptureError, match="once with it before capturing"):
            call()
        fake_gpu.capturing = False
        call()
        fake_gpu.capturing = True
        call()
        assert len(no_prepared_weights._kept_for_graphs) == 2, "a graph's weights may be freed"

    def test_a_weight_that_folding_would_spoil(self) -> None:
        c = case()
        c.w1[2, :, 3] *= 2.0**20
        with pytest.raises(glulam.FoldError, match="expert 2"):
            glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe="mxfp8")
        glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe="mxfp8_exact")


class TestRecipes:
    def test_names_and_objects(self) -> None:
        c = case()
        for name, recipe in recipes.RECIPES.items():
            assert str(recipe) == recipe.name == name and recipes.find("op", name) is recipe
            y, z = (glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=r) for r in (name, copy.deepcopy(recipe)))
            assert same_bits(y[: c.rows], z[: c.rows])
            assert pickle.loads(pickle.dumps(recipe)) == recipe
            module = glulam.nn.GroupedMLP(2, 64, 32, recipe=recipe)
            assert module.call_options["recipe"] == name

    @pytest.mark.parametrize("bad", ["fp8", None, 3, ["mxfp8"], "MXFP8"])
    def test_unknown(self, bad: Any) -> None:
        c = case()
        with pytest.raises(
            ValueError, match=r"recipe is .*choose one of bf16, mxfp8, mxfp8_blocks, mxfp8_wgrad, mxfp8_exact"
        ):
            glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=bad)
        with pytest.raises(ValueError, match=r"GroupedMLP: recipe is"):
            glulam.nn.GroupedMLP(2, 64, 32, recipe=bad)

    @pytest.mark.parametrize(
        ("base", "change"),
        [
            (MXFP8, {"name": "mine"}),
            (MXFP8, {"operands": "fp8"}),
            (MXFP8, {"x": MXFP8_EXACT.x}),
            (MXFP8, {"activation": None}),
            (MXFP8, {"weights": MXFP8_EXACT.weights}),
            (MXFP8_EXACT, {"dtypes": ("float16",)}),
            (MXFP8_EXACT, {"fc2_operands": "mxfp8"}),
            (MXFP8_EXACT, {"trains": True}),
            (BF16_RECIPE, {"x": MXFP8.x}),
        ],
    )
    def test_no_other_combination_is_taken(self, base: Recipe, change: Any) -> None:
        mine = dataclasses.replace(base, **change)
        with pytest.raises(ValueError, match="recipe is Recipe.*choose one of"):
            recipes.find("op", mine)
        c = case()
        with pytest.raises(ValueError, match="recipe is Recipe.*choose one of"):
            glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, recipe=mine)


def arguments(c: Case, **changes: Any) -> dict[str, Any]:
    return {"x": c.x, "w1": c.w1, "w2": c.w2, "offs": c.offs, "recipe": "mxfp8", **changes}


def refusals(c: Case) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    """Return changed arguments, the error's type and its words of each bad call, by name."""
    folded, exact = glulam.prepare_mxfp8_weight(c.w1), prepared(c.w1, "mxfp8_exact")
    column = glulam.prepare_mxfp8_weight(c.w1, axis="col")
    narrow, narrow_w1 = c.x[:, :72].contiguous(), c.w1[:, :, :72].contiguous()
    half = {"x": c.x.half(), "b1": None}
    rows, columns = glulam.quantize_mxfp8(c.x.nan_to_num()), glulam.quantize_mxfp8(c.x.nan_to_num(), axis="col")
    swizzled = MXFP8Tensor(exact.data, exact.scale).swizzled()
    return {
        "x in MXFP8, bf16": ({"x": rows, "recipe": "bf16"}, TypeError, "x is in MXFP8, and recipe is 'bf16'"),
        "w1 folded, bf16": ({"w1": folded, "recipe": "bf16"}, TypeError, "w1 is in MXFP8, and recipe is 'bf16'"),
        "x in MXFP8, weights": ({"x": rows, "recipe": "mxfp8_weight_only"}, TypeError, "takes 16-bit rows"),
        "x by columns": ({"x": columns}, ValueError, "quantised along its columns"),
        "folded, exact": ({"w1": folded, "recipe": "mxfp8_exact"}, TypeError, "w1 is a FoldedWeight.*or choose"),
        "folded by columns": ({"w1": column}, ValueError, "w1 is folded along its columns"),
        "swizzled": ({"w1": swizzled, "recipe": "mxfp8_exact"}, ValueError, r"w1 is .*w1\.plain\(\)"),
        "H": ({"x": narrow, "w1": narrow_w1}, ValueError, r"H .x's columns. is 72.*multiples of 32.*'bf16'"),
        "I": ({"w1": c.w1[:, :80].contiguous(), "w2": c.w2[:, :, :40].contiguous()}, ValueError, "I is 40"),
        "N": ({"w2": c.w2[:, :72].contiguous()}, ValueError, "the number of w2's rows is 72"),
        "fp16, exact": ({**half, "recipe": "mxfp8_exact"}, TypeError, "takes bfloat16, but the dtype is float16"),
        "fp16, weights": ({**half, "recipe": "mxfp8_weight_only"}, TypeError, "cast to bfloat16, or use"),
        "recompute": ({"recompute": True, "recipe": "mxfp8_exact"}, ValueError, "recompute is True, but recipe"),
        "recompute's type": ({"recompute": 1}, TypeError, "recompute is 1; give True or False"),
        "w1 of 3 experts": ({"w1": c.w1[:3]}, ValueError, r"w2 has shape \[7, 160, 96\]"),
        "w1's dtype": ({"w1": c.w1.double()}, TypeError, "w1 is torch.float64; recipe 'mxfp8' takes FoldedWeight"),
        "w1 of other columns": ({"w1": c.w1[:, :, :128].contiguous()}, ValueError, "x has 160 columns"),
        "b1's dtype": ({"b1": c.b1.float()}, TypeError, "b1 is torch.float32"),
        "both groups": ({"splits": c.splits()}, ValueError, "both offs and splits"),
        "activation": ({"activation": "swish"}, ValueError, "activation is 'swish'"),
        "out": ({"out": c.x.new_empty(3, 3)}, ValueError, r"out has shape \[3, 3\]"),
        "an empty list": ({"w1": []}, ValueError, "w1 is an empty list"),
        "no weight": ({"w2": None}, TypeError, "w2 is a NoneType"),
    }


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("name", refusals(case()))
def test_refusals(request: pytest.FixtureRequest, name: str, on_gpu: bool) -> None:
    c = case()
    changes, error, words = refusals(c)[name]
    launches: list[Any] = []
    if on_gpu:
        fake = request.getfixturevalue("fake_gpu")
        launches = fake.launches
    with pytest.raises(error, match=words) as caught:
        glulam.grouped_mlp(**arguments(c, **changes))
    assert str(caught.value).startswith("grouped_mlp: ") and not launches


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["x", "w1", "b2", "row_scale"])
def test_gradients_are_refused(recipe: str, name: str) -> None:
    if recipes.RECIPES[recipe].trains or (recipes.RECIPES[recipe].freezes_weights and name != "w1"):
        pytest.skip("it has them")
    c = case()
    given = arguments(c, recipe=recipe, **c.addends)
    given[name] = given[name].detach().requires_grad_()
    words = "w1 requires a gradient, and weights of" if recipes.RECIPES[recipe].freezes_weights else ""
    with pytest.raises(glulam.GradientNotSupported, match=f"{words}.*recipe '{recipe}'.*(detach|no_grad)"):
        glulam.grouped_mlp(**given)
    with torch.no_grad():
        glulam.grouped_mlp(**given)


class TestModule:
    @pytest.mark.parametrize("recipe", [name for name in RECIPES if type(recipes.RECIPES[name].weights) not in LAYERS])
    @pytest.mark.parametrize("packed", [False, True])
    def test_forward(self, recipe: str, packed: bool) -> None:
        c = case()
        layer = glulam.nn.GroupedMLP(len(SIZES), HIDDEN, INTER, packed=packed, recipe=recipe, dtype=BF16)
        w1, w2 = (torch.stack(list(fc.parameters())).view(-1, *shape) for fc, shape in (
            (layer.fc1, c.w1.shape[1:]), (layer.fc2, c.w2.shape[1:])))  # fmt: skip
        with torch.no_grad():
            weights = prepared(w1, recipe), prepared(w2, recipe)
            check(c, layer(c.x, offs=c.offs), recipe, weights)
        assert f"recipe='{recipe}'" in repr(layer)

    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"hidden_size": 72}, ValueError, "hidden_size is 72.*multiples of 32"),
            ({"intermediate_size": 40}, ValueError, "intermediate_size is 40"),
            ({"out_features": 40}, ValueError, "out_features is 40"),
            ({"recipe": "mxfp8_exact", "dtype": torch.float16}, TypeError, "the dtype is float16.*'mxfp8'"),
            ({"recipe": "mxfp8_exact", "recompute": True}, ValueError, "recompute is True, but recipe 'mxfp8_exact'"),
            ({"recipe": "mxfp8_weight_only", "delay_wgrad": True}, ValueError, "delay_wgrad is True"),
        ],
    )
    def test_refused_at_construction(self, options: dict[str, Any], error: type[Exception], words: str) -> None:
        given = {"num_experts": 2, "hidden_size": 64, "intermediate_size": 32, "recipe": "mxfp8", **options}
        with pytest.raises(error, match=f"GroupedMLP: .*{words}"):
            glulam.nn.GroupedMLP(**given)


def compiled_calls(c: Case) -> dict[str, Callable[[], Tensor]]:
    folded, exact = weights_of(c, "mxfp8"), weights_of(c, "mxfp8_exact")
    rows = glulam.quantize_mxfp8(c.x.nan_to_num())
    return {
        "prepared": lambda: glulam.grouped_mlp(c.x, *folded, offs=c.offs, recipe="mxfp8", **c.addends),
        "16-bit": lambda: glulam.grouped_mlp(c.x, c.w1, list(c.w2), offs=c.offs, recipe="mxfp8"),
        "exact": lambda: glulam.grouped_mlp(c.x, *exact, splits=SIZES, recipe=recipes.MXFP8_EXACT),
        "weights": lambda: glulam.grouped_mlp(c.x, *exact, offs=c.offs, recipe="mxfp8_weight_only"),
        "rows in MXFP8": lambda: glulam.grouped_mlp(rows, *folded, offs=c.offs, recipe="mxfp8"),
    }


class TestTraces:
    @pytest.mark.parametrize("name", compiled_calls(case()))
    @torch.no_grad()
    def test_compiled_equals_eager(self, name: str) -> None:
        torch.compiler.reset()
        c = case()
        call = compiled_calls(c)[name]
        wanted = call()
        got = torch.compile(call, backend="aot_eager", fullgraph=True)()
        assert same_bits(got[: c.rows], wanted[: c.rows])

    @torch.no_grad()
    def test_compiled_calls_prepare_once(self, no_prepared_weights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.compiler.reset()
        c, made = case(), []
        prepare = prepared_weights.prepare
        monkeypatch.setattr(prepared_weights, "prepare", lambda *a, **k: made.append(a) or prepare(*a, **k))
        layer = glulam.nn.GroupedMLP(len(SIZES), HIDDEN, INTER, recipe="mxfp8", dtype=BF16)
        compiled = torch.compile(lambda x: layer(x, offs=c.offs), backend="aot_eager", fullgraph=True)
        for _ in range(3):
            compiled(c.x)
        assert len(made) == 2

    @pytest.mark.parametrize("has_out", [False, True])
    def test_opcheck(self, has_out: bool) -> None:
        c = make_case(SIZES, HIDDEN, INTER)
        w1, w2 = weights_of(c, "mxfp8")
        name = "grouped_mlp_mxfp8_out" if has_out else "grouped_mlp_mxfp8"
        operator = getattr(torch.ops.glulam, name).default
        out = {"out": torch.zeros_like(c.x)} if has_out else {}
        same = {"x": c.x, "offs": c.offs, "row_scale": c.row_scale, "b1": [c.b1], "recipe": "mxfp8", **out}
        scales = {"w1_scale": w1.scale, "w2_scale": w2.scale}
        given = torch_arguments(name, **same, **scales, w1=[w1.data], w2=[w2.data])
        # Its fourth test compares inputs by torch.allclose, which knows no E4M3.
        tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(operator, given, test_utils=tests)
        torch.library.opcheck(operator, torch_arguments(name, **same, w1=[c.w1], w2=[c.w2]))

    def test_the_16_bit_operator_refuses_other_recipes(self) -> None:
        c = case()
        given = {"x": c.x, "w1": [c.w1], "w2": [c.w2], "offs": c.offs, "recipe": "mxfp8"}
        with pytest.raises(ValueError, match="recipe is 'mxfp8'; choose one of bf16"):
            torch.ops.glulam.grouped_mlp(*torch_arguments("grouped_mlp", **given))


class TestExplain:
    def test_reference(self) -> None:
        c = case()
        for x, recipe in itertools.product((c.x, glulam.quantize_mxfp8(c.x.nan_to_num())), ("mxfp8", MXFP8_EXACT)):
            told = glulam.explain(glulam.grouped_mlp, x, c.w1, c.w2, offs=c.offs, recipe=recipe)
            assert told.source == "reference"

    def test_shapes(self, fake_gpu: FakeGpu) -> None:
        told = glulam.explain("grouped_mlp", (512, 2048), (128, 1536, 2048), (128, 2048, 768), recipe="mxfp8")
        assert told.spec is not None and "_mxfp8_bf16_" in told.spec.name and "4 an expert" in told.why
        told = glulam.explain("grouped_mlp", (512, 2048), (128, 1536, 2048), (128, 2048, 768))
        assert any("recipe='mxfp8'" in reason for reason in told.why_not)

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="multiples of 32"):
            glulam.explain("grouped_mlp", (512, 72), (8, 128, 72), (8, 72, 64), recipe="mxfp8")
        with pytest.raises(TypeError, match="the dtype is float16"):
            shapes = (512, 64), (8, 128, 64), (8, 64, 64)
            glulam.explain("grouped_mlp", *shapes, dtype=torch.float16, recipe="mxfp8_exact")


class TestWritesThatNoVersionCounts:
    """Quantised copies of 16-bit weights are renewed after writes through `.data`, as weight averaging and weight syncs
    do.
    """

    @staticmethod
    def change(mlp: glulam.nn.GroupedMLP, how: str) -> None:
        for p in mlp.parameters():
            if how == "scaled":
                p.data.mul_(0.5)
            elif how == "one expert copied":
                one = p.data if p.dim() == 2 else p.data[-1]
                one.copy_(one.flip(0).clone())
            else:
                p.data.lerp_(torch.ones_like(p), 0.25)

    @pytest.mark.parametrize("how", ["scaled", "one expert copied", "averaged"])
    @pytest.mark.parametrize("packed", [True, False])
    @pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact", "mxfp8_weight_only"])
    def test_are_seen_in_evaluation(self, recipe: str, packed: bool, how: str, anywhere: Any) -> None:
        mlp = glulam.nn.GroupedMLP(4, 64, 32, recipe=recipe, packed=packed, dtype=torch.bfloat16).eval()
        x, offs = torch.randn(24, 64).bfloat16(), torch.tensor([6, 12, 18, 24], dtype=torch.int32)
        with torch.no_grad():
            before = [mlp(x, offs=offs) for _ in range(2)]
            self.change(mlp, how)
            after, wanted = mlp(x, offs=offs), copy.deepcopy(mlp)(x, offs=offs)
        assert torch.equal(*before) and torch.equal(after, wanted) and not torch.equal(before[0], after)

    @pytest.mark.parametrize("recipe", ["mxfp8_exact", "mxfp4_weight_only"])
    def test_are_seen_in_inference_tensors(self, recipe: str, anywhere: Any) -> None:
        with torch.inference_mode():
            w1, w2 = torch.randn(4, 64, 64).bfloat16(), torch.randn(4, 64, 32).bfloat16()
            x, offs = torch.randn(24, 64).bfloat16(), torch.tensor([6, 12, 18, 24], dtype=torch.int32)
            before = glulam.grouped_mlp(x, w1, w2, offs=offs, recipe=recipe)
            w2.mul_(2)
            after = glulam.grouped_mlp(x, w1, w2, offs=offs, recipe=recipe)
        assert torch.equal(after, 2 * before) and before.any()

    @pytest.mark.parametrize("of", [lambda mlp: [mlp], lambda mlp: [list(mlp.parameters())], lambda mlp: []])
    def test_of_one_element_are_told(self, of: Any, anywhere: Any) -> None:
        """A write that no sample of 4096 of these elements need see."""
        mlp = glulam.nn.GroupedMLP(4, 128, 128, recipe="mxfp8_exact", dtype=torch.bfloat16).eval()
        x, offs = torch.randn(24, 128).bfloat16(), torch.tensor([6, 12, 18, 24], dtype=torch.int32)
        with torch.no_grad():
            before = mlp(x, offs=offs)
            mlp.fc2.weight.data[1, 2, 3] += 100
            glulam.refresh_weights(*of(mlp))
            after, wanted = mlp(x, offs=offs), copy.deepcopy(mlp)(x, offs=offs)
        assert not torch.equal(before, after) and torch.equal(after, wanted)

    def test_refresh_takes_nothing_else(self) -> None:
        with pytest.raises(TypeError, match="refresh_weights: got a str"):
            glulam.refresh_weights("fc1.weight")

    def test_a_storage_where_another_one_lay(self, anywhere: Any) -> None:
        """FSDP frees storages and allocates them again: at an address there may be another weight of the same shape."""
        held = (ctypes.c_char * (2 * 4 * 64 * 64)).from_buffer(bytearray(2 * 4 * 64 * 64))
        x, w1 = torch.randn(24, 64).bfloat16(), torch.randn(4, 128, 64).bfloat16()
        offs = torch.tensor([6, 12, 18, 24], dtype=torch.int32)
        views = [torch.frombuffer(held, dtype=torch.bfloat16, count=4 * 64 * 64).view(4, 64, 64) for _ in range(2)]
        assert views[0].data_ptr() == views[1].data_ptr() and views[0]._version == views[1]._version
        torch.frombuffer(held, dtype=torch.bfloat16, count=4 * 64 * 64).copy_(torch.randn(4 * 64 * 64))
        first = glulam.grouped_mlp(x, w1, views[0], offs=offs, recipe="mxfp8_exact")
        torch.frombuffer(held, dtype=torch.bfloat16, count=4 * 64 * 64)[5] += 100  # between two sampled elements
        second = glulam.grouped_mlp(x, w1, views[1], offs=offs, recipe="mxfp8_exact")
        assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("recipe", "most"), [("bf16", 7), ("mxfp8", 12), ("mxfp8_weight_only", 12), ("mxfp4_weight_only", 12)]
)
def test_a_warm_call_is_few_frames(fake_gpu: FakeGpu, recipe: str, most: int) -> None:
    """Frames of Python, with weights that are as kernels read them."""
    c = case()
    w1, w2 = (w if recipe == "bf16" else prepared(w, recipe) for w in (c.w1, c.w2))
    w1, w2 = (w.prepare_() if isinstance(w, glulam.MXFP4Tensor) else w for w in (w1, w2))
    offs, out = c.offs, torch.empty_like(c.x)
    call = lambda: glulam.grouped_mlp(c.x, w1, w2, offs=offs, recipe=recipe, out=out)  # noqa: E731
    frames: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and ("/glulam/" in name or name.startswith("<glulam ")):
            frames.append(f"{name}: {frame.f_code.co_name}")

    with torch.no_grad():
        for _ in range(3):
            call()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert len(frames) <= most, "\n".join(frames)


@pytest.mark.parametrize("arch", ARCHS)
def test_recipes_with_kernels_are_those_whose_operands_an_architecture_has(
    fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    monkeypatch.setattr(gpus, "gpu", lambda index: SimpleNamespace(arch=arch))
    x = torch.empty(1)
    having = {name for name, recipe in recipes.RECIPES.items() if recipes.has_kernels(recipe, x)}
    quantised = {"mxfp8", "mxfp4", "fp8_block"} if arch == "sm_90a" else set()
    if ARCHS[arch].folder == "sm100":
        quantised = {"mxfp8", "mxfp8_blocks", "mxfp8_wgrad"}
    everywhere = {"bf16", "mxfp8_exact", *(name for name in recipes.RECIPES if name.endswith("weight_only"))}
    assert having == everywhere | quantised


def test_operands_that_an_architecture_lacks_are_refused_by_name(fake_gpu: FakeGpu) -> None:
    x, w = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(1, 128, 128, dtype=torch.bfloat16)
    offs = torch.tensor([4], dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(SpecError, match="'mxfp8_blocks' are multiplied on sm_100a, sm_103a alone, not on sm_90a"):
            glulam.grouped_mlp(x, w, w[:, :, :64].contiguous(), offs=offs, recipe="mxfp8_blocks")
