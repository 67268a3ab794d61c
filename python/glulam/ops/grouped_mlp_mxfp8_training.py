"""What a trained grouped_mlp in MXFP8 is made of: its forward, which keeps the preactivation, and its data gradients.

Both take the weights that are trained, in 16 bits or float32, and prepare them themselves: forward folds rows, backward
folds columns. They are operators of torch's, so that a trace sees each as one, but no part of the public interface.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec
from cute_kernels.tiles import TileConfig

from .. import device as gpus
from .. import recipes, workspace
from ..activations import ActivationParams, KernelParams, kernel_params
from ..by_name import by_name
from ..call import Call
from ..experts import find
from ..mxfp8 import mlp_reference, prepared
from ..mxfp8.prepared import FOLDED_COLUMNS, FOLDED_ROWS, Prepared
from ..plan import Launch, address, addresses, aligned_row
from ..plans import Plans, unplanned
from ..problem import Problem
from ..recipes import Recipe
from ..signature import (
    Experts,
    check_activation,
    check_flag,
    check_groups,
    check_indices,
    check_out,
    check_params,
    check_rows_like,
    check_scale,
    check_x,
    intermediate_width,
    mismatch,
)
from .grouped_dglu import partials_layout
from .grouped_mlp_mxfp8 import Mxfp8MlpCall, check_weight
from .mxfp8_mlp_plans import layouts_in_mxfp8
from .rows import NO_SUMS, Sums, take_rows

_TILE = TileConfig(k=128)
_FC1, _FC2 = GroupedGluSpec(save_preact=True, tile=_TILE, operands="mxfp8"), GroupedMmSpec(tile=_TILE, operands="mxfp8")


class ForwardMemory(NamedTuple):
    """x and the activation in MXFP8, and their scales. All live in one piece of memory."""

    x8: Any
    mid8: Any
    x_scales: Any
    mid_scales: Any


class BackwardMemory(NamedTuple):
    """dy and the gradient of h in MXFP8, and their scales; partial sums of d_row_scale."""

    dy8: Any
    dpreact8: Any
    dy_scales: Any
    dpreact_scales: Any
    partials: Any


def forward_layouts(problem: Problem, launch: Launch, tokens: int | None = None) -> workspace.Layouts:
    """Of ForwardMemory. `tokens`: of x, where its rows come by index."""
    x, mid = (problem.rows if tokens is None else tokens, problem.in_features), (problem.rows, problem.intermediate)
    return workspace.Layouts(*layouts_in_mxfp8(launch, x, mid))


def backward_layouts(problem: Problem, launch: Launch, tokens: int | None = None) -> workspace.Layouts:
    """Of BackwardMemory. `problem`: that of the data gradients. `tokens`: of dy, where its rows come by index."""
    dy = (problem.rows if tokens is None else tokens, problem.in_features)
    dpreact = (problem.rows, problem.w1_rows)
    in_mxfp8 = layouts_in_mxfp8(launch, dy, dpreact)
    return workspace.Layouts(*in_mxfp8, partials_layout(problem, launch).num_bytes)


def folded_rows(w1: Any, w2: Any, trained: bool) -> tuple[Prepared, Prepared]:
    """Weights as forward reads them."""
    get = prepared.PREPARED.get
    return get(FOLDED_ROWS, w1, None, trained), get(FOLDED_ROWS, w2, None, trained)


def folded_columns(w1: Any, w2: Any, trained: bool) -> tuple[Prepared | None, Prepared]:
    """Weights as data gradients read them; w1 is None where dx is not wanted."""
    get = prepared.PREPARED.get
    return None if w1 is None else get(FOLDED_COLUMNS, w1, None, trained), get(FOLDED_COLUMNS, w2, None, trained)


@by_name(function=signature_of(GroupedMlpSpec(_FC1, _FC2)))
def launch_forward(
    launch: Launch, layouts: workspace.Layouts, params: KernelParams, x: Tensor, weights: tuple[Prepared, Prepared],
    y: Tensor, preact: Tensor, groups_at: int, b1: Sequence[int], b2: Sequence[int], scale: Tensor | None,
    rows: Tensor | None = None, sums: Sums = NO_SUMS,
) -> None:  # fmt: skip
    """y and preact. `b1`, `b2`: the first two of `plan.addresses`; `launch.function`: a grouped_mlp's that keeps h."""
    (w1, w1_scale), (w2, w2_scale) = weights
    memory = ForwardMemory(*workspace.take_all(layouts))
    tickets = launch.tickets() if launch.draws_tickets else 0
    (b1_at, b1_table), (b2_at, b2_table) = b1, b2
    kind, layout, limit, alpha, offset = params
    launch.function(
        x=x, x8=memory.x8, x8_scale=memory.x_scales, w1=w1, w1_scale=w1_scale.data_ptr(), w2=w2,
        w2_scale=w2_scale.data_ptr(), mid=memory.mid8, mid_scale=memory.mid_scales, preact=preact, y=y,
        groups=groups_at, group_form=launch.group_form, num_groups=launch.experts, tickets=tickets,
        b1=b1_at, b1_table=b1_table, b2=b2_at, b2_table=b2_table,
        scale=address(scale), kind=kind, glu_layout=layout, limit=limit, alpha=alpha, offset=offset,
        num_sms=launch.sm_count, rows=address(rows),
        row_of=sums.row_of, residual=sums.residual, out=sums.out, tokens=sums.tokens, k=sums.k,
    )  # fmt: skip


class DataGradients(NamedTuple):
    """Buffers for what a backward makes beside weight gradients; dx and d_scale where they are wanted."""

    dpreact: Tensor
    act: Tensor
    dx: Tensor | None
    d_scale: Tensor | None


@by_name(
    dglu=signature_of(GroupedDgluSpec(tile=_TILE, operands="mxfp8")),
    with_dgrad=signature_of(GroupedDgluSpec(tile=_TILE, dgrad=_TILE, operands="mxfp8")),
)
def launch_backward(
    launch: Launch, function: Callable[..., Any], layouts: workspace.Layouts,
    params: KernelParams, dy: Tensor, w1: Prepared | None, w2: Prepared, preact: Tensor, results: DataGradients,
    groups_at: int, scale: Tensor | None, rows: Tensor | None = None, sums: Sums = NO_SUMS,
) -> None:  # fmt: skip
    """`results`. `w1`: folded along its columns as w2 is; None where dx is not wanted. `function`: a grouped_dglu's,
    with its data gradient where that is.
    """
    dpreact, act, dx, d_scale = results
    memory = BackwardMemory(*workspace.take_all(layouts))
    d_scale_at, partials_at, rows_at = address(d_scale), 0 if d_scale is None else memory.partials, address(rows)
    _, _, limit, alpha, offset = params
    dglu = with_dgrad = function
    if w1 is None:
        dglu(
            dy=dy, dy8=memory.dy8, dy8_scale=memory.dy_scales, w2=w2.data, w2_scale=w2.scale.data_ptr(),
            preact=preact, dpreact=dpreact, act=act,
            groups=groups_at, group_form=launch.group_form, num_groups=launch.experts,
            scale=address(scale), d_scale=d_scale_at, partials=partials_at, rows=rows_at,
            limit=limit, alpha=alpha, offset=offset, num_sms=launch.sm_count,
        )  # fmt: skip
    else:
        with_dgrad(
            dy=dy, dy8=memory.dy8, dy8_scale=memory.dy_scales, w2=w2.data, w2_scale=w2.scale.data_ptr(),
            preact=preact, dpreact=dpreact, act=act, dpreact8=memory.dpreact8,
            dpreact8_scale=memory.dpreact_scales, w1=w1.data, w1_scale=w1.scale.data_ptr(), dx=dx,
            groups=groups_at, group_form=launch.group_form, num_groups=launch.experts, tickets=launch.tickets(),
            scale=address(scale), d_scale=d_scale_at, partials=partials_at, rows=rows_at,
            limit=limit, alpha=alpha, offset=offset, num_sms=launch.sm_count,
            row_of=sums.row_of, dx_tokens=sums.out, tokens=sums.tokens, k=sums.k,
        )  # fmt: skip


def forward(
    x: Tensor, w1: Any, w2: Any, offs: Any, splits: Any, row_scale: Tensor | None, b1: Any, b2: Any, activation: str,
    glu_layout: str, limit: float, alpha: float, offset: float, recipe: str, trained: bool, out: Tensor | None,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, h), y in `out` where that is given. `trained`: whether a weight is; see `PreparedWeights.get`."""
    key = plan = failure = None
    if not unplanned():
        try:
            groups: Any = offs if splits is None else splits
            b1_ = find("bias", b1) if b1.__class__ is list else b1
            b2_ = find("bias", b2) if b2.__class__ is list else b2
            given = [t for t in (x, w1, w2, groups, row_scale, b1_, b2_, out, rows) if t is not None]
            options = (
                offs is None, splits is None, row_scale is None, b1 is None, b2 is None, out is None, rows is None,
                activation, glu_layout, limit, alpha, offset, recipe, trained,
            )  # fmt: skip
            key, plan = FORWARD_PLANS.look_up(given, options)
            if plan is not None:
                return plan.run(x, w1, w2, groups, b1_, b2_, row_scale, out, rows)
        except Exception as error:
            failure = error
    call = ForwardCall(
        x=x, x_scale=None, w1=w1, w1_scale=None, w2=w2, w2_scale=None, offs=offs, splits=splits, row_scale=row_scale,
        b1=b1, b2=b2, activation=activation, glu_layout=glu_layout, limit=limit, alpha=alpha, offset=offset,
        recipe=recipe, recompute=False, dtype=None, out=out, rows=rows, trained=trained,
    )  # fmt: skip
    try:
        y, preact = call.settle(key, plan, failure, {"b1": b1_, "b2": b2_} if key else {})
        return y, preact
    finally:
        del failure  # its traceback holds this frame: a cycle that would keep all arguments until the next collection


@dataclasses.dataclass(frozen=True)
class ForwardPlan(Launch):
    """The constants of a forward. `width`, `preact_width`: columns of y and h."""

    width: int
    preact_width: int
    trained: bool
    memory: workspace.Layouts
    params: KernelParams

    def run(
        self, x: Tensor, w1: Any, w2: Any, groups: Tensor, b1: Any, b2: Any, scale: Tensor | None, out: Tensor | None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(x, w1, w2, groups, b1, b2, scale, out, rows)
        groups_at, (*b1_at, b1_mark), (*b2_at, b2_mark) = groups.data_ptr(), addresses(b1), addresses(b2)
        packed, others = map(_packed_at, (w1, w2)), map(address, (rows, out))
        at = (x.data_ptr(), *packed, groups_at, address(scale), b1_mark, b2_mark, *others)
        if at not in self.apart:
            self.check_apart(at, out, x=x, w1=w1, w2=w2, groups=groups, row_scale=scale, b1=b1, b2=b2, rows=rows)
        weights = folded_rows(w1, w2, self.trained)
        y = result = x.new_empty(self.rows, self.width) if out is None else out
        preact = x.new_empty(self.rows, self.preact_width)
        if self.rows == 1 or rows is not None:
            x = aligned_row(x)
        if self.rows == 1:
            y = aligned_row(y)
        launch_forward(self, self.memory, self.params, x, weights, y, preact, groups_at, b1_at, b2_at, scale, rows)
        return result, preact


def _packed_at(w: Any) -> int:
    """The address of a packed weight. Those of a list are looked at where prepared weights are looked up."""
    return address(w) if isinstance(w, Tensor) else 0


FORWARD_PLANS: Plans[ForwardPlan] = Plans()


@dataclasses.dataclass
class ForwardCall(Mxfp8MlpCall):
    """The arguments of one forward: those of a grouped_mlp, x and weights in 16 bits."""

    operator = staticmethod(forward)
    plans = FORWARD_PLANS
    tabled = ()  # a plan looks prepared weights up
    reads = ("x", "w1", "w2", "groups", "row_scale", "b1", "b2", "rows")

    trained: bool

    @property
    def form(self) -> str:
        return "grouped_mlp_mxfp8_preact" if self.out is None else "grouped_mlp_mxfp8_preact_out"

    def again(self) -> Any:
        names = ("x_scale", "w1_scale", "w2_scale", "recompute", "dtype")
        return forward(**{name: value for name, value in self.arguments().items() if name not in names})

    def assembled(self, returned: Any) -> Any:
        return returned if self.out is None else (self.out, returned)

    def check(self) -> Problem:
        return dataclasses.replace(super().check(), save_preact=True)

    def results(self, problem: Problem) -> Any:
        out = super().results(problem) if self.out is None else self.out
        return out, self.x.new_empty(problem.rows, problem.w1_rows)

    def prepared(self) -> Any:
        return super(Mxfp8MlpCall, self).prepared()

    def reference(self, problem: Problem) -> Any:
        out, preact = self.results(problem)
        form = (self.activation, self.glu_layout, self.params)
        weights = folded_rows(self.w1, self.w2, self.trained)
        mlp_reference.grouped_mlp(
            recipes.RECIPES[self.recipe], self.taken(), weights, self.host_ends(), (self.b1, self.b2),
            self.row_scale, form, out, preact,
        )  # fmt: skip
        return out, preact

    def plan(self, problem: Problem, launch: Launch) -> Any:
        return ForwardPlan(
            **vars(launch),
            width=problem.out_features,
            preact_width=problem.w1_rows,
            trained=self.trained,
            params=kernel_params(self.activation, self.glu_layout, self.params),
            **self.sizes(problem, launch),
        )

    def sizes(self, problem: Problem, launch: Launch) -> dict[str, Any]:
        return {"memory": forward_layouts(problem, launch, self.x.shape[0])}

    def run(self, plan: Any) -> Any:
        tensors = (self.x, self.w1, self.w2, self.groups, self.b1, self.b2, self.row_scale, self.out)
        return plan.run(*tensors, *self.by_index())


def backward(
    dy: Tensor, w1: Any, w2: Any, preact: Tensor, offs: Any, splits: Any, row_scale: Tensor | None, activation: str,
    glu_layout: str, limit: float, alpha: float, offset: float, recipe: str, trained: bool, input_grad: bool,
    row_scale_grad: bool, out: Tensor | None, rows: Tensor | None,
) -> DataGradients:  # fmt: skip
    """All but weights' and biases' gradients, dx in `out` where that is given. `preact`: as forward returned it.

    `w1`: None will do without input_grad. `rows`: as of `grouped_dglu`, of dy; dx has these rows.
    """
    key = plan = failure = None
    if not unplanned():
        try:
            groups: Any = offs if splits is None else splits
            given = [t for t in (dy, w1, w2, preact, groups, row_scale, out, rows) if t is not None]
            options = (
                offs is None, splits is None, w1 is None, row_scale is None, out is None, rows is None, activation,
                glu_layout, limit, alpha, offset, recipe, trained, input_grad, row_scale_grad,
            )  # fmt: skip
            key, plan = BACKWARD_PLANS.look_up(given, options)
            if plan is not None:
                return plan.run(dy, w1, w2, preact, groups, row_scale, out, rows)
        except Exception as error:
            failure = error
    call = BackwardCall(
        dy=dy, w1=w1, w2=w2, preact=preact, offs=offs, splits=splits, row_scale=row_scale, activation=activation,
        glu_layout=glu_layout, limit=limit, alpha=alpha, offset=offset, recipe=recipe, trained=trained,
        input_grad=input_grad, row_scale_grad=row_scale_grad, out=out, rows=rows,
    )  # fmt: skip
    try:
        return DataGradients(*call.settle(key, plan, failure))
    finally:
        del failure  # its traceback holds this frame: a cycle that would keep all arguments until the next collection


@dataclasses.dataclass(frozen=True)
class BackwardPlan(Launch):
    """The constants of a backward. `width`, `preact_width`: columns of the activation and h; `dx_width`: of dx, if any.

    `wants_d_scale`: whether there is a row scale and its gradient is asked for.
    """

    width: int
    preact_width: int
    dx_width: int | None
    wants_d_scale: bool
    trained: bool
    memory: workspace.Layouts
    params: KernelParams

    def run(
        self, dy: Tensor, w1: Any, w2: Any, preact: Tensor, groups: Tensor, scale: Tensor | None, out: Tensor | None,
        rows: Tensor | None = None,
    ) -> DataGradients:  # fmt: skip
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run(dy, w1, w2, preact, groups, scale, out, rows)
        groups_at = groups.data_ptr()
        packed, others = map(_packed_at, (w1, w2)), map(address, (scale, rows, out))
        at = (dy.data_ptr(), *packed, preact.data_ptr(), groups_at, *others)
        if at not in self.apart:
            self.check_apart(at, out, dy=dy, w1=w1, w2=w2, preact=preact, groups=groups, row_scale=scale, rows=rows)
        dx = out
        if self.dx_width is not None and out is None:
            dx = dy.new_empty(self.rows, self.dx_width)
        if self.rows == 1 or rows is not None:
            dy = aligned_row(dy)
        if self.rows == 1:
            preact = aligned_row(preact)
        d_scale = scale.new_empty(self.rows) if self.wants_d_scale and scale is not None else None
        dpreact, act = dy.new_empty(self.rows, self.preact_width), dy.new_empty(self.rows, self.width)
        results = DataGradients(dpreact, act, dx, d_scale)
        w1_, w2_ = folded_columns(None if self.dx_width is None else w1, w2, self.trained)
        aligned = results if self.rows > 1 or dx is None else results._replace(dx=aligned_row(dx))
        launch_backward(
            self, self.function, self.memory, self.params, dy, w1_, w2_, preact, aligned, groups_at, scale, rows
        )
        return results


BACKWARD_PLANS: Plans[BackwardPlan] = Plans()


@dataclasses.dataclass
class BackwardCall(Call):
    """The arguments of one backward. `out`: where dx goes."""

    op = "grouped_mlp_backward"
    operator = staticmethod(backward)
    plans = BACKWARD_PLANS
    matrices = ("dy", "preact", "out")
    weights = ("w1", "w2")
    biases = ()
    scales = ("row_scale", "rows")
    tabled = ()
    reads = ("dy", "w1", "w2", "preact", "groups", "row_scale", "rows")
    rowwise = ("dy", "rows", "preact", "row_scale", "out")
    w1_scale = w2_scale = None  # weights are not in MXFP8

    dy: Tensor
    w1: Experts | None
    w2: Experts
    preact: Tensor
    row_scale: Tensor | None
    activation: str
    glu_layout: str
    limit: float
    alpha: float
    offset: float
    recipe: str
    trained: bool
    input_grad: bool
    row_scale_grad: bool
    out: Tensor | None
    rows: Tensor | None

    @property
    def params(self) -> ActivationParams:
        return ActivationParams(self.limit, self.alpha, self.offset)

    @property
    def wants_d_scale(self) -> bool:
        return self.row_scale is not None and self.row_scale_grad

    def check(self) -> Problem:
        recipe = recipes.find(self.op, self.recipe)
        _, columns = check_x(self.op, self.dy)
        check_indices(self.op, self.rows, self.dy, of="dy")
        rows, like = self.num_rows, self.dy if self.rows is None else self.dy.new_empty(self.num_rows, 0)
        check_activation(self.op, self.activation, self.glu_layout)
        check_params(self.op, self.params)
        for name in ("trained", "input_grad", "row_scale_grad"):
            check_flag(self.op, name, getattr(self, name))
        width_of_h = check_rows_like(self.op, "preact", self.preact, like, None, "it has the rows of dy")
        width = intermediate_width(self.op, "preact", width_of_h, self.activation, self.glu_layout)
        experts, *_ = shape = check_weight(self, "w2", "E H I", recipe)
        if shape != (experts, columns, width):
            mismatch(self.op, "w2", shape, (experts, columns, width), "dy and preact have that many columns")
        hidden = self._check_w1(recipe, experts, width_of_h) if self.input_grad else 0
        check_groups(self.op, self.offs, self.splits, self.dy, experts, "w2")
        check_scale(self.op, "row_scale", self.row_scale, like)
        check_out(self.op, "out", self.out, like, hidden)
        return Problem(
            op="grouped_dglu",
            dtype=str(self.dy.dtype).removeprefix("torch."),
            rows=rows,
            experts=experts,
            in_features=columns,
            intermediate=width,
            out_features=hidden,
            activation=self.activation,
            glu_layout=self.glu_layout,
            operands=recipe.operands,
        )

    def _check_w1(self, recipe: Recipe, experts: int, rows: int) -> int:
        """The columns of dx."""
        shape = check_weight(self, "w1", "E 2I H", recipe)
        if shape[:2] != (experts, rows):
            mismatch(self.op, "w1", shape, (experts, rows, shape[2]), "preact has that many columns")
        return shape[2]

    @property
    def form(self) -> str:
        return "grouped_mlp_mxfp8_backward" if self.out is None else "grouped_mlp_mxfp8_backward_out"

    def assembled(self, returned: Any) -> DataGradients:
        dpreact, act, *others = returned
        dx = self.out
        if self.input_grad and dx is None:
            dx = others.pop(0)
        return DataGradients(dpreact, act, dx, others[0] if others else None)

    def results(self, problem: Problem) -> DataGradients:
        rows, dx = problem.rows, self.out
        if self.input_grad:
            dx = self.dy.new_zeros(rows, problem.out_features) if dx is None else dx.zero_()
        d_scale = torch.zeros_like(self.row_scale) if self.wants_d_scale else None  # type: ignore[arg-type]
        dpreact, act = (self.dy.new_empty(rows, width) for width in (problem.w1_rows, problem.intermediate))
        return DataGradients(dpreact, act, dx, d_scale)

    def reference(self, problem: Problem) -> DataGradients:
        results = self.results(problem)
        w1, w2 = folded_columns(self.w1 if self.input_grad else None, self.w2, self.trained)
        form = (self.activation, self.glu_layout, self.params)
        dy = self.dy if self.rows is None else take_rows(self.dy, self.rows)
        mlp_reference.data_gradients(
            recipes.RECIPES[self.recipe], dy, (w1, w2), self.preact, self.host_ends(), self.row_scale, form,
            *results,
        )  # fmt: skip
        return results

    def plan(self, problem: Problem, launch: Launch) -> BackwardPlan:
        return BackwardPlan(
            **vars(launch),
            width=problem.intermediate,
            preact_width=problem.w1_rows,
            dx_width=problem.out_features if self.input_grad else None,
            wants_d_scale=self.wants_d_scale,
            trained=self.trained,
            params=kernel_params(self.activation, self.glu_layout, self.params),
            **self.sizes(problem, launch),
        )

    def sizes(self, problem: Problem, launch: Launch) -> dict[str, Any]:
        return {"memory": backward_layouts(problem, launch, self.dy.shape[0])}

    def run(self, plan: BackwardPlan) -> DataGradients:
        tensors = (self.dy, self.w1, self.w2, self.preact, self.groups, self.row_scale, self.out)
        return plan.run(*tensors, *self.by_index())
