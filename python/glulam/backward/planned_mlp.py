"""The common differentiable grouped_mlp or moe, by `planned`: gradients behind the activation.

Forward is one launch; backward is one for its data path (the gradients of h, x and row_scale), and one for each weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..calls.call import Call
from ..choose.problem import Problem, training_parts
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_mlp_mxfp8 import Mxfp8MlpCall
from ..ops.mlp_training import SMALL_BYTES, GradientsCall, Mxfp8TokenGradientsCall, WeightGradientCall, forward_kind
from . import mlp
from .data_path import path_of
from .parts import Targets, contracted, scale_of_bias_grad
from .planned import Maker, Part, TrainingPlan, is_common, requires, save


class Options(NamedTuple):
    """What launches depend on.

    Attributes:
        copies_forward, copies_backward: whether a layer's rows are copied.
        is_small: forward's activation is.
    """

    copies_forward: bool
    copies_backward: bool
    is_small: bool


TAKES = ("x", "w1", "w2", "row_scale", "b2", "rows", "row_of", "groups")
SAVED = ("x", "w1", "w2", "preact", "groups", "row_scale", "b2", "rows", "row_of")


def _forward(plan: TrainingPlan, ctx: Any, targets: Targets, inputs: tuple[Any, ...]) -> Tensor:
    x, w1, w2, scale, b2, rows, row_of, groups = plan.pick((*inputs, None))
    need, forward = plan.needs, plan.parts["forward"]
    y = x.new_empty(x.shape[0], forward.constants["out_features"]) if targets.out is None else targets.out
    if plan.options.copies_forward:
        named = dict(zip(plan.names, inputs, strict=True))
        inputs = tuple({**named, "x": plan.general.path.rows(x, row_of), "rows": None}.values())
    _, preact = forward.run(*inputs, y)
    save(
        ctx, x if need["w1"] else None, w1 if need["x"] else None, w2, preact, groups, scale,
        b2 if need["row_scale"] else None, rows, row_of,
    )  # fmt: skip
    return y


def _backward(plan: TrainingPlan, targets: Targets, kept: list[Any], dy: Tensor) -> dict[str, Any]:
    x, w1, w2, preact, groups, scale, b2, indices, row_of = kept
    kept.clear()
    need, parts, d_result, dx = plan.needs, plan.parts, dy, None
    if plan.options.copies_backward:
        rows, indices = plan.general.path.rows, None
        x, dy = None if x is None else rows(x, row_of), rows(dy, row_of)
    if need["x"]:
        width = parts["gradients"].constants["out_features"]
        no_buffer = targets.grad_input is None
        dx = d_result.new_empty(d_result.shape[0], width) if no_buffer else targets.given_grad_input(d_result)
    dpreact, act, _, d_scale = parts["gradients"].run(
        dy=dy, w1=w1, w2=w2, preact=preact, row_scale=scale, rows=indices, row_of=row_of, groups=groups, out=dx
    )
    if targets.grad_input is not None:
        torch.autograd.graph.increment_version(targets.grad_input)
    # Each intermediate goes as soon as its last use is launched: the largest tensors of a step meet here.
    del preact
    dw1 = dw2 = db1 = db2 = None
    if need["w1"] and "w1" in targets.weights:
        dw1 = targets.weights["w1"](dpreact, x, plan.grouped(groups, x_rows=indices))
    elif need["w1"]:
        dw1 = parts["w1"].run(dy=dpreact, x=x, groups=groups, x_rows=indices)
    if need["b1"]:
        db1 = grouped_bias_grad(dpreact, **plan.grouped(groups))
    del dpreact
    if need["w2"] and "w2" in targets.weights:
        dw2 = targets.weights["w2"](dy, act, plan.grouped(groups, dy_rows=indices))
    elif need["w2"]:
        dw2 = parts["w2"].run(dy=dy, x=act, groups=groups, dy_rows=indices)
    by_groups = plan.grouped(groups, rows=indices)
    if need["b2"]:
        db2 = grouped_bias_grad(dy, row_scale=scale, **by_groups)
    if b2 is not None and d_scale is not None:
        d_scale += scale_of_bias_grad(dy, b2, by_groups)
    gradients = {"x": dx, "w1": dw1, "w2": dw2, "row_scale": d_scale, "b1": db1, "b2": db2}
    if need.get("residual"):
        gradients["residual"] = d_result
    return gradients


def _check(call: Call) -> Problem | None:
    """As of Maker; weights that are not of x's dtype take the general path. Raises ValueError or TypeError where an
    argument does not fit."""
    problem = call.check()
    needs_preact = any(requires(call, name) for name in path_of(call).need_preact)
    if not needs_preact or call.recompute or not is_common(call):
        return None
    if any(w.dtype != call.x.dtype for w in (call.w1, call.w2)):
        return None
    call.check_addresses()
    return problem


def _options(call: Call) -> Options:
    copies = _copies(call)
    return Options(copies and not isinstance(call, Mxfp8MlpCall), copies, _is_small(call))


def _is_small(call: Call) -> bool:
    inner: int = contracted(call.w2, getattr(call, "transpose_w", False))
    return call.num_rows * inner * call.x.element_size() <= SMALL_BYTES


def _copies(call: Call) -> bool:
    """Whether a layer's rows are: of tokens without padding, which the kernel that copies does not know."""
    row_of = getattr(call, "row_of", None)
    return row_of is not None and call.x.is_contiguous() and path_of(call).copies(call.x, row_of, call.w2)


def _parts(call: Call, problem: Problem, need: Mapping[str, bool], options: Options) -> dict[str, Part]:
    """The launches. What is not there yet is stood for by tensors of the same dtype and device."""
    x, rows, tokens = call.x, call.indices, getattr(call, "row_of", None)
    forward_rows, rows = None if options.copies_forward else rows, None if options.copies_backward else rows
    for_x, trained = need["x"], need["w1"] or need["w2"]
    problems = training_parts(problem, for_x, rows is not None)
    groups = {"offs": call.offs, "splits": call.splits}

    def forward() -> Call:
        kind: Any = type(call)
        others = {"rows": forward_rows, "out": x, "trained": trained, "is_small": options.is_small}
        return forward_kind(kind)(**{**vars(call), **others})

    def gradients() -> Call:
        return (Mxfp8TokenGradientsCall if isinstance(call, Mxfp8MlpCall) else GradientsCall)(
            **groups, **{name: getattr(call, name) for name in OF_GRADIENTS}, preact=x, rows=rows,
            dy=x.new_empty(problem.rows, 0) if options.copies_backward else x,
            w1=call.w1 if for_x else None, row_of=tokens if for_x else None, out=x if for_x else None,
            row_scale_grad=need["row_scale"], input_grad=for_x, trained=trained,
        )  # fmt: skip

    parts = {"forward": Part(forward, problems.forward), "gradients": Part(gradients, problems.data_gradients)}
    for name, by, (n, k) in zip(("w1", "w2"), ("x_rows", "dy_rows"), problem.weights, strict=True):
        if need[name]:
            given = {**NEW_GRADIENT, **groups, "dy": x, "x": x, "n": n, "k": k, by: rows}
            parts[name] = Part(partial(WeightGradientCall, **given), problems.weight_gradients)
    return parts


OF_GRADIENTS = ("w2", "row_scale", "activation", "glu_layout", "limit", "alpha", "offset")
NEW_GRADIENT = {**dict.fromkeys(("dy_rows", "x_rows", "mask", "out", "out_dtype")), "accumulate": False}
MAKER = Maker(mlp.FORMULA, _check, _parts, _options, TAKES, SAVED, _forward, _backward)
