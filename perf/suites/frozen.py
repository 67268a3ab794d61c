"""Gradients of rows through frozen quantised weights, against dequantising the weights first.

Dequantising is one compiled kernel where torch.compile works: it reads a weight's bytes and writes it in 16 bits, which
the GEMM of 16-bit weights then reads. "bf16" is that GEMM alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import glulam
from glulam import recipes
from glulam.formats.prepared import PREPARED
from glulam.ops.quantized_weights import FORMS

from ..cases import Case, fp8_cases
from ..contest import check_error, make_record, numbered, records_of
from ..options import Options
from ..problem import Buffers, make_problem
from ..quantised import quantised
from ..results import Record
from ..targets import BF16
from ..timing import measure_device

RECIPES = tuple(name for name, recipe in recipes.RECIPES.items() if recipe.freezes_weights)
DEQUANTISED = "dequantised"
MAX_RELATIVE_ERROR = 0.01
"""Bound of a gradient's distance from the dequantised weight's, in Frobenius norms; rounding alone is 0.002."""

Call = Callable[[], Tensor]


def dequantising(w: Any) -> Callable[[], Tensor]:
    """One kernel where torch.compile works."""
    compiled = torch.compile(lambda: w.dequantize(torch.bfloat16), dynamic=False)
    try:
        compiled()
    except Exception as error:  # a compiler that is missing must not cost the run
        warnings.warn(f"dequantising is not compiled: {type(error).__name__}", stacklevel=2)
        return lambda: w.dequantize(torch.bfloat16)
    return compiled


def _of_weight(name: str, w: Tensor, dy: Tensor, offs: Tensor) -> dict[str, Call]:
    """dx through one weight."""
    ready, given = quantised(name, w)
    wide, make = given.dequantize(torch.bfloat16), dequantising(given)
    return {
        name: lambda: glulam.grouped_mm(dy, ready, offs=offs, transpose_w=True),
        DEQUANTISED: lambda: glulam.grouped_mm(dy, make(), offs=offs, transpose_w=True),
        BF16: lambda: glulam.grouped_mm(dy, wide, offs=offs, transpose_w=True),
    }


def _of_step(name: str, b: Buffers) -> dict[str, Call]:
    """Forward and backward of grouped_mlp, of which x is trained."""
    pairs = [quantised(name, w) for w in (b.w1, b.w2)]
    (w1, _), (w2, _) = pairs
    makes = [dequantising(given) for _, given in pairs]
    wide = [given.dequantize(torch.bfloat16) for _, given in pairs]
    x, dy = b.x.detach().clone().requires_grad_(), torch.randn_like(b.x)

    def step(*weights: Any, recipe: Any = BF16) -> Tensor:
        with torch.enable_grad():
            y = glulam.grouped_mlp(x, *weights, offs=b.offs, recipe=recipe)
            return torch.autograd.grad(y, x, dy)[0]

    return {
        name: lambda: step(w1, w2, recipe=name),
        DEQUANTISED: lambda: step(*(make() for make in makes)),
        BF16: lambda: step(*wide),
    }


def _measure(case: Case, budget_s: float) -> Iterator[Record]:
    problem = make_problem(case)
    b = problem.sets[0]
    for name in RECIPES:
        if FORMS[name].of_gate(2 * case.intermediate) != FORMS[name]:  # a grid of scales for each half: no gradient
            continue
        torch._dynamo.reset()  # else it gives up after so many shapes
        dh = torch.randn(len(b.x), b.w1.shape[1], device="cuda").to(b.x)
        contests = {
            "dx through w1": _of_weight(name, b.w1, dh, b.offs),
            "dx through w2": _of_weight(name, b.w2, b.x, b.offs),
            "forward and backward": _of_step(name, b),
        }
        for op, competing in contests.items():
            check_error(f"{op}, {name}", competing[name](), competing[BF16](), MAX_RELATIVE_ERROR)
            times = measure_device(numbered(competing), budget_s / len(RECIPES) / len(contests))
            yield make_record(case, times, problem.sizes, op=op, recipe=name)
        del contests, competing
        PREPARED.clear()
        torch.cuda.empty_cache()


def run_frozen(options: Options) -> list[Record]:
    """One record a case, recipe and operation."""
    cases = fp8_cases(options.case)
    return records_of("frozen", cases, lambda case: _measure(case, options.budget_s / len(cases)))
