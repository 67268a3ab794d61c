"""LoRA on experts: adapters in grouped_mlp and moe, their layouts, and modules with adapters."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import frozen, lora
from support.fake_gpu import FakeGpu
from support.frozen import BF16, RECIPES, quantised, saved_bytes
from support.inputs import Case, gradient, make_case
from support.ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import parametrize

import glulam
from cute_kernels.shipped import activation_forms
from cute_kernels.specs import is_gated
from glulam.distributed import ExpertParallel, gather_state_dict, shard_state_dict
from glulam.nn.lora import Lora

pytest_plugins = ["support.fixtures"]

SIZES = [5, 0, 9, 3]
HIDDEN, INTER, RANK = 96, 64, 8
FORM = ("swiglu", "concat")
F64 = torch.float64


def case(form: tuple[str, str] = FORM, dtype: torch.dtype = BF16, tail: int = 4, **options: Any) -> Case:
    return make_case(SIZES, HIDDEN, INTER, gated=is_gated(form[0]), dtype=dtype, tail=tail, **options)


class TestMlp:
    @pytest.mark.parametrize("rank", [1, 5, 8, 16])
    def test_result_and_gradients(self, rank: int, anywhere: FakeGpu | None) -> None:
        c = case()
        leaves, dy = lora.trained(c, rank), gradient(c)
        y = lora.call(c, leaves, c.w1, c.w2)
        y.backward(dy)
        lora.check(c, leaves, y, dy, c.w1, c.w2)

    @pytest.mark.parametrize("layers", ["1", "2"])
    @pytest.mark.parametrize("addends", [(), ("b1",), ("row_scale",), ("b2", "row_scale")], ids="-".join)
    def test_adapters_of_one_layer(self, layers: str, addends: tuple[str, ...]) -> None:
        c = case()
        leaves, dy = lora.trained(c, RANK, layers, addends), gradient(c)
        y = lora.call(c, leaves, c.w1, c.w2)
        y.backward(dy)
        lora.check(c, leaves, y, dy, c.w1, c.w2)

    @pytest.mark.parametrize("form", activation_forms(), ids=":".join)
    def test_every_activation(self, form: tuple[str, str]) -> None:
        c = case(form, F64)
        leaves, dy = lora.trained(c, 5), gradient(c)
        y = lora.call(c, leaves, c.w1, c.w2, form)
        y.backward(dy)
        lora.check(c, leaves, y, dy, c.w1, c.w2, form)

    @pytest.mark.parametrize("weights", ["transposed", "lists", "halves"])
    def test_weights_in_other_forms(self, weights: str) -> None:
        c = case(dtype=F64)
        given: dict[str, Any] = {
            "transposed": {"w1": c.w1.mT.contiguous(), "w2": c.w2.mT.contiguous(), "transpose_w": True},
            "lists": {"w1": list(c.w1), "w2": list(c.w2)},
            "halves": {"w1": glulam.GateUp(*[half.contiguous() for half in c.w1.chunk(2, dim=1)]), "w2": c.w2},
        }[weights]
        made = []
        for options in ({"w1": c.w1, "w2": c.w2}, given):
            leaves = lora.trained(c, RANK)
            lists = {"bias1": list(leaves["bias1"])} if weights == "lists" else {}
            y = lora.call(c, {**leaves, **lists}, **options)  # type: ignore[arg-type]
            y.backward(gradient(c))
            made.append([y.detach()[: c.rows], *[leaf.grad for leaf in leaves.values()]])
        for one, other in zip(*made, strict=True):
            assert one is not None and other is not None and torch.allclose(one, other)

    def test_weights_are_trained_beside_adapters(self) -> None:
        c = case(dtype=F64)
        leaves, weights = lora.trained(c, RANK), [w.clone().requires_grad_() for w in (c.w1, c.w2)]
        lora.call(c, leaves, *weights).backward(gradient(c))
        given = {name: one.detach()[: c.rows] if name in lora.BY_ROW else one for name, one in leaves.items()}
        wanted = torch.autograd.grad(lora.merged(c, given, *weights, FORM), weights, gradient(c)[: c.rows])
        for weight, exact in zip(weights, wanted, strict=True):
            assert weight.grad is not None and torch.allclose(weight.grad, exact) and bool(exact.any())

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_frozen_quantised_weights(self, recipe: str, anywhere: FakeGpu | None) -> None:
        c = make_case(SIZES, 128, 128, tail=4)
        w1, w2 = quantised(c.w1, recipe), quantised(c.w2, recipe)
        leaves, dy = lora.trained(c, 5), gradient(c)
        y = lora.call(c, leaves, w1, w2, recipe=recipe)
        y.backward(dy)
        lora.check(c, leaves, y, dy, frozen.exact_values(w1), frozen.exact_values(w2))

    def test_a_global_scale_for_each_half(self) -> None:
        c = case()
        w1, w2 = quantised(c.w1, "nvfp4_weight_only"), quantised(c.w2, "nvfp4_weight_only")
        w1 = frozen.in_halves(w1)
        leaves, dy = lora.trained(c, RANK), gradient(c)
        y = lora.call(c, leaves, w1, w2, recipe="nvfp4_weight_only")
        y.backward(dy)
        lora.check(c, leaves, y, dy, frozen.exact_values(w1), frozen.exact_values(w2))

    def test_float32_adapters_have_float32_gradients(self) -> None:
        c = case()
        leaves = lora.trained(c, RANK)
        wide = {name: one.detach().float().requires_grad_() for name, one in leaves.items() if name in lora.MATRICES}
        lora.call(c, leaves, c.w1, c.w2).backward(gradient(c))
        lora.call(c, {**leaves, **wide}, c.w1, c.w2).backward(gradient(c))
        for name, one in wide.items():
            assert one.grad is not None and one.grad.dtype == torch.float32
            assert torch.equal(one.grad.to(BF16), leaves[name].grad)  # type: ignore[arg-type]

    def test_saved_are_x_the_preactivation_and_the_narrow_products(self) -> None:
        c = make_case(SIZES, 128, 128)
        given = {name: one.requires_grad_() for name, one in lora.matrices(c, RANK).items()}
        given["x"] = c.x.clone().requires_grad_()
        kept = saved_bytes(lambda: lora.call(c, given, c.w1, c.w2))
        weights = sum(t.nbytes for name, t in given.items() if name != "x") + c.w1.nbytes + c.w2.nbytes
        rows, slack = c.rows, 64  # offs
        saved = rows * (128 + 2 * 128 + 2 * RANK) * 2
        assert weights + saved <= kept <= weights + saved + slack

    def test_out_keeps_what_lies_behind_the_groups(self) -> None:
        c = case()
        given = {"x": c.x, **lora.matrices(c, RANK)}
        out = torch.full_like(c.x, 7.0)
        assert lora.call(c, given, c.w1, c.w2, out=out) is out
        assert torch.equal(out[: c.rows], lora.call(c, given, c.w1, c.w2)[: c.rows])
        assert bool((out[c.rows :] == 7.0).all())

    def test_rows_by_index(self) -> None:
        c = case(tail=0)
        given = {"x": c.x, **lora.matrices(c, RANK)}
        rows = torch.arange(c.rows - 1, -1, -1, dtype=torch.int32)
        flipped = {**given, "x": c.x.flip(0)}
        assert torch.equal(lora.call(c, flipped, c.w1, c.w2, rows=rows), lora.call(c, given, c.w1, c.w2))

    @pytest.mark.parametrize("splits", ["list", "int64"])
    def test_splits(self, splits: str) -> None:
        c = case()
        given = {"x": c.x.clone().requires_grad_(), **lora.matrices(c, RANK)}
        sizes: Any = SIZES if splits == "list" else c.splits(torch.int64)
        y = glulam.grouped_mlp(given["x"], c.w1, c.w2, splits=sizes, lora=lora.adapter(given))
        assert torch.equal(y[: c.rows], lora.call(c, given, c.w1, c.w2)[: c.rows])

    def test_no_rows(self) -> None:
        c = make_case([0, 0], HIDDEN, INTER)
        given = {"x": c.x.requires_grad_(), **{n: m.requires_grad_() for n, m in lora.matrices(c, RANK).items()}}
        lora.call(c, given, c.w1, c.w2).sum().backward()
        assert all(one.grad is not None and not bool(one.grad.any()) for one in given.values())


N, K, E = 7, 2, 4


def layer_leaves(dtype: torch.dtype = F64, intermediate: int = INTER) -> dict[str, Tensor]:
    c = make_case([1] * E, HIDDEN, intermediate, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    made = {name: torch.randn(N, HIDDEN, generator=generator).to(dtype) for name in ("x", "residual")}
    made["logits"] = torch.randn(N, E, generator=generator, dtype=dtype)
    made.update(lora.matrices(c, 5), bias1=c.b1, bias2=c.b2)
    return {name: one.detach().clone().requires_grad_() for name, one in made.items()}


def layer(given: dict[str, Tensor], w1: Any, w2: Any, **options: Any) -> Tensor:
    return glulam.moe(
        given["x"], glulam.route(given["logits"], K), w1, w2, b1=given["bias1"], b2=given["bias2"],
        residual=given["residual"], **options,
    )  # fmt: skip


class TestMoe:
    def weights(self, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
        c = make_case([1] * E, HIDDEN, INTER, dtype=dtype)
        return c.w1, c.w2

    def test_result_and_gradients_are_those_of_merged_weights(self) -> None:
        made = []
        for is_merged in (False, True):
            given = layer_leaves()
            w1, w2 = self.weights()
            if is_merged:
                y = layer(given, *[lora._added(given, at, w) for at, w in ((1, w1), (2, w2))])
            else:
                y = layer(given, w1, w2, lora=lora.adapter(given))
            y.square().sum().backward()
            made.append({"y": y.detach(), **{name: leaf.grad for name, leaf in given.items()}})
        for name, one in made[0].items():
            assert one is not None and bool(one.any()), name
            torch.testing.assert_close(one, made[1][name], rtol=1e-6, atol=1e-6)  # routing weights are float32

    def test_without_gradients_tokens_are_read_by_index(self) -> None:
        given, (w1, w2) = layer_leaves(BF16), self.weights(BF16)
        with torch.no_grad():
            out = torch.empty_like(given["x"])
            assert layer(given, w1, w2, lora=lora.adapter(given), out=out) is out
        assert torch.equal(out, layer(given, w1, w2, lora=lora.adapter(given)))

    def test_choices_without_a_row(self) -> None:
        given, (w1, w2) = layer_leaves(), self.weights()
        ids = torch.tensor([[0, -1], [3, 9], [-1, -1], [1, 2], [2, -1], [-1, 3], [0, 3]])
        weights = torch.rand(N, K, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = glulam.moe(given["x"], glulam.Routing.from_topk(ids, weights, E), w1, w2, lora=lora.adapter(given))
        y.sum().backward()
        absent = (ids < 0) | (ids >= E)
        assert not bool(y[2].any()) and weights.grad is not None
        assert not bool(weights.grad[absent].any()) and bool((weights.grad[~absent] != 0).all())
        assert given["x"].grad is not None and not bool(given["x"].grad[2].any())

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_frozen_quantised_weights(self, recipe: str) -> None:
        """As permute, grouped_mlp and combine, bit for bit."""
        c = make_case([1] * E, HIDDEN, 128)
        w1, w2 = quantised(c.w1, recipe), quantised(c.w2, recipe)
        made = []
        for whole in (True, False):
            given = layer_leaves(BF16, 128)
            routing, adapter = glulam.route(given["logits"], K), lora.adapter(given)
            options = {"b1": given["bias1"], "b2": given["bias2"], "recipe": recipe, "lora": adapter}
            if whole:
                y = glulam.moe(given["x"], routing, w1, w2, residual=given["residual"], **options)
            else:
                rows, scale = glulam.permute(given["x"], routing), routing.weight_of_row
                y = glulam.grouped_mlp(rows, w1, w2, offs=routing.offs, row_scale=scale, **options)
                y = glulam.combine(y, routing, given["residual"])
            y.float().square().sum().backward()
            made.append([y.detach(), *[leaf.grad for leaf in given.values()]])
        for one, other in zip(*made, strict=True):
            assert one is not None and other is not None and torch.equal(one, other) and bool(one.any())

    def test_saved_are_tokens_and_no_copies_of_rows(self) -> None:
        given, (w1, w2) = layer_leaves(BF16), self.weights(BF16)
        frozen_names = ("logits", "residual", "bias1", "bias2")
        given = {name: one.detach() if name in frozen_names else one for name, one in given.items()}
        kept = saved_bytes(lambda: layer(given, w1, w2, lora=lora.adapter(given)))
        padded = 8 * E * (HIDDEN + 2 * INTER + INTER + HIDDEN) * 2  # ranks of 5 are padded to 8
        weights, rows = w1.nbytes + w2.nbytes + padded, N * K
        saved = N * HIDDEN * 2 + rows * (2 * INTER + 2 * 8) * 2
        routing = 4 * (3 * rows + E) + 64
        assert kept <= weights + saved + routing < weights + saved + rows * INTER * 2

    @pytest.mark.parametrize("dtype", [F64, BF16])
    def test_a_compiled_step_has_the_same_bits(self, dtype: torch.dtype) -> None:
        w1, w2 = self.weights(dtype)

        def step(given: dict[str, Tensor]) -> Tensor:
            return layer(given, w1, w2, lora=lora.adapter(given)).square().sum()

        made = []
        for one in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            given = layer_leaves(dtype)
            loss = one(given)
            loss.backward()
            made.append([loss.detach(), *[leaf.grad for leaf in given.values()]])
        for one, other in zip(*made, strict=True):
            assert one is not None and other is not None and torch.equal(one, other)  # type: ignore[arg-type]

    def test_checkpointing(self) -> None:
        w1, w2 = self.weights()
        made = []
        for again in (False, True):
            given = layer_leaves()
            run = lambda given=given: layer(given, w1, w2, lora=lora.adapter(given))  # noqa: E731
            y = torch.utils.checkpoint.checkpoint(run, use_reentrant=False) if again else run()
            y.sum().backward()
            made.append([leaf.grad for leaf in given.values()])
        assert all(torch.equal(*pair) for pair in zip(*made, strict=True))  # type: ignore[arg-type]


class TestPeft:
    def numbers(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return matrices by expert, and the same in the layout of PEFT's documentation: row e r + j of A, column j E +
        e of B.
        """
        c = case(dtype=F64)
        own = [lora.matrices(c, 3)[name] for name in lora.MATRICES]
        theirs = []
        for matrix in own:
            is_a = matrix.shape[1] == 3
            rows = [matrix[e, j] if is_a else matrix[e, :, j] for e in range(E) for j in range(3)]
            if is_a:
                theirs.append(torch.stack(rows))
            else:
                theirs.append(torch.stack([rows[3 * e + j] for j in range(3) for e in range(E)], dim=1))
        return own, theirs

    def test_both_orders(self) -> None:
        own, theirs = self.numbers()
        found = glulam.ExpertLora.from_peft(*theirs, E, 2.0)
        assert found.scale == 2.0
        for one, other in zip(own, (found.a1, found.b1, found.a2, found.b2), strict=True):
            assert other is not None and torch.equal(one, other)
        back = found.to_peft()
        assert all(one is not None and torch.equal(one, other) for one, other in zip(back, theirs, strict=True))

    def test_the_two_orders_differ(self) -> None:
        own, theirs = self.numbers()
        wrong = glulam.ExpertLora.from_peft(*theirs, E, grouped_by_expert=True)
        assert torch.equal(wrong.a1, own[0]) and not torch.equal(wrong.b1, own[1])  # type: ignore[arg-type]
        grouped = glulam.ExpertLora(*own).to_peft(grouped_by_expert=True)
        assert torch.equal(glulam.ExpertLora.from_peft(*grouped, E, grouped_by_expert=True).b1, own[1])  # type: ignore[arg-type]
        assert not torch.equal(grouped[1], theirs[1])  # type: ignore[arg-type]

    def test_gradients_reach_the_checkpoint(self) -> None:
        _, theirs = self.numbers()
        c, theirs = case(dtype=F64), [one.requires_grad_() for one in theirs]
        adapter = glulam.ExpertLora.from_peft(*theirs, E)
        glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, lora=adapter)[: c.rows].sum().backward()
        assert all(one.grad is not None and bool(one.grad.any()) for one in theirs)

    def test_a_checkpoint_of_other_experts(self) -> None:
        with pytest.raises(ValueError, match=r"from_peft: a1 has shape \[10, 6\]; give \[E r, in\] with E = 4"):
            glulam.ExpertLora.from_peft(torch.zeros(10, 6), torch.zeros(8, 12), None, None, 4)


class TestErrors:
    def matrices(self, **changes: Any) -> dict[str, Any]:
        return {**lora.matrices(case(), RANK), **changes}

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            (dict.fromkeys(lora.MATRICES), ValueError, "a1, b1, a2 and b2 are None; give"),
            ({"b2": None}, ValueError, "a2 is given without b2; give both"),
            ({"a1": 3}, TypeError, r"a1 is a int; give \[E, r, H\]"),
            ({"a1": torch.zeros(8, HIDDEN)}, ValueError, r"a1 has shape \[8, 96\]; give \[E, r, H\]"),
            ({"b1": torch.zeros(4, 128, 7, dtype=BF16)}, ValueError, r"b1 .*must be \[4, 128, 8\], since a1 has r = 8"),
            ({"a2": torch.zeros(3, 8, INTER, dtype=BF16)}, ValueError, "a2 .*since a1 has E = 4"),
            ({"b2": torch.zeros(4, HIDDEN, 8)}, TypeError, "b2 is torch.float32 but a1 is torch.bfloat16"),
            ({"b2": torch.zeros(4, HIDDEN, 8, dtype=torch.int32)}, TypeError, "b2 is torch.int32; give bfloat16"),
            ({"scale": "1"}, TypeError, "scale is a str"),
            ({"scale": float("nan")}, ValueError, "scale is nan; give a finite number"),
        ],
    )
    def test_of_an_adapter(self, changes: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=f"^ExpertLora: {message}"):
            glulam.ExpertLora(**self.matrices(**changes))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"a1": torch.zeros(4, 8, 32, dtype=BF16)}, r"lora.a1 has shape .*must be \[4, 8, 96\], since .*columns"),
            ({"b1": torch.zeros(4, 64, 8, dtype=BF16)}, r"lora.b1 has shape .*must be \[4, 128, 8\], since .*rows"),
            ({"a2": torch.zeros(4, 8, 32, dtype=BF16)}, r"lora.a2 has shape .*must be \[4, 8, 64\]"),
            ({"b2": torch.zeros(4, 64, 8, dtype=BF16)}, r"lora.b2 has shape .*must be \[4, 96, 8\]"),
        ],
    )
    def test_shapes_of_a_call(self, changes: Any, message: str) -> None:
        c = case()
        adapter = glulam.ExpertLora(**self.matrices(**changes))
        with pytest.raises(ValueError, match=f"^grouped_mlp: {message}"):
            glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, lora=adapter)
        routing = glulam.route(torch.randn(len(c.x), 4), 2)
        with pytest.raises(ValueError, match=f"^moe: {message}"):
            glulam.moe(c.x, routing, c.w1, c.w2, lora=adapter)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"lora": 3}, TypeError, "lora is a int; give a glulam.ExpertLora"),
            ({"recompute": True}, ValueError, "recompute is True, and lora is given"),
            ({"recipe": "mxfp8"}, ValueError, "recipe is 'mxfp8', which quantises rows.*'bf16', 'mxfp8_weight_only'"),
            ({"recipe": "fp8_block"}, ValueError, "recipe is 'fp8_block', which quantises rows"),
            ({"limit": float("nan")}, ValueError, "limit is NaN"),
            ({"activation": "tanh"}, ValueError, "activation is 'tanh'"),
            ({"w2": torch.zeros(4, HIDDEN, 32, dtype=BF16)}, ValueError, "w2 has shape"),
            ({"x": torch.zeros(21, HIDDEN, dtype=F64)}, TypeError, "w1 is torch.bfloat16 but x is torch.float64"),
        ],
    )
    def test_other_arguments(self, options: Any, error: type[Exception], message: str) -> None:
        c = case()
        given = {"x": c.x, "w1": c.w1, "w2": c.w2, "lora": glulam.ExpertLora(**self.matrices()), **options}
        with pytest.raises(error, match=f"^grouped_mlp: {message}"):
            glulam.grouped_mlp(**given, offs=c.offs)
        routing = glulam.route(torch.randn(len(c.x), 4), 2)
        with pytest.raises(error, match=f"^moe: {message}"):
            glulam.moe(**given, routing=routing)

    def test_dtypes(self) -> None:
        c = case()
        given = {name: one.double() for name, one in self.matrices().items()}
        with pytest.raises(TypeError, match="grouped_mlp: lora.a1 is torch.float64 but x is torch.bfloat16"):
            glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs, lora=glulam.ExpertLora(**given))

    def test_what_has_no_gradient(self) -> None:
        c = case(tail=0)
        given = {name: one.requires_grad_() for name, one in self.matrices().items()}
        options: dict[str, Any] = {"offs": c.offs, "lora": glulam.ExpertLora(**given)}
        with pytest.raises(glulam.GradientNotSupported, match="grouped_mlp: .* rows= has none"):
            glulam.grouped_mlp(c.x, c.w1, c.w2, rows=torch.zeros(c.rows, dtype=torch.int32), **options)
        with pytest.raises(glulam.GradientNotSupported, match="grouped_mlp: out is given"):
            glulam.grouped_mlp(c.x, c.w1, c.w2, out=torch.empty_like(c.x), **options)
        with pytest.raises(glulam.GradientNotSupported, match="grouped_mlp: w2 requires a gradient.*frozen"):
            glulam.grouped_mlp(c.x, c.w1, c.w2.requires_grad_(), recipe="mxfp8_weight_only", **options)

    def test_a_grid_of_scales_for_each_half(self) -> None:
        c = make_case(SIZES, 128, INTER)
        weights = glulam.quantize_fp8_block(c.w1, in_halves=True), glulam.quantize_fp8_block(c.w2)
        with pytest.raises(glulam.GradientNotSupported, match="^grouped_mlp: .*inside a block.*nor lora"):
            lora.call(c, {"x": c.x, **lora.matrices(c, 8)}, *weights, recipe="fp8_block_weight_only")

    def test_explain_names_it(self) -> None:
        c = case(tail=0)
        adapter = glulam.ExpertLora(**self.matrices())
        with pytest.raises(ValueError, match="grouped_mlp: lora is given, and such a call is several operators"):
            glulam.explain("grouped_mlp", c.x, c.w1, c.w2, offs=c.offs, lora=adapter)
        with pytest.raises(ValueError, match="moe: lora is given, and such a call is several operators"):
            glulam.explain("moe", c.x, (c.rows, 2), c.w1, c.w2, lora=adapter)

    def test_second_derivatives(self) -> None:
        c = case(tail=0)
        given = {"x": c.x, **{name: one.requires_grad_() for name, one in lora.matrices(c, RANK).items()}}
        y = lora.call(c, given, c.w1, c.w2)
        grads = torch.autograd.grad(y.sum(), [given[name] for name in lora.MATRICES], create_graph=True)
        for grad in grads:
            with pytest.raises(glulam.GradientNotSupported, match="^grouped_mlp is differentiable once"):
                grad.sum().backward(retain_graph=True)


def module(recipe: str = "bf16", dtype: torch.dtype = BF16, **options: Any) -> glulam.nn.GroupedMLP:
    torch.manual_seed(0)
    return glulam.nn.GroupedMLP(4, 128, 128, recipe=recipe, dtype=dtype, **options)


def filled(adapters: Lora) -> Lora:
    with torch.no_grad():
        for parameter in adapters.parameters():
            parameter.normal_(0, 0.1)
    return adapters


class Halved(torch.nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


class TestModules:
    def run(self, mlp: glulam.nn.GroupedMLP) -> Tensor:
        dtype = next((one.dtype for one in mlp.fc2.parameters()), BF16)
        c = make_case(SIZES, 128, 128, dtype=dtype)
        y: Tensor = mlp(c.x, offs=c.offs)
        return y

    def test_new_adapters_change_nothing_and_train_alone(self) -> None:
        mlp = module(bias=True, dtype=F64)
        before = self.run(mlp).detach()
        adapters = mlp.add_lora(4, alpha=8)
        assert mlp.lora is adapters and adapters.scale == 2.0
        y = self.run(mlp)
        assert torch.equal(y.detach(), before)
        y.float().square().sum().backward()
        trained = {name for name, one in mlp.named_parameters() if one.requires_grad}
        assert trained == {"lora.a1", "lora.b1", "lora.a2", "lora.b2"}
        assert adapters.b1 is not None and adapters.b1.grad is not None and bool(adapters.b1.grad.any())
        assert mlp.fc1.weight.grad is None

    def test_initial_numbers_are_pefts(self) -> None:
        adapters = module().add_lora(4)
        for a, b in ((adapters.a1, adapters.b1), (adapters.a2, adapters.b2)):
            assert a is not None and b is not None and not bool(b.any())
            bound = 1 / 128**0.5
            assert 0.9 * bound < float(a.detach().abs().max()) <= bound * 1.01 and bool(a.any(dim=-1).all())

    @pytest.mark.parametrize(
        ("options", "scale"), [({}, 1.0), ({"alpha": 2}, 0.5), ({"rslora": True, "alpha": 6}, 3.0)]
    )
    def test_scale(self, options: Any, scale: float) -> None:
        assert module().add_lora(4, **options).scale == scale

    @pytest.mark.parametrize("recipe", ["bf16", *RECIPES])
    def test_over_every_recipe(self, recipe: str) -> None:
        mlp = module(recipe)
        adapters = filled(mlp.add_lora(4, dtype=torch.float32))
        y = self.run(mlp)
        c = make_case(SIZES, 128, 128)
        given: dict[str, Any] = {"x": c.x, "offs": c.offs, **mlp.arguments()}
        assert torch.equal(y, glulam.grouped_mlp(**given)) and isinstance(given["lora"], glulam.ExpertLora)
        y.float().square().sum().backward()
        assert all(one.grad is not None and bool(one.grad.any()) for one in adapters.parameters())

    def test_weights_are_left_trained_on_request(self) -> None:
        mlp = module()
        mlp.add_lora(4, freeze=False)
        self.run(mlp).float().square().sum().backward()
        assert mlp.fc1.weight.grad is not None

    @pytest.mark.parametrize("packed", [True, False])
    def test_merging_and_unmerging(self, packed: bool) -> None:
        mlp = module(dtype=F64, packed=packed)
        adapters = filled(mlp.add_lora(4, alpha=2))
        weights = [one.detach().clone() for one in mlp.fc1.parameter_list("weight")]
        applied = self.run(mlp)
        mlp.merge_lora()
        assert "lora" not in mlp.arguments() and "merged" in repr(adapters)
        assert not torch.equal(mlp.fc1.parameter_list("weight")[0], weights[0])
        torch.testing.assert_close(self.run(mlp), applied)
        mlp.unmerge_lora()
        assert all(map(torch.equal, mlp.fc1.parameter_list("weight"), weights))
        assert torch.equal(self.run(mlp), applied)

    def test_a_merged_weight_is_rounded_once(self) -> None:
        mlp = module()
        adapters = filled(mlp.add_lora(4, layers=("fc2",)))
        assert adapters.a1 is None and adapters.a2 is not None and adapters.b2 is not None
        w1, w2 = mlp.fc1.weight.detach().clone(), mlp.fc2.weight.detach().double()
        exact = (w2 + adapters.b2.double() @ adapters.a2.double()).detach()
        mlp.merge_lora(keep=False)
        assert torch.equal(mlp.fc1.weight, w1)
        assert float((mlp.fc2.weight.detach().double() - exact).abs().max() / exact.abs().max()) < 2**-8
        with pytest.raises(RuntimeError, match="keep=False, so the weights before are lost"):
            mlp.unmerge_lora()
        mlp.remove_lora()
        assert mlp.lora is None and "lora" not in mlp.state_dict() and "lora" not in repr(mlp)

    def test_a_merged_module_has_no_state(self) -> None:
        mlp = module()
        mlp.add_lora(4)
        state = mlp.state_dict()
        mlp.merge_lora()
        with pytest.raises(RuntimeError, match="adapters are merged, and would be applied twice"):
            mlp.state_dict()
        with pytest.raises(RuntimeError, match="adapters are merged, and would be applied twice"):
            mlp.load_state_dict(state)
        mlp.remove_lora()
        assert set(mlp.state_dict()) == {"fc1.weight", "fc2.weight"}

    def test_state_dicts(self) -> None:
        first, second = module(), module()
        filled(first.add_lora(4)), second.add_lora(4)
        assert {"lora.a1", "lora.b1", "lora.a2", "lora.b2"} < set(first.state_dict())
        second.load_state_dict(first.state_dict())
        assert torch.equal(self.run(first), self.run(second))

    def test_a_checkpoint_of_pefts(self) -> None:
        first, second = module(), module()
        given = filled(first.add_lora(4, alpha=8)).adapter()
        assert second.add_lora(4).copy_(glulam.ExpertLora.from_peft(*given.to_peft(), 4, given.scale)).scale == 2.0
        assert torch.equal(self.run(first), self.run(second))
        with pytest.raises(ValueError, match="adapter has a1, b1; give a1, b1, a2, b2"):
            second.lora.copy_(glulam.ExpertLora(given.a1, given.b1, None, None))  # type: ignore[union-attr]
        with pytest.raises(ValueError, match=r"adapter.a1 has shape \[4, 4, 128\]; it must be \[4, 2, 128\]"):
            module().add_lora(2).copy_(given)

    def test_copies_and_pickles(self) -> None:
        mlp = module()
        filled(mlp.add_lora(4))
        y = self.run(mlp)
        for other in (copy.deepcopy(mlp), pickle.loads(pickle.dumps(mlp))):
            assert torch.equal(self.run(other), y)
            assert other.lora.a1.data_ptr() != mlp.lora.a1.data_ptr()  # type: ignore[union-attr]
        file = io.BytesIO()
        torch.save(mlp.state_dict(), file)
        assert torch.equal(torch.load(io.BytesIO(file.getvalue()))["lora.a1"], mlp.lora.a1)  # type: ignore[union-attr]

    def test_repr(self) -> None:
        mlp = module()
        assert "lora" not in repr(mlp)
        mlp.add_lora(4, alpha=8, layers=["fc1"])
        assert "(lora): Lora(r=4, scale=2.0, layers=['fc1'])" in repr(mlp)

    @pytest.mark.parametrize(
        ("given", "options", "error", "message"),
        [
            ({}, {"r": 0}, ValueError, "Lora: r is 0; give 1 or more"),
            ({}, {"r": 4.0}, TypeError, "Lora: r is 4.0; give an integer"),
            ({}, {"r": 4, "layers": "fc1"}, ValueError, "add_lora: layers is 'fc1'; give some of"),
            ({}, {"r": 4, "layers": ["fc3"]}, ValueError, "add_lora: layers is"),
            ({}, {"r": 4, "alpha": "8"}, TypeError, "add_lora: alpha is a str"),
            ({}, {"r": 4, "dtype": torch.int8}, TypeError, "add_lora: dtype is torch.int8; give bfloat16"),
            ({}, {"r": 4, "dtype": torch.float8_e4m3fn}, TypeError, "add_lora: dtype is torch.float8_e4m3fn"),
            ({}, {"r": 4, "dtype": "bfloat16"}, TypeError, "add_lora: dtype is 'bfloat16'"),
            ({}, {"r": 4, "layers": 3}, ValueError, "add_lora: layers is 3; give some of"),
            ({}, {"r": 4, "rslora": 1}, TypeError, "add_lora: rslora is 1; give True or False"),
            ({}, {"r": 4, "freeze": "no"}, TypeError, "add_lora: freeze is 'no'; give True or False"),
            ({"recipe": "mxfp8"}, {"r": 4}, ValueError, "add_lora: recipe is 'mxfp8'"),
            ({"recompute": True}, {"r": 4}, ValueError, "add_lora: the module was made with recompute=True"),
        ],
    )
    def test_refused_options(self, given: Any, options: Any, error: Any, message: str) -> None:
        mlp = module(**given)
        with pytest.raises(error, match=message):
            mlp.add_lora(**options)
        assert mlp.lora is None and mlp.fc1.weight.requires_grad

    def test_refused_calls(self) -> None:
        mlp = module("mxfp4_weight_only")
        for name in ("remove_lora", "merge_lora", "unmerge_lora"):
            with pytest.raises(RuntimeError, match=f"{name}: this module has no adapters"):
                getattr(mlp, name)()
        mlp.add_lora(4)
        with pytest.raises(RuntimeError, match="add_lora: this module has adapters of rank 4"):
            mlp.add_lora(4)
        with pytest.raises(RuntimeError, match="not merged"):
            mlp.unmerge_lora()
        with pytest.raises(ValueError, match="merge_lora: weights are in MXFP4"):
            mlp.merge_lora()

    def test_matrices_may_be_computed(self) -> None:
        mlp = module(dtype=F64)
        lora = filled(mlp.add_lora(4))
        plain = self.run(mlp)
        parametrize.register_parametrization(lora, "a1", Halved())
        halved = self.run(mlp)
        assert not torch.equal(halved, plain)
        with pytest.raises(RuntimeError, match="Lora.copy_: lora.a1 is no parameter but computed"):
            lora.copy_(lora.adapter())
        mlp.merge_lora()
        torch.testing.assert_close(self.run(mlp), halved)

    def test_computed_weights_are_not_merged_into(self) -> None:
        mlp = module()
        filled(mlp.add_lora(4))
        parametrize.register_parametrization(mlp.fc2, "weight", Halved())
        before = copy.deepcopy(mlp)
        with pytest.raises(RuntimeError, match="merge_lora: fc2.weight is no parameter but computed"):
            mlp.merge_lora()
        assert not mlp.lora.is_merged and torch.equal(mlp.fc1.weight, before.fc1.weight)  # type: ignore[union-attr]
        parametrize.remove_parametrizations(mlp.fc2, "weight")
        mlp.merge_lora()
        parametrize.register_parametrization(mlp.fc2, "weight", Halved())
        with pytest.raises(RuntimeError, match="unmerge_lora: fc2.weight is no parameter but computed"):
            mlp.unmerge_lora()

    def test_hooked_layers_are_refused(self) -> None:
        """Their forward would know nothing of adapters."""
        mlp = module()
        mlp.fc1.register_forward_hook(lambda *_: None)
        self.run(mlp)
        mlp.add_lora(4)
        with pytest.raises(ValueError, match="fc1 or fc2 has hooks.* it has adapters; do so with the whole module"):
            self.run(mlp)

    def test_buffers_of_gradients_are_refused(self) -> None:
        mlp = module()
        filled(mlp.add_lora(4, freeze=False))
        mlp.fc1.weight.main_grad = torch.zeros_like(mlp.fc1.weight)  # type: ignore[attr-defined]
        with pytest.raises(glulam.GradientNotSupported, match="grouped_mlp of a module with adapters: main_grad"):
            self.run(mlp)
        mlp.fc1.requires_grad_(False)
        self.run(mlp).float().sum().backward()
        c = make_case(SIZES, 128, 128)
        with pytest.raises(glulam.GradientNotSupported, match="grad_input"):
            mlp(c.x.requires_grad_(), offs=c.offs, grad_input=torch.empty_like(c.x))


class TestLayers:
    def layer(self, **options: Any) -> glulam.nn.MoE:
        torch.manual_seed(0)
        return glulam.nn.MoE(64, 32, 4, top_k=2, dtype=torch.float32, shared_intermediate_size=32, **options)

    def test_experts_are_adapted_and_the_router_stays_trained(self) -> None:
        layer, x = self.layer(), torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
        before, weights = layer(x).detach(), {name: one.detach().clone() for name, one in layer.named_parameters()}
        layer.add_lora(4)
        torch.testing.assert_close(layer(x).detach(), before)
        filled(layer.experts.lora)  # type: ignore[arg-type]
        y = layer(x)
        y.square().sum().backward()
        trained = {name for name, one in layer.named_parameters() if one.grad is not None}
        assert {"router.weight", *[f"experts.lora.{name}" for name in lora.MATRICES]} < trained
        assert not any(name.startswith("experts.fc") for name in trained)
        layer.merge_lora()
        torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)
        layer.unmerge_lora()
        torch.testing.assert_close(layer(x), y)
        layer.remove_lora()
        assert {name: torch.equal(one, weights[name]) for name, one in layer.named_parameters()} == dict.fromkeys(
            weights, True
        )

    def test_a_compiled_layer_has_the_same_bits(self) -> None:
        layer, x = self.layer(), torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
        filled(layer.add_lora(5))
        made = []
        for one in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
            y = one(x)
            y.square().sum().backward()
            made.append([y.detach(), *[p.grad for p in layer.experts.lora.parameters()]])  # type: ignore[union-attr]
            layer.zero_grad()
        assert all(map(torch.equal, *made))

    def test_state_dicts_of_checkpoints_load_beside_adapters(self) -> None:
        layer = self.layer()
        state = {name: one.clone() for name, one in layer.state_dict().items() if "lora" not in name}
        other = self.layer()
        other.add_lora(4)
        missing, unexpected = other.load_state_dict(state, strict=False)
        assert not unexpected and set(missing) == {f"experts.lora.{name}" for name in lora.MATRICES}


def layers_over_ranks() -> None:
    """Check nn.MoE with adapters on two ranks, whose state is sharded like the experts', against one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = ExpertParallel(None, 5, 2, 64, 6, dtype=F64)
    torch.manual_seed(0)
    whole = glulam.nn.MoE(64, 32, 5, 2, dtype=F64)
    filled(whole.add_lora(3, alpha=6))
    xs = [torch.randn(6, 64, dtype=F64) for _ in range(world)]
    wanted = whole(torch.cat(xs))
    wanted.sin().sum().backward()
    module = glulam.nn.MoE(64, 32, 5, 2, dtype=F64, parallel=ep)
    module.add_lora(3, alpha=6)
    module.load_state_dict(shard_state_dict(whole.state_dict(), ep))
    y, mine = module(xs[rank]), slice(6 * rank, 6 * rank + 6)
    torch.testing.assert_close(y, wanted[mine], rtol=1e-10, atol=1e-10)
    y.sin().sum().backward()
    for name in lora.MATRICES:
        grad, exact = (getattr(one.experts.lora, name).grad for one in (module, whole))
        torch.testing.assert_close(grad, exact[ep.first : ep.first + ep.num_local], rtol=1e-9, atol=1e-9)
    experts = {name: given for name, given in module.experts.arguments().items() if name != "recipe"}
    with pytest.raises(ValueError, match="moe: recipe is 'mxfp8', which quantises rows, and lora is given"):
        glulam.moe(xs[rank], module.route(xs[rank]), **experts, recipe="mxfp8", parallel=ep)
    mesh = init_device_mesh("cpu", (world,))
    adapter = glulam.ExpertLora(torch.zeros(5, 8, 64, dtype=F64), torch.zeros(5, 64, 8, dtype=F64), None, None)
    sharded = distribute_tensor(torch.zeros(6, 64, dtype=F64), mesh)
    for changes, message in (
        ({"x": sharded}, "x is a DTensor, and lora is given"),
        ({"lora": dataclasses.replace(adapter, a1=distribute_tensor(adapter.a1, mesh))}, "lora.a1 is a DTensor"),  # type: ignore[arg-type]
    ):
        given = {"x": xs[rank], "w1": whole.experts.fc1.weight, "w2": whole.experts.fc2.weight, "lora": adapter}
        with pytest.raises(TypeError, match=f"grouped_mlp: {message}"):
            glulam.grouped_mlp(**{**given, **changes}, splits=[6, 0, 0, 0, 0])  # type: ignore[arg-type]
    with torch.no_grad():  # rows, added on their way
        torch.testing.assert_close(module(xs[rank]), wanted[mine], rtol=1e-10, atol=1e-10)
    gathered = gather_state_dict(module.state_dict(), ep)
    assert torch.equal(gathered["experts.lora.b1"], whole.experts.lora.b1)  # type: ignore[arg-type, union-attr]


def test_layers_over_ranks() -> None:
    run_ranks(2, layers_over_ranks)
