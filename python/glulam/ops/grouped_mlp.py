"""grouped_mlp: both GEMMs of each expert's MLP in one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, is_grad_enabled

from cute_kernels.chains import signature_of
from cute_kernels.specs import GroupedMlpSpec

from .. import device as gpus
from .. import recipes, reference, workspace
from ..activations import ActivationParams, KernelParams, kernel_params
from ..by_name import by_name
from ..call import Call
from ..experts import ExpertList, GateUp, find
from ..groups import Splits
from ..mxfp8 import FoldedWeight, MXFP8Tensor
from ..plan import Launch, address, addresses, aligned_row
from ..plans import Plans, unplanned
from ..problem import Problem
from ..recipes import Recipe
from ..signature import (
    Experts,
    any_requires_grad,
    check_activation,
    check_bias,
    check_experts,
    check_flag,
    check_groups,
    check_indices,
    check_out,
    check_params,
    check_recipe,
    check_scale,
    check_w1,
    check_width,
    check_x,
    mismatch,
    runs_kernels,
)
from .grouped_mlp_mxfp8 import Mxfp8MlpCall, quantised_mlp
from .rows import NO_SUMS, check_tokens, sums_of, take_rows

Weights = Tensor | Sequence[Tensor] | FoldedWeight | MXFP8Tensor


def grouped_mlp(
    x: Tensor | MXFP8Tensor,
    w1: Weights,
    w2: Weights,
    *,
    offs: Tensor | None = None,
    splits: Splits | None = None,
    rows: Tensor | None = None,
    row_scale: Tensor | None = None,
    b1: Tensor | Sequence[Tensor] | None = None,
    b2: Tensor | Sequence[Tensor] | None = None,
    activation: str = "swiglu",
    glu_layout: str = "concat",
    limit: float = 7.0,
    alpha: float = 1.702,
    offset: float = 1.0,
    recipe: str | Recipe = "bf16",
    recompute: bool = False,
    transpose_w: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """y = m w2_e^T + s b2_e, m = activation(h) s, h = x w1_e^T + b1_e, s = row_scale[row], e the row's expert.

    Rows are sorted by expert. Rows behind the last group are neither read into a result nor written. The activation m
    [T, I] is kept in memory that the calling thread reuses on the same stream (see `glulam.workspace`).

    Differentiable once in x, w1, w2, row_scale, b1 and b2, where that is asked for and recipe is "bf16" or "mxfp8":
    forward then saves x, h and row_scale for the backward. Gradients that nothing asks for are not computed; those of
    rows behind the last group are zero.

    Args:
        x: [T, H], bfloat16 or float16; on the CPU also float32 or float64. Rows may be padded. With recipes "mxfp8" and
            "mxfp8_exact" also an MXFP8Tensor by rows; the result is then of `out`'s or a bias's dtype, or bfloat16.
        w1: [E, 2I, H] for an activation with a gate, else [E, I, H]; or a list of E tensors; contiguous, x's dtype. By
            recipe "bf16" also a GateUp, two tensors [E, I, H] in place of one of glu_layout "concat". Other recipes
            take weights prepared, which spares the first call that work and the memory for both: a FoldedWeight
            ("mxfp8") or an MXFP8Tensor [E, 2I or I, H] by rows with plain scales; or of any 16-bit dtype or float32,
            prepared once for each version of theirs and kept as long as they live.
        w2: [E, H, I], or a list of E tensors; contiguous, x's dtype. H, I and 2I are multiples of 8 on a GPU. The
            rows of w2 may be of another number than x's columns; so is then the result.
        offs: int32 [E], each group's end: group e is rows offs[e-1] .. offs[e]. Give this or splits.
        splits: row counts: int32 or int64 [E] on x's device, or a CPU tensor or a list, which is checked and copied.
        rows: int32 [T] on x's device: row t is x[rows[t]], x is [N, H]. "bf16" and "mxfp8" make no copy of the rows,
            and "mxfp8" quantises x's N rows; others make one. An index out of range is clamped. There is no gradient
            with it.
        row_scale: float32 [T], as the router's probabilities; it scales m and so the second bias as well.
        b1: [E, 2I or I] or a list of E tensors, laid out as w1's rows. b2: [E, H] or a list. x's dtype.
        activation, glu_layout, limit, alpha, offset: as of `grouped_glu`.
        recipe: a name of `glulam.recipes.RECIPES`, or one of those objects. Products are accumulated in float32.
            "bf16": 16-bit operands of x's dtype.
            "mxfp8": x and the activation in MXFP8 with a scale for 128 elements, folded weights.
            "mxfp8_exact": x, the activation and weights in MXFP8 with a scale for 32, multiplied in bfloat16.
            "mxfp8_weight_only": such weights, and rows in bfloat16.
            All but "bf16" want H, I and the result's columns to be multiples of 32.
        recompute: with gradients: save x and row_scale only, and make h again in the backward ("mxfp8": by all of
            forward).
        transpose_w: h = x w1_e + b1_e and y = m w2_e + s b2_e instead: w1 is [E, H, 2I or I] and w2 [E, I, H], and
            w1's columns lie as else its rows, and so do gradients. No copy of them is made. Of recipe "bf16".
        out: the result's buffer, [T, H] (rows may be padded); by default a new one, whose tail is uninitialised.

    Returns:
        [T, H] in x's dtype; `out` where given.

    Raises:
        ValueError, TypeError: an argument that does not fit; nothing was launched.
        GradientNotSupported: `out` or `rows` is given although an argument requires a gradient, or a second derivative
            is taken.
        UnsupportedDevice, BundleError (RuntimeErrors): no kernel for this GPU, or no usable bundle.
        FoldError (a ValueError): recipe "mxfp8" would change a weight too much.
        CaptureError: host splits under CUDA graph capture, or weights that would have to be prepared there; but those
            that are trained the graph prepares at each replay.
    """
    if recipe != "bf16":
        if (found := recipes.find("grouped_mlp", recipe)) is not recipes.BF16:
            return quantised_mlp(
                Mxfp8MlpCall, found, x, w1, w2, offs, splits, rows, None, None, row_scale, b1, b2, activation,
                glu_layout, limit, alpha, offset, recompute, transpose_w, out,
            )  # fmt: skip
        recipe = found.name
    return call_mlp(
        GroupedMlpCall, x, w1, w2, offs, splits, rows, None, None, row_scale, b1, b2, activation, glu_layout, limit,
        alpha, offset, recipe, recompute, transpose_w, out,
    )  # fmt: skip


def call_mlp(
    kind: type[GroupedMlpCall], x: Any, w1: Any, w2: Any, offs: Any, splits: Any, rows: Any, row_of: Any, residual: Any,
    row_scale: Any, b1: Any, b2: Any, activation: Any, glu_layout: Any, limit: Any, alpha: Any, offset: Any,
    recipe: Any, recompute: Any, transpose_w: Any, out: Any,
) -> Tensor:  # fmt: skip
    """A grouped_mlp in 16 bits, or a layer of tokens: `layer.moe` has a `kind` of its own, row_of and a residual."""
    key = plan = failure = None
    is_planned = not unplanned()
    x_: Any = x
    w1_: Any = w1
    w2_: Any = w2
    b1_: Any = b1
    b2_: Any = b2
    if is_planned:
        try:
            groups: Any = offs if splits is None else splits
            if w1.__class__ is list:
                w1_ = find("weight", w1)
            if w2.__class__ is list:
                w2_ = find("weight", w2)
            if b1 is not None and b1.__class__ is list:
                b1_ = find("bias", b1)
            if b2 is not None and b2.__class__ is list:
                b2_ = find("bias", b2)
            given = [
                t for t in (x_, w1_, w2_, groups, row_scale, b1_, b2_, out, rows, row_of, residual) if t is not None
            ]
            options = (
                is_grad_enabled(), offs is None, splits is None, rows is None, row_of is None, residual is None,
                row_scale is None, b1 is None, b2 is None, out is None, activation, glu_layout, limit, alpha, offset,
                recipe, recompute, transpose_w,
            )  # fmt: skip
            key, plan = PLANS.look_up(given, options)
            if plan is not None and rows is None:
                return plan.run(x_, w1_, w2_, groups, b1_, b2_, row_scale, out)  # type: ignore[no-any-return]
            if plan is not None:
                return plan.run(  # type: ignore[no-any-return]
                    x_, w1_, w2_, groups, b1_, b2_, row_scale, out, rows, row_of, residual
                )
        except Exception as error:
            failure = error
    needs = is_planned and is_grad_enabled() and any_requires_grad(x, w1, w2, row_scale, b1, b2, residual)
    if needs:
        w1_, w2_, b1_, b2_ = w1, w2, b1, b2  # autograd is given the experts themselves
    of_tokens = {} if row_of is None else {"row_of": row_of, "residual": residual}
    call = kind(
        x=x_, w1=w1_, w2=w2_, offs=offs, splits=splits, rows=rows, row_scale=row_scale, b1=b1_, b2=b2_,
        activation=activation, glu_layout=glu_layout, limit=limit, alpha=alpha, offset=offset, recipe=recipe,
        recompute=recompute, transpose_w=transpose_w, out=out, **of_tokens,
    )  # fmt: skip
    try:
        if needs:
            return call.differentiate(key, plan, failure)  # type: ignore[no-any-return]
        return call.settle(key, plan, failure)  # type: ignore[no-any-return]
    finally:
        del failure  # its traceback holds this frame: a cycle that would keep all arguments until the next collection


@dataclasses.dataclass(frozen=True)
class GroupedMlpPlan(Launch):
    """The constants of a grouped_mlp call. `width`: of the result; `mid`: of the activation between the two GEMMs.

    `w1_listed`, `w2_listed`: an ExpertList, not a packed tensor.
    """

    width: int
    mid: workspace.Layout
    w1_listed: bool
    w2_listed: bool
    params: KernelParams

    @by_name(function=signature_of(GroupedMlpSpec()))
    def run(
        self, x: Tensor, w1: Any, w2: Any, groups: Tensor, b1: Any, b2: Any, scale: Tensor | None, out: Tensor | None,
        rows: Tensor | None = None, row_of: Tensor | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(x, w1, w2, groups, b1, b2, scale, out, rows, row_of, residual)
        b1_at = b1_table = b1_mark = b2_at = b2_table = b2_mark = 0
        if b1 is not None:
            b1_at, b1_table, b1_mark = addresses(b1)
        if b2 is not None:
            b2_at, b2_table, b2_mark = addresses(b2)
        groups_at, scale_at = groups.data_ptr(), 0 if scale is None else scale.data_ptr()
        out_at = 0 if out is None else out.data_ptr()
        rows_at = 0 if rows is None else rows.data_ptr()
        at: Any = (x.data_ptr(), w1.data_ptr(), w2.data_ptr(), groups_at, scale_at, b1_mark, b2_mark, rows_at, out_at)
        if row_of is not None:
            at = (*at[:-1], row_of.data_ptr(), address(residual), out_at)
        if at not in self.apart:
            of_tokens = {} if row_of is None else {"row_of": row_of, "residual": residual}
            if row_of is not None:
                check_tokens(self.op, row_of.shape[0], x=x, residual=residual, out=out)
            self.check_apart(
                at, out, x=x, w1=w1, w2=w2, groups=groups, row_scale=scale, b1=b1, b2=b2, rows=rows, **of_tokens
            )
        if self.rows == 1 or rows is not None:
            x = aligned_row(x)
        if row_of is None:
            y = out = x.new_empty(self.rows, self.width) if out is None else out
            sums = NO_SUMS
        else:
            y = x.new_empty(self.rows, self.width)
            out = x.new_empty(row_of.shape[0], self.width) if out is None else out
            sums = sums_of(row_of, residual, out)
        if self.rows == 1:
            y = aligned_row(y)
        w1_table = w1_up = w2_table = 0
        if self.w1_listed:
            w1_table, w1 = w1.address, w1.lowest
        elif w1.__class__ is GateUp:
            w1, w1_up = w1.gate, w1.up.data_ptr()
        if self.w2_listed:
            w2_table, w2 = w2.address, w2.lowest
        kind, layout, limit, alpha, offset = self.params
        tickets = self.tickets() if self.draws_tickets else 0
        self.function(
            x=x, rows=rows_at, w1=w1, w2=w2, mid=workspace.take(self.mid), y=y,
            groups=groups_at, group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            w1_table=w1_table, w1_up=w1_up, b1=b1_at, b1_table=b1_table, w2_table=w2_table, b2=b2_at, b2_table=b2_table,
            scale=scale_at, kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset,
            row_of=sums.row_of, residual=sums.residual, out=sums.out, tokens=sums.tokens, k=sums.k,
            num_sms=self.sm_count,
        )  # fmt: skip
        return out


PLANS: Plans[Any] = Plans()
"""GroupedMlpPlans, and `backward.planned_mlp.MlpTrainingPlan`s where an argument requires a gradient."""


@dataclasses.dataclass
class GroupedMlpCall(Call):
    """The arguments of one call of grouped_mlp."""

    op = "grouped_mlp"
    operator: ClassVar[Callable[..., Any]] = staticmethod(grouped_mlp)
    plans = PLANS
    weights = ("w1", "w2")
    biases = ("b1", "b2")
    scales: ClassVar[tuple[str, ...]] = ("row_scale", "rows")
    reads: ClassVar[tuple[str, ...]] = ("x", "w1", "w2", "groups", "row_scale", "b1", "b2", "rows")
    rowwise: ClassVar[tuple[str, ...]] = ("x", "rows", "out", "row_scale")
    given = ("x", "w1", "w2", "groups", "row_scale", "b1", "b2", "out", "rows", "row_of", "residual")
    of_any_rows: ClassVar[tuple[str, ...]] = ("x",)

    x: Tensor
    out: Tensor | None
    w1: Experts
    w2: Experts
    rows: Tensor | None
    row_scale: Tensor | None
    b1: Experts | None
    b2: Experts | None
    activation: str
    glu_layout: str
    limit: float
    alpha: float
    offset: float
    recipe: str
    recompute: bool
    transpose_w: bool

    @property
    def params(self) -> ActivationParams:
        return ActivationParams(self.limit, self.alpha, self.offset)

    def again(self) -> Any:
        check_recipe(self.op, self.recipe)
        return super().again()

    def check(self) -> Problem:
        for name in ("x", "w1", "w2"):
            if isinstance(getattr(self, name), (FoldedWeight, MXFP8Tensor)):
                raise TypeError(
                    f"{self.op}: {name} is in MXFP8, and recipe is 'bf16'; choose a recipe that takes it, as 'mxfp8', "
                    f"or give {name}.dequantize() in 16 bits"
                )
        _, columns = check_x(self.op, self.x)
        check_indices(self.op, self.rows, self.x)
        like = self.x if self.rows is None else self.x.new_empty(self.num_rows, 0)
        check_activation(self.op, self.activation, self.glu_layout)
        check_params(self.op, self.params)
        check_recipe(self.op, self.recipe)
        check_flag(self.op, "recompute", self.recompute)
        check_flag(self.op, "transpose_w", self.transpose_w)
        form = (self.activation, self.glu_layout, self.transpose_w)
        experts, w1_rows, width = check_w1(self.op, self.w1, self.x, *form)
        shape = check_experts(self.op, "w2", self.w2, self.x, "E I H" if self.transpose_w else "E H I")
        out_features = shape[2 if self.transpose_w else 1]
        wanted = (experts, width, out_features) if self.transpose_w else (experts, out_features, width)
        if shape != wanted:
            mismatch(self.op, "w2", shape, wanted, f"w1 gives E = {experts}, I = {width}")
        check_width(self.op, "w2", out_features, runs_kernels(self.x))
        check_groups(self.op, self.offs, self.splits, self.x, experts, "w1")
        check_bias(self.op, "b1", self.b1, self.x, experts, w1_rows)
        check_bias(self.op, "b2", self.b2, self.x, experts, out_features)
        check_scale(self.op, "row_scale", self.row_scale, like)
        self.check_result(out_features, like)
        return Problem(
            op=GroupedMlpCall.op,
            dtype=str(self.x.dtype).removeprefix("torch."),
            rows=self.num_rows,
            experts=experts,
            in_features=columns,
            intermediate=width,
            out_features=out_features,
            activation=self.activation,
            glu_layout=self.glu_layout,
            transpose_w=self.transpose_w,
        )

    def check_result(self, width: int, like: Tensor) -> None:
        """`out`, and what the result is made of beside rows. `like`: a matrix of these."""
        check_out(self.op, "out", self.out, like, width)

    def results(self, problem: Problem) -> Tensor:
        return self.x.new_empty(problem.rows, problem.out_features)

    def reference(self, problem: Problem) -> Tensor:
        return self.reference_rows(self.results(problem) if self.out is None else self.out)

    def reference_rows(self, out: Tensor) -> Tensor:
        form = (self.activation, self.glu_layout, self.params)
        ends = self.host_ends()
        x = self.x if self.rows is None else take_rows(self.x, self.rows)
        reference.grouped_mlp(x, self.w1, self.w2, ends, self.b1, self.b2, self.row_scale, form, out, self.transpose_w)
        return out

    def plan(self, problem: Problem, launch: Launch) -> GroupedMlpPlan:
        return GroupedMlpPlan(
            **vars(launch),
            width=problem.out_features,
            w1_listed=isinstance(self.w1, ExpertList),
            w2_listed=isinstance(self.w2, ExpertList),
            params=kernel_params(self.activation, self.glu_layout, self.params),
            **self.sizes(problem, launch),
        )

    def sizes(self, problem: Problem, launch: Launch) -> dict[str, Any]:
        shape = (problem.rows, problem.intermediate)
        return {"mid": workspace.Layout(shape, launch.dtype, launch.device, launch.index)}

    def run(self, plan: GroupedMlpPlan) -> Tensor:
        tensors: Any = (self.x, self.w1, self.w2, self.groups, self.b1, self.b2, self.row_scale, self.out)
        return plan.run(*tensors, *self.by_index())
