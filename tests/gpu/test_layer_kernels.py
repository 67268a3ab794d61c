"""Kernels of the MoE layer against plain loops and the CPU reference, through the public API."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from support import routes as oracle
from support.criterion import assert_close, same_bits
from support.routes import RULES, check_rows, options_of, some_logits
from torch import Tensor

import glulam
from glulam import Routing
from glulam.host import workspace
from glulam.host.plans import forget_plans
from glulam.layer import reference
from glulam.layer.choices import moe_of_choices
from glulam.layer.few_tokens import route_few
from glulam.layer.routing import row_weights_backward
from glulam.layer.rows import combine_rows, permute_tokens
from glulam.recipes import RECIPES

pytestmark = pytest.mark.gpu

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
OF_4_BITS = {
    "mxfp4": glulam.quantize_mxfp4,
    "mxfp4_weight_only": glulam.quantize_mxfp4,
    "nvfp4_weight_only": glulam.quantize_nvfp4,
}
# Tokens and experts: one token, the most of one launch, one more, chunks of one and of several, all capacities.
SHAPES = [(1, 128), (64, 128), (256, 256), (65, 128), (3000, 64), (700, 512), (65, 1024)]


def routed(logits: Tensor, options: dict[str, Any], **more: Any) -> Routing:
    options = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in options.items()}
    return glulam.route(logits, options.pop("k"), **options, **more)


def tensors(made: Routing) -> list[Tensor]:
    end = int(made.offs[-1])
    rows = [made.token_of_row[:end], made.weight_of_row[:end]]
    return [made.offs, made.row_of, made.ids, made.weights, *rows]


class TestRouteFew:
    """Tests of logits and routing in one kernel: token counts below and above one CTA, and widths that CTAs do not
    divide.
    """

    @pytest.mark.parametrize("of_logits", [F32, BF16, torch.float16])
    @pytest.mark.parametrize("shape", [(1, 128, 2880), (3, 60, 64), (5, 32, 8), (16, 256, 7168), (7, 1000, 1504)])
    def test_against_route(self, shape: tuple[int, int, int], of_logits: torch.dtype) -> None:
        tokens, experts, width = shape
        for of_x in (BF16, torch.float16) if of_logits is F32 else (of_logits,):
            for of_weight in dict.fromkeys((of_x, of_logits)):
                x = torch.randn(tokens, width, device="cuda") * torch.logspace(-1, 1, tokens, device="cuda")[:, None]
                weight = torch.randn(experts, width, device="cuda") * width**-0.5
                bias = torch.randn(experts, device="cuda").to(of_weight)
                x, weight = x.to(of_x), weight.to(of_weight)
                made = route_few(x, weight, bias, min(experts, 4), of_logits)
                exact = x.to(F64) @ weight.to(F64).mT + bias.to(F64)
                by_torch = torch.nn.functional.linear(x.to(of_logits), weight.to(of_logits), bias.to(of_logits))
                assert made.logits.dtype is of_logits
                assert_close(made.logits, exact, by_torch, tokens)
                wanted = glulam.route(made.logits, min(experts, 4))
                again = route_few(x, weight, bias, min(experts, 4), of_logits)
                for other in (wanted, again):
                    assert all(map(same_bits, tensors(made), tensors(other)))

    def test_a_graph_follows_its_input(self) -> None:
        """The first call of all is captured; replays see other tokens, another number of them and other weights."""
        x, weight = torch.randn(9, 256, device="cuda").to(BF16), torch.randn(32, 256, device="cuda").to(BF16)
        limit = torch.tensor([9], dtype=torch.int32, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = route_few(x, weight, None, 4, F32, num_tokens=limit)
        for count in (9, 4):
            for tensor in (x, weight):
                tensor.copy_(torch.randn_like(tensor))
            limit.fill_(count)
            graph.replay()
            again = route_few(x, weight, None, 4, F32, num_tokens=limit)
            assert all(map(same_bits, tensors(made), tensors(again))) and int(made.offs[-1]) == 4 * count


class TestRoute:
    @pytest.mark.parametrize("dtype", [F32, BF16, torch.float16])
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_against_plain_loops(self, shape: tuple[int, int], rule: str, dtype: torch.dtype) -> None:
        tokens, experts = shape
        logits, options = some_logits(tokens, experts, dtype), options_of(rule, experts)
        made = routed(logits.cuda(), options)
        ids, weights = oracle.route(logits, **options)
        assert made.ids.cpu().equal(ids.int())
        torch.testing.assert_close(made.weights.cpu(), weights.float(), rtol=1e-5, atol=1e-7)
        assert weights.abs().max() > 1e-2
        check_rows(made, ids, made.weights, experts)
        again = routed(logits.cuda(), options)
        assert all(map(same_bits, tensors(made), tensors(again)))

    def test_few_and_many_experts_and_choices(self) -> None:
        for tokens, experts, k in ((40, 1, 1), (40, 8, 2), (300, 60, 32), (5, 1000, 32), (32768, 128, 8), (9, 33, 5)):
            logits = some_logits(tokens, experts)
            made = glulam.route(logits.cuda(), k)
            wanted = reference.route(logits, None, None, k, "softmax", True, 1, 1, 1.0)
            assert made.ids.cpu().equal(wanted[0]) and made.offs.cpu().equal(wanted[2])
            assert made.token_of_row.cpu().equal(wanted[3]) and made.row_of.cpu().equal(wanted[4])

    def test_not_a_number_is_chosen_first(self) -> None:
        logits = some_logits(6, 32)
        logits[2, [5, 9]], logits[2, 9] = torch.nan, -torch.nan
        logits[3, 7], logits[4, :30], logits[5, :4] = torch.inf, -torch.inf, torch.tensor([0.0, -0.0, 0.0, -0.0])
        logits[5, 4:] = -1
        made = glulam.route(logits.cuda(), 3)
        assert made.ids[2, :2].tolist() == [5, 9] and made.weights[2].isnan().all()
        assert made.ids[3, 0] == 7
        assert set(made.ids[4, :2].tolist()) == {30, 31} and made.ids[4, 2] == 0
        assert made.ids[5].tolist() == [0, 1, 2]
        assert made.offs[-1] == 18

    @pytest.mark.parametrize("tokens", [9, 900])
    def test_padding_has_no_row(self, tokens: int) -> None:
        logits = some_logits(tokens, 32)
        logits[tokens // 2 :] = torch.nan
        for count in (0, tokens // 2, tokens, tokens + 3):
            made = glulam.route(logits.cuda(), 4, num_tokens=torch.tensor([count], dtype=torch.int32, device="cuda"))
            ids, _ = oracle.route(logits, 4, num_tokens=count)
            assert made.ids.cpu().equal(ids.int()) and not made.weights[count:].any()
            assert int(made.offs[-1]) == 4 * min(count, tokens)

    @pytest.mark.parametrize("tokens", [50, 2000])
    def test_a_graph_follows_its_input(self, tokens: int) -> None:
        """The first call of all is captured; replays see other logits and another number of tokens."""
        logits, limit = some_logits(tokens, 128).cuda(), torch.tensor([tokens], dtype=torch.int32, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = glulam.route(logits, 8, num_tokens=limit)
        for seed, count in ((1, tokens), (2, tokens // 3)):
            logits.copy_(some_logits(tokens, 128, seed=seed))
            limit.fill_(count)
            graph.replay()
            assert all(map(same_bits, tensors(made), tensors(glulam.route(logits, 8, num_tokens=limit))))

    @pytest.mark.parametrize("dtype", [F32, BF16])
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("shape", [(7, 64), (900, 256)])
    def test_gradient(self, shape: tuple[int, int], rule: str, dtype: torch.dtype) -> None:
        """Of padding it is zero, whatever its logits are."""
        tokens, experts = shape
        logits, options = some_logits(tokens, experts, dtype, seed=5), options_of(rule, experts)
        limit = torch.tensor([tokens - 2], dtype=torch.int32, device="cuda")
        given = logits.cuda().requires_grad_()
        with torch.enable_grad():
            made = routed(given, options, num_tokens=limit)
            end = int(made.offs[-1])
            g, h = torch.randn(made.row_of.numel(), device="cuda"), torch.randn_like(made.weights)
            g[end:] = torch.nan
            torch.autograd.backward([made.weight_of_row, made.weights], [g, h])
        by_rows = torch.where(made.row_of >= 0, g[made.row_of.clamp(min=0).long()], 0) + h
        rule_of = options.get("score", "softmax"), options.get("normalize", True), options.get("scale", 1.0)
        (wanted,) = reference.route_backward(by_rows.cpu().to(F64), logits.to(F64), made.ids.cpu(), *rule_of)
        error = (given.grad.cpu().to(F64) - wanted).abs().max() / wanted.abs().max()
        assert error < (1e-5 if dtype == F32 else 5e-3) and wanted.abs().max() > 1e-2
        assert not given.grad[tokens - 2 :].any()


def some_ids(tokens: int, k: int, dtype: torch.dtype) -> Tensor:
    ids = torch.randint(-3, 300, (tokens, k), generator=torch.Generator().manual_seed(tokens), dtype=dtype)
    if dtype == torch.int64:
        ids[tokens // 2] = 2**32 + 5
    return ids


class TestFromTopk:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize(("tokens", "k"), [(1, 1), (64, 8), (3000, 8), (641, 32)])
    @pytest.mark.parametrize(("first", "experts"), [(0, 100), (60, 240), (2, 1024)])
    def test_rows(self, tokens: int, k: int, dtype: torch.dtype, first: int, experts: int) -> None:
        for of_weights in (F32, BF16, torch.float16):
            ids, weights = some_ids(tokens, k, dtype), torch.rand(tokens, k).to(of_weights)
            made = Routing.from_topk(ids.cuda(), weights.cuda(), experts, first)
            assert made.weight_of_row.dtype is F32
            check_rows(made, ids - first, weights.float(), experts)

    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize(("tokens", "k"), [(1, 1), (64, 8), (3000, 8), (641, 32)])
    @pytest.mark.parametrize(("mapped", "experts"), [(256, 32), (290, 240), (1500, 1024)])
    def test_rows_by_a_map(self, tokens: int, k: int, dtype: torch.dtype, mapped: int, experts: int) -> None:
        """Places in any order, of several ids the same, -1 and no places; ids outside the map."""
        generator = torch.Generator().manual_seed(mapped)
        places = torch.randint(-3, experts + 3, (mapped,), generator=generator, dtype=torch.int32)
        ids, weights = some_ids(tokens, k, dtype), torch.rand(tokens, k)
        made = Routing.from_topk(ids.cuda(), weights.cuda(), experts, expert_map=places.cuda())
        is_mapped = (ids >= 0) & (ids < mapped)
        check_rows(made, places.long()[ids.long().where(is_mapped, 0)].where(is_mapped, -1), weights, experts)

    def test_a_graph_reads_the_map_that_is_there(self) -> None:
        """Experts move between ranks, and a graph goes on."""
        ids, weights = some_ids(700, 8, torch.int64), torch.rand(700, 8)
        places = torch.arange(256, dtype=torch.int32).remainder(40).cuda()
        at = ids.cuda(), weights.cuda()
        Routing.from_topk(*at, 32, expert_map=places)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = Routing.from_topk(*at, 32, expert_map=places)
        for shift in (0, 7):
            places.copy_(places.roll(shift))
            graph.replay()
            wanted = Routing.from_topk(ids, weights, 32, expert_map=places.cpu())
            end = int(wanted.offs[-1])
            assert made.offs.cpu().equal(wanted.offs) and made.row_of.cpu().equal(wanted.row_of) and end
            assert made.token_of_row[:end].cpu().equal(wanted.token_of_row[:end])

    @pytest.mark.parametrize("expert", [-1, 0, 9])
    def test_all_to_one_or_none(self, expert: int) -> None:
        for tokens in (50, 5000):
            ids, weights = torch.full((tokens, 2), expert), torch.rand(tokens, 2)
            made = Routing.from_topk(ids.cuda(), weights.cuda(), 10)
            check_rows(made, ids, weights, 10)

    def test_gradient_is_zero_without_a_row(self) -> None:
        weights = torch.rand(500, 8, device="cuda", requires_grad=True)
        with torch.enable_grad():
            made = Routing.from_topk(some_ids(500, 8, torch.int64).cuda(), weights, 100)
            g = torch.randn(4000, device="cuda")
            g[int(made.offs[-1]) :] = torch.nan
            torch.autograd.backward(made.weight_of_row, g)
        wanted = torch.where(made.row_of >= 0, g[made.row_of.clamp(min=0).long()], 0)
        assert same_bits(weights.grad, wanted)


class TestRows:
    @pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
    @pytest.mark.parametrize("width", [8, 736, 4096])
    @pytest.mark.parametrize(("tokens", "k"), [(1, 8), (33, 2), (700, 9), (64, 32)])
    def test_both(self, tokens: int, k: int, width: int, dtype: torch.dtype) -> None:
        """Bit for bit, with rows that no choice has full of NaN, and left alone."""
        made = Routing.from_topk(some_ids(tokens, k, torch.int64).cuda(), torch.rand(tokens, k).cuda(), 200)
        end = int(made.offs[-1])
        x, residual = torch.randn(tokens, width, device="cuda").to(dtype), torch.randn(tokens, width).cuda().to(dtype)
        rows = torch.full((tokens, k, width), torch.nan, device="cuda", dtype=dtype)
        permute_tokens(x, made.row_of, out=rows)
        rows = rows.view(tokens * k, width)
        assert rows[:end].equal(x[made.token_of_row[:end].long()]) and rows[end:].isnan().all()
        assert rows[:end].equal(glulam.permute(x, made)[:end])
        y = torch.randn(tokens * k, width, device="cuda").to(dtype)
        y[end:] = torch.nan
        for given in (None, residual):
            out = glulam.combine(y, made, given)
            assert same_bits(out, reference.combine(y, made.row_of, given)[0])
            assert same_bits(out, glulam.combine(y, made, given, out=torch.full_like(out, torch.nan)))


class TestRowsByIndex:
    """Rows read by index give the same bits as a copy of the rows, since tiles and their order are the same."""

    @pytest.mark.parametrize("dtype", [BF16, torch.float16])
    @pytest.mark.parametrize("return_preact", [False, True])
    @pytest.mark.parametrize("width", [64, 200, 736, 1504])
    @pytest.mark.parametrize("rows", [20, 700, 4000])
    def test_glu(self, rows: int, width: int, return_preact: bool, dtype: torch.dtype) -> None:
        experts, inter, tokens = 6, 160, rows // 4
        x = torch.randn(tokens, width, device="cuda").to(dtype)
        w1 = (torch.randn(experts, 2 * inter, width, device="cuda") * width**-0.5).to(dtype)
        indices = torch.randint(-3, tokens + 3, (rows,), device="cuda", dtype=torch.int32)
        end = rows - 7
        indices[end:] = 2**31 - 1
        offs = torch.tensor([0, rows // 9, rows // 9 + 1, rows // 2, rows // 2, end], dtype=torch.int32, device="cuda")
        scale = torch.rand(rows, device="cuda") + 0.5
        copied = x[indices.clamp(0, tokens - 1).long()]
        for form in ({}, {"activation": "srelu"}, {"activation": "geglu", "glu_layout": "interleaved"}):
            weights = w1 if form.get("activation") != "srelu" else w1[:, :inter].contiguous()
            options = {"offs": offs, "row_scale": scale, "return_preact": return_preact, **form}
            made = glulam.grouped_glu(x, weights, rows=indices, **options)
            wanted = glulam.grouped_glu(copied, weights, **options)
            for one, other in zip(*(m if return_preact else (m,) for m in (made, wanted)), strict=True):
                assert same_bits(one[:end], other[:end]) and other[:end].abs().max() > 0.5

    def test_a_graph_follows_its_indices(self) -> None:
        x, w1 = torch.randn(300, 256, device="cuda").to(BF16), torch.randn(4, 128, 256, device="cuda").to(BF16) / 16
        indices = torch.zeros(900, dtype=torch.int32, device="cuda")
        offs = torch.tensor([100, 400, 400, 880], dtype=torch.int32, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = glulam.grouped_glu(x, w1, offs=offs, rows=indices)
        for _ in range(2):
            indices.copy_(torch.randint(0, 300, (900,)))
            graph.replay()
            assert same_bits(out[:880], glulam.grouped_glu(x[indices.long()], w1, offs=offs)[:880])


class TestMoe:
    @pytest.fixture(params=["by index", "copied"], autouse=True)
    def rows(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Select how forward and backward read tokens: by index, or copied first."""
        if request.param == "copied":
            monkeypatch.setattr(sys.modules["glulam.layer.of_tokens"], "COPIED_WIDTH", 0)
        forget_plans()

    def layer(self, tokens: int, dtype: torch.dtype = BF16) -> list[Tensor]:
        shapes = (tokens, 256), (8, 2 * 160, 256), (8, 256, 160), (tokens, 8)
        generator = torch.Generator().manual_seed(1)
        scales = 1.0, 256**-0.5, 160**-0.5, 1.0
        return [
            (torch.randn(shape, generator=generator) * scale).to(dtype).cuda()
            for shape, scale in zip(shapes, scales, strict=True)
        ]

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("tokens", [1, 64, 512])
    def test_one_call_is_what_its_parts_are(self, tokens: int, recipe: str) -> None:
        """Of as many experts as fill the GPU, so that some write their rows while others still read activations."""
        x = torch.randn(tokens, 2048, device="cuda").bfloat16()
        w1, w2 = (0.02 * torch.randn(64, *shape, device="cuda").bfloat16() for shape in ((1536, 2048), (2048, 768)))
        made = glulam.route(torch.randn(tokens, 64, device="cuda"), 8)
        rows = {"offs": made.offs, "rows": made.token_of_row, "row_scale": made.weight_of_row}
        wanted = glulam.combine(glulam.grouped_mlp(x, w1, w2, **rows, recipe=recipe), made, x)
        assert wanted.abs().max() > 0.1
        for _ in range(5):
            assert glulam.moe(x, made, w1, w2, residual=x, recipe=recipe).equal(wanted)

    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("tokens", [1, 40, 1500])
    def test_against_the_reference(self, tokens: int, recipe: str) -> None:
        x, w1, w2, logits = self.layer(tokens)
        if recipe in OF_4_BITS:  # whose weights' own error is larger than the kernels'
            w1, w2 = (OF_4_BITS[recipe](w).dequantize(w.dtype) for w in (w1, w2))
        made = glulam.route(logits, 2)
        out = glulam.moe(x, made, w1, w2, residual=x, recipe=recipe)
        wide = [t.cpu().to(F64) for t in (x, w1, w2)]
        on_cpu = Routing.from_topk(made.ids.cpu(), made.weights.cpu().to(F64), 8)
        wanted = glulam.moe(wide[0], on_cpu, *wide[1:])
        error = ((out.cpu().to(F64) - wide[0]) - wanted).norm() / wanted.norm()
        assert wanted.abs().max() > 0.2
        assert error < (0.02 if recipe in ("bf16", "mxfp4_weight_only", "nvfp4_weight_only") else 0.1)

    @pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
    def test_gradients(self, recipe: str) -> None:
        given = [t.requires_grad_() for t in self.layer(900)]
        x, w1, w2, logits = given
        d_out = torch.randn_like(x)
        with torch.enable_grad():
            out = glulam.moe(x, glulam.route(logits, 3), w1, w2, residual=x, recipe=recipe)
            made = torch.autograd.grad(out, given, d_out)
            wide = [t.detach().cpu().to(F64).requires_grad_() for t in given]
            right = glulam.moe(wide[0], glulam.route(wide[3], 3), *wide[1:3], residual=wide[0])
            wanted = torch.autograd.grad(right, wide, d_out.cpu().to(F64))
        for one, other in zip(made, wanted, strict=True):
            error = (one.cpu().to(F64) - other).norm() / other.norm()
            assert error < (0.02 if recipe == "bf16" else 0.15)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_a_graph_follows_its_input(self, recipe: str) -> None:
        x, w1, w2, logits = self.layer(300)
        glulam.moe(x, glulam.route(logits, 2), w1, w2, residual=x, recipe=recipe)  # which prepares weights
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = glulam.moe(x, glulam.route(logits, 2), w1, w2, residual=x, recipe=recipe)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            logits.copy_(torch.randn_like(logits))
            graph.replay()
            assert same_bits(out, glulam.moe(x, glulam.route(logits, 2), w1, w2, residual=x, recipe=recipe))


class TestMoeOfChoices:
    """moe_of_choices gives the same bits as the two calls Routing.from_topk and moe."""

    EXPERTS = 64

    @pytest.fixture(params=RECIPES)
    def options(self, request: pytest.FixtureRequest) -> dict[str, Any]:
        """Weights and recipe for enough wide experts to fill the GPU, so that FC2's tiles wait for FC1's."""
        w1, w2 = self.weights()
        return {"w1": w1, "w2": w2, "recipe": request.param}

    def weights(self) -> tuple[Tensor, ...]:
        shapes = (self.EXPERTS, 1024, 1024), (self.EXPERTS, 1024, 512)
        return tuple(0.04 * torch.randn(shape, device="cuda").bfloat16() for shape in shapes)

    def tokens(
        self, count: int, k: int = 8, ids: torch.dtype = torch.int64, of_weights: torch.dtype = BF16
    ) -> dict[str, Any]:
        """Return random tokens and choices, which include the invalid ids -1 and E; few tokens leave most experts
        empty.
        """
        return {
            "x": torch.randn(count, 1024, device="cuda").bfloat16(),
            "ids": torch.randint(-1, self.EXPERTS + 1, (count, k), device="cuda", dtype=ids),
            "weights": (torch.rand(count, k, device="cuda") + 0.5).to(of_weights),
            "num_experts": self.EXPERTS,
        }

    def by_two_calls(self, given: dict[str, Any], options: dict[str, Any]) -> Tensor:
        made = Routing.from_topk(given["ids"], given["weights"], given["num_experts"])
        return glulam.moe(given["x"], made, **options)

    def poison(self, byte: int) -> None:
        """Fill the workspace with a byte before a call."""
        for buffer in workspace.stats().buffers.values():
            buffer.fill_(byte)

    @pytest.mark.parametrize(("ids", "of_weights"), [(torch.int64, BF16), (torch.int64, F32), (torch.int32, F32)])
    @pytest.mark.parametrize(("count", "k"), [(1, 8), (1, 1), (2, 32), (16, 8), (256, 8), (2048, 1)])
    def test_same_bits(
        self, count: int, k: int, ids: torch.dtype, of_weights: torch.dtype, options: dict[str, Any]
    ) -> None:
        """Again and again with other choices, in memory that says that no group has rows, that all do, and in what the
        call before left: a GEMM that read offs too early would find those.
        """
        for number in range(20):
            given = self.tokens(count, k, ids, of_weights)
            wanted = self.by_two_calls(given, options)
            if number % 3 < 2:
                self.poison((0x00, 0x7F)[number % 3])
            assert same_bits(moe_of_choices(**given, **options), wanted)
        assert count < 16 or wanted.abs().max() > 0.1

    @pytest.mark.parametrize("world", [200, 512, 10**6])
    @pytest.mark.parametrize("count", [1, 16, 256])
    def test_a_map_and_a_part_of_the_experts(self, count: int, world: int, options: dict[str, Any]) -> None:
        """In one call, in two, and by ids that are places; all choices are here, however few are expected."""
        places = torch.randperm(200, device="cuda").remainder(self.EXPERTS).int()
        for _ in range(5):
            given = self.tokens(count)
            ids = torch.randint(200, given["ids"].shape, device="cuda")
            mapped = {**given, "ids": ids, "expert_map": places, "world_experts": world}
            plain = {**given, "ids": places.long()[ids], "world_experts": world}
            self.poison(0x7F)
            made = moe_of_choices(**mapped, **options)
            assert same_bits(made, moe_of_choices(**plain, **options))
            now = Routing.from_topk(**{name: value for name, value in mapped.items() if name != "x"})
            assert int(now.offs[-1]) == ids.numel() and same_bits(made, glulam.moe(given["x"], now, **options))
            usual = glulam.moe(given["x"], dataclasses.replace(now, world_experts=self.EXPERTS), **options).float()
            scale = float(usual.abs().max())
            assert scale > 0.1 and float((made.float() - usual).abs().max()) <= 2e-2 * scale

    @pytest.mark.parametrize("expert", [-1, 0, 63, 64, 2**32])
    def test_all_to_one_or_none(self, expert: int, options: dict[str, Any]) -> None:
        for count in (1, 200):
            given = self.tokens(count)
            given["ids"].fill_(expert)
            self.poison(0x7F)
            made = moe_of_choices(**given, **options)
            assert same_bits(made, self.by_two_calls(given, options)) and made.any() == (0 <= expert < 64)

    def test_calls_right_behind_each_other(self, options: dict[str, Any]) -> None:
        """They share memory, and none waits on the host for another."""
        several = [self.tokens(1 + number % 3) for number in range(60)]
        wanted = [self.by_two_calls(given, options) for given in several]
        torch.cuda.synchronize()
        made = [moe_of_choices(**given, **options) for given in several]
        for one, other in zip(made, wanted, strict=True):
            assert same_bits(one, other)

    @pytest.mark.parametrize("count", [1, 16, 256])
    def test_a_graph_follows_its_choices(self, count: int, options: dict[str, Any]) -> None:
        """Of several calls in a row, replayed without a pause."""
        given = [self.tokens(count) for _ in range(4)]
        for one in given:
            moe_of_choices(**one, **options)  # which prepares weights
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = [moe_of_choices(**one, **options) for one in given]
        for _ in range(5):
            for one in given:
                for name, tensor in self.tokens(count).items():
                    if isinstance(tensor, Tensor):
                        one[name].copy_(tensor)
            wanted = [self.by_two_calls(one, options) for one in given]
            self.poison(0x7F)
            for _ in range(3):
                graph.replay()
            for out, other in zip(made, wanted, strict=True):
                assert same_bits(out, other)

    @pytest.mark.parametrize("experts", [256, 257])
    def test_most_experts(self, experts: int) -> None:
        """The most of one call, and one more."""
        w1, w2 = (0.05 * torch.randn(experts, *shape, device="cuda").bfloat16() for shape in ((256, 512), (512, 128)))
        options = {"w1": w1, "w2": w2}
        for count in (1, 200):
            ids = torch.randint(-1, experts + 1, (count, 8), device="cuda")
            ids[0, :2] = torch.tensor([experts - 1, experts], device="cuda")
            given = {**self.tokens(count), "x": torch.randn(count, 512, device="cuda").bfloat16(), "ids": ids}
            given["num_experts"] = experts
            self.poison(0x7F)
            assert same_bits(moe_of_choices(**given, **options), self.by_two_calls(given, options))

    def test_other_forms_of_weights(self) -> None:
        """Lists, transposed, in halves, with biases, and of float16."""
        given = self.tokens(3)
        w1, w2 = self.weights()
        halves = glulam.GateUp(*(half.contiguous() for half in w1.chunk(2, dim=1)))
        biases = {"b1": w1[:, :, 0].contiguous(), "b2": w2[:, :, 0].contiguous()}
        for options in (
            {"w1": list(w1), "w2": list(w2)},
            {"w1": halves, "w2": w2},
            {"w1": w1.mT.contiguous(), "w2": w2.mT.contiguous(), "transpose_w": True},
            {"w1": w1, "w2": w2, **biases, "activation": "clamped_swiglu", "glu_layout": "interleaved"},
        ):
            assert same_bits(moe_of_choices(**given, **options), self.by_two_calls(given, options))
        given["x"] = given["x"].half()
        options = {"w1": w1.half(), "w2": w2.half()}
        assert same_bits(moe_of_choices(**given, **options), self.by_two_calls(given, options))

    def test_a_compiled_layer(self, options: dict[str, Any]) -> None:
        torch.compiler.reset()

        def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return moe_of_choices(x, ids, weights, self.EXPERTS, **options)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for count in (1, 16):
            given = [self.tokens(count)[name] for name in ("x", "ids", "weights")]
            assert same_bits(compiled(*given), layer(*given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_row_numbers_past_the_end_lead_nowhere(dtype: torch.dtype) -> None:
    """A routing changed by hand: nothing is written beside the rows, and nothing beside them is read."""
    tokens, k, width = 37, 3, 64
    row_of = torch.arange(tokens * k, device="cuda", dtype=torch.int32).view(tokens, k)
    row_of[::5, 0], row_of[1::5, 1], row_of[2::5, 2] = tokens * k, 2**31 - 1, -(2**31)
    is_there = (row_of >= 0) & (row_of < tokens * k)
    memory = torch.full((3 * tokens * k, width), 7.0, device="cuda", dtype=dtype)
    rows = memory[tokens * k : 2 * tokens * k].view(tokens, k, width)
    x = torch.randn(tokens, width, device="cuda").to(dtype)
    permute_tokens(x, row_of, out=rows)
    assert (memory[: tokens * k] == 7).all() and (memory[2 * tokens * k :] == 7).all()
    wanted = torch.where(is_there.unsqueeze(-1), x.unsqueeze(1).expand(-1, k, -1), 7.0)
    assert torch.equal(rows, wanted)
    memory[: tokens * k], memory[2 * tokens * k :] = torch.nan, torch.nan
    sums = combine_rows(rows, row_of, None)
    exact = (rows.double() * is_there.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(sums.double(), exact, rtol=1e-2, atol=1e-5)
    d_rows = torch.full((3 * tokens * k,), torch.nan, device="cuda")
    d_rows[tokens * k : 2 * tokens * k] = torch.arange(tokens * k, device="cuda")
    d_weights = row_weights_backward(d_rows[tokens * k : 2 * tokens * k].view(tokens, k), row_of)
    assert torch.equal(d_weights, torch.where(is_there, row_of, 0).float())
