"""grouped_mm: one GEMM for each expert's rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from cute_kernels.chains import signature_of
from cute_kernels.specs import GroupedMmSpec

from .. import device as gpus
from .. import reference
from ..by_name import by_name
from ..call import Call
from ..experts import ExpertList, GateUp, find
from ..groups import Splits
from ..plan import Launch, address, addresses, aligned_row
from ..plans import Plans, unplanned
from ..problem import Problem
from ..signature import (
    Experts,
    any_requires_grad,
    check_bias,
    check_experts,
    check_flag,
    check_groups,
    check_halves,
    check_indices,
    check_out,
    check_scale,
    check_width,
    check_x,
    mismatch,
    runs_kernels,
)
from .rows import take_rows


def grouped_mm(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    rows: Tensor | None = None,
    bias_scale: Tensor | None = None,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """y = x w_e^T (+ bias_e * bias_scale[row]), where e is the expert whose group the row lies in.

    Rows are sorted by expert. Rows behind the last group are neither read into a result nor written. Differentiable
    once in x, w, bias and bias_scale; gradients of rows behind the last group are zero.

    Args:
        x: [T, K], bfloat16 or float16; on the CPU also float32 or float64. Rows may be padded.
        w: [E, N, K], or a list of E tensors [N, K]; contiguous, x's dtype. K and N are multiples of 8 on a GPU. With
            transpose_w also a GateUp of two [E, N, K], without bias, rows and gradients: x is [T, 2N] and
            y = x[:, :N] gate_e + x[:, N:] up_e, the gradient of what `grouped_glu` makes of it.
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: row counts: int32 or int64 [E] on x's device, or a CPU tensor or a list, which is checked and copied.
        rows: int32 [T] on x's device: row t is x[rows[t]], x is [N, K], and no copy of the rows is made. An index
            out of range is clamped. There is no gradient with it.
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
    is_planned = not unplanned()
    w_: Any = w
    bias_: Any = bias
    if is_planned:
        try:
            groups: Any = offs if splits is None else splits
            if w.__class__ is list:
                w_ = find("weight", w)
            if bias is not None and bias.__class__ is list:
                bias_ = find("bias", bias)
            given = [t for t in (x, w_, groups, bias_, bias_scale, out, rows) if t is not None]
            options = (
                is_grad_enabled(), transpose_w, offs is None, splits is None, rows is None, bias is None,
                bias_scale is None, out is None,
            )  # fmt: skip
            key, plan = PLANS.look_up(given, options)
            if plan is not None:
                if rows is None:
                    return plan.run(x, w_, groups, bias_, bias_scale, out)  # type: ignore[no-any-return]
                return plan.run(x, w_, groups, bias_, bias_scale, out, rows)  # type: ignore[no-any-return]
        except Exception as error:
            failure = error
    needs = is_planned and is_grad_enabled() and any_requires_grad(x, w, bias, bias_scale)
    if needs:
        w_, bias_ = w, bias  # autograd is given the experts themselves
    call = GroupedMmCall(
        x=x, w=w_, offs=offs, splits=splits, rows=rows, bias=bias_, bias_scale=bias_scale, transpose_w=transpose_w,
        out=out,
    )  # fmt: skip
    try:
        if needs:
            return call.differentiate(key, plan, failure)  # type: ignore[no-any-return]
        return call.settle(key, plan, failure)  # type: ignore[no-any-return]
    finally:
        del failure  # its traceback holds this frame: a cycle that would keep all arguments until the next collection


@dataclasses.dataclass(frozen=True)
class GroupedMmPlan(Launch):
    """The constants of a grouped_mm call. `width`: of the result; `w_listed`: w is an ExpertList, not packed;
    `in_halves`: a GateUp.
    """

    width: int
    w_listed: bool
    in_halves: bool

    @by_name(
        function=signature_of(GroupedMmSpec()), halves=signature_of(GroupedMmSpec(transpose_w=True, in_halves=True))
    )
    def run(
        self, x: Tensor, w: Any, groups: Tensor, bias: Any, scale: Tensor | None, out: Tensor | None,
        rows: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(x, w, groups, bias, scale, out, rows)
        bias_at, bias_table, bias_mark = addresses(bias)
        groups_at, scale_at, rows_at = groups.data_ptr(), address(scale), address(rows)
        at = (x.data_ptr(), w.data_ptr(), groups_at, bias_mark, scale_at, rows_at, address(out))
        if at not in self.apart:
            self.check_apart(at, out, x=x, w=w, groups=groups, bias=bias, bias_scale=scale, rows=rows)
        y = out = x.new_empty(self.rows, self.width) if out is None else out
        if self.rows == 1 or rows is not None:
            x, y = aligned_row(x), aligned_row(y)
        w_table = 0
        if self.w_listed:
            w_table, w = w.address, w.lowest
        tickets = self.tickets() if self.draws_tickets else 0
        if self.in_halves:
            halves = self.function
            halves(
                x=x, w=w.gate, y=y, w_up=w.up.data_ptr(),
                groups=groups_at, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
                num_sms=self.sm_count,
            )  # fmt: skip
            return out
        self.function(
            x=x, w=w, y=y, rows=rows_at,
            groups=groups_at, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            w_table=w_table, bias=bias_at, bias_table=bias_table, scale=scale_at,
            num_sms=self.sm_count,
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
    scales = ("bias_scale", "rows")
    reads = ("x", "w", "groups", "bias", "bias_scale", "rows")
    rowwise = ("x", "rows", "bias_scale", "out")

    x: Tensor
    out: Tensor | None
    w: Experts
    rows: Tensor | None
    bias: Experts | None
    bias_scale: Tensor | None
    transpose_w: bool

    def check(self) -> Problem:
        _, columns = check_x(self.op, self.x)
        check_indices(self.op, self.rows, self.x)
        like = self.x if self.rows is None else self.x.new_empty(self.num_rows, 0)
        check_flag(self.op, "transpose_w", self.transpose_w)
        in_halves = isinstance(self.w, GateUp)
        shape = self._check_halves() if in_halves else check_experts(self.op, "w", self.w, self.x, "E N K")
        experts, n, k = shape
        contracted, width = (n, k) if self.transpose_w else (k, n)
        if contracted != columns:
            wanted = (experts, columns, k) if self.transpose_w else (experts, n, columns)
            other = f", or give transpose_w={not self.transpose_w}" if width == columns else ""
            mismatch(self.op, "w", shape, wanted, f"x has {columns} columns{other}")
        check_width(self.op, "w", width, runs_kernels(self.x))
        check_groups(self.op, self.offs, self.splits, self.x, experts, "w")
        check_bias(self.op, "bias", self.bias, self.x, experts, width)
        check_scale(self.op, "bias_scale", self.bias_scale, like)
        check_out(self.op, "out", self.out, like, width)
        return Problem(
            op=self.op,
            dtype=str(self.x.dtype).removeprefix("torch."),
            rows=self.num_rows,
            experts=experts,
            in_features=columns,
            out_features=width,
            transpose_w=self.transpose_w,
            in_halves=in_halves,
        )

    def _check_halves(self) -> tuple[int, ...]:
        """[E, 2N, K], of a GateUp."""
        if not self.transpose_w:
            raise ValueError(
                f"{self.op}: w is a GateUp, of which transpose_w=True alone is there; call it with w.gate and w.up"
            )
        for name in ("bias", "bias_scale", "rows"):
            if getattr(self, name) is not None:
                raise ValueError(f"{self.op}: {name} is given beside a GateUp; leave it out")
        experts, n, k = check_halves(self.op, "w", self.w, self.x, "E N K")  # type: ignore[arg-type]
        check_width(self.op, "w.gate", n, runs_kernels(self.x))
        return experts, 2 * n, k

    def results(self, problem: Problem) -> Tensor:
        return self.x.new_empty(problem.rows, problem.out_features)

    def reference(self, problem: Problem) -> Tensor:
        out = self.results(problem) if self.out is None else self.out
        x = self.x if self.rows is None else take_rows(self.x, self.rows)
        reference.grouped_mm(x, self.w, self.host_ends(), self.bias, self.bias_scale, self.transpose_w, out)
        return out

    def plan(self, problem: Problem, launch: Launch) -> GroupedMmPlan:
        return GroupedMmPlan(
            **vars(launch),
            width=problem.out_features,
            w_listed=isinstance(self.w, ExpertList),
            in_halves=isinstance(self.w, GateUp),
        )

    def run(self, plan: GroupedMmPlan) -> Tensor:
        return plan.run(self.x, self.w, self.groups, self.bias, self.bias_scale, self.out, self.rows)
