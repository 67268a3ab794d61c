"""The gradient of grouped_mlp: h = x w1_e^T + b1_e; m = act(h) s; y = m w2_e^T + s b2_e.

Forward saves x, h and s; m is computed again by the kernel that makes the gradient of h. With `recompute` it saves x
and s, and backward makes h again. Where w2 alone is trained, m serves it and neither h nor a data gradient is made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_dglu import grouped_dglu
from ..ops.grouped_glu import grouped_glu
from ..ops.grouped_mlp import GroupedMlpCall
from ..ops.grouped_mm import grouped_mm
from ..signature import check_flag, check_recipe
from .layout import Layout, flatten
from .parts import (
    ORDINARY,
    Targets,
    as_result,
    once_differentiable,
    scale_of_bias_grad,
    taken,
    tensor_groups,
    usable,
    without_graph,
)

OP = "grouped_mlp"
BEHIND_THE_ACTIVATION = frozenset({"x", "w1", "b1", "row_scale"})
"""Arguments whose gradients need that of the activation."""


class Options(NamedTuple):
    """What is not differentiated. `form`: the activation and its numbers, as keywords of the operators."""

    form: dict[str, Any]
    recompute: bool
    targets: Targets


def options(call: GroupedMlpCall, targets: Targets) -> Options:
    form = {name: getattr(call, name) for name in ("activation", "glu_layout", "limit", "alpha", "offset")}
    return Options(form, call.recompute, targets)


def apply(call: GroupedMlpCall, targets: Targets = ORDINARY) -> Tensor:
    """The result of a call, differentiable."""
    check_recipe(OP, call.recipe)
    check_flag(OP, "recompute", call.recompute)
    groups = tensor_groups(OP, call.offs, call.splits, call.x)
    arguments = {name: getattr(call, name) for name in ("x", "w1", "w2", "row_scale", "b1", "b2")}
    layout, flat = flatten({**arguments, **groups})
    return GroupedMlp.apply(layout, options(call, targets), *flat)  # type: ignore[no-any-return, no-untyped-call]


class GroupedMlp(torch.autograd.Function):
    """Inputs: the layout, the options, and the flat arguments."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, options: Options, *flat: Any) -> Tensor:
        ctx.layout, ctx.options = layout, options
        given, wanted = layout.named(flat), layout.wanted(ctx.needs_input_grad[2:])
        groups, scale = _groups(given), given["row_scale"]
        hidden = {"bias": given["b1"], "row_scale": scale, **groups, **options.form}
        keep_preact = bool(wanted & BEHIND_THE_ACTIVATION) and not options.recompute
        act = grouped_glu(given["x"], given["w1"], return_preact=keep_preact, **hidden)
        made = {}
        if keep_preact:
            act, made["preact"] = act
        elif "w2" in wanted and not options.recompute:
            made["act"] = act
        ctx.saved_layout, saved = flatten({**_to_save(given, wanted, options.recompute), **made})
        ctx.save_for_backward(*saved)
        out = options.targets.out
        y = grouped_mm(act, given["w2"], bias=given["b2"], bias_scale=_scale_of_b2(given), out=out, **groups)
        return y if out is None else as_result(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        wanted = ctx.layout.wanted(needed)
        saved = ctx.saved_layout.named(taken(ctx))
        with without_graph():
            gradients = make_gradients(saved, ctx.options, usable(dy), wanted)
        flat = ctx.layout.flat_gradients(gradients, needed)
        return None, None, *once_differentiable(OP, flat)


def _groups(named: dict[str, Any]) -> dict[str, Any]:
    return {name: named[name] for name in ("offs", "splits") if name in named}


def _scale_of_b2(given: dict[str, Any]) -> Tensor | None:
    return None if given["b2"] is None else given["row_scale"]


def _to_save(given: dict[str, Any], wanted: frozenset[str], recompute: bool) -> dict[str, Any]:
    """The arguments that backward reads."""
    behind = bool(wanted & BEHIND_THE_ACTIVATION)
    again = recompute and (behind or "w2" in wanted)
    used = {
        "x": again or "w1" in wanted,
        "w1": again or "x" in wanted,
        "b1": again,
        "w2": behind,
        "row_scale": True,
        "b2": "row_scale" in wanted,
        "offs": True,
        "splits": True,
    }
    return {name: value for name, value in given.items() if used[name]}


def make_gradients(saved: dict[str, Any], options: Options, dy: Tensor, wanted: frozenset[str]) -> dict[str, Any]:
    """The gradients that are wanted, by name. The preactivation leaves `saved`.

    The data path comes first, then the weights, so that each intermediate goes once nothing needs it: h before any
    weight gradient is allocated, its gradient before the last.
    """
    groups, scale = _groups(saved), saved["row_scale"]
    result: dict[str, Any] = {}
    act = None
    if wanted & BEHIND_THE_ACTIVATION:
        dpreact, act, d_scale = grouped_dglu(
            dy, saved["w2"], _take_preact(saved, groups), row_scale=scale, row_scale_grad="row_scale" in wanted,
            **groups, **options.form,
        )  # fmt: skip
        result.update(_input_side(saved, options.targets, dy, dpreact, groups, wanted))
        del dpreact
        if d_scale is not None:
            from_bias = saved["b2"] is not None
            result["row_scale"] = d_scale + scale_of_bias_grad(dy, saved["b2"], groups) if from_bias else d_scale
    if "w2" in wanted:
        act = _act(saved, options, groups) if act is None else act
        result["w2"] = options.targets.grad_of("w2")(dy, act, groups)
    if "b2" in wanted:
        result["b2"] = grouped_bias_grad(dy, row_scale=scale, **groups)
    return result


def _input_side(
    saved: dict[str, Any], targets: Targets, dy: Tensor, dpreact: Tensor, groups: dict[str, Any],
    wanted: frozenset[str],
) -> dict[str, Any]:  # fmt: skip
    """Gradients of the first layer: x, w1, b1."""
    result: dict[str, Any] = {}
    if "x" in wanted:
        w1 = saved["w1"]
        dx = targets.new_grad_input(dy, (w1 if isinstance(w1, Tensor) else w1[0]).shape[-1])
        result["x"] = grouped_mm(dpreact, w1, transpose_w=True, out=dx, **groups)
    if "w1" in wanted:
        result["w1"] = targets.grad_of("w1")(dpreact, saved["x"], groups)
    if "b1" in wanted:
        result["b1"] = grouped_bias_grad(dpreact, **groups)
    return result


def _take_preact(saved: dict[str, Any], groups: dict[str, Any]) -> Tensor:
    if "preact" in saved:
        preact: Tensor = saved.pop("preact")
        return preact
    return grouped_mm(saved["x"], saved["w1"], bias=saved["b1"], **groups)


def _act(saved: dict[str, Any], options: Options, groups: dict[str, Any]) -> Tensor:
    if "act" in saved:
        act: Tensor = saved["act"]
        return act
    scale = saved["row_scale"]
    return grouped_glu(saved["x"], saved["w1"], bias=saved["b1"], row_scale=scale, **groups, **options.form)  # type: ignore[no-any-return]
