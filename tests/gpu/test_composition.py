"""Modules and operators within PyTorch, on kernels: adapters, child modules that are called, and dispatch modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import frozen, lora
from support.frozen import RECIPES, quantised
from support.inputs import gradient, make_case
from test_watched import Watch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import glulam
from glulam.nn import MoE

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
SIZES = [300, 0, 17, 64, 129]


class TestLora:
    @pytest.mark.parametrize("rank", [5, 16])
    @pytest.mark.parametrize("form", [("swiglu", "concat"), ("swiglu", "interleaved"), ("silu", "concat")])
    def test_result_and_gradients(self, rank: int, form: tuple[str, str]) -> None:
        c = make_case(SIZES, 256, 192, gated=form[0] != "silu", tail=5, device="cuda")
        leaves, dy = lora.trained(c, rank), gradient(c)
        with torch.enable_grad():
            y = lora.call(c, leaves, c.w1, c.w2, form)
        y.backward(dy)
        lora.check(c, leaves, y, dy, c.w1, c.w2, form)

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_frozen_quantised_weights(self, recipe: str) -> None:
        c = make_case(SIZES, 256, 256, tail=5, device="cuda")
        w1, w2 = quantised(c.w1, recipe), quantised(c.w2, recipe)
        leaves, dy = lora.trained(c, 16), gradient(c)
        with torch.enable_grad():
            y = lora.call(c, leaves, w1, w2, recipe=recipe)
        y.backward(dy)
        lora.check(c, leaves, y, dy, frozen.exact_values(w1), frozen.exact_values(w2))

    @pytest.mark.parametrize("recipe", ["bf16", "mxfp4_weight_only"])
    def test_a_captured_step(self, recipe: str) -> None:
        """Forward and backward of a layer, replayed with other tokens, which go elsewhere."""
        torch.manual_seed(0)
        layer = MoE(128, 128, 8, 2, recipe=recipe, device="cuda", dtype=BF16).requires_grad_(False)
        adapters = layer.add_lora(8)
        for matrix in adapters.parameters():
            matrix.data.normal_(0.0, 0.1)
        x = torch.randn(2, 64, 128, device="cuda", dtype=BF16)

        def step(tokens: Tensor) -> list[Tensor]:
            with torch.enable_grad():
                y = layer(tokens)
                return [y, *torch.autograd.grad(y.float().square().sum(), list(adapters.parameters()))]

        wanted = [[one.clone() for one in step(tokens)] for tokens in x]
        given = x[0].clone()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step(given)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = step(given)
        for tokens, results in zip(x, wanted, strict=True):
            given.copy_(tokens)
            graph.replay()
            assert all(one.equal(other) for one, other in zip(made, results, strict=True))
        assert not wanted[0][0].equal(wanted[1][0])


def layer(**options: Any) -> MoE:
    torch.manual_seed(0)
    given = {"shared_intermediate_size": 128, "shared_gate": True, "bias": True, "router_bias": True}
    return MoE(256, 192, 8, 2, **{**given, **options}, device="cuda", dtype=BF16)


def step(module: MoE, x: Tensor) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.backward(torch.linspace(-1, 1, y.numel(), device="cuda", dtype=y.dtype).view(y.shape))
    found = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    module.zero_grad(set_to_none=True)
    return {"y": y.detach(), "x": leaf.grad, **found}  # type: ignore[dict-item]


@pytest.mark.parametrize("tokens", [7, 300])
@pytest.mark.parametrize("name", ["router", "experts", "experts.fc1", "experts.fc2", "shared", "shared_gate"])
def test_a_child_that_is_hooked_is_called(name: str, tokens: int) -> None:
    """Results are those of the fused way, but for one rounding between."""
    module, x, seen = layer(), torch.randn(tokens, 256, device="cuda", dtype=BF16), []
    wanted = step(module, x)
    part = module.get_submodule(name)
    part.register_forward_hook(lambda *_: seen.append("forward"))
    part.register_full_backward_hook(lambda *_: seen.append("backward"))
    made = step(module, x)
    assert seen == ["forward", "backward"] and made.keys() == wanted.keys()
    for key, value in wanted.items():
        distance, scale = float((made[key] - value).float().norm()), float(value.float().norm())
        assert scale > 0 and distance <= 0.02 * scale, key


def test_known_calls_are_seen() -> None:
    """Also those whose plan is kept, under a dispatch mode; and a trace computes another routing."""
    c = make_case(SIZES, 256, 192, device="cuda")
    other = torch.tensor([100, 200, 300, 400, 510], device="cuda", dtype=torch.int32)
    for _ in range(3):
        known = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs)
    with Watch() as watch:
        assert glulam.grouped_mlp(c.x, c.w1, c.w2, offs=c.offs).equal(known)
    assert [sample.op._schema.name for sample in watch.samples] == ["glulam::grouped_mlp"]
    program = make_fx(lambda x, offs: glulam.grouped_mlp(x, c.w1, c.w2, offs=offs))(c.x, c.offs)
    wanted = glulam.grouped_mlp(c.x, c.w1, c.w2, offs=other)
    assert program(c.x, other).equal(wanted) and not wanted.equal(known)


def test_a_planned_backward_is_seen() -> None:
    c = make_case(SIZES, 256, 192, device="cuda")
    x, w1 = (t.clone().requires_grad_() for t in (c.x, c.w1))
    made = []
    for _ in range(3):
        with torch.enable_grad():
            y = glulam.grouped_mlp(x, w1, c.w2, offs=c.offs)
        made.append(torch.autograd.grad(y, (x, w1), gradient(c)))
    with torch.enable_grad():
        y = glulam.grouped_mlp(x, w1, c.w2, offs=c.offs)
    with Watch() as watch:
        watched = torch.autograd.grad(y, (x, w1), gradient(c))
    assert "glulam::grouped_dglu" in [sample.op._schema.name for sample in watch.samples]
    for one, other in zip(watched, made[-1], strict=True):
        torch.testing.assert_close(one[: c.rows], other[: c.rows])


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_one_graph_serves_any_number_of_tokens(recipe: str) -> None:
    torch.compiler.reset()
    module = MoE(256, 256, 8, 2, recipe=recipe, device="cuda", dtype=BF16)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (20, 33, 300, 7):
        x = torch.randn(count, 256, device="cuda", dtype=BF16)
        torch.testing.assert_close(compiled(x), module(x), rtol=2e-2, atol=2e-2)
