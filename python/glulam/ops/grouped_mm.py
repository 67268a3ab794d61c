"""grouped_mm: one GEMM for each expert's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .. import device as gpus
from .. import reference
from ..call import Call
from ..dispatch import Problem
from ..experts import ExpertList, find
from ..groups import Splits
from ..plan import Launch, Plans, addresses, aligned_row, bare
from ..signature import (
    Experts,
    check_bias,
    check_experts,
    check_flag,
    check_groups,
    check_no_overlap,
    check_out,
    check_scale,
    check_width,
    check_x,
    mismatch,
    requiring_grad,
    runs_kernels,
)


def grouped_mm(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    bias_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """y = x w_e^T (+ bias_e * bias_scale[row]), where e is the expert whose group the row lies in.

    Rows are sorted by expert. Rows behind the last group are neither read into a result nor written. Differentiable
    once in x, w, bias and bias_scale; gradients of rows behind the last group are zero.

    Args:
        x: [T, K], bfloat16 or float16; on the CPU also float32 or float64. Rows may be padded.
        w: [E, N, K], or a list of E tensors [N, K]; contiguous, x's dtype. K and N are multiples of 8 on a GPU.
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: row counts: int32 or int64 [E] on x's device, or a CPU tensor or a list, which is checked and copied.
        bias: [E, N] or a list of E tensors [N], x's dtype; with transpose_w [E, K].
        bias_scale: float32 [T], a factor for the bias of each row.
        transpose_w: y = x w_e instead: x is [T, N] and the result [T, K].
        out: the result's buffer, [T, N] (rows may be padded); by default a new one, whose tail is uninitialised.

    Returns:
        [T, N] in x's dtype, computed with float32 accumulation; `out` where given.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: `out` is given although an argument requires a gradient, or a second derivative is taken.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
        CaptureError: host splits under CUDA graph capture.
    """
    key = plan = failure = None
    compiling = is_dynamo_compiling()
    needs = requiring_grad(x, w, bias, bias_scale) if not compiling and is_grad_enabled() else None
    w_: Any = w
    bias_: Any = bias
    if not compiling:
        try:
            groups: Any = offs if splits is None else splits
            if w.__class__ is list:
                w_ = find("weight", w)
            if bias is not None and bias.__class__ is list:
                bias_ = find("bias", bias)
            key = (
                x.__class__, x.shape, x.dtype, x.get_device(), x.is_contiguous() or x.stride(), needs,
                w_.shape, transpose_w,
                groups.shape, groups.dtype, groups.get_device(), groups.is_contiguous(), offs is None, splits is None,
                None if bias is None else bare(bias_),
                None if bias_scale is None else bare(bias_scale),
                None if out is None else out.is_contiguous() or out.stride(),
            )  # fmt: skip
            plan = PLANS.find(key)
            if plan is not None:
                return plan.run(x, w_, groups, bias_, bias_scale, out)  # type: ignore[no-any-return]
        except Exception as error:
            failure = error
    if needs is not None:
        w_, bias_ = w, bias  # autograd is given the experts themselves
    call = GroupedMmCall(
        x=x, w=w_, offs=offs, splits=splits, bias=bias_, bias_scale=bias_scale, transpose_w=transpose_w, out=out
    )
    try:
        if needs is not None:
            return call.differentiate(key, plan, failure)  # type: ignore[no-any-return]
        return call.settle(key, plan, failure)  # type: ignore[no-any-return]
    finally:
        del failure  # its traceback holds this frame: a cycle that would keep all arguments until the next collection


@dataclasses.dataclass(frozen=True)
class GroupedMmPlan(Launch):
    """The constants of a grouped_mm call. `width`: of the result; `w_listed`: w is an ExpertList, not packed."""

    width: int
    w_listed: bool

    def run(self, x: Tensor, w: Any, groups: Tensor, bias: Any, scale: Tensor | None, out: Tensor | None) -> Tensor:
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(x, w, groups, bias, scale, out)
        if out is None:
            out = x.new_empty(self.rows, self.width)
        elif -self.out_extent < out.data_ptr() - x.data_ptr() < self.x_extent:
            check_no_overlap(self.op, "out", out, "x", x)
        y = out
        if self.rows == 1:
            x, y = aligned_row(x), aligned_row(y)
        w_table = bias_at = bias_table = 0
        if self.w_listed:
            w_table, w = w.address, w.lowest
        if bias is not None:
            bias_at, bias_table = addresses(bias)
        tickets = self.tickets() if self.draws_tickets else 0
        self.function(
            x, w, y,
            groups.data_ptr(), self.group_form, self.experts, tickets,
            w_table, bias_at, bias_table, 0 if scale is None else scale.data_ptr(),
            self.sm_count, 1,
        )  # fmt: skip
        return out


PLANS: Plans[Any] = Plans()
"""GroupedMmPlans, and `backward.planned_mm.MmTrainingPlan`s where an argument requires a gradient."""


@dataclasses.dataclass
class GroupedMmCall(Call):
    """The arguments of one call of grouped_mm."""

    op = "grouped_mm"
    operator = staticmethod(grouped_mm)
    plans = PLANS
    weights = ("w",)
    biases = ("bias",)
    scales = ("bias_scale",)

    x: Tensor
    out: Tensor | None
    w: Experts
    bias: Experts | None
    bias_scale: Tensor | None
    transpose_w: bool

    def check(self) -> Problem:
        rows, columns = check_x(self.op, self.x)
        check_flag(self.op, "transpose_w", self.transpose_w)
        shape = check_experts(self.op, "w", self.w, self.x, "E N K")
        experts, n, k = shape
        contracted, width = (n, k) if self.transpose_w else (k, n)
        if contracted != columns:
            wanted = (experts, columns, k) if self.transpose_w else (experts, n, columns)
            other = f", or give transpose_w={not self.transpose_w}" if width == columns else ""
            mismatch(self.op, "w", shape, wanted, f"x has {columns} columns{other}")
        check_width(self.op, "w", width, runs_kernels(self.x))
        check_groups(self.op, self.offs, self.splits, self.x, experts)
        check_bias(self.op, "bias", self.bias, self.x, experts, width)
        check_scale(self.op, "bias_scale", self.bias_scale, self.x)
        check_out(self.op, "out", self.out, self.x, width)
        return Problem(
            op=self.op,
            dtype=str(self.x.dtype).removeprefix("torch."),
            rows=rows,
            experts=experts,
            in_features=columns,
            out_features=width,
            transpose_w=self.transpose_w,
        )

    def results(self, problem: Problem) -> Tensor:
        return self.x.new_empty(problem.rows, problem.out_features)

    def reference(self, problem: Problem) -> Tensor:
        out = self.results(problem) if self.out is None else self.out
        reference.grouped_mm(self.x, self.w, self.host_ends(), self.bias, self.bias_scale, self.transpose_w, out)
        return out

    def plan(self, problem: Problem, launch: Launch) -> GroupedMmPlan:
        return GroupedMmPlan(
            **vars(launch),
            width=problem.out_features,
            w_listed=isinstance(self.w, ExpertList),
        )

    def run(self, plan: GroupedMmPlan) -> Tensor:
        return plan.run(self.x, self.w, self.groups, self.bias, self.bias_scale, self.out)
