"""The CPU reference of grouped_mlp in MXFP8: what each recipe computes, at the level of its quantised operands.

Operands are rounded as the kernels round them, x and weights to the bit, the activation from float32. Products are
accumulated in float32, or in float64 where x is. Kernels add up in another order, so that an activation that lies on
the edge between two E4M3 numbers may round to the other one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import reference
from ..mxfp4 import MXFP4Tensor
from ..recipes import Format, Recipe
from ..scaled import scales_of
from .layout import BLOCK_SIZES
from .prepared import Prepared
from .reference import dequantized, quantize_rows


@dataclass(frozen=True)
class Values:
    """Prepared weights as `reference` reads experts."""

    weights: Prepared

    def __getitem__(self, expert: int) -> Tensor:
        """An expert's weight [R, C], float32."""
        data, scale = self.weights.data[expert], self.weights.scale[expert].view(torch.uint8)
        if data.dtype in MXFP4Tensor.data_dtypes:
            return MXFP4Tensor(data, scale).dequantize()
        return data.float() * scales_of(scale)[:, None] if scale.dim() == 1 else dequantized(data, scale)


def rounded(values: Tensor, number_format: Format | None) -> Tensor:
    """Rows as the kernels multiply them: the values of a format, in float32 or float64, or as they are."""
    if number_format is None:
        return values
    data, exponents = quantize_rows(values, BLOCK_SIZES[number_format.block])
    return dequantized(data, exponents).to(torch.promote_types(values.dtype, torch.float32))


def grouped_mlp(
    recipe: Recipe, x: tuple[Tensor, Tensor | None], weights: tuple[Prepared, Prepared], ends: Sequence[int],
    biases: tuple[Any, Any], row_scale: Tensor | None, function: reference.ActivationArgs, out: Tensor,
    preact: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes out [T, H], and preact [T, 2I or I] unless None.

    x: rows, and their scales where they are in MXFP8; the rest as of `reference.grouped_mlp`.
    """
    data, scale = x
    rows = rounded(data, recipe.x) if scale is None else dequantized(data, scale.view(torch.uint8))
    w1, w2 = map(Values, weights)
    reference.grouped_mlp(
        rows, w1, w2, ends, *biases, row_scale, function, out,
        preact=preact, rounded=lambda act: rounded(act, recipe.activation),
    )  # fmt: skip


def data_gradients(
    recipe: Recipe, dy: Tensor, weights: tuple[Prepared | None, Prepared], preact: Tensor, ends: Sequence[int],
    row_scale: Tensor | None, function: reference.ActivationArgs, dpreact: Tensor, act: Tensor, dx: Tensor | None,
    d_row_scale: Tensor | None,
) -> None:  # fmt: skip
    """As `reference.grouped_dglu`, and dx [T, H] unless None. Weights (w1 for dx alone) are folded along their columns.

    dy is quantised as x is in forward, and so is what is stored of dpreact.
    """
    w1, w2 = weights
    reference.grouped_dglu(
        rounded(dy, recipe.x), Values(w2), preact, ends, row_scale, function, dpreact, act, d_row_scale,
        transpose_w=True,
    )  # fmt: skip
    if dx is not None and w1 is not None:
        reference.grouped_mm(rounded(dpreact, recipe.x), Values(w1), ends, None, None, False, dx)
