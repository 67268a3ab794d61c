"""The CPU reference of grouped_mlp in MXFP8: what each recipe computes, at the level of its quantised operands.

Operands are rounded as the kernels round them, x and weights to the bit, the activation from float32. Products are
accumulated in float32, or in float64 where x is. Kernels add up in another order, so that an activation that lies on
the edge between two E4M3 numbers may round to the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..activations import ActivationParams, activate, activate_backward
from ..recipes import Quantised, Recipe
from ..reference import groups_of
from .layout import BLOCK_SIZES
from .prepared import Prepared
from .reference import dequantized, quantize_rows, scales_of


def rounded(values: Tensor, quantised: Quantised | None) -> Tensor:
    """Rows as the kernels multiply them: the values of their MXFP8 form, in float32, or as they are."""
    if quantised is None:
        return values
    data, exponents = quantize_rows(values, BLOCK_SIZES[quantised.block])
    return dequantized(data, exponents).to(values.dtype)


def rows_of(x: Tensor, x_scale: Tensor | None, quantised: Quantised | None) -> Tensor:
    """x as it is multiplied, float32 or float64. `x_scale`: of an x in MXFP8."""
    if x_scale is not None:
        return dequantized(x, x_scale.view(torch.uint8))
    return rounded(x if x.dtype == torch.float64 else x.float(), quantised)


def weight_of(weights: Prepared, expert: int) -> Tensor:
    """An expert's weight [N, K], float32."""
    data, scale = weights.data[expert], weights.scale[expert].view(torch.uint8)
    return data.float() * scales_of(scale)[:, None] if scale.dim() == 1 else dequantized(data, scale)


def grouped_mlp(
    recipe: Recipe,
    x: tuple[Tensor, Tensor | None],
    weights: tuple[Prepared, Prepared],
    ends: Sequence[int],
    biases: tuple[Any, Any],
    row_scale: Tensor | None,
    form: tuple[str, str, ActivationParams],
    out: Tensor,
    preact: Tensor | None = None,
) -> None:
    """Writes out [T, H], and preact [T, 2I or I] unless None.

    x: rows, and their scales where they are in MXFP8; the rest as of `reference.grouped_mlp`.
    """
    data, x_scale = x
    for expert, rows in groups_of(ends):
        values = rows_of(data[rows], None if x_scale is None else x_scale[rows], recipe.x)
        scale = None if row_scale is None else row_scale[rows].to(values.dtype)[:, None]
        h = _linear(values, weight_of(weights[0], expert), biases[0], expert, None)
        if preact is not None:
            preact[rows] = h.to(preact.dtype)
        act = activate(h, *form)
        mid = rounded(act if scale is None else act * scale, recipe.activation)
        out[rows] = _linear(mid, weight_of(weights[1], expert), biases[1], expert, scale).to(out.dtype)


def _linear(x: Tensor, w: Tensor, biases: Any, expert: int, scale: Tensor | None) -> Tensor:
    y = x @ w.to(x.dtype).mT
    if biases is None:
        return y
    bias: Tensor = biases[expert].to(x.dtype)
    return y + (bias if scale is None else bias * scale)


def data_gradients(
    recipe: Recipe,
    dy: Tensor,
    weights: tuple[Prepared | None, Prepared],
    preact: Tensor,
    ends: Sequence[int],
    row_scale: Tensor | None,
    form: tuple[str, str, ActivationParams],
    dpreact: Tensor,
    act: Tensor,
    dx: Tensor | None,
    d_row_scale: Tensor | None,
) -> None:
    """As `reference.grouped_dglu`, and dx [T, H] unless None. Weights (w1 for dx alone) are folded along their columns.

    dy is quantised as x is in forward, and so is what is stored of dpreact.
    """
    for expert, rows in groups_of(ends):
        grad = rows_of(dy[rows], None, recipe.x)
        dm = grad @ weight_of(weights[1], expert).to(grad.dtype).mT
        scale = None if row_scale is None else row_scale[rows].to(dm.dtype)[:, None]
        dh, activated = activate_backward(dm if scale is None else dm * scale, preact[rows].to(dm.dtype), *form)
        dpreact[rows] = dh.to(dpreact.dtype)
        act[rows] = (activated if scale is None else activated * scale).to(act.dtype)
        if d_row_scale is not None:
            d_row_scale[rows] = (dm * activated).sum(dim=1).to(d_row_scale.dtype)
        if dx is not None and weights[0] is not None:
            stored = rows_of(dpreact[rows], None, recipe.x)
            dx[rows] = (stored @ weight_of(weights[0], expert).to(stored.dtype).mT).to(dx.dtype)
