"""The gradient of grouped_mlp: h = x w1_e^T + b1_e; m = act(h) s; y = m w2_e^T + s b2_e.

Forward saves x, h and s; m is computed again by the kernel that makes the gradient of h. With `recompute` it saves x
and s, and backward makes h again. Where w2 alone is trained, m serves it and neither h nor a data gradient is made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..calls.checks import check_flag, check_recipe
from ..ops.grouped_bias_grad import grouped_bias_grad
from .data_path import DataPath, QuantisedPath, path_of
from .function import Formula
from .parts import Targets, WeightGrad, groups_of, scale_of_bias_grad, weight_grad, wide_weight_grad

INPUTS = ("x", "w1", "w2", "row_scale", "b1", "b2")
OPPOSITE = {"x_rows": "dy_rows", "dy_rows": "x_rows"}


class Options(NamedTuple):
    """What is not differentiated. `form`: the activation and its numbers, as keywords of the operators."""

    form: dict[str, Any]
    recompute: bool
    path: DataPath

    def grad_of(self, name: str, targets: Targets) -> WeightGrad:
        return targets.weights.get(name, wide_weight_grad if name in self.path.wide else weight_grad)


def _options(call: Any) -> Options:
    """Of a GroupedMlpCall or Mxfp8MlpCall."""
    path = path_of(call)
    if not isinstance(path, QuantisedPath):
        check_recipe(call.op, call.recipe)
    check_flag(call.op, "recompute", call.recompute)
    form = {name: getattr(call, name) for name in ("activation", "glu_layout", "limit", "alpha", "offset")}
    return Options(form, call.recompute, path)


def _forward(
    given: dict[str, Any], wanted: frozenset[str], options: Options, out: Tensor | None
) -> tuple[Tensor, dict[str, Any]]:
    keep_preact = bool(wanted & options.path.need_preact) and not options.recompute
    keep_act = "w2" in wanted and not options.recompute
    y, kept = options.path.forward(given, options.form, keep_preact, keep_act, out)
    return y, {**_to_save(given, wanted, options), **kept}


def _to_save(given: dict[str, Any], wanted: frozenset[str], options: Options) -> dict[str, Any]:
    """The arguments that backward reads."""
    behind = bool(wanted & options.path.need_preact)
    again = options.recompute and (behind or "w2" in wanted)
    used = {
        "x": again or "w1" in wanted,
        "w1": again or "x" in wanted,
        "b1": again,
        "w2": behind,
        "row_scale": True,
        "b2": "row_scale" in wanted,
        "offs": True,
        "splits": True,
        "rows": True,
        "row_of": True,
        "residual": False,
    }
    return {name: value for name, value in given.items() if used[name]}


def _gradients(
    saved: dict[str, Any], options: Options, targets: Targets, wanted: frozenset[str], dy: Tensor
) -> dict[str, Any]:
    """The gradients that are wanted, by name. The preactivation leaves `saved`.

    The data path comes first, then the weights, so that each intermediate goes once nothing needs it: h before any
    weight gradient is allocated, its gradient before the last.
    """
    d_result, dy = dy, options.path.gathered(saved, dy)
    groups, scale, rows = groups_of(saved), saved["row_scale"], saved.get("rows")

    def grouped(name: str) -> dict[str, Any]:
        """The groups, and the indices of rows, where there are some, as the argument that an operator calls so."""
        return groups if rows is None else {**groups, name: rows}

    def of_weight(name: str, dy: Tensor, x: Tensor, by_index: str) -> Any:
        """The gradient of a weight as it lies. `by_index`: which of dy and x has rows so, where some have."""
        if options.path.transpose_w:
            dy, x, by_index = x, dy, OPPOSITE[by_index]
        return options.grad_of(name, targets)(dy, x, grouped(by_index))

    result: dict[str, Any] = {}
    act = None
    if wanted & options.path.need_preact:
        dpreact, act, dx, d_scale = options.path.gradients(saved, options.form, targets, dy, wanted)
        result["x"] = dx
        if "w1" in wanted:
            halves = dpreact.chunk(2, dim=1) if options.path.in_halves else (dpreact,)
            made = [of_weight("w1", half, saved["x"], "x_rows") for half in halves]
            result["w1"] = made if options.path.in_halves else made[0]
            del halves
        if "b1" in wanted:
            result["b1"] = grouped_bias_grad(dpreact, **groups)
        del dpreact
        if d_scale is not None:
            if saved["b2"] is not None:
                d_scale = d_scale + scale_of_bias_grad(dy, saved["b2"], grouped("rows"))
            result["row_scale"] = d_scale
    if "w2" in wanted:
        act = _act(saved, options) if act is None else act
        result["w2"] = of_weight("w2", dy, act, "dy_rows")
    if "b2" in wanted:
        result["b2"] = grouped_bias_grad(dy, row_scale=scale, **grouped("rows"))
    if "residual" in wanted:
        result["residual"] = d_result
    return result


def _act(saved: dict[str, Any], options: Options) -> Tensor:
    act: Tensor | None = saved.get("act")
    return options.path.new_act(saved, options.form) if act is None else act


FORMULA = Formula(INPUTS, _options, _forward, _gradients)
