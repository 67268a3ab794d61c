"""grouped_glu: one GEMM for each expert's rows with the activation in its epilogue."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from cute_kernels.chains import signature_of
from cute_kernels.specs import GroupedGluSpec

from .. import device as gpus
from .. import reference
from ..activations import ActivationParams, KernelParams, kernel_params
from ..by_name import by_name
from ..call import Call
from ..experts import ExpertList, GateUp, find
from ..groups import Splits
from ..plan import Launch, address, addresses, aligned_row
from ..plans import Plans, unplanned
from ..problem import Problem
from ..signature import (
    Experts,
    check_activation,
    check_bias,
    check_flag,
    check_groups,
    check_indices,
    check_out,
    check_params,
    check_scale,
    check_w1,
    check_x,
    refuse_gradients,
)
from .rows import take_rows


def grouped_glu(
    x: Tensor,
    w1: Tensor | Sequence[Tensor],
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    rows: Tensor | None = None,
    bias: Tensor | Sequence[Tensor] | None = None,
    row_scale: Tensor | None = None,
    activation: str = "swiglu",
    glu_layout: str = "concat",
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
    return_preact: bool = False,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Any:
    """act = activation(h) * row_scale[row], h = x w1_e^T (+ bias_e), where e is the expert whose group the row lies in.

    Rows are sorted by expert. Rows behind the last group are neither read into a result nor written.

    Args:
        x: [T, H], bfloat16 or float16; on the CPU also float32 or float64. Rows may be padded.
        w1: [E, 2I, H] for an activation with a gate, else [E, I, H]; or a list of E tensors; contiguous, x's dtype.
            H, I and 2I are multiples of 8 on a GPU. Also a GateUp: two tensors [E, I, H] in place of one of glu_layout
            "concat".
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: row counts: int32 or int64 [E] on x's device, or a CPU tensor or a list, which is checked and copied.
        rows: int32 [T] on x's device: row t is x[rows[t]], x is [N, H], and no copy of the rows is made. An index out
            of range is clamped.
        bias: [E, 2I or I] or a list of E tensors, x's dtype, laid out as w1's rows.
        row_scale: float32 [T], a factor for the activation of each row.
        activation: with a gate "swiglu", "clamped_swiglu", "geglu" (tanh form), "reglu"; without "srelu" (squared
            relu), "silu", "gelu" (erf form), "none".
        glu_layout: how the activated half a and the linear half u lie along the rows of w1: "concat" (a, then u),
            "interleaved" (a0 u0 a1 u1 ...) or "interleaved32" (32 of a, 32 of u, repeating; I a multiple of 32).
        limit, alpha, offset: of clamped_swiglu: with a' = min(a, limit) it is
            a' sigmoid(alpha a') (clamp(u, -limit, limit) + offset).
        return_preact: return h as well.
        transpose_w: h = x w1_e (+ bias_e) instead: w1 is [E, H, 2I or I], and its columns lie as else its rows. No copy
            of it is made.
        out: the activation's buffer, [T, I] (rows may be padded); by default a new one, its tail uninitialised.

    Returns:
        act [T, I] in x's dtype; with return_preact (act, preact [T, 2I or I]), laid out as w1's rows.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: grad mode is on and an argument requires a gradient.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
        CaptureError: host splits under CUDA graph capture.
    """
    key = plan = failure = None
    w1_: Any = w1
    bias_: Any = bias
    if not unplanned():
        try:
            groups: Any = offs if splits is None else splits
            if w1.__class__ is list:
                w1_ = find("weight", w1)
            if bias is not None and bias.__class__ is list:
                bias_ = find("bias", bias)
            given = [t for t in (x, w1_, groups, bias_, row_scale, out, rows) if t is not None]
            options = (
                is_grad_enabled(), offs is None, splits is None, rows is None, bias is None, row_scale is None,
                out is None, activation, glu_layout, limit, alpha, offset, return_preact, transpose_w,
            )  # fmt: skip
            key, plan = PLANS.look_up(given, options)
            if plan is not None:
                return plan.run(x, w1_, groups, bias_, row_scale, out, rows)
        except Exception as error:
            failure = error
    if is_grad_enabled():
        refuse_gradients("grouped_glu", x=x, w1=w1, bias=bias, row_scale=row_scale, out=out)
    call = GroupedGluCall(
        x=x, w1=w1_, offs=offs, splits=splits, rows=rows, bias=bias_, row_scale=row_scale, activation=activation,
        glu_layout=glu_layout, limit=limit, alpha=alpha, offset=offset, return_preact=return_preact,
        transpose_w=transpose_w, out=out,
    )  # fmt: skip
    try:
        return call.settle(key, plan, failure)
    finally:
        del failure  # its traceback holds this frame: a cycle that would keep all arguments until the next collection


@dataclasses.dataclass(frozen=True)
class GroupedGluPlan(Launch):
    """The constants of a grouped_glu call. `width`: I; `preact_width`: None where no preactivation is asked for.

    `w1_listed`: w1 is an ExpertList, not a packed tensor.
    """

    width: int
    preact_width: int | None
    w1_listed: bool
    params: KernelParams

    @by_name(function=signature_of(GroupedGluSpec()), saving=signature_of(GroupedGluSpec(save_preact=True)))
    def run(
        self, x: Tensor, w1: Any, groups: Tensor, bias: Any, scale: Tensor | None, out: Tensor | None,
        rows: Tensor | None,
    ) -> Any:  # fmt: skip
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(x, w1, groups, bias, scale, out, rows)
        bias_at, bias_table, bias_mark = addresses(bias)
        groups_at, scale_at, rows_at = groups.data_ptr(), address(scale), address(rows)
        at = (x.data_ptr(), w1.data_ptr(), groups_at, bias_mark, scale_at, rows_at, address(out))
        if at not in self.apart:
            self.check_apart(at, out, x=x, w1=w1, groups=groups, bias=bias, row_scale=scale, rows=rows)
        act = out = x.new_empty(self.rows, self.width) if out is None else out
        if self.rows == 1 or rows is not None:
            x, act = aligned_row(x), aligned_row(act)
        w1_table = w1_up = 0
        if self.w1_listed:
            w1_table, w1 = w1.address, w1.lowest
        elif w1.__class__ is GateUp:
            w1, w1_up = w1.gate, w1.up.data_ptr()
        kind, layout, limit, alpha, offset = self.params
        tickets = self.tickets() if self.draws_tickets else 0
        if self.preact_width is None:
            self.function(
                x=x, w=w1, act=act, rows=rows_at,
                groups=groups_at, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
                w_table=w1_table, w_up=w1_up, bias=bias_at, bias_table=bias_table, scale=scale_at,
                kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
            )  # fmt: skip
            return out
        preact, saving = x.new_empty(self.rows, self.preact_width), self.function
        saving(
            x=x, w=w1, act=act, preact=preact, rows=rows_at,
            groups=groups_at, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            w_table=w1_table, w_up=w1_up, bias=bias_at, bias_table=bias_table, scale=scale_at,
            kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
        )  # fmt: skip
        return out, preact


PLANS: Plans[GroupedGluPlan] = Plans()


@dataclasses.dataclass
class GroupedGluCall(Call):
    """The arguments of one call of grouped_glu."""

    op = "grouped_glu"
    operator = staticmethod(grouped_glu)
    plans = PLANS
    weights = ("w1",)
    biases = ("bias",)
    scales = ("row_scale", "rows")
    reads = ("x", "w1", "groups", "bias", "row_scale", "rows")
    rowwise = ("x", "rows", "out", "row_scale")

    x: Tensor
    out: Tensor | None
    w1: Experts
    rows: Tensor | None
    bias: Experts | None
    row_scale: Tensor | None
    activation: str
    glu_layout: str
    limit: float
    alpha: float
    offset: float
    return_preact: bool
    transpose_w: bool

    @property
    def params(self) -> ActivationParams:
        return ActivationParams(self.limit, self.alpha, self.offset)

    def check(self) -> Problem:
        _, columns = check_x(self.op, self.x)
        check_indices(self.op, self.rows, self.x)
        like = self.x if self.rows is None else self.x.new_empty(self.num_rows, 0)
        check_activation(self.op, self.activation, self.glu_layout)
        check_params(self.op, self.params)
        check_flag(self.op, "return_preact", self.return_preact)
        check_flag(self.op, "transpose_w", self.transpose_w)
        form = (self.activation, self.glu_layout, self.transpose_w)
        experts, w1_rows, width = check_w1(self.op, self.w1, self.x, *form)
        check_groups(self.op, self.offs, self.splits, self.x, experts, "w1")
        check_bias(self.op, "bias", self.bias, self.x, experts, w1_rows)
        check_scale(self.op, "row_scale", self.row_scale, like)
        check_out(self.op, "out", self.out, like, width)
        return Problem(
            op=self.op,
            dtype=str(self.x.dtype).removeprefix("torch."),
            rows=self.num_rows,
            experts=experts,
            in_features=columns,
            intermediate=width,
            activation=self.activation,
            glu_layout=self.glu_layout,
            save_preact=self.return_preact,
            transpose_w=self.transpose_w,
        )

    @property
    def form(self) -> str:
        preact = "_preact" if self.return_preact else ""
        return f"{self.op}{preact}" if self.out is None else f"{self.op}{preact}_out"

    def assembled(self, returned: Any) -> Any:
        if self.out is None:
            return returned
        return (self.out, returned) if self.return_preact else self.out

    def results(self, problem: Problem) -> Any:
        out = self.x.new_empty(problem.rows, problem.intermediate) if self.out is None else self.out
        return (out, self.x.new_empty(problem.rows, problem.w1_rows)) if self.return_preact else out

    def reference(self, problem: Problem) -> Any:
        results = self.results(problem)
        out, preact = results if self.return_preact else (results, None)
        form = (self.activation, self.glu_layout, self.params)
        x = self.x if self.rows is None else take_rows(self.x, self.rows)
        ends = self.host_ends()
        reference.grouped_glu(x, self.w1, ends, self.bias, self.row_scale, form, out, preact, self.transpose_w)
        return results

    def plan(self, problem: Problem, launch: Launch) -> GroupedGluPlan:
        return GroupedGluPlan(
            **vars(launch),
            width=problem.intermediate,
            preact_width=problem.w1_rows if self.return_preact else None,
            w1_listed=isinstance(self.w1, ExpertList),
            params=kernel_params(self.activation, self.glu_layout, self.params),
        )

    def run(self, plan: GroupedGluPlan) -> Any:
        return plan.run(self.x, self.w1, self.groups, self.bias, self.row_scale, self.out, self.rows)
