"""The gradient of grouped_mm: y = x w_e^T + s b_e."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_mm import GroupedMmCall, grouped_mm
from .layout import Layout, flatten
from .parts import (
    ORDINARY,
    Targets,
    as_result,
    backward_of,
    check_saved,
    once_differentiable,
    scale_of_bias_grad,
    taken,
    tensor_groups,
    usable,
)

OP = "grouped_mm"


def apply(call: GroupedMmCall, targets: Targets = ORDINARY) -> Tensor:
    """The result of a call, differentiable."""
    groups = tensor_groups(OP, call.offs, call.splits, call.x)
    arguments = {"x": call.x, "w": call.w, "bias": call.bias, "bias_scale": call.bias_scale, **groups}
    layout, flat = flatten(arguments)
    return GroupedMm.apply(layout, call.transpose_w, targets, *flat)  # type: ignore[no-untyped-call]


class GroupedMm(torch.autograd.Function):
    """Inputs: the layout, transpose_w, the targets, and the flat arguments."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, transpose_w: bool, targets: Targets, *flat: Any) -> Tensor:
        ctx.layout, ctx.transpose_w, ctx.targets = layout, transpose_w, targets
        given, wanted = layout.named(flat), layout.wanted(ctx.needs_input_grad[3:])
        used = {
            "x": "w" in wanted,
            "w": "x" in wanted,
            "bias": "bias_scale" in wanted,
            "bias_scale": "bias" in wanted,
            "offs": True,
            "splits": True,
        }
        ctx.saved_layout, saved = flatten({name: value for name, value in given.items() if used[name]})
        ctx.save_for_backward(*saved)
        y = grouped_mm(transpose_w=transpose_w, out=targets.out, **given)
        return y if targets.out is None else as_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        needed = ctx.needs_input_grad[3:]
        wanted = ctx.layout.wanted(needed)
        saved = ctx.saved_layout.named(taken(ctx))
        with backward_of(OP):
            gradients = make_gradients(saved, ctx.transpose_w, ctx.targets, usable(dy), wanted)
        flat = ctx.layout.flat_gradients(gradients, needed)
        return None, None, None, *once_differentiable(OP, flat)


def make_gradients(
    saved: dict[str, Any], transpose_w: bool, targets: Targets, dy: Tensor, wanted: frozenset[str]
) -> dict[str, Any]:
    """The gradients that are wanted, by name."""
    check_saved(OP, saved)
    groups: dict[str, Any] = {name: saved[name] for name in ("offs", "splits") if name in saved}
    result: dict[str, Any] = {}
    if "x" in wanted:
        w = saved["w"]
        columns = (w if isinstance(w, Tensor) else w[0]).shape[-2 if transpose_w else -1]
        dx = targets.new_grad_input(dy, columns)
        result["x"] = grouped_mm(dy, w, **groups, transpose_w=not transpose_w, out=dx)
    if "w" in wanted:
        left, right = (saved["x"], dy) if transpose_w else (dy, saved["x"])
        result["w"] = targets.grad_of("w")(left, right, groups)
    if "bias" in wanted:
        result["bias"] = grouped_bias_grad(dy, **groups, row_scale=saved["bias_scale"])
    if "bias_scale" in wanted and saved["bias"] is not None:
        result["bias_scale"] = scale_of_bias_grad(dy, saved["bias"], groups)
    return result
