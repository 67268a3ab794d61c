"""The common differentiable grouped_mm, by `planned`: no scale that wants a gradient.

Forward is one launch, backward one for x's gradient and one for the weight's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..changed import changed
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_mm import GroupedMmCall
from ..ops.grouped_wgrad import GroupedWgradCall
from ..problem import Problem
from . import mm
from .parts import Targets, as_result, backward_of, once_differentiable, taken, usable
from .planned import Maker, Part, TrainingPlan, are_in_memory, as_saved, is_common, is_usual, requires, save

SAVED = ("x", "w", "groups", "bias_scale")


class PlannedMm(torch.autograd.Function):
    """Inputs: the plan, the targets, and what the plan names."""

    @staticmethod
    def forward(ctx: Any, plan: TrainingPlan, targets: Targets, *inputs: Any) -> Tensor:
        given, need, out = plan.named(inputs), plan.needs, targets.out
        x, forward = given["x"], plan.parts["forward"]
        y = x.new_empty(x.shape[0], forward.constants["width"]) if out is None else out
        forward.run(**given, out=y)
        ctx.plan, ctx.targets = plan, targets
        save(
            ctx, x if need["w"] else None, given["w"] if need["x"] else None, given["groups"],
            given.get("bias_scale") if need["bias"] else None,
        )  # fmt: skip
        return y if out is None else as_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan: TrainingPlan = ctx.plan
        targets: Targets = ctx.targets
        x, w, groups, scale = kept = taken(ctx)
        if not is_usual(dy) or not as_saved(ctx, kept) or not are_in_memory(dy, *kept):
            return _unusual_backward(plan, targets, kept, dy)
        need, by_groups = plan.needs, plan.grouped(groups)
        dx = dw = db = None
        if need["x"]:
            dgrad = plan.parts["x"]
            dx = dgrad.run(x=dy, w=w, groups=groups, out=targets.new_grad_input(dy, dgrad.constants["width"]))
        if need["w"]:
            left, right = (x, dy) if plan.options else (dy, x)
            if "w" in targets.weights:
                dw = targets.weights["w"](left, right, by_groups)
            else:
                dw = plan.parts["w"].run(dy=left, x=right, groups=groups)
        if need["bias"]:
            db = grouped_bias_grad(dy, row_scale=scale, **by_groups)
        by_name = {"x": dx, "w": dw, "bias": db}
        return None, None, *map(by_name.get, plan.names)


_apply: Callable[..., Any] = super(torch.autograd.Function, PlannedMm).apply
"""As in planned_mlp."""


def _unusual_backward(plan: TrainingPlan, targets: Targets, kept: tuple[Any, ...], dy: Tensor) -> Any:
    """As in planned_mlp."""
    named = {**plan.by_argument(dict(zip(SAVED, kept, strict=True))), "bias": None}
    wanted = frozenset(name for name, need in plan.needs.items() if need)
    with backward_of(mm.OP):
        gradients = mm.make_gradients(named, plan.options, targets, usable(dy), wanted)
    return None, None, *once_differentiable(mm.OP, [gradients.get(name) for name in plan.names])


def _check(call: Call) -> Problem | None:
    """As of Maker. Raises ValueError or TypeError where an argument does not fit."""
    problem = call.check()
    if requires(call, "bias_scale") or not is_common(call, problem):
        return None
    call.check_addresses()
    return problem


def _parts(call: Call, problem: Problem) -> dict[str, Part]:
    """The launches. dy is stood for by x."""
    x_columns, y_columns, x = problem.in_features, problem.out_features, call.x
    groups = {"offs": call.offs, "splits": call.splits}
    given = {"x": x, "w": call.w, "rows": None, "bias": None, "bias_scale": None, "out": x}
    parts = {"forward": Part(changed(call, out=x), problem)}
    if requires(call, "x"):
        dgrad = changed(problem, in_features=y_columns, out_features=x_columns, transpose_w=not problem.transpose_w)
        parts["x"] = Part(GroupedMmCall(**given, **groups, transpose_w=not problem.transpose_w), dgrad)
    if requires(call, "w"):
        n, k = (x_columns, y_columns) if problem.transpose_w else (y_columns, x_columns)
        wgrad = changed(
            problem, op="grouped_wgrad", in_features=k, out_features=n, transpose_w=False, out_dtype=problem.dtype
        )
        indices = {"dy_rows": None, "x_rows": None, "mask": None, "out": None, "out_dtype": None}
        parts["w"] = Part(GroupedWgradCall(dy=x, x=x, **groups, **indices, accumulate=False), wgrad)
    return parts


MAKER = Maker(_check, _parts, lambda call: call.transpose_w, _apply, mm.apply)
