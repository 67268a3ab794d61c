"""The gradient of grouped_mm: y = x w_e^T + s b_e.

With a plan, forward is one launch, backward one for x's gradient and one for the weight's.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor

from ..calls.call import Call
from ..choose.problem import Problem, changed
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_mm import GroupedMmCall, grouped_mm
from .function import Formula
from .parts import Operators, Targets, groups_of, scale_of_bias_grad
from .planned import Part, TrainingPlan, is_common, requires, weight_part


class _Mm(Operators):
    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return grouped_mm(transpose_w=self.transpose_w, out=out, **given), {}

    def reads(self, wanted: frozenset[str]) -> dict[str, bool]:
        return {"x": "w" in wanted, "w": "x" in wanted, "bias": "bias_scale" in wanted, "bias_scale": "bias" in wanted}


def _gradients(
    saved: dict[str, Any], made_by: Any, targets: Targets, wanted: frozenset[str], dy: Tensor
) -> dict[str, Any]:
    groups, result = groups_of(saved), {}
    if "x" in wanted:
        result["x"] = made_by.data_gradient(targets, dy, saved["w"], groups)
    if "w" in wanted:
        result["w"] = made_by.weight_gradient(targets, "w", dy, saved["x"], groups)
    if "bias" in wanted:
        result["bias"] = grouped_bias_grad(dy, row_scale=saved.get("bias_scale"), **groups)
    if "bias_scale" in wanted and saved["bias"] is not None:
        result["bias_scale"] = scale_of_bias_grad(dy, saved["bias"], groups)
    return result


class MmPlan(TrainingPlan):
    """Without a scale that is trained."""

    formula = Formula(("x", "w", "bias", "bias_scale"), lambda call: _Mm(call.transpose_w), _gradients)

    @classmethod
    def check(cls, call: Call) -> Problem | None:
        problem = call.check()
        if requires(call, "bias_scale") or not is_common(call):
            return None
        call.check_addresses()
        return problem

    @classmethod
    def parts_of(cls, call: Call, problem: Problem, need: Collection[str], options: Any) -> dict[str, Part]:
        """dy is stood for by x."""
        x_columns, y_columns, x = problem.in_features, problem.out_features, call.x
        groups = {"offs": call.offs, "splits": call.splits}
        parts = {"forward": Part(partial(changed, call, out=x), problem)}
        if "x" in need:
            dgrad = changed(problem, in_features=y_columns, out_features=x_columns, transpose_w=not problem.transpose_w)
            given = {"x": x, "w": call.w, "rows": None, "bias": None, "bias_scale": None, "out": x}
            parts["x"] = Part(partial(GroupedMmCall, **given, **groups, transpose_w=not problem.transpose_w), dgrad)
        if "w" in need:
            n, k = (x_columns, y_columns) if problem.transpose_w else (y_columns, x_columns)
            wgrad = changed(
                problem, op="grouped_wgrad", in_features=k, out_features=n, transpose_w=False, out_dtype=problem.dtype
            )
            parts["w"] = weight_part(call, wgrad, (n, k))
        return parts

    def data_gradient(self, targets: Targets, dy: Tensor, w: Tensor, groups: dict[str, Any]) -> Tensor:
        launch = self.parts["x"]
        dx = targets.new_grad_input(dy, launch.constants["out_features"])
        made: Tensor = launch.run(x=dy, w=w, groups=groups[self.grouped_by], out=dx)
        return made
