"""Results of a layer's experts, one row for each choice of a token, times the choice's weight and not yet summed.

`moe` is the sum of these rows over each token's choices.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from cute_kernels.formats import DECODED

from .. import recipes
from ..activations import Numbers, packed
from ..calls.call import Call
from ..calls.checks import any_requires_grad
from ..calls.front import operator
from ..choose.problem import Problem
from ..formats.mxfp8 import MXFP8Tensor
from ..host.groups import part_of
from ..names import RecipeName
from ..ops.grouped_mlp import GroupedMlpCall, grouped_mlp
from ..ops.quantized_mlp import QuantizedMlpCall, want_16_bits
from ..recipes import Recipe
from .checks import check_world
from .routing import Routing
from .rows import permute, row_indices

OP = "moe"
"""The operator's name in errors."""


class OfWorld(Call):
    """Base of calls with a layer's rows. Their kernels are chosen for the number of rows expected on this rank.

    `world_experts`: number of experts on all ranks among which the tokens choose; 0: all choices are expected here.
    """

    def problem(self, experts: int, in_features: int, **fields: Any) -> Problem:
        if self.world_experts != 0:
            check_world(self.op, "routing.world_experts", self.world_experts, experts)
        return super().problem(experts, in_features, **fields)


class ExpertRowsCall(OfWorld, GroupedMlpCall):
    """A call of `expert_rows` in 16 bits."""

    op, torch_op = OP, "moe_rows"
    after_groups = ""
    explains = differentiable = False
    out = None


class QuantizedExpertRowsCall(OfWorld, QuantizedMlpCall):
    """A call of `expert_rows` with a recipe that quantises."""

    op, torch_op = OP, "moe_rows_mxfp8"
    after_groups = ""
    differentiable = False
    out = None


@operator(ExpertRowsCall, quantized=QuantizedExpertRowsCall)
def expert_rows(
    x: Tensor, w1: Any, w2: Any, *, offs: Any, splits: Any, rows: Any, row_scale: Any, b1: Any, b2: Any,
    activation: str, glu_layout: str, numbers: Numbers, recipe: Any, recompute: bool, transpose_w: bool,
    world_experts: int,
) -> Any:  # fmt: skip
    """Return `grouped_mlp` of a layer's rows, one for each choice of a token. Not differentiable.

    `world_experts`: number of experts on all ranks among which the tokens choose; 0: all choices are expected here.
    """
    raise NotImplementedError  # `front` writes the body


def rows_of_experts(
    x: Tensor | MXFP8Tensor, routing: Routing, w1: Any, w2: Any, *, recipe: RecipeName | Recipe, dtype: torch.dtype,
    lora: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Return the experts' results, one row for each choice, times the choice's weight: [T, H']. Not differentiable.

    H' is the number of w2's rows.

    Args:
        dtype: dtype of the result if x is in MXFP8; else x's dtype is used.
        x, routing, w1, w2, recipe, lora, options: see `moe`.

    Raises:
        GradientNotSupported: x is in MXFP8, and a weight or bias requires a gradient.
    """
    rows: Tensor | None = row_indices(OP, x, routing)
    found = recipes.find(OP, recipe)
    if isinstance(x, Tensor) and found.operands in DECODED:  # these kernels cannot read rows by index
        x, rows = permute(x, routing), None
    given = {"x": x, "w1": w1, "w2": w2, "offs": routing.offs, "rows": rows, "row_scale": routing.weight_of_row}
    if lora is not None:  # such a call is several operators
        with nullcontext() if is_dynamo_compiling() else part_of(OP):
            made: Tensor = grouped_mlp(**given, recipe=recipe, lora=lora, **options)
            return made
    given = {
        **dict.fromkeys(("splits", "b1", "b2")), "recompute": False, "transpose_w": False, **given,
        "world_experts": routing.world_experts, **options,
    }  # fmt: skip
    if isinstance(x, Tensor):
        return expert_rows(**packed({**given, "recipe": recipe}))
    if is_grad_enabled() and any_requires_grad(w1, w2, given["b1"], given["b2"]):
        want_16_bits(OP, "x")
    parts = QuantizedExpertRowsCall.unwrapped(found, {**given, "dtype": dtype})
    return QuantizedExpertRowsCall.operator(**parts)
