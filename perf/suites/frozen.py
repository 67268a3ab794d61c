"""Gradients of rows through frozen quantised weights, against dequantising the weights first.

Dequantising is one compiled kernel where torch.compile works; the GEMM of 16-bit weights then reads what it writes.
"bf16" is that GEMM alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import glulam
from glulam import recipes
from glulam.formats.prepared import PREPARED
from glulam.ops.quantized_weights import FORMS

from ..cases import Case
from ..contest import contest, of_calls, over_cases
from ..mlp import Buffers, make_buffers
from ..quantised import dequantising, quantised
from ..results import Record
from ..targets import BF16

RECIPES = tuple(name for name, recipe in recipes.RECIPES.items() if recipe.freezes_weights)
DEQUANTISED = "dequantised"
MAX_RELATIVE_ERROR = 0.01
"""Bound of a gradient's distance from the dequantised weight's, in Frobenius norms; rounding alone is 0.002."""

Step = Callable[[], Tensor]


def _of_weight(name: str, w: Tensor, dy: Tensor, offs: Tensor) -> dict[str, Step]:
    """dx through one weight."""
    ready, given = quantised(name, w)
    wide, make = given.dequantize(torch.bfloat16), dequantising(given)
    return {
        name: lambda: glulam.grouped_mm(dy, ready, offs=offs, transpose_w=True),
        DEQUANTISED: lambda: glulam.grouped_mm(dy, make(), offs=offs, transpose_w=True),
        BF16: lambda: glulam.grouped_mm(dy, wide, offs=offs, transpose_w=True),
    }


def _of_step(name: str, b: Buffers) -> dict[str, Step]:
    """Forward and backward of grouped_mlp, of which x is trained."""
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


def _measure(case: Case, budget_s: float) -> Iterator[Record]:
    """One record a recipe and operation."""
    b = make_buffers(case)[0]
    dh = torch.randn(len(b.x), b.w1.shape[1], device=b.x.device).to(b.x)
    steps: dict[str, Callable[[str], dict[str, Step]]] = {
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


run_frozen = over_cases("frozen", _measure)
