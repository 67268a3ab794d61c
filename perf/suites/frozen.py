"""Experts whose weights are frozen: gradients of rows through quantised weights, and steps of adapters on them.

Gradients are compared with "dequantised": first dequantise the weights to 16 bits (by one compiled kernel where
torch.compile works), then run the 16-bit GEMM. "bf16" is that GEMM alone.

A training step of adapters is compared in time and memory with the layer alone, and with two ways that do without
Glulam's adapters. "materialised" is PEFT's way: compute w + scale b a for all experts, then run the 16-bit layer.
"dequantised": make 16-bit weights first, then multiply by these and by the adapters in separate GEMMs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import glulam
from glulam import ExpertLora, recipes
from glulam.formats.prepared import PREPARED
from glulam.ops.quantized_weights import FORMS

from ..cases import Case, LayerCase
from ..contest import contest, of_calls, over_cases
from ..mlp import Buffers, make_buffers, normals, swiglu, trained, weights_of
from ..quantised import dequantising, quantised
from ..results import Record
from ..targets import BF16
from ..timing import Run, measure_device, peak_bytes

RECIPES = tuple(name for name, recipe in recipes.RECIPES.items() if recipe.freezes_weights)
DEQUANTISED = "dequantised"
MAX_RELATIVE_ERROR = 0.01
"""Bound of a gradient's distance from the dequantised weight's, in Frobenius norms; rounding alone is 0.002."""
RANK, SCALE = 16, 2.0
STEP_TIMES = partial(measure_device, enqueue_us=6000.0)  # more than the host needs for a step of some forty launches
ALONE, ADAPTED, MATERIALISED = "the layer alone", "lora", "materialised"
QUANTISED = "mxfp4_weight_only"

Steps = dict[str, Run]
"""Contestants by name."""


def _of_weight(name: str, w: Tensor, dy: Tensor, offs: Tensor) -> Steps:
    """Return {contestant: function} for the gradient dx = dy w through one quantised weight.

    name: the recipe, which is also the name of our contestant.
    """
    ready, given = quantised(name, w)
    wide, make = given.dequantize(torch.bfloat16), dequantising(given)
    dx = partial(glulam.grouped_mm, offs=offs, transpose_w=True)
    return {name: lambda: dx(dy, ready), DEQUANTISED: lambda: dx(dy, make()), BF16: lambda: dx(dy, wide)}


def _of_step(name: str, b: Buffers) -> Steps:
    """Return {contestant: function} for the forward and backward of grouped_mlp, with the gradient of x alone.

    name: the recipe, which is also the name of our contestant.
    """
    (w1, given1), (w2, given2) = (quantised(name, w) for w in (b.w1, b.w2))
    wide = [given.dequantize(torch.bfloat16) for given in (given1, given2)]
    make1, make2 = dequantising(given1), dequantising(given2)
    x, dy = b.x.detach().clone().requires_grad_(), torch.randn_like(b.x)

    def step(*weights: Any, recipe: Any = BF16) -> Tensor:
        y = glulam.grouped_mlp(x, *weights, offs=b.offs, recipe=recipe)
        return torch.autograd.grad(y, x, dy)[0]

    return {
        name: lambda: step(w1, w2, recipe=name),
        DEQUANTISED: lambda: step(make1(), make2()),
        BF16: lambda: step(*wide),
    }


@over_cases("frozen")
def run_frozen(case: Case, budget_s: float) -> Iterator[Record]:
    """Yield one record for each recipe and operation."""
    b = make_buffers(case)[0]
    dh = torch.randn(len(b.x), b.w1.shape[1], device=b.x.device).to(b.x)
    steps: dict[str, Callable[[str], Steps]] = {
        "dx through w1": lambda name: _of_weight(name, b.w1, dh, b.offs),
        "dx through w2": lambda name: _of_weight(name, b.w2, b.x, b.offs),
        "forward and backward": lambda name: _of_step(name, b),
    }
    for name in RECIPES:
        if FORMS[name].of_gate(2 * case.intermediate) != FORMS[name]:  # a grid of scales for each half: no gradient
            continue
        torch._dynamo.reset()  # else it gives up after so many shapes
        for op, make in steps.items():
            share, calls = budget_s / len(RECIPES) / len(steps), make(name)
            contestants = of_calls(calls, name, calls[BF16], MAX_RELATIVE_ERROR)
            yield contest(case, contestants, share, b.sizes, where=f"{op}, {name}", op=op, recipe=name)
            PREPARED.clear()
            torch.cuda.empty_cache()


class Data(NamedTuple):
    """The tensors of a step: x [N, H], its result's gradient, a routing, 16-bit weights, and trained adapters of all
    experts.
    """

    x: Tensor
    dy: Tensor
    routing: Any
    w1: Tensor
    w2: Tensor
    lora: ExpertLora

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.lora.given().values()]

    def step(self, forward: Run) -> Run:
        """Return a function that runs the forward and its backward, and returns the gradients that leaves have."""
        return lambda: trained(forward, self.leaves, self.dy)[1:]


def make_data(case: LayerCase) -> Data:
    random = normals(torch.Generator("cuda").manual_seed(case.seed))
    experts, hidden, inner = case.experts, case.hidden, case.intermediate
    shapes = (RANK, hidden), (2 * inner, RANK), (RANK, inner), (hidden, RANK)
    a1, b1, a2, b2 = (random(experts, *shape, scale=shape[1] ** -0.5).requires_grad_() for shape in shapes)
    x, dy = random(case.tokens, hidden).requires_grad_(), random(case.tokens, hidden)
    routing = glulam.route(random(case.tokens, experts), case.top_k)
    return Data(x, dy, routing, *weights_of(case, random), ExpertLora(a1, b1, a2, b2, SCALE))


def _materialised(d: Data) -> Tensor:
    a1, b1, a2, b2 = d.lora.given().values()
    return glulam.moe(d.x, d.routing, d.w1 + SCALE * torch.bmm(b1, a1), d.w2 + SCALE * torch.bmm(b2, a2))


def _apart(d: Data, w1: Tensor, w2: Tensor) -> Tensor:
    a1, b1, a2, b2 = d.lora.given().values()
    mm = partial(glulam.grouped_mm, offs=d.routing.offs)

    def adapted(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        narrow = mm(x, a)
        return mm(x, w) + SCALE * mm(narrow, b)

    y = adapted(swiglu(adapted(glulam.permute(d.x, d.routing), w1, a1, b1)), w2, a2, b2)
    return glulam.combine(y * d.routing.weight_of_row.to(y.dtype)[:, None], d.routing)


def _adapter_steps(d: Data) -> dict[str, Steps]:
    """Return {recipe: its contestants}: the layer alone, the layer with our adapters, and adapters without Glulam's.

    The last is "materialised" or "dequantised", see the top of this file.
    """
    (w1, given1), (w2, given2) = (quantised(QUANTISED, w) for w in (d.w1, d.w2))
    make1, make2 = dequantising(given1), dequantising(given2)
    others: dict[Any, Any] = {
        BF16: (d.w1, d.w2, MATERIALISED, lambda: _materialised(d)),
        QUANTISED: (w1, w2, DEQUANTISED, lambda: _apart(d, make1(), make2())),
    }
    made: dict[str, Steps] = {}
    for recipe, (*weights, name, other) in others.items():
        ours: Any = partial(glulam.moe, d.x, d.routing, *weights, recipe=recipe)
        made[recipe] = {ALONE: d.step(ours), ADAPTED: d.step(partial(ours, lora=d.lora)), name: d.step(other)}
    return made


@over_cases("lora")
def run_lora(case: LayerCase, budget_s: float) -> Iterator[Record]:
    """Yield one record for each recipe."""
    d = make_data(case)
    for recipe, steps in _adapter_steps(d).items():
        for step in steps.values():
            step()  # what is prepared or compiled at a first call does not count as memory
        peaks = {name: peak_bytes(step, d.leaves) for name, step in steps.items()}
        fields: Record = {"recipe": recipe, "rank": RANK, "peak_bytes": peaks}
        *_, other = steps.values()
        contestants = of_calls(steps, ADAPTED, other, MAX_RELATIVE_ERROR)
        yield contest(case, contestants, budget_s / 2, where=recipe, measure=STEP_TIMES, **fields)
