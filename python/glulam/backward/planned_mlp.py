"""The common differentiable grouped_mlp or moe: packed weights and group sizes on a GPU, and gradients behind the
activation.

A plan settles once for a signature which kernels run, what is saved and what is computed. Forward is one call;
backward is one call for its data path (the gradients of h, x and row_scale), and one for each weight. What is done here
less often than a plan is kept for takes the general path, `mlp.GroupedMlp`, in either direction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.chains import signature_of
from cute_kernels.specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedWgradSpec
from cute_kernels.tiles import TileConfig

from .. import device as gpus
from .. import workspace
from ..activations import KernelParams, kernel_params
from ..by_name import by_name
from ..ops import grouped_mlp_mxfp8_training as mxfp8
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_dglu import partials_layout
from ..ops.grouped_mlp import GroupedMlpCall
from ..ops.grouped_mlp_mxfp8 import Mxfp8MlpCall
from ..ops.grouped_mlp_mxfp8_training import DataGradients
from ..ops.rows import NO_SUMS, Sums, check_tokens, sums_of
from ..plan import Launch, address, addresses
from ..problem import Problem, TrainingParts, training_parts
from . import mlp
from .data_path import path_of
from .layout import flatten
from .parts import (
    ORDINARY,
    Targets,
    as_result,
    backward_of,
    once_differentiable,
    scale_of_bias_grad,
    taken,
    usable,
)
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


class Inputs(NamedTuple):
    """Those of the function below that may be tensors. The last three are a layer's, and None without one."""

    x: Tensor
    w1: Any
    w2: Any
    groups: Tensor
    row_scale: Tensor | None
    b1: Any
    b2: Any
    rows: Tensor | None = None
    row_of: Tensor | None = None
    residual: Tensor | None = None


NAMES = Inputs._fields


class Saved(NamedTuple):
    """What forward saves. x, w1 and b2: where gradients need them."""

    x: Any
    w1: Any
    w2: Any
    preact: Tensor
    groups: Tensor
    row_scale: Any
    b2: Any
    rows: Tensor | None
    row_of: Tensor | None


SMALL_BYTES = workspace.GRANULE
"""Up to here forward's activation lies in a workspace; a larger one is worth giving back after the call."""


@dataclasses.dataclass(frozen=True)
class MlpTrainingPlan(TrainingLaunch):
    """The constants of a grouped_mlp's forward and backward; `function` is that of a forward that saves h.

    Attributes:
        dglu, wgrad: the functions of backward; the first makes x's gradient as well where x requires one.
        options: as the general path takes them.
        copies: whether a layer's rows are copied, in each direction.
        hidden, preact_width, inner, width: columns of x, h, the activation and the result.
    """

    dglu: Callable[..., Any]
    wgrad: Callable[..., Any]
    options: mlp.Options
    copies: bool
    hidden: int
    preact_width: int
    inner: int
    width: int
    params: KernelParams

    def forward(self, given: Inputs, result: Tensor, preact: Tensor) -> None:
        """Launches what makes the result, of rows or of tokens, and preact."""
        raise NotImplementedError

    def data_gradients(self, dy: Tensor, saved: Saved, results: DataGradients) -> None:
        """Launches what makes `results`, dx of rows or of tokens."""
        raise NotImplementedError

    def inputs_of(self, call: GroupedMlpCall) -> Inputs:
        return Inputs._make([getattr(call, name, None) for name in NAMES])

    def run(
        self, x: Tensor, w1: Any, w2: Any, groups: Tensor, b1: Any, b2: Any, scale: Tensor | None, out: None,
        rows: Tensor | None = None, row_of: Tensor | None = None, residual: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        return self.run_into(ORDINARY, x, w1, w2, groups, scale, b1, b2, rows, row_of, residual)

    def run_into(self, targets: Targets, *inputs: Any) -> Tensor:
        """As `run`, of `Inputs`, with the result and gradients where `targets` says."""
        if not self.only and gpus.current() != self.index:
            with torch.cuda.device(self.index):
                return self.run_into(targets, *inputs)
        at = tuple([0 if one is None else one.data_ptr() for one in inputs])
        if at not in self.apart:
            self.check_addresses(at, Inputs(*inputs))
        if not has_functorch_transforms():
            return apply_untransformed(self, targets, *inputs)  # type: ignore[no-any-return]
        layout, flat = flatten(self.named(Inputs(*inputs)))
        options = self.options._replace(targets=targets)
        return mlp.GroupedMlp.apply(layout, options, *flat)  # type: ignore[no-any-return, no-untyped-call]

    def summed(
        self, like: Tensor, columns: int, row_of: Tensor | None, residual: Tensor | None, result: Tensor
    ) -> tuple[Tensor, Sums]:
        """Where the rows of a result go, and what adds them up to it: its own memory, and nothing, without a layer."""
        if row_of is None:
            return result, NO_SUMS
        return like.new_empty(self.rows, columns), sums_of(row_of, residual, result)

    def check_addresses(self, at: tuple[int, ...], given: Inputs) -> None:
        if given.row_of is not None:
            check_tokens(self.op, len(given.row_of), x=given.x, residual=given.residual)
        self.check_apart(at, **given._asdict())

    def gathered(self, given: Inputs) -> Inputs:
        """As GEMMs read them."""
        if not self.copies:
            return given
        return given._replace(x=self.options.path.rows(given.x, given.row_of), rows=None)

    def gathered_back(self, saved: Saved, dy: Tensor) -> tuple[Saved, Tensor]:
        """Likewise, what forward saved and the result's gradient."""
        if not self.copies:
            return saved, dy
        rows, row_of = self.options.path.rows, saved.row_of
        x = None if saved.x is None else rows(saved.x, row_of)
        return saved._replace(x=x, rows=None), rows(dy, row_of)

    def named(self, values: Inputs | Saved) -> dict[str, Any]:
        """As the general path calls them."""
        named = values._asdict()
        named[self.grouped_by] = named.pop("groups")
        return named

    def grouped(self, groups: Tensor, **rows: Tensor | None) -> dict[str, Any]:
        """The groups, and the indices of rows, where there are some, as keywords of an operator."""
        given = {name: indices for name, indices in rows.items() if indices is not None}
        return {self.grouped_by: groups, **given}


@dataclasses.dataclass(frozen=True)
class In16BitsPlan(MlpTrainingPlan):
    """Recipe "bf16".

    Attributes:
        act: where the activation of forward lies between its two launches; None allocates it.
        partials: memory for parts of d_row_scale; None where nothing asks for that.
    """

    act: workspace.Layout | None
    partials: workspace.Layout | None

    @by_name(function=signature_of(GroupedMlpSpec(GroupedGluSpec(save_preact=True))))
    def forward(self, given: Inputs, result: Tensor, preact: Tensor) -> None:
        x, w1, w2, groups, scale, b1, b2, rows, row_of, residual = given
        act = x.new_empty(self.rows, self.inner) if self.act is None else workspace.take(self.act)
        y, sums = self.summed(given.x, self.width, row_of, residual, result)
        tickets = self.tickets() if self.draws_tickets else 0
        kind, layout, limit, alpha, offset = self.params
        self.function(
            x=x, rows=address(rows), w1=w1, mid=act, preact=preact, w2=w2, y=y,
            groups=groups.data_ptr(), group_form=self.group_form, num_groups=self.experts, tickets=tickets,
            b1=address(b1), b2=address(b2), scale=address(scale), kind=kind, glu_layout=layout,
            limit=limit, alpha=alpha, offset=offset,
            row_of=sums.row_of, residual=sums.residual, out=sums.out, tokens=sums.tokens, k=sums.k,
            num_sms=self.sm_count,
        )  # fmt: skip

    @by_name(dglu=signature_of(GroupedDgluSpec()), with_dgrad=signature_of(GroupedDgluSpec(dgrad=TileConfig())))
    def data_gradients(self, dy: Tensor, saved: Saved, results: DataGradients) -> None:
        _, w1, w2, preact, groups, scale, _, rows, row_of = saved
        dpreact, act, dx, d_scale = results
        d_scale_at = partials_at = 0
        if d_scale is not None and self.partials is not None:
            partials = workspace.take(self.partials)  # held until all is launched: a graph's own is freed with it
            d_scale_at, partials_at = d_scale.data_ptr(), partials.data_ptr()
        _, _, limit, alpha, offset = self.params
        dglu = with_dgrad = self.dglu
        if dx is None:
            dglu(
                dy=dy, rows=address(rows), w2=w2, preact=preact, dpreact=dpreact, act=act,
                groups=groups.data_ptr(), group_form=self.group_form, num_groups=self.experts,
                scale=address(scale), d_scale=d_scale_at, partials=partials_at,
                limit=limit, alpha=alpha, offset=offset, num_sms=self.sm_count,
            )  # fmt: skip
            return
        dx_rows, sums = self.summed(dy, self.hidden, row_of, None, dx)
        with_dgrad(
            dy=dy, rows=address(rows), w2=w2, preact=preact, dpreact=dpreact, act=act, w1=w1, dx=dx_rows,
            groups=groups.data_ptr(), group_form=self.group_form, num_groups=self.experts, tickets=self.tickets(),
            scale=address(scale), d_scale=d_scale_at, partials=partials_at,
            limit=limit, alpha=alpha, offset=offset,
            row_of=sums.row_of, dx_tokens=sums.out, tokens=sums.tokens, k=sums.k, num_sms=self.sm_count,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mxfp8TrainingPlan(MlpTrainingPlan):
    """Recipe "mxfp8": weights are folded along their rows for forward, along their columns for backward.

    Attributes:
        forward_memory, backward_memory: what a call needs besides; see `ops.grouped_mlp_mxfp8_training`.
        trained: whether a weight is.
    """

    forward_memory: workspace.Layouts
    backward_memory: workspace.Layouts
    trained: bool

    def forward(self, given: Inputs, result: Tensor, preact: Tensor) -> None:
        x, w1, w2, groups, scale, b1, b2, rows, row_of, residual = given
        weights = mxfp8.folded_rows(w1, w2, self.trained)
        biases = addresses(b1)[:2], addresses(b2)[:2]
        y, sums = self.summed(x, self.width, row_of, residual, result)
        mxfp8.launch_forward(
            self, self.forward_memory, self.params, x, weights, y, preact, groups.data_ptr(), *biases, scale, rows, sums
        )

    def data_gradients(self, dy: Tensor, saved: Saved, results: DataGradients) -> None:
        _, w1, w2, preact, groups, scale, _, rows, row_of = saved
        w1_, w2_ = mxfp8.folded_columns(w1, w2, self.trained)
        sums = NO_SUMS
        if results.dx is not None:
            dx, sums = self.summed(dy, self.hidden, row_of, None, results.dx)
            results = results._replace(dx=dx)
        mxfp8.launch_backward(
            self, self.dglu, self.backward_memory, self.params, dy, w1_, w2_, preact, results, groups.data_ptr(), scale,
            rows, sums,
        )  # fmt: skip

    def gathered(self, given: Inputs) -> Inputs:
        """By index: a token is quantised once."""
        return given


class PlannedMlp(torch.autograd.Function):
    """Inputs: the plan, the targets, and those of `Inputs`."""

    @staticmethod
    def forward(ctx: Any, plan: MlpTrainingPlan, targets: Targets, *inputs: Any) -> Tensor:
        given, need, out = Inputs._make(inputs), plan.needs, targets.out
        x = given.x
        y = x.new_empty(x.shape[0], plan.width) if out is None else out
        preact = x.new_empty(plan.rows, plan.preact_width)
        plan.forward(plan.gathered(given), y, preact)
        ctx.plan, ctx.targets = plan, targets
        save(
            ctx, x if need.w1 else None, given.w1 if need.x else None, given.w2, preact, given.groups,
            given.row_scale, given.b2 if need.row_scale else None, given.rows, given.row_of,
        )  # fmt: skip
        return y if out is None else as_result(y)

    @staticmethod
    @by_name(wgrad=signature_of(GroupedWgradSpec()))
    def backward(ctx: Any, dy: Tensor) -> Any:
        plan: MlpTrainingPlan = ctx.plan
        targets: Targets = ctx.targets
        saved = Saved._make(taken(ctx))
        if not is_usual(dy) or not as_saved(ctx, saved) or not are_in_memory(dy, *saved):
            return _unusual_backward(plan, targets, saved, dy)
        need, rows, scale = plan.needs, plan.rows, saved.row_scale
        d_result, (saved, dy) = dy, plan.gathered_back(saved, dy)
        dpreact, act = dy.new_empty(rows, plan.preact_width), dy.new_empty(rows, plan.inner)
        dx = d_scale = dw1 = dw2 = db1 = db2 = None
        if need.x:
            out = targets.grad_input
            dx = dy.new_empty(len(d_result), plan.hidden) if out is None else targets.given_grad_input(d_result)
        if need.row_scale:
            d_scale = scale.new_empty(rows)
        plan.data_gradients(dy, saved, DataGradients(dpreact, act, dx, d_scale))
        if targets.grad_input is not None:
            torch.autograd.graph.increment_version(targets.grad_input)
        # Each intermediate goes as soon as its last use is launched: the largest tensors of a step meet here.
        x, _, _, _, groups, _, b2, indices, _ = saved
        del saved
        groups_at, rows_at = groups.data_ptr(), address(indices)
        if need.w1 and "w1" in targets.weights:
            dw1 = targets.weights["w1"](dpreact, x, plan.grouped(groups, x_rows=indices))
        elif need.w1:
            dw1 = dy.new_empty(plan.experts, plan.preact_width, plan.hidden)
            plan.wgrad(
                dy=dpreact, x=x, dw=dw1, x_rows=rows_at, groups=groups_at, group_form=plan.group_form,
                num_groups=plan.experts, num_sms=plan.sm_count,
            )  # fmt: skip
        if need.b1:
            db1 = grouped_bias_grad(dpreact, **plan.grouped(groups))
        del dpreact
        if need.w2 and "w2" in targets.weights:
            dw2 = targets.weights["w2"](dy, act, plan.grouped(groups, dy_rows=indices))
        elif need.w2:
            dw2 = dy.new_empty(plan.experts, plan.width, plan.inner)
            plan.wgrad(
                dy=dy, x=act, dw=dw2, dy_rows=rows_at, groups=groups_at, group_form=plan.group_form,
                num_groups=plan.experts, num_sms=plan.sm_count,
            )  # fmt: skip
        by_groups = plan.grouped(groups, rows=indices)
        if need.b2:
            db2 = grouped_bias_grad(dy, row_scale=scale, **by_groups)
        if b2 is not None and d_scale is not None:
            d_scale += scale_of_bias_grad(dy, b2, by_groups)
        d_residual = d_result if need.residual else None
        return None, None, dx, dw1, dw2, None, d_scale, db1, db2, None, None, d_residual


apply_untransformed: Callable[..., Any] = super(torch.autograd.Function, PlannedMlp).apply
"""PlannedMlp.apply without its look at every argument for what functorch left behind, which takes 2 us."""


def _unusual_backward(plan: MlpTrainingPlan, targets: Targets, saved: Saved, dy: Tensor) -> Any:
    """By the public operators, which look at everything anew: with a graph of the backward, from a dy that is traced, a
    view or misaligned, or after hooks gave back tensors that lie otherwise."""
    wanted = frozenset(name for name, need in zip(NAMES, plan.needs, strict=True) if need)
    options = plan.options._replace(targets=targets)
    with backward_of(options.op):
        gradients = mlp.make_gradients(plan.named(saved), options, usable(dy), wanted)
    return None, None, *once_differentiable(options.op, [gradients.get(name) for name in NAMES])


def _check(call: GroupedMlpCall | Mxfp8MlpCall) -> Problem | None:
    """As of Maker. Raises ValueError or TypeError where an argument does not fit."""
    problem = call.check()
    needs_preact = any(requires(call, name) for name in path_of(call).need_preact)
    if not needs_preact or call.recompute or not is_common(call, problem, NAMES):
        return None
    call.check_addresses()
    return problem


def _check_mxfp8(call: Mxfp8MlpCall) -> Problem | None:
    """The same; weights that are not of x's dtype take the general path."""
    problem = _check(call)
    if problem is None or any(w.dtype != call.x.dtype for w in (call.w1, call.w2)):  # type: ignore[union-attr]
        return None
    return problem


def _make(call: GroupedMlpCall, problem: Problem) -> MlpTrainingPlan:
    launch = call.launch(_parts(call, problem).forward, NAMES)
    return In16BitsPlan(**_fields(call, problem, launch), **_sizes(call, problem, launch))


def _make_mxfp8(call: Mxfp8MlpCall, problem: Problem) -> MlpTrainingPlan:
    launch = call.launch(_parts(call, problem).forward, NAMES)
    trained = requires(call, "w1") or requires(call, "w2")
    return Mxfp8TrainingPlan(**_fields(call, problem, launch), **_sizes_mxfp8(call, problem, launch), trained=trained)


def _resize(call: GroupedMlpCall, problem: Problem, like: MlpTrainingPlan) -> MlpTrainingPlan:
    return _resized(call, problem, like, **_sizes(call, problem, like))


def _resize_mxfp8(call: Mxfp8MlpCall, problem: Problem, like: MlpTrainingPlan) -> MlpTrainingPlan:
    return _resized(call, problem, like, **_sizes_mxfp8(call, problem, like))


def _resized(
    call: GroupedMlpCall | Mxfp8MlpCall, problem: Problem, like: MlpTrainingPlan, **sizes: Any
) -> MlpTrainingPlan:
    """`sizes`: of the recipe's plan. Weight gradients keep their tile, which either way of reading rows may have."""
    sizes = {**functions(like.parts, problem.rows), "copies": _copies(call), **sizes}
    plan: MlpTrainingPlan = call.resized(like, problem.rows, NAMES, **sizes)
    return plan


MAKER, MXFP8_MAKER = Maker(_check, _make, _resize), Maker(_check_mxfp8, _make_mxfp8, _resize_mxfp8)


def _parts(call: GroupedMlpCall | Mxfp8MlpCall, problem: Problem) -> TrainingParts:
    return training_parts(problem, requires(call, "x"), call.indices is not None and not _copies(call))


def _copies(call: GroupedMlpCall | Mxfp8MlpCall) -> bool:
    """Whether a layer's rows are: of tokens without padding, which the kernel that copies does not know."""
    row_of = getattr(call, "row_of", None)
    return row_of is not None and call.x.is_contiguous() and path_of(call).copies(call.x, row_of, call.w2)


def _sizes(call: GroupedMlpCall, problem: Problem, launch: Launch) -> dict[str, Any]:
    """The fields of an In16BitsPlan that depend on the number of rows, but for those of a Launch."""
    act = workspace.Layout((problem.rows, problem.intermediate), launch.dtype, launch.device, launch.index)
    return {
        "act": act if act.num_bytes <= SMALL_BYTES else None,
        "partials": partials_layout(problem, launch) if requires(call, "row_scale") else None,
    }


def _sizes_mxfp8(call: Mxfp8MlpCall, problem: Problem, launch: Launch) -> dict[str, Any]:
    """As `_sizes`, of an Mxfp8TrainingPlan."""
    return {
        "forward_memory": mxfp8.forward_layouts(problem, launch, call.x.shape[0]),
        "backward_memory": mxfp8.backward_layouts(
            _parts(call, problem).data_gradients, launch, None if _copies(call) else call.x.shape[0]
        ),
    }


def _fields(call: GroupedMlpCall | Mxfp8MlpCall, problem: Problem, launch: Launch) -> dict[str, Any]:
    """The fields of an MlpTrainingPlan."""
    _, dglu, wgrad = _parts(call, problem)
    parts = serving(launch.index, dglu=dglu, wgrad=wgrad)
    return {
        **vars(launch),
        **functions(parts, problem.rows),
        "parts": parts,
        "op": call.op,
        "needs": Inputs._make([requires(call, name) for name in NAMES]),
        "grouped_by": "offs" if call.splits is None else "splits",
        "options": mlp.options(call, ORDINARY),
        "copies": _copies(call),
        "hidden": problem.in_features,
        "preact_width": problem.w1_rows,
        "inner": problem.intermediate,
        "width": problem.out_features,
        "params": kernel_params(call.activation, call.glu_layout, call.params),
    }
