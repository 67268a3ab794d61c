"""A step of adapters on a layer's frozen experts: time and memory, against the layer alone and what users do without.

"materialised" is PEFT's way: w + scale b a for all experts, then the 16-bit layer. "dequantised" makes 16-bit weights
first, in one compiled kernel where torch.compile works, and multiplies with them and with the adapters apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import glulam
from glulam import ExpertLora

from ..cases import OTHER_MODELS, QWEN3, select
from ..contest import check_error, make_record, numbered, records_of
from ..layer_cases import LayerCase, layer_of
from ..memory import peak_bytes
from ..options import Options
from ..problem import normals
from ..quantised import quantised
from ..results import Record
from ..targets import BF16
from ..timing import measure_device
from .frozen import DEQUANTISED, MAX_RELATIVE_ERROR, dequantising

RANK, SCALE, TOKENS = 16, 2.0, 4096
ENQUEUE_US = 6000.0  # more than the host needs for a step of some forty launches
ALONE, ADAPTED, MATERIALISED = "the layer alone", "lora", "materialised"
QUANTISED = "mxfp4_weight_only"
CASES = [
    dataclasses.replace(layer_of(case), tokens=TOKENS)
    for case in (*OTHER_MODELS, QWEN3) if case.name in ("gpt-oss-20b", QWEN3.name)
]  # fmt: skip

Step = Callable[[], list[Tensor]]


@dataclasses.dataclass(frozen=True)
class Data:
    """x [N, H], its result's gradient, a routing, 16-bit weights, and trained adapters of all experts."""

    x: Tensor
    dy: Tensor
    routing: Any
    w1: Tensor
    w2: Tensor
    lora: ExpertLora

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.lora.given().values()]

    def forget_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def step(self, forward: Callable[[], Tensor]) -> Step:
        """Return a forward and backward, which returns the gradients of all leaves that have one."""

        def run() -> list[Tensor]:
            self.forget_gradients()
            forward().backward(self.dy)
            return [leaf.grad for leaf in self.leaves if leaf.grad is not None]

        return run


def make_data(case: LayerCase) -> Data:
    generator = torch.Generator("cuda").manual_seed(case.seed)

    random = normals(generator)
    experts, hidden, inner = case.experts, case.hidden, case.intermediate
    shapes = (RANK, hidden), (2 * inner, RANK), (RANK, inner), (hidden, RANK)
    a1, b1, a2, b2 = (random(experts, *shape, scale=shape[1] ** -0.5).requires_grad_() for shape in shapes)
    return Data(
        x=random(case.tokens, hidden).requires_grad_(),
        dy=random(case.tokens, hidden),
        routing=glulam.route(random(case.tokens, experts), case.top_k),
        w1=random(experts, 2 * inner, hidden, scale=hidden**-0.5),
        w2=random(experts, hidden, inner, scale=inner**-0.5),
        lora=ExpertLora(a1, b1, a2, b2, SCALE),
    )


def _materialised(d: Data) -> Tensor:
    a1, b1, a2, b2 = d.lora.given().values()
    return glulam.moe(d.x, d.routing, d.w1 + SCALE * torch.bmm(b1, a1), d.w2 + SCALE * torch.bmm(b2, a2))


def _apart(d: Data, w1: Tensor, w2: Tensor) -> Tensor:
    a1, b1, a2, b2 = d.lora.given().values()
    offs = d.routing.offs

    def adapted(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
        narrow = glulam.grouped_mm(x, a, offs=offs)
        return glulam.grouped_mm(x, w, offs=offs) + SCALE * glulam.grouped_mm(narrow, b, offs=offs)

    gate, up = adapted(glulam.permute(d.x, d.routing), w1, a1, b1).chunk(2, dim=1)
    y = adapted(F.silu(gate) * up, w2, a2, b2)
    return glulam.combine(y * d.routing.weight_of_row.to(y.dtype)[:, None], d.routing)


def _steps(d: Data) -> dict[str, dict[str, Step]]:
    """By recipe, the contestants."""
    (w1, given1), (w2, given2) = (quantised(QUANTISED, w) for w in (d.w1, d.w2))
    make1, make2 = dequantising(given1), dequantising(given2)

    def ours(*weights: Any, recipe: Any, lora: ExpertLora | None = None) -> Step:
        return d.step(lambda: glulam.moe(d.x, d.routing, *weights, recipe=recipe, lora=lora))

    return {
        BF16: {
            ALONE: ours(d.w1, d.w2, recipe=BF16),
            ADAPTED: ours(d.w1, d.w2, recipe=BF16, lora=d.lora),
            MATERIALISED: d.step(lambda: _materialised(d)),
        },
        QUANTISED: {
            ALONE: ours(w1, w2, recipe=QUANTISED),
            ADAPTED: ours(w1, w2, recipe=QUANTISED, lora=d.lora),
            DEQUANTISED: d.step(lambda: _apart(d, make1(), make2())),
        },
    }


def _measure(case: LayerCase, budget_s: float) -> Iterator[Record]:
    d = make_data(case)
    for recipe, steps in _steps(d).items():
        _, adapted, other = steps
        for got, exact in zip(steps[adapted](), steps[other](), strict=True):
            check_error(f"a gradient, {recipe}", got, exact, MAX_RELATIVE_ERROR)
        peaks = {name: peak_bytes(step, d.forget_gradients) for name, step in steps.items()}
        times = measure_device(numbered(steps), budget_s / 2, ENQUEUE_US)
        yield make_record(case, times, recipe=recipe, rank=RANK, peak_bytes=peaks)


def run_lora(options: Options) -> list[Record]:
    """One record a case and recipe."""
    cases = select(CASES, options.case)
    return records_of("lora", cases, lambda case: _measure(case, options.budget_s / len(cases)))
