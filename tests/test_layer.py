"""The MoE layer on the CPU, and the host path to its kernels' arguments: routing, permute, combine and moe."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import routes as oracle
from support.fake_gpu import FakeGpu
from support.hopper import SERVED
from support.routes import RULES, check_rows, options_of, some_logits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import glulam
from cute_kernels.specs import LayerSpec
from glulam import Routing
from glulam.host.plans import forget_plans
from glulam.layer.few_tokens import route_few
from glulam.ops.grouped_mlp import GroupedMlpCall
from glulam.ops.quantized_mlp import QuantizedMlpCall
from glulam.recipes import BF16 as IN_16_BITS

pytest_plugins = ["support.fixtures"]

BF16, F64 = torch.bfloat16, torch.float64
QUANTISED = [name for name in SERVED if name != IN_16_BITS.name]


def dicts(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "k"}


def routed(logits: Tensor, options: dict[str, Any], **more: Any) -> Routing:
    return glulam.route(logits, options["k"], **dicts(options), **more)


class TestRoute:
    @pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
    @pytest.mark.parametrize("rule", RULES)
    @pytest.mark.parametrize("shape", [(5, 64), (1, 128), (37, 160), (300, 256)])
    def test_against_plain_loops(self, shape: tuple[int, int], rule: str, dtype: torch.dtype, anywhere: Any) -> None:
        tokens, experts = shape
        logits, options = some_logits(tokens, experts, dtype), options_of(rule, experts)
        made = routed(logits, options)
        ids, weights = oracle.route(logits, **options)
        assert made.ids.dtype == torch.int32 and made.ids.equal(ids.int())
        assert made.weights.dtype == torch.float32
        torch.testing.assert_close(made.weights, weights.float(), rtol=1e-5, atol=1e-7)
        assert weights.abs().max() > 1e-2
        check_rows(made, ids, made.weights, experts)

    def test_more_than_one_launch_serves(self, fake_gpu: FakeGpu) -> None:
        for tokens in (64, 65, 257, 1000):
            logits = some_logits(tokens, 128)
            made = glulam.route(logits, 8)
            check_rows(made, oracle.route(logits, 8)[0], made.weights, 128)
            assert bool(fake_gpu.launches[-1]["workspace"]) is (tokens > 64)
            check_rows(Routing.from_topk(made.ids, made.weights, 128), made.ids, made.weights, 128)
            assert bool(fake_gpu.launches[-1]["workspace"]) is (tokens > 256)

    def test_not_a_number_is_chosen_first(self, anywhere: Any) -> None:
        logits = some_logits(6, 32)
        logits[2, [5, 9]] = torch.nan
        logits[3, 7] = torch.inf
        logits[4, :30] = -torch.inf
        made = glulam.route(logits, 3)
        assert made.ids[2, :2].tolist() == [5, 9] and made.weights[2].isnan().all()
        assert made.ids[3, 0] == 7
        assert set(made.ids[4, :2].tolist()) == {30, 31} and made.ids[4, 2] == 0
        numbers = dataclasses.replace(made, weight_of_row=made.weight_of_row.nan_to_num(7))
        check_rows(numbers, made.ids, made.weights.nan_to_num(7), 32)

    def test_padding_has_no_row(self, anywhere: Any) -> None:
        logits = some_logits(9, 32)
        logits[5:] = torch.nan
        for count in (0, 5, 9, 12):
            made = glulam.route(logits, 4, num_tokens=torch.tensor([count], dtype=torch.int32))
            ids, _ = oracle.route(logits, 4, num_tokens=count)
            assert made.ids.equal(ids.int()) and not made.weights[count:].any()
            assert int(made.offs[-1]) == 4 * min(count, 9)

    def test_no_token(self, anywhere: Any) -> None:
        made = glulam.route(torch.empty(0, 16), 4)
        assert made.ids.shape == (0, 4) and made.offs.tolist() == [0] * 16 and made.token_of_row.shape == (0,)
        assert glulam.route(torch.empty(0, 16), 4, num_groups=4, top_groups=2).ids.shape == (0, 4)

    @pytest.mark.parametrize("rule", RULES)
    def test_gradient(self, rule: str) -> None:
        options = options_of(rule, 64)
        logits = torch.stack([torch.randperm(64) for _ in range(5)]).to(F64) / 16 - 2
        logits += torch.arange(64) // 16 * 0.003  # far apart, and so are the sums of two
        mix = torch.randn(5 * options["k"], dtype=F64)

        def weigh(given: Tensor) -> Tensor:
            made = routed(given, options)
            return (made.weight_of_row * mix).sum() + (made.weights.view(-1) ** 2 * mix).sum()

        assert torch.autograd.gradcheck(weigh, logits.requires_grad_())

    @pytest.mark.parametrize("rule", RULES)
    def test_gradient_by_kernels(self, rule: str, fake_gpu: FakeGpu) -> None:
        """Of padding it is zero, whatever its logits are."""
        logits, options = some_logits(7, 64, seed=5), options_of(rule, 64)
        limit = torch.tensor([5], dtype=torch.int32)
        given = logits.clone().requires_grad_()
        made = routed(given, options, num_tokens=limit)
        end = int(made.offs[-1])
        g = torch.randn(end)
        (made.weight_of_row[:end] * g).sum().backward()
        wide = logits.double().requires_grad_()
        weights = torch.stack(_differentiable(wide[:5], options))
        order = made.row_of[:5].reshape(-1).long()
        (weights.view(-1) * g.double()[order]).sum().backward()
        torch.testing.assert_close(given.grad, wide.grad.float(), rtol=1e-4, atol=1e-6)
        assert wide.grad.abs().max() > 1e-3 and not given.grad[5:].any()

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"logits": [1.0]}, TypeError, r"logits is a list; give a tensor \[N, E\]"),
            ({"logits": torch.zeros(4)}, ValueError, r"logits has shape \[4\]; give \[N, E\]"),
            ({"logits": torch.zeros(4, 8, dtype=torch.int32)}, TypeError, "logits is torch.int32"),
            ({"logits": torch.zeros(8, 4).mT}, ValueError, "logits is not contiguous"),
            ({"logits": torch.zeros(4, 1025)}, ValueError, "E = 1025 experts; 1 to 1024"),
            ({"k": 9}, ValueError, "k is 9; it must be 1 to 8, since 8 experts take part"),
            ({"k": 0}, ValueError, "k is 0"),
            ({"k": 33, "logits": torch.zeros(2, 64)}, ValueError, "k is 33; it must be 1 to 32"),
            ({"k": 2.0}, TypeError, "k is 2.0; give an integer"),
            ({"k": 5, "num_groups": 4, "top_groups": 2}, ValueError, "k is 5; it must be 1 to 4"),
            ({"num_groups": 3}, ValueError, "num_groups is 3; it must cut 8 experts"),
            ({"num_groups": 8}, ValueError, "num_groups is 8; it must cut 8 experts into equal groups of 2 or more"),
            ({"num_groups": 2, "top_groups": 3}, ValueError, "top_groups is 3; it must be 1 to 2"),
            ({"score": "tanh"}, ValueError, "score='tanh'; choose 'softmax'"),
            ({"normalize": 1}, TypeError, "normalize is 1"),
            ({"scale": "2"}, TypeError, "scale is '2'"),
            ({"bias": torch.zeros(7)}, ValueError, r"bias has shape \[7\]; it must be \[8\]"),
            ({"bias": torch.zeros(8, dtype=BF16)}, TypeError, "bias is torch.bfloat16; it must be torch.float32"),
            ({"num_tokens": torch.zeros(1)}, TypeError, "num_tokens is torch.float32; it must be torch.int32"),
            ({"num_tokens": 4}, TypeError, "num_tokens is a int"),
        ],
    )
    def test_bad_input(self, change: dict[str, Any], error: type[Exception], message: str, fake_gpu: FakeGpu) -> None:
        given = {"logits": torch.zeros(4, 8), "k": 2, **change}
        with pytest.raises(error, match=f"route: .*{message}"):
            glulam.route(given.pop("logits"), given.pop("k"), **given)
        assert not fake_gpu.launches


def a_router(tokens: int, experts: int, width: int, of_x: torch.dtype, of_weight: torch.dtype) -> list[Tensor]:
    """Return x, weight and bias whose logits are spread widely."""
    generator = torch.Generator().manual_seed(7)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((tokens, width), (experts, width), (experts,))
    )
    return [x.to(of_x), (weight * 2 * width**-0.5).to(of_weight), bias.to(of_weight)]


class TestRouteFew:
    """Tests of route_few, logits and routing in one call, against `route` on a linear layer's logits."""

    @pytest.mark.parametrize("of_logits", [torch.float32, BF16])
    @pytest.mark.parametrize("of_weight", [torch.float32, BF16])
    @pytest.mark.parametrize("rule", RULES)
    def test_against_route(self, rule: str, of_weight: torch.dtype, of_logits: torch.dtype, anywhere: Any) -> None:
        if of_weight is torch.float32 and of_logits is BF16:
            pytest.skip("a weight is not rounded unasked")
        options, limit = options_of(rule, 64), torch.tensor([4], dtype=torch.int32)
        x, weight, bias = a_router(5, 64, 72, BF16, of_weight)
        for one in (bias, None):
            made = route_few(x, weight, one, options["k"], of_logits, num_tokens=limit, **dicts(options))
            exact = x.double() @ weight.double().mT + (0 if one is None else one.double())
            error = float((made.logits.double() - exact).abs().max())
            assert made.logits.dtype is of_logits and error < (1e-5 if of_logits is torch.float32 else 2e-2)
            wanted = routed(made.logits, options, num_tokens=limit)
            for name in ("ids", "weights", "offs", "row_of"):
                assert getattr(made, name).equal(getattr(wanted, name)), name
            check_rows(made, wanted.ids, made.weights, 64)
            assert (made.num_experts, made.score) == (64, options.get("score", "softmax")) and exact.abs().max() > 1

    def test_a_module_routes_so_where_no_gradient_is_recorded(self, fake_gpu: FakeGpu) -> None:
        layer = glulam.nn.MoE(64, 32, 16, top_k=2, dtype=BF16, router_bias=True, router_dtype=torch.float32)
        for tokens in (1, 16, 17):
            x = torch.randn(tokens, 64, dtype=BF16)
            wanted, by_gemm = layer(x), layer.routing
            with torch.no_grad():
                fake_gpu.specs.clear()
                got = layer(x)
            first = fake_gpu.specs[0]
            assert isinstance(first, LayerSpec) and first.kernel == ("router" if tokens <= 16 else "route")
            assert got.equal(wanted.detach()) and layer.routing.ids.equal(by_gemm.ids)
            assert not layer.routing.weights.requires_grad and by_gemm.weights.requires_grad
            torch.testing.assert_close(layer.routing.logits, by_gemm.logits.detach())

    def test_one_graph(self) -> None:
        torch.compiler.reset()
        x, weight, bias = a_router(5, 64, 72, BF16, BF16)

        def routes(x: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
            made = route_few(x, weight, bias, 4, torch.float32, num_tokens=torch.tensor([4], dtype=torch.int32))
            return made.logits, made.ids, made.weights, made.offs, made.row_of

        compiled = torch.compile(routes, fullgraph=True, backend="aot_eager")
        for given in ((x, bias), (x, None), (x[:1], bias)):
            assert all(map(torch.equal, compiled(*given), routes(*given)))

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"x": torch.zeros(4, 60, dtype=BF16)}, ValueError, "x has H = 60; it must be a positive multiple of 8"),
            ({"weight": torch.zeros(8, 64)}, TypeError, "weight is torch.float32"),
            ({"weight": torch.zeros(8, 72, dtype=BF16)}, ValueError, r"weight has shape \[8, 72\]"),
            ({"weight_bias": torch.zeros(7, dtype=BF16)}, ValueError, r"weight_bias has shape \[7\]"),
            ({"bias": torch.zeros(8, dtype=BF16)}, TypeError, "bias is torch.bfloat16"),
            ({"k": 9}, ValueError, "k is 9; it must be 1 to 8"),
            ({"x": torch.zeros(4, 64, dtype=BF16).requires_grad_()}, RuntimeError, "gradient"),
        ],
    )
    def test_bad_input(self, change: dict[str, Any], error: type[Exception], message: str, fake_gpu: FakeGpu) -> None:
        x, weight = torch.zeros(4, 64, dtype=BF16), torch.zeros(8, 64, dtype=BF16)
        given = {"x": x, "weight": weight, "weight_bias": None, "k": 2, "dtype": BF16, **change}
        with pytest.raises(error, match=f"route.*{message}"):
            route_few(**given)
        assert not fake_gpu.launches


def _differentiable(logits: Tensor, options: dict[str, Any]) -> list[Tensor]:
    """Return each token's weights by plain formulas, for experts chosen by loops."""
    ids, _ = oracle.route(logits.detach(), **options)
    scale, normalize = options.get("scale", 1.0), options.get("normalize", True)
    score, rows = options.get("score", "softmax"), []
    for row, mine in zip(logits, ids, strict=True):
        if score == "sigmoid":
            s = row.sigmoid()[mine]
            found = s / (s.sum() + 1e-20) if normalize else s
        else:
            found = row[mine].softmax(0) if normalize or score == "topk_softmax" else row.softmax(0)[mine]
        rows.append(found * scale)
    return rows


def some_ids(tokens: int, k: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return ids that include other ranks' experts, sentinels, duplicates and numbers that overflow int32."""
    ids = torch.randint(-3, 24, (tokens, k), generator=torch.Generator().manual_seed(tokens), dtype=dtype)
    if dtype == torch.int64 and tokens > 2:
        ids[1] = 2**32 + 5
    return ids


class TestFromTopk:
    @pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
    @pytest.mark.parametrize(("tokens", "k"), [(1, 1), (7, 8), (300, 8), (41, 32)])
    @pytest.mark.parametrize("first", [0, 6])
    def test_rows(self, tokens: int, k: int, dtype: torch.dtype, first: int, anywhere: Any) -> None:
        for of_weights in (torch.float32, BF16, torch.float16):
            ids, weights = some_ids(tokens, k, dtype), torch.rand(tokens, k).to(of_weights)
            made = Routing.from_topk(ids, weights, 10, first)
            assert made.ids is ids and made.weights is weights and (made.num_experts, made.first) == (10, first)
            assert made.weight_of_row.dtype is torch.float32
            check_rows(made, ids - first, weights.float(), 10)

    @pytest.mark.parametrize("expert", [-1, 0, 9])
    def test_all_to_one_or_none(self, expert: int, anywhere: Any) -> None:
        ids, weights = torch.full((50, 2), expert), torch.rand(50, 2)
        made = Routing.from_topk(ids, weights, 10)
        check_rows(made, ids, weights, 10)

    def test_no_token(self, anywhere: Any) -> None:
        made = Routing.from_topk(torch.empty(0, 4, dtype=torch.int64), torch.empty(0, 4), 8)
        assert made.offs.tolist() == [0] * 8 and made.row_of.shape == (0, 4)

    @pytest.mark.parametrize("dtype", [torch.float32, BF16])
    def test_gradient_is_zero_without_a_row(self, dtype: torch.dtype, anywhere: Any) -> None:
        ids, weights = some_ids(30, 4), torch.rand(30, 4).to(dtype).requires_grad_()
        made = Routing.from_topk(ids, weights, 10)
        g = torch.randn(120)
        g[int(made.offs[-1]) :] = torch.nan
        torch.autograd.backward(made.weight_of_row, g)
        rows = made.row_of.view(-1)
        wanted = [float(g[row]) if row >= 0 else 0.0 for row in rows.tolist()]
        assert weights.grad is not None and weights.grad.view(-1).equal(torch.tensor(wanted).to(dtype))

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"ids": torch.zeros(4, 2)}, TypeError, "ids is torch.float32; it must be torch.int32 or torch.int64"),
            ({"ids": torch.zeros(4, dtype=torch.int32)}, ValueError, r"ids has shape \[4\]; give \[N, K\]"),
            ({"ids": torch.zeros(4, 33, dtype=torch.int32)}, ValueError, "ids a token is 33"),
            ({"weights": torch.zeros(4, 3)}, ValueError, r"weights has shape \[4, 3\]; it must be \[4, 2\]"),
            ({"weights": torch.zeros(4, 2, dtype=F64)}, TypeError, "weights is torch.float64"),
            ({"weights": None}, TypeError, "weights is a NoneType"),
            ({"num_experts": 0}, ValueError, "num_experts is 0; it must be 1 to 1024"),
            ({"num_experts": 2.0}, TypeError, "num_experts is 2.0"),
            ({"first": -1}, ValueError, "first is -1"),
        ],
    )
    def test_bad_input(self, change: dict[str, Any], error: type[Exception], message: str, fake_gpu: FakeGpu) -> None:
        given = {"ids": torch.zeros(4, 2, dtype=torch.int64), "weights": torch.zeros(4, 2), "num_experts": 8, **change}
        with pytest.raises(error, match=f"from_topk: .*{message}"):
            Routing.from_topk(**given)
        assert not fake_gpu.launches


def some_routing(tokens: int = 30, k: int = 4, experts: int = 10) -> Routing:
    return Routing.from_topk(some_ids(tokens, k), torch.rand(tokens, k) + 0.5, experts)


class TestRows:
    @pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
    @pytest.mark.parametrize("tokens", [0, 1, 30])
    def test_permute(self, tokens: int, dtype: torch.dtype, anywhere: Any) -> None:
        made, x = some_routing(tokens), torch.randn(tokens, 24).to(dtype)
        rows, end = glulam.permute(x, made), int(made.offs[-1])
        assert rows.shape == (4 * tokens, 24) and rows[:end].equal(x[made.token_of_row[:end].long()])

    @pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
    @pytest.mark.parametrize("with_residual", [False, True])
    def test_combine(self, with_residual: bool, dtype: torch.dtype, anywhere: Any) -> None:
        """Rows that no choice has are NaN, and tokens without any row give the residual, or 0."""
        made = some_routing()
        y = torch.randn(120, 24).to(dtype)
        y[int(made.offs[-1]) :] = torch.nan
        residual = torch.randn(30, 24).to(dtype) if with_residual else None
        out = glulam.combine(y, made, residual)
        wanted = torch.zeros(30, 24) if residual is None else residual.float().clone()
        for n, rows in enumerate(made.row_of.tolist()):
            for row in rows:
                wanted[n] += y[row].float() if row >= 0 else 0
        assert out.equal(wanted.to(dtype)) and out.abs().max() > 1
        buffer = torch.full_like(out, torch.nan)
        assert glulam.combine(y, made, residual, out=buffer) is buffer and buffer.equal(out)

    def test_gradients(self) -> None:
        made = some_routing()
        x, y, residual = (torch.randn(*shape, dtype=F64, requires_grad=True) for shape in ((30, 3), (120, 3), (30, 3)))
        end = int(made.offs[-1])
        assert torch.autograd.gradcheck(lambda x: glulam.permute(x, made)[:end], x)
        assert torch.autograd.gradcheck(lambda y, r: glulam.combine(y, made, r), (y, residual))

    def test_each_is_the_others_gradient(self, fake_gpu: FakeGpu) -> None:
        made, end = some_routing(), None
        x, y = torch.randn(30, 16, requires_grad=True), torch.randn(120, 16, requires_grad=True)
        end = int(made.offs[-1])
        d_rows, d_out = torch.randn(120, 16), torch.randn(30, 16)
        (d_x,) = torch.autograd.grad(glulam.permute(x, made), x, d_rows)
        (d_y,) = torch.autograd.grad(glulam.combine(y, made), y, d_out)
        assert d_x.equal(glulam.combine(d_rows, made)) and d_y[:end].equal(glulam.permute(d_out, made)[:end])
        assert end < len(d_y) and not d_y[end:].any()

    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (
                lambda r: glulam.permute(torch.zeros(29, 8), r),
                ValueError,
                "permute: x has 29 tokens, but routing is of 30",
            ),
            (lambda r: glulam.permute(torch.zeros(30, 12), r), ValueError, "permute: x has H = 12"),
            (lambda r: glulam.permute(torch.zeros(30, 8, dtype=F64), r), TypeError, "permute: x is torch.float64"),
            (lambda r: glulam.permute(torch.zeros(30, 8), r.row_of), TypeError, "permute: routing is a Tensor"),
            (
                lambda r: glulam.combine(torch.zeros(30, 8), r),
                ValueError,
                r"combine: y has shape \[30, 8\]; it must be \[120",
            ),
            (lambda r: glulam.combine(torch.zeros(120, 16)[:, :8], r), ValueError, "combine: y is not contiguous"),
            (lambda r: glulam.combine(torch.zeros(8, 120).mT, r), ValueError, "combine: y is not contiguous"),
            (lambda r: glulam.combine([1.0], r), TypeError, "combine: y is a list"),
            (
                lambda r: glulam.combine(torch.zeros(120, 8), r, torch.zeros(30, 16)),
                ValueError,
                r"combine: residual has shape \[30, 16\]",
            ),
            (
                lambda r: glulam.combine(torch.zeros(120, 8), r, torch.zeros(30, 8, dtype=BF16)),
                TypeError,
                "combine: residual is torch.bfloat16",
            ),
            (
                lambda r: glulam.combine(torch.zeros(120, 8), r, out=torch.zeros(30, 16)),
                ValueError,
                r"combine: out is torch.float32 \[30, 16\]",
            ),
        ],
    )
    def test_bad_input(
        self, call: Callable[[Routing], Any], error: type[Exception], message: str, fake_gpu: FakeGpu
    ) -> None:
        made = some_routing()
        fake_gpu.launches.clear()
        with pytest.raises(error, match=message):
            call(made)
        assert not fake_gpu.launches


class TestRowsByIndex:
    """grouped_glu and grouped_mlp on x[rows], against the same call on a copy of these rows."""

    EXPERTS, HIDDEN, INTER = 5, 64, 32

    def given(self, rows: int, tokens: int = 17) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(rows)
        e, h, i = self.EXPERTS, self.HIDDEN, self.INTER
        shapes = {"x": (tokens, h), "w1": (e, 2 * i, h), "w2": (e, h, i), "b1": (e, 2 * i)}
        made: dict[str, Any] = {
            name: (torch.randn(shape, generator=generator) / 4).to(BF16) for name, shape in shapes.items()
        }
        made["rows"] = torch.randint(-4, tokens + 4, (rows,), generator=generator, dtype=torch.int32)
        made["offs"] = torch.tensor([rows // 4, rows // 4, rows // 2, rows - 2, rows - 2], dtype=torch.int32)
        made["row_scale"] = torch.rand(rows, generator=generator) + 0.5
        return made

    def copied(self, given: dict[str, Any]) -> dict[str, Any]:
        x, rows = given["x"], given["rows"]
        return {**{n: v for n, v in given.items() if n != "rows"}, "x": x[rows.clamp(0, len(x) - 1).long()]}

    @pytest.mark.parametrize("rows", [8, 40, 41, 300])
    def test_glu(self, rows: int, anywhere: Any) -> None:
        given = self.given(rows)
        given["bias"] = given.pop("b1")
        del given["w2"]
        made, wanted = (glulam.grouped_glu(**which, return_preact=True) for which in (given, self.copied(given)))
        for one, other in zip(made, wanted, strict=True):
            assert one[: rows - 2].equal(other[: rows - 2]) and other[: rows - 2].abs().max() > 0.1
        buffer = torch.full_like(made[0], torch.nan)
        glulam.grouped_glu(**given, out=buffer)
        assert buffer[: rows - 2].equal(made[0][: rows - 2]) and buffer[rows - 2 :].isnan().all()

    @pytest.mark.parametrize("recipe", SERVED)
    def test_mlp(self, recipe: str, anywhere: Any) -> None:
        for rows, tokens in ((40, 17), (24, 9), (41, 1), (40, 30)):  # others are found by what they differ in
            given = self.given(rows, tokens)
            made, wanted = (glulam.grouped_mlp(**which, recipe=recipe) for which in (given, self.copied(given)))
            assert made.shape == (rows, self.HIDDEN) and made[: rows - 2].equal(wanted[: rows - 2])

    @pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact"])
    @pytest.mark.parametrize("block", ["1x32", "1x128"])
    def test_mlp_of_tokens_in_mxfp8(self, block: str, recipe: str, anywhere: Any) -> None:
        for rows, tokens in ((40, 17), (24, 9), (41, 1), (40, 30)):
            given = self.given(rows, tokens)
            copied = self.copied(given)
            for one in (given, copied):
                one["x"] = glulam.quantize_mxfp8(one["x"], block=block)
            made, wanted = (glulam.grouped_mlp(**which, recipe=recipe) for which in (given, copied))
            assert made[: rows - 2].equal(wanted[: rows - 2]) and wanted[: rows - 2].abs().max() > 0.1

    def test_a_token_is_quantised_once(self, fake_gpu: FakeGpu) -> None:
        """And not for each of its rows."""
        given = self.given(40, 17)
        glulam.grouped_mlp(**given, recipe="mxfp8")
        fake_gpu.launches.clear()
        glulam.grouped_mlp(**given, recipe="mxfp8")
        (launch,) = fake_gpu.launches
        assert len(launch["x"]) == len(launch["x8"]) == 17

    @pytest.mark.parametrize("rows", [8, 41, 300])
    def test_mm(self, rows: int, anywhere: Any) -> None:
        given = {name: value for name, value in self.given(rows).items() if name in ("x", "rows", "offs")}
        w, scale = self.given(rows)["w1"], self.given(rows)["row_scale"]
        for options in ({}, {"bias": w[:, :, 0].contiguous(), "bias_scale": scale}):
            made, wanted = (glulam.grouped_mm(**at, w=w, **options) for at in (given, self.copied(given)))
            assert made[: rows - 2].equal(wanted[: rows - 2]) and wanted[: rows - 2].abs().max() > 0.1

    @pytest.mark.parametrize("rows", [8, 41, 300])
    def test_dglu(self, rows: int, anywhere: Any) -> None:
        given = self.given(rows)
        options = {name: given[name] for name in ("w2", "offs", "row_scale")}
        options["preact"] = torch.randn(rows, 2 * self.INTER).to(BF16)
        made = glulam.grouped_dglu(given["x"], rows=given["rows"], **options)
        for one, other in zip(made, glulam.grouped_dglu(self.copied(given)["x"], **options), strict=True):
            assert one[: rows - 2].equal(other[: rows - 2]) and other[: rows - 2].abs().max() > 1e-3

    @pytest.mark.parametrize("by", ["dy", "x"])
    @pytest.mark.parametrize("accumulate", [False, True])
    def test_wgrad(self, by: str, accumulate: bool, anywhere: Any) -> None:
        for rows, tokens in ((40, 17), (24, 9), (41, 1), (40, 30)):
            given = self.given(rows, tokens)
            other = torch.randn(rows, self.INTER).to(BF16)
            names = ("dy", "x") if by == "dy" else ("x", "dy")
            outs = [torch.ones(self.EXPERTS, *self.shape(by)) if accumulate else None for _ in range(2)]
            made, wanted = (
                glulam.grouped_wgrad(
                    **dict(zip(names, (at["x"], other), strict=True)), **rows_of, offs=given["offs"], out=out,
                    accumulate=accumulate,
                )
                for at, rows_of, out in zip(
                    (given, self.copied(given)), ({f"{by}_rows": given["rows"]}, {}), outs, strict=True
                )
            )  # fmt: skip
            assert made.equal(wanted) and made[0].abs().max() > 0.1

    def shape(self, by: str) -> tuple[int, int]:
        return (self.HIDDEN, self.INTER) if by == "dy" else (self.INTER, self.HIDDEN)

    def test_wgrad_of_bad_input(self, fake_gpu: FakeGpu) -> None:
        given = self.given(40)
        dy, x, rows, offs = torch.zeros(40, 32, dtype=BF16), given["x"], given["rows"], given["offs"]
        for wrong, error, message in (
            ({"dy_rows": rows, "x_rows": rows}, ValueError, "got both dy_rows and x_rows; give one of them"),
            ({"x_rows": rows.long()}, TypeError, "x_rows is torch.int64; it must be torch.int32"),
            ({"x_rows": rows[:30]}, ValueError, r"dy has shape \[40, 32\]; it must be \[30, columns\]"),
            ({"dy_rows": rows}, ValueError, r"dy_rows has shape \[40\]; it must be \[17\]"),
        ):
            with pytest.raises(error, match=f"grouped_wgrad: {message}"):
                glulam.grouped_wgrad(dy, x, offs=offs, **wrong)
        assert not fake_gpu.launches

    def test_weights_in_lists(self, fake_gpu: FakeGpu) -> None:
        given = self.given(40)
        lists = {name: list(given[name].clone()) for name in ("w1", "w2", "b1")}
        made, wanted = glulam.grouped_mlp(**{**given, **lists}), glulam.grouped_mlp(**given)
        assert made[:38].equal(wanted[:38])

    @pytest.mark.parametrize("recipe", SERVED)
    def test_a_new_number_of_rows_is_checked_no_more(
        self, recipe: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checked: list[int] = []
        kind = GroupedMlpCall if recipe == "bf16" else QuantizedMlpCall
        check = kind.check
        monkeypatch.setattr(kind, "check", lambda call: checked.append(call.num_rows) or check(call))
        weights = {name: self.given(40)[name] for name in ("w1", "w2")}
        glulam.grouped_mlp(**{**self.given(32, 4), **weights}, recipe=recipe)  # which prepares weights
        checked.clear()
        for rows, tokens in ((40, 5), (48, 6), (56, 7)):
            given = {**self.given(rows, tokens), **weights}
            wanted = glulam.grouped_mlp(**self.copied(given), recipe=recipe)
            checked.clear()
            assert glulam.grouped_mlp(**given, recipe=recipe)[: rows - 2].equal(wanted[: rows - 2])
            assert not checked
        with pytest.raises(ValueError, match="rows has 48 indices, but x has no row"):
            glulam.grouped_mlp(
                **{**self.given(48), **weights, "x": torch.empty(0, self.HIDDEN, dtype=BF16)}, recipe=recipe
            )

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"rows": torch.zeros(40, dtype=torch.int64)}, TypeError, "rows is torch.int64; it must be torch.int32"),
            ({"rows": torch.zeros(40, 1, dtype=torch.int32)}, ValueError, r"rows has shape \[40, 1\]; give \[T\]"),
            ({"rows": [0] * 40}, TypeError, "rows is a list"),
            ({"rows": torch.zeros(80, dtype=torch.int32)[::2]}, ValueError, "rows is not contiguous"),
            ({"row_scale": torch.ones(17)}, ValueError, r"row_scale has shape \[17\]; it must be \[40\]"),
            ({"out": torch.empty(17, 64, dtype=BF16)}, ValueError, r"out has shape \[17, 64\]; it must be \[40, 64\]"),
        ],
    )
    @pytest.mark.parametrize("recipe", SERVED)
    def test_bad_input(
        self, recipe: str, change: dict[str, Any], error: type[Exception], message: str, fake_gpu: FakeGpu
    ) -> None:
        with pytest.raises(error, match=f"grouped_mlp: {message}"):
            glulam.grouped_mlp(**{**self.given(40), **change}, recipe=recipe)
        assert not fake_gpu.launches

    @pytest.mark.parametrize("recipe", SERVED)
    def test_gradients_are_refused(self, recipe: str) -> None:
        given = self.given(40)
        given["w1"].requires_grad_()
        with pytest.raises(glulam.GradientNotSupported, match="rows=|has no gradient|w1 requires a gradient"):
            glulam.grouped_mlp(**given, recipe=recipe)

    @pytest.mark.parametrize("recipe", SERVED)
    def test_moe_is_one_call(self, recipe: str, fake_gpu: FakeGpu) -> None:
        """And one more by a recipe that rounds tokens. It is found again, and by another number of tokens."""
        weights = {name: self.given(40)[name] for name in ("w1", "w2", "b1")}
        for tokens in (17, 23, 23, 1):
            x, residual = self.given(40, tokens)["x"], torch.randn(tokens, self.HIDDEN).to(BF16)
            made = Routing.from_topk(torch.randint(-1, 5, (tokens, 2)), torch.rand(tokens, 2), 5)
            rows = {"rows": made.token_of_row, "offs": made.offs, "row_scale": made.weight_of_row, **weights}
            wanted = glulam.combine(glulam.grouped_mlp(x, **rows, recipe=recipe), made, residual)
            fake_gpu.launches.clear()
            assert glulam.moe(x, made, **weights, residual=residual, recipe=recipe).equal(wanted)
            assert len(fake_gpu.launches) == 1 + (recipe == "mxfp8_exact")
            out = torch.full_like(residual, torch.nan)
            assert glulam.moe(x, made, **weights, residual=residual, recipe=recipe, out=out) is out
            assert out.equal(wanted)

    @pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact"])
    @pytest.mark.parametrize("block", ["1x32", "1x128"])
    def test_moe_of_tokens_in_mxfp8(self, block: str, recipe: str, anywhere: Any) -> None:
        given, made = self.given(40), Routing.from_topk(torch.randint(-1, 5, (17, 2)), torch.rand(17, 2), 5)
        x = glulam.quantize_mxfp8(given["x"], block=block)
        weights = {name: given[name] for name in ("w1", "w2")}
        for _ in range(2):
            out = glulam.moe(x, made, **weights, recipe=recipe)
            assert out.dtype == BF16 and out.abs().max() > 0.1
            assert out.equal(glulam.moe(x.dequantize(BF16), made, **weights, recipe=recipe))
        with pytest.raises(ValueError, match="moe: x has 16 tokens, but routing is of 17"):
            glulam.moe(glulam.quantize_mxfp8(given["x"][:16]), made, **weights, recipe=recipe)

    @pytest.mark.parametrize("recipe", SERVED)
    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"residual": torch.zeros(16, 64, dtype=BF16)}, ValueError, r"residual has shape \[16, 64\]"),
            ({"residual": torch.zeros(17, 64)}, TypeError, "residual is torch.float32"),
            ({"out": torch.zeros(34, 64, dtype=BF16)}, ValueError, r"out has shape \[34, 64\]; it must be \[17, 64\]"),
            ({"w2": torch.zeros(5, 64, 64, dtype=BF16)}, ValueError, r"w2 has shape \[5, 64, 64\]"),
            ({"recipe": "mxfp6"}, ValueError, "recipe is 'mxfp6'; choose one of bf16, mxfp8"),
            ({"transpose_w": 1}, (TypeError, ValueError), "transpose_w"),
        ],
    )
    def test_bad_input_of_moe(
        self, recipe: str, change: dict[str, Any], error: type[Exception], message: str, fake_gpu: FakeGpu
    ) -> None:
        given, made = self.given(40), Routing.from_topk(torch.randint(-1, 5, (17, 2)), torch.rand(17, 2), 5)
        weights = {name: given[name] for name in ("w1", "w2")}
        options = {"recipe": recipe, **weights}
        residual = torch.zeros(17, 64, dtype=BF16)
        glulam.moe(given["x"], made, **options, residual=residual)  # what is known of a right one serves no wrong one
        fake_gpu.launches.clear()
        with pytest.raises(error, match=f"moe: {message}"):
            glulam.moe(given["x"], made, **{**options, **change})
        assert not fake_gpu.launches

    def test_moe_copies_no_row(self, fake_gpu: FakeGpu) -> None:
        """In 16 bits. Forward is one call, backward one for data gradients and one for each weight."""
        given, made = self.given(40), Routing.from_topk(torch.randint(0, 5, (17, 2)), torch.rand(17, 2), 5)
        fake_gpu.specs.clear()
        glulam.moe(given["x"], made, given["w1"], given["w2"])
        assert [spec.name.split("_bf16")[0] for spec in fake_gpu.specs] == ["grouped_mlp"]
        x, w1, w2 = (given[name].clone().requires_grad_() for name in ("x", "w1", "w2"))
        fake_gpu.work.clear()
        glulam.moe(x, made, w1, w2).backward(torch.ones_like(x))
        assert fake_gpu.work == ["glu, mm", "dglu, mm", "wgrad", "wgrad"]


class TestMoe:
    @pytest.fixture(params=["by index", "copied"], autouse=True)
    def rows(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        """Select how forward and backward read tokens: by index, or copied first."""
        if request.param == "copied":
            monkeypatch.setattr(sys.modules["glulam.layer.of_tokens"], "COPIED_WIDTH", 0)
        forget_plans()

    def layer(self, dtype: torch.dtype, experts: int = 6, hidden: int = 64, inter: int = 32) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        shapes = (20, hidden), (experts, 2 * inter, hidden), (experts, hidden, inter), (20, experts)
        return tuple(torch.randn(shape, generator=generator, dtype=F64).to(dtype) / 4 for shape in shapes)

    def by_loops(self, x: Tensor, routing: Routing, w1: Tensor, w2: Tensor) -> Tensor:
        rows = []
        for n, (ids, weights) in enumerate(zip(routing.ids.tolist(), routing.weights, strict=True)):
            total = torch.zeros(w2.shape[1], dtype=x.dtype)
            for e, weight in zip(ids, weights, strict=True):
                if 0 <= e < len(w1):
                    a, u = (w1[e] @ x[n]).chunk(2)
                    total = total + w2[e] @ (torch.nn.functional.silu(a) * u * weight)
            rows.append(total)
        return torch.stack(rows)

    def test_against_plain_loops(self, anywhere: Any) -> None:
        x, w1, w2, logits = self.layer(BF16)
        made = glulam.route(logits.float(), 2)
        out = glulam.moe(x, made, w1, w2, residual=x)
        wanted = self.by_loops(x.double(), made, w1.double(), w2.double()) + x.double()
        torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
        assert (wanted - x.double()).abs().max() > 0.2

    def test_gradients(self) -> None:
        x, w1, w2, logits = (t.requires_grad_() for t in self.layer(F64))

        def layer(x: Tensor, w1: Tensor, w2: Tensor, logits: Tensor) -> Tensor:
            return glulam.moe(x, glulam.route(logits, 2), w1, w2, residual=x)

        given = (x, w1, w2, logits)
        made = torch.autograd.grad(layer(*given).square().sum(), given)
        wanted = torch.autograd.grad((self.by_loops(x, glulam.route(logits, 2), w1, w2) + x).square().sum(), given)
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9)
            assert other.abs().max() > 1e-2

    @pytest.mark.parametrize("trained", ["x w1 w2 b1 b2 residual scale", "x", "w1", "residual b1", "w2 scale"])
    def test_planned_gradients_are_those_of_the_operators(self, trained: str, fake_gpu: FakeGpu) -> None:
        """A gradient that lies as kernels want it takes planned calls, another one the public operators."""
        x, w1, w2, _ = self.layer(BF16)
        b1, b2, residual = w1[:, :, 0] * 2, w2[:, :, 0] * 2, x.flip(0)
        scale = torch.rand(20, 3, generator=torch.Generator().manual_seed(5))
        given = {"x": x, "w1": w1, "w2": w2, "b1": b1, "b2": b2, "residual": residual, "scale": scale}
        leaves = [given[name].contiguous().requires_grad_() for name in trained.split()]
        given.update(zip(trained.split(), leaves, strict=True))
        ids = torch.randint(-1, 6, (20, 3), generator=torch.Generator().manual_seed(4))
        made = Routing.from_topk(ids, given.pop("scale"), 6)
        d_out = x.roll(3, 0)

        def gradients(d_out: Tensor) -> tuple[tuple[Tensor, ...], list[str]]:
            fake_gpu.work.clear()
            out = glulam.moe(given["x"], made, **{name: one for name, one in given.items() if name != "x"})
            return torch.autograd.grad(out, leaves, d_out, retain_graph=True), list(fake_gpu.work)

        planned, calls = gradients(d_out)
        assert "dglu, mm" in calls or "x" not in trained.split()
        for one, other in zip(planned, gradients(d_out.mT.contiguous().mT)[0], strict=True):
            assert one.equal(other) and one.abs().max() > 1e-3

    @pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
    def test_a_plan_for_other_rows_copies_as_a_new_one_does(
        self, recipe: str, fake_gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Copies of 20 tokens are small enough here, copies of 40 are not; and padded tokens are never copied."""
        monkeypatch.setattr(sys.modules["glulam.layer.of_tokens"], "COPIED_WIDTH", 0)
        monkeypatch.setattr(sys.modules["glulam.layer.of_tokens"], "COPIED_BYTES", 20 * 3 * 64 * 2)
        x, w1, w2, _ = self.layer(BF16)

        def step(tokens: int, padding: int = 0) -> list[str]:
            tall = torch.nn.functional.pad(x.repeat(2, 1)[:tokens], (0, padding))[:, :64].detach().requires_grad_()
            made = Routing.from_topk(torch.arange(tokens * 3).view(tokens, 3) % 6, torch.rand(tokens, 3), 6)
            given = tall, w1.requires_grad_(), w2.requires_grad_()
            fake_gpu.work.clear()
            out = glulam.moe(tall, made, *given[1:], recipe=recipe)
            assert all(g.isfinite().all() for g in torch.autograd.grad(out, given, torch.ones_like(out)))
            return [work for work in fake_gpu.work if work == "layer"]

        for padding in (0, 8):
            first, larger, again = step(20, padding), step(40, padding), step(20, padding)
            assert bool(first) is (padding == 0) and not larger and again == first
            forget_plans()
            assert not step(40, padding) and step(20, padding) == first and not step(40, padding)

    @pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
    def test_choices_without_a_row_are_no_reason_to_warn(self, recipe: str) -> None:
        x, w1, w2 = (t.requires_grad_() for t in self.layer(BF16)[:3])
        made = Routing.from_topk(torch.randint(-1, 4, (20, 3)), torch.rand(20, 3), 6)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            glulam.moe(x, made, w1, w2, recipe=recipe).float().sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()

    def test_transposed_weights(self) -> None:
        x, w1, w2 = self.layer(BF16)[:3]
        made = Routing.from_topk(torch.randint(-1, 6, (20, 3)), torch.rand(20, 3), 6)
        transposed = {"w1": w1.mT.contiguous(), "w2": w2.mT.contiguous(), "transpose_w": True}
        wanted = glulam.moe(x, made, w1, w2)
        torch.testing.assert_close(glulam.moe(x, made, **transposed), wanted, rtol=0.02, atol=0.005)
        assert wanted.abs().max() > 0.1

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("dtype", [BF16, F64])
    def test_gradients_with_transposed_weights(self, dtype: torch.dtype, recompute: bool, anywhere: Any) -> None:
        """Sentinels are among the choices; in 16 bits by the host path as well."""
        if anywhere is not None and dtype == F64:
            pytest.skip("kernels have none")
        x, w1, w2, _ = self.layer(dtype)
        ids = torch.randint(-1, 6, (20, 3), generator=torch.Generator().manual_seed(4))
        weights = torch.rand(20, 3, dtype=torch.promote_types(dtype, torch.float32))

        def gradients(w1: Tensor, w2: Tensor, **options: Any) -> tuple[Tensor, ...]:
            given = [t.clone(memory_format=torch.contiguous_format).requires_grad_() for t in (x, w1, w2, weights)]
            made = Routing.from_topk(ids, given[3], 6)
            out = glulam.moe(given[0], made, given[1], given[2], residual=given[0], **options)
            return torch.autograd.grad(out.square().sum(), given)

        made = gradients(w1.mT, w2.mT, recompute=recompute, transpose_w=True)
        wanted = gradients(w1, w2)
        for name, one, other in zip(("x", "w1", "w2", "weights"), made, wanted, strict=True):
            right = other.mT if name in ("w1", "w2") else other
            assert other.abs().max() > 1e-2
            error = (one - right).to(F64).norm() / right.to(F64).norm()
            assert error < (0.02 if dtype == BF16 else 1e-10), name

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
    def test_no_copy_of_rows_is_kept(self, recipe: str, recompute: bool, anywhere: Any) -> None:
        """And backward sees that x is what it was."""
        given = [t.requires_grad_() for t in self.layer(BF16, inter=64)[:3]]
        made = Routing.from_topk(torch.randint(0, 6, (20, 3)), torch.rand(20, 3), 6)
        x, saved = given[0].clone(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            glulam.moe(x, made, *given[1:], recipe=recipe, recompute=recompute)
        out = glulam.moe(x, made, *given[1:], recipe=recipe, recompute=recompute)
        assert x.shape in saved and (60, 64) not in saved and ((60, 128) in saved) is not recompute
        gradients = torch.autograd.grad(out.float().square().sum(), given, retain_graph=True)
        rows = glulam.permute(given[0], made)
        options = {"offs": made.offs, "row_scale": made.weight_of_row, "recipe": recipe, "recompute": recompute}
        plain = glulam.combine(glulam.grouped_mlp(rows, *given[1:], **options), made)
        for one, other in zip(gradients, torch.autograd.grad(plain.float().square().sum(), given), strict=True):
            assert one.equal(other) and one.abs().max() > 1e-3
        x.data.zero_()  # which autograd does not see either
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified (in place|by an inplace)"):
            torch.autograd.grad(out.float().sum(), given[1])

    @pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
    @pytest.mark.parametrize("name", ["w2", "b2", "residual"])
    def test_one_argument_alone_that_needs_no_data_gradient(self, name: str, recipe: str, anywhere: Any) -> None:
        x, w1, w2 = self.layer(BF16)[:3]
        made = Routing.from_topk(torch.randint(-1, 6, (20, 3)), torch.rand(20, 3), 6)
        given = {"w2": w2, "b2": w2[:, :, 0].contiguous(), "residual": x.flip(0)}

        def gradient(*trained: str) -> Tensor:
            leaves = {one: t.clone().requires_grad_(one in trained) for one, t in given.items()}
            out = glulam.moe(x, made, w1, **leaves, recipe=recipe)
            return torch.autograd.grad(out, leaves[name], torch.ones_like(out))[0]

        torch.testing.assert_close(gradient(name), gradient(*given), rtol=0.02, atol=0.02)
        assert gradient(name).abs().max() > 0.1

    @pytest.mark.parametrize("recipe", QUANTISED)
    def test_a_residual_alone_has_a_gradient_by_any_recipe(self, recipe: str, anywhere: Any) -> None:
        x, w1, w2 = self.layer(BF16)[:3]
        made = Routing.from_topk(torch.randint(-1, 6, (20, 3)), torch.rand(20, 3), 6)
        residual = torch.randn_like(x, requires_grad=True)
        out = glulam.moe(x, made, w1, w2, residual=residual, recipe=recipe)
        (gradient,) = torch.autograd.grad(out, residual, torch.ones_like(out))
        assert gradient.eq(1).all()
        assert out.equal(glulam.moe(x, made, w1, w2, residual=residual.detach(), recipe=recipe))

    @pytest.mark.parametrize("recipe", ["mxfp8_exact", "mxfp8_weight_only"])
    def test_recipes_without_a_gradient(self, recipe: str) -> None:
        x, w1, w2 = self.layer(BF16)[:3]
        made = Routing.from_topk(torch.randint(-1, 6, (20, 3)), torch.rand(20, 3), 6)
        with pytest.raises(glulam.GradientNotSupported, match=f"moe: .*recipe '{recipe}' (has no|are frozen)"):
            glulam.moe(x, made, w1.requires_grad_(), w2, recipe=recipe)

    @pytest.mark.parametrize("recompute", [False, True])
    def test_mxfp8_gradients_are_those_of_its_parts(self, recompute: bool, anywhere: Any) -> None:
        """Of all that has one, by either way to read tokens: by index, dy is quantised once a token."""
        x, w1, w2 = self.layer(BF16)[:3]
        ids = torch.randint(-1, 6, (20, 3), generator=torch.Generator().manual_seed(3))
        b1, b2 = torch.randn(6, 64).to(BF16) / 4, torch.randn(6, 64).to(BF16) / 4
        given = [t.requires_grad_() for t in (x, w1, w2, b1, b2, torch.rand(20, 3), torch.randn(20, 64).to(BF16))]
        options = {"recipe": "mxfp8", "recompute": recompute}
        d_out = torch.randn(20, 64).to(BF16)

        def gradients(whole: bool) -> tuple[Tensor, ...]:
            x, w1, w2, b1, b2, weights, residual = given
            made = Routing.from_topk(ids, weights, 6)
            if whole:
                out = glulam.moe(x, made, w1, w2, b1=b1, b2=b2, residual=residual, **options)
            else:
                rows = {"offs": made.offs, "row_scale": made.weight_of_row, "b1": b1, "b2": b2, **options}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # not all rows are an expert's
                    out = glulam.combine(glulam.grouped_mlp(glulam.permute(x, made), w1, w2, **rows), made, residual)
            return torch.autograd.grad(out, given, d_out)

        for _ in range(2):
            for one, other in zip(gradients(True), gradients(False), strict=True):
                assert one.equal(other) and one.abs().max() > 1e-3

    def test_a_trace_is_asked_for_no_address(self, recwarn: pytest.WarningsRecorder) -> None:
        """All tensors of one that have the same shape would seem the same."""
        with FakeTensorMode():
            given = [torch.empty(t.shape, requires_grad=True) for t in self.layer(torch.float32)]
            x, w1, w2, logits = given
            out = glulam.moe(x, glulam.route(logits, 2), w1, w2)
            gradients = torch.autograd.grad(out.sum(), given)
        assert [t.shape for t in gradients] == [t.shape for t in given]
        assert not [one for one in recwarn if "data pointer" in str(one.message)]

    @pytest.mark.parametrize("recipe", SERVED)
    def test_recipes_and_sentinels(self, recipe: str, anywhere: Any) -> None:
        x, w1, w2, _ = self.layer(BF16)
        ids = torch.randint(-2, 8, (20, 3), generator=torch.Generator().manual_seed(4))
        ids[3] = -1
        made = Routing.from_topk(ids, torch.rand(20, 3), 6)
        out = glulam.moe(x, made, w1, w2, recipe=recipe)
        wanted = self.by_loops(x.double(), made, w1.double(), w2.double())
        error = (out.double() - wanted).norm() / wanted.norm()
        most = {"bf16": 0.01, "mxfp4": 0.3, "mxfp4_weight_only": 0.3, "nvfp4_weight_only": 0.2}.get(recipe, 0.1)
        assert error < most and not out[3].any()

    @pytest.mark.parametrize("recipe", SERVED)
    def test_one_graph_without_gradients(self, recipe: str) -> None:
        torch.compiler.reset()  # which compiles a function at most eight times
        x, w1, w2, logits = self.layer(BF16)

        def layer(x: Tensor, logits: Tensor) -> Tensor:
            return glulam.moe(x, glulam.route(logits, 2), w1, w2, residual=x, recipe=recipe)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for given in ((x, logits), (x[:7], logits[:7])):
            assert compiled(*given).equal(layer(*given))

    @pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
    def test_one_graph(self, recipe: str) -> None:
        """torch.compile sees each operator as one, in forward and backward."""
        x, w1, w2, logits = (t.requires_grad_() for t in self.layer(torch.float32))

        def layer(x: Tensor, w1: Tensor, w2: Tensor, logits: Tensor) -> Tensor:
            return glulam.moe(x, glulam.route(logits, 2), w1, w2, residual=x, recipe=recipe)

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        given = (x, w1, w2, logits)
        out, plain = compiled(*given), layer(*given)
        assert out.equal(plain)
        made, wanted = (torch.autograd.grad(y.square().sum(), given) for y in (out, plain))
        for one, other in zip(made, wanted, strict=True):
            torch.testing.assert_close(one, other)
