"""The common differentiable grouped_mm: a packed weight and group sizes on a GPU, no scale that wants a gradient.

As `planned_mlp`: forward is one call, backward one for x's gradient and one for the weight's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.specs import GroupedMmSpec, GroupedWgradSpec

from .. import device as gpus
from ..by_name import by_name
from ..changed import changed
from ..kernels import Serving
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_mm import GroupedMmCall
from ..plan import address
from ..problem import Problem
from . import mm
from .layout import flatten
from .parts import ORDINARY, Targets, as_result, backward_of, once_differentiable, taken, usable
from .planned import (
    Maker,
    TrainingLaunch,
    are_in_memory,
    as_saved,
    functions,
    has_functorch_transforms,
    is_common,
    is_usual,
    requires,
    save,
    serving,
)

MM, WGRAD = signature_of(GroupedMmSpec()), signature_of(GroupedWgradSpec())
NAMES = ("x", "w", "groups", "bias", "bias_scale")
"""The inputs of the function below that may be tensors, in order."""


@dataclasses.dataclass(frozen=True)
class MmTrainingPlan(TrainingLaunch):
    """The constants of a grouped_mm's forward and backward.

    Attributes:
        dgrad, wgrad: the functions of backward.
        transpose_w: the operator's.
        contracted, width: columns of x and of the result.
        w_shape: [E, N, K].
    """

    dgrad: Callable[..., Any]
    wgrad: Callable[..., Any]
    transpose_w: bool
    contracted: int
    width: int
    w_shape: tuple[int, int, int]

    def inputs_of(self, call: GroupedMmCall) -> tuple[Any, ...]:
        return call.x, call.w, call.groups, call.bias, call.bias_scale

    def run(self, x: Tensor, w: Any, groups: Tensor, bias: Any, scale: Tensor | None, out: None) -> Tensor:
        return self.run_into(ORDINARY, x, w, groups, bias, scale)

    def run_into(
        self, targets: Targets, x: Tensor, w: Any, groups: Tensor, bias: Any, scale: Tensor | None
    ) -> Tensor:  # fmt: skip
        """As `run`, with the result and gradients where `targets` says."""
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run_into(targets, x, w, groups, bias, scale)
        at = (x.data_ptr(), w.data_ptr(), groups.data_ptr(), address(bias), address(scale))
        if at not in self.apart:
            self.check_apart(at, x=x, w=w, groups=groups, bias=bias, bias_scale=scale)
        if not has_functorch_transforms():
            return apply_untransformed(self, targets, x, w, groups, bias, scale)  # type: ignore[no-any-return]
        layout, flat = flatten({"x": x, "w": w, "bias": bias, "bias_scale": scale, self.grouped_by: groups})
        return mm.GroupedMm.apply(layout, self.transpose_w, targets, *flat)  # type: ignore[no-any-return, no-untyped-call]


class PlannedMm(torch.autograd.Function):
    """Inputs: the plan, the targets, and the tensors in the order of NAMES."""

    @staticmethod
    @by_name(function=MM)
    def forward(
        ctx: Any, plan: MmTrainingPlan, targets: Targets, x: Tensor, w: Tensor, groups: Tensor, bias: Tensor | None,
        scale: Tensor | None,
    ) -> Tensor:  # fmt: skip
        out = targets.out
        y = x.new_empty(plan.rows, plan.width) if out is None else out
        tickets = plan.tickets() if plan.draws_tickets else 0
        plan.function(
            x=x, w=w, y=y,
            groups=groups.data_ptr(), group_form=plan.group_form, num_groups=plan.experts, tickets=tickets,
            bias=address(bias), scale=address(scale), num_sms=plan.sm_count,
        )  # fmt: skip
        for_x, for_w, _, for_bias, _ = plan.needs
        ctx.plan, ctx.targets = plan, targets
        save(ctx, x if for_w else None, w if for_x else None, groups, scale if for_bias else None)
        return y if out is None else as_result(y)

    @staticmethod
    @by_name(dgrad=MM, wgrad=WGRAD)
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan: MmTrainingPlan = ctx.plan
        targets: Targets = ctx.targets
        x, w, groups, scale = saved = taken(ctx)
        if not is_usual(dy) or not as_saved(ctx, saved) or not are_in_memory(dy, *saved):
            return _unusual_backward(plan, targets, saved, dy)
        for_x, for_w, _, for_bias, _ = plan.needs
        by_groups, groups_at = {plan.grouped_by: groups}, groups.data_ptr()
        dx = dw = db = None
        if for_x:
            dx = targets.new_grad_input(dy, plan.contracted)
            plan.dgrad(
                x=dy, w=w, y=dx, groups=groups_at, group_form=plan.group_form, num_groups=plan.experts,
                tickets=plan.tickets(), num_sms=plan.sm_count,
            )  # fmt: skip
        if for_w:
            left, right = (x, dy) if plan.transpose_w else (dy, x)
            if "w" in targets.weights:
                dw = targets.weights["w"](left, right, by_groups)
            else:
                dw = dy.new_empty(plan.w_shape)
                plan.wgrad(
                    dy=left, x=right, dw=dw, groups=groups_at, group_form=plan.group_form, num_groups=plan.experts,
                    num_sms=plan.sm_count,
                )  # fmt: skip
        if for_bias:
            db = grouped_bias_grad(dy, row_scale=scale, **by_groups)
        return None, None, dx, dw, None, db, None


apply_untransformed: Callable[..., Any] = super(torch.autograd.Function, PlannedMm).apply
"""As in planned_mlp."""


def _unusual_backward(plan: MmTrainingPlan, targets: Targets, saved: tuple[Any, ...], dy: Tensor) -> Any:
    """As in planned_mlp."""
    x, w, groups, scale = saved
    named = {"x": x, "w": w, "bias": None, "bias_scale": scale, plan.grouped_by: groups}
    wanted = frozenset(name for name, need in zip(NAMES, plan.needs, strict=True) if need)
    with backward_of(mm.OP):
        gradients = mm.make_gradients(named, plan.transpose_w, targets, usable(dy), wanted)
    return None, None, *once_differentiable(mm.OP, [gradients.get(name) for name in NAMES])


def _check(call: GroupedMmCall) -> Problem | None:
    """As of Maker. Raises ValueError or TypeError where an argument does not fit."""
    problem = call.check()
    if requires(call, "bias_scale") or not is_common(call, problem, NAMES):
        return None
    call.check_addresses()
    return problem


def _make(call: GroupedMmCall, problem: Problem) -> MmTrainingPlan:
    launch = call.launch(problem, NAMES)
    parts = _parts(problem, launch.index)
    x_columns, y_columns = problem.in_features, problem.out_features
    n, k = (x_columns, y_columns) if call.transpose_w else (y_columns, x_columns)
    return MmTrainingPlan(
        **vars(launch),
        needs=tuple([requires(call, name) for name in NAMES]),
        grouped_by="offs" if call.splits is None else "splits",
        transpose_w=call.transpose_w,
        contracted=x_columns,
        width=y_columns,
        w_shape=(problem.experts, n, k),
        parts=parts,
        **functions(parts, problem.rows),
    )


def _resize(call: GroupedMmCall, problem: Problem, like: MmTrainingPlan) -> MmTrainingPlan:
    plan: MmTrainingPlan = call.resized(like, problem.rows, NAMES, **functions(like.parts, problem.rows))
    return plan


def _parts(problem: Problem, index: int) -> dict[str, Serving]:
    """Of backward."""
    x_columns, y_columns = problem.in_features, problem.out_features
    n, k = (x_columns, y_columns) if problem.transpose_w else (y_columns, x_columns)
    dgrad = changed(problem, in_features=y_columns, out_features=x_columns, transpose_w=not problem.transpose_w)
    wgrad = changed(
        problem, op="grouped_wgrad", in_features=k, out_features=n, transpose_w=False, out_dtype=problem.dtype
    )
    return serving(index, dgrad=dgrad, wgrad=wgrad)


MAKER = Maker(_check, _make, _resize)
