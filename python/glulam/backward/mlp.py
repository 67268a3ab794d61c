"""The gradient of grouped_mlp: h = x w1_e^T + b1_e; m = act(h) s; y = m w2_e^T + s b2_e.

Forward saves x, h and s; m is computed again by the kernel that makes the gradient of h. With `recompute` it saves x
and s, and backward makes h again. Where w2 alone is trained, m serves it and neither h nor a data gradient is made.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.grouped_bias_grad import grouped_bias_grad
from .function import Formula
from .parts import Targets, groups_of, scale_of_bias_grad
from .paths import path_of


def _gradients(
    saved: dict[str, Any], made_by: Any, targets: Targets, wanted: frozenset[str], dy: Tensor
) -> dict[str, Any]:
    """The gradients that are wanted, by name. The preactivation leaves `saved`.

    The data path comes first, then the weights, so that each intermediate goes once nothing needs it: h before any
    weight gradient is allocated, its gradient before the last.

    Args:
        made_by: a DataPath, or a plan.
    """
    d_result, dy = dy, made_by.gathered(saved, dy)
    groups, rows = groups_of(saved), saved.get("rows")
    result: dict[str, Any] = {}
    act = None
    if wanted & made_by.need_preact:
        dpreact, act, result["x"], d_scale = made_by.data_gradients(saved, targets, d_result, dy, wanted)
        if "w1" in wanted:
            result["w1"] = made_by.weight_gradient(targets, "w1", dpreact, saved["x"], groups, x_rows=rows)
        if "b1" in wanted:
            result["b1"] = grouped_bias_grad(dpreact, **groups)
        del dpreact
        if d_scale is not None:
            if saved.get("b2") is not None:
                d_scale = d_scale + scale_of_bias_grad(dy, saved["b2"], {**groups, "rows": rows})
            result["row_scale"] = d_scale
    if "w2" in wanted:
        act = made_by.act(saved) if act is None else act
        result["w2"] = made_by.weight_gradient(targets, "w2", dy, act, groups, dy_rows=rows)
    if "b2" in wanted:
        result["b2"] = grouped_bias_grad(dy, row_scale=saved.get("row_scale"), rows=rows, **groups)
    if "residual" in wanted:
        result["residual"] = d_result
    return result


FORMULA = Formula(("x", "w1", "w2", "row_scale", "b1", "b2"), path_of, _gradients)
