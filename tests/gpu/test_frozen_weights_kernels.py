"""Gradients through frozen quantised weights, by kernels: sizes, routings, graphs, and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import frozen, oracle
from support.criterion import assert_close
from support.frozen import BF16, RECIPES, quantised
from support.inputs import make_case

import glulam

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*the groups end at row")]

ROUTINGS = {
    "some": [5, 0, 130, 1, 64, 257],
    "first and last empty": [0, 128, 3, 0],
    "one": [300],
    "many": [(7 * i) % 5 for i in range(160)],
    "none": [0, 0, 0],
}
WIDTHS = [(128, 128), (392, 640), (1032, 256), (64, 1408)]
"""Rows and columns of weights: whole tiles, odd ones, narrow ones."""

recipes = pytest.mark.parametrize("recipe", RECIPES)


def weight(recipe: str, experts: int, n: int, k: int, seed: int = 0) -> Any:
    generator = torch.Generator("cuda").manual_seed(seed)
    return quantised((torch.randn(experts, n, k, device="cuda", generator=generator) / n**0.5).to(BF16), recipe)


@recipes
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_routing(recipe: str, routing: str) -> None:
    c = make_case(ROUTINGS[routing], 392, 64, tail=5, device="cuda")
    w = weight(recipe, len(c.sizes), 392, 640)
    y = torch.full((len(c.x), 640), torch.nan, dtype=BF16, device="cuda")
    glulam.grouped_mm(c.x, w, offs=c.offs, transpose_w=True, out=y)
    assert bool(y[c.rows :].isnan().all())
    exact = frozen.exact_values(w)
    made = [oracle.grouped_mm(c.x, exact, c.ends, transpose_w=True, dtype=dtype) for dtype in (torch.float64, BF16)]
    assert_close(y, *made, c.rows)


@recipes
@pytest.mark.parametrize(("n", "k"), WIDTHS)
def test_every_width(recipe: str, n: int, k: int) -> None:
    c = make_case([140, 0, 33, 1], n, 64, device="cuda")
    w = weight(recipe, 4, n, k)
    bias, scale = torch.randn(4, k, device="cuda").to(BF16), torch.rand(c.rows, device="cuda")
    given = {"bias": bias, "bias_scale": scale}
    exact = frozen.exact_values(w)
    made = [
        oracle.grouped_mm(c.x, exact, c.ends, transpose_w=True, dtype=dtype, **given) for dtype in (torch.float64, BF16)
    ]
    y = glulam.grouped_mm(c.x, w, offs=c.offs, transpose_w=True, **given)
    assert_close(y, *made, c.rows)
    assert torch.equal(y, glulam.grouped_mm(c.x, w, offs=c.offs, transpose_w=True, **given))


@recipes
@pytest.mark.parametrize("scale", [0, 1, 126, 127, 255])
def test_special_scales(recipe: str, scale: int) -> None:
    """The least, the largest and NaN, in one block of one row: NaN reaches this block's columns alone."""
    c = make_case([20], 128, 64, device="cuda")
    w = weight(recipe, 1, 128, 256)
    if w.scale.itemsize == 1:
        w.scale.view(torch.uint8)[0, 40, 3] = scale
    else:
        w.scale[0, 0, 1] = {0: 0.0, 255: torch.nan}.get(scale, 2.0 ** (scale - 127))
    y = glulam.grouped_mm(c.x, w, offs=c.offs, transpose_w=True)
    exact = frozen.exact_values(w)[0]
    wanted = (c.x.double() @ exact).float()
    bad = ~wanted.to(BF16).isfinite()
    is_nan = y.isnan() | y.isinf()
    columns = bad.any(0)
    assert torch.equal(is_nan.any(0), columns)
    good = ~columns
    if bool(good.any()):
        assert_close(y[:, good], wanted[:, good].double(), wanted[:, good].to(BF16), 20)


@recipes
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_of_an_mlp(recipe: str, recompute: bool) -> None:
    form = "swiglu", "concat"
    c = make_case([140, 0, 33, 1], 256, 384, tail=7, device="cuda")
    weights = quantised(c.w1, recipe), quantised(c.w2, recipe)
    got, dy = frozen.run_mlp(c, weights, recipe, form, recompute=recompute)
    frozen.check_gradients(c, got, weights, form, dy)
    again, _ = frozen.run_mlp(c, weights, recipe, form, recompute=recompute)
    assert all(torch.equal(got[name].grad, again[name].grad) for name in got)  # type: ignore[arg-type]


@recipes
def test_memory(recipe: str) -> None:
    """No weight in 16 bits: beside weights and rows, a step takes less than half of one."""
    experts, hidden, inter, rows = 32, 1024, 1024, 64
    w1, w2 = weight(recipe, experts, 2 * inter, hidden), weight(recipe, experts, hidden, inter)
    x = torch.randn(rows, hidden, device="cuda").to(BF16).requires_grad_()
    offs = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)

    def step() -> None:
        with torch.enable_grad():
            glulam.grouped_mlp(x, w1, w2, offs=offs, recipe=recipe).sum().backward()

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    of_16_bits = experts * inter * hidden * 2
    assert torch.cuda.max_memory_allocated() - before < of_16_bits // 2


@recipes
def test_a_captured_step_follows_its_routing(recipe: str) -> None:
    c = make_case([40, 30, 0, 58], 256, 256, device="cuda")
    weights = quantised(c.w1, recipe), quantised(c.w2, recipe)
    x, offs, dy = c.x.clone().requires_grad_(), c.offs.clone(), torch.randn_like(c.x)

    def step() -> torch.Tensor:
        with torch.enable_grad():
            y = glulam.grouped_mlp(x, *weights, offs=offs, recipe=recipe)
            return torch.autograd.grad(y, x, dy)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for sizes in ([0, 128, 0, 0], [1, 2, 3, 122]):
        offs.copy_(torch.tensor(sizes, device="cuda").cumsum(0).int())
        graph.replay()
        assert torch.equal(captured, step())
