"""The gradient of grouped_mm: y = x w_e^T + s b_e.

With a plan, forward is one launch, backward one for x's gradient and one for the weight's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..calls.call import Call
from ..choose.problem import Problem, changed
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_mm import GroupedMmCall, grouped_mm
from ..ops.grouped_wgrad import GroupedWgradCall
from .function import Formula
from .parts import Targets, contracted, groups_of, scale_of_bias_grad
from .planned import Maker, Part, TrainingPlan, is_common, requires, save


def _forward(
    given: dict[str, Any], wanted: frozenset[str], transpose_w: bool, out: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    used = {
        "x": "w" in wanted, "w": "x" in wanted, "bias": "bias_scale" in wanted, "bias_scale": "bias" in wanted,
        "offs": True, "splits": True,
    }  # fmt: skip
    y = grouped_mm(transpose_w=transpose_w, out=out, **given)
    return y, {name: value for name, value in given.items() if used[name]}


def _gradients(
    saved: dict[str, Any], transpose_w: bool, targets: Targets, wanted: frozenset[str], dy: Tensor
) -> dict[str, Any]:
    groups, result = groups_of(saved), {}
    if "x" in wanted:
        dx = targets.new_grad_input(dy, contracted(saved["w"], transpose_w))
        result["x"] = grouped_mm(dy, saved["w"], **groups, transpose_w=not transpose_w, out=dx)
    if "w" in wanted:
        left, right = (saved["x"], dy) if transpose_w else (dy, saved["x"])
        result["w"] = targets.grad_of("w")(left, right, groups)
    if "bias" in wanted:
        result["bias"] = grouped_bias_grad(dy, **groups, row_scale=saved["bias_scale"])
    if "bias_scale" in wanted and saved["bias"] is not None:
        result["bias_scale"] = scale_of_bias_grad(dy, saved["bias"], groups)
    return result


FORMULA = Formula(("x", "w", "bias", "bias_scale"), lambda call: call.transpose_w, _forward, _gradients)


def _planned_forward(plan: TrainingPlan, ctx: Any, targets: Targets, inputs: tuple[Any, ...]) -> Tensor:
    x, w, scale, groups, _ = plan.pick((*inputs, None))
    need, forward = plan.needs, plan.parts["forward"]
    y = x.new_empty(x.shape[0], forward.constants["out_features"]) if targets.out is None else targets.out
    forward.run(*inputs, y)
    save(ctx, x if need["w"] else None, w if need["x"] else None, groups, scale if need["bias"] else None)
    return y


def _planned_backward(plan: TrainingPlan, targets: Targets, kept: list[Any], dy: Tensor) -> dict[str, Any]:
    x, w, groups, scale = kept
    need = plan.needs
    result: dict[str, Any] = {}
    if need["x"]:
        dgrad = plan.parts["x"]
        dx = targets.new_grad_input(dy, dgrad.constants["out_features"])
        result["x"] = dgrad.run(x=dy, w=w, groups=groups, out=dx)
    if need["w"]:
        left, right = (x, dy) if plan.general else (dy, x)
        if "w" in targets.weights:
            result["w"] = targets.weights["w"](left, right, plan.grouped(groups))
        else:
            result["w"] = plan.parts["w"].run(dy=left, x=right, groups=groups)
    if need["bias"]:
        result["bias"] = grouped_bias_grad(dy, row_scale=scale, **plan.grouped(groups))
    return result


def _check(call: Call) -> Problem | None:
    """As of Maker: without a scale that is trained. Raises ValueError or TypeError where an argument does not fit."""
    problem = call.check()
    if requires(call, "bias_scale") or not is_common(call):
        return None
    call.check_addresses()
    return problem


def _parts(call: Call, problem: Problem, need: Mapping[str, bool], _: None) -> dict[str, Part]:
    """The launches. dy is stood for by x."""
    x_columns, y_columns, x = problem.in_features, problem.out_features, call.x
    groups = {"offs": call.offs, "splits": call.splits}
    parts = {"forward": Part(partial(changed, call, out=x), problem)}
    if need["x"]:
        dgrad = changed(problem, in_features=y_columns, out_features=x_columns, transpose_w=not problem.transpose_w)
        given = {"x": x, "w": call.w, "rows": None, "bias": None, "bias_scale": None, "out": x}
        parts["x"] = Part(partial(GroupedMmCall, **given, **groups, transpose_w=not problem.transpose_w), dgrad)
    if need["w"]:
        n, k = (x_columns, y_columns) if problem.transpose_w else (y_columns, x_columns)
        wgrad = changed(
            problem, op="grouped_wgrad", in_features=k, out_features=n, transpose_w=False, out_dtype=problem.dtype
        )
        absent = dict.fromkeys(("dy_rows", "x_rows", "mask", "out", "out_dtype"))
        parts["w"] = Part(partial(GroupedWgradCall, dy=x, x=x, **groups, **absent, accumulate=False), wgrad)
    return parts


TAKES = ("x", "w", "bias_scale", "groups", "")
SAVED = ("x", "w", "groups", "bias_scale")
MAKER = Maker(FORMULA, _check, _parts, lambda _: None, TAKES, SAVED, _planned_forward, _planned_backward)
