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
from ..activations import Activation
from .form import Form
from .mxfp8.reference import dequantized
from .scaled import Parts


@dataclass(frozen=True)
class Weight:
    """A weight as `reference` reads experts: its parts, as a form has them."""

    form: Form
    parts: Parts

    def __getitem__(self, expert: int) -> Tensor:
        """An expert's weight [R, C], float32."""
        return self.form.values(self.parts, expert)


def rounded(values: Tensor, rows: Any) -> Tensor:
    """Rows as the kernels multiply them: as a recipe's `x` or `activation` has them, or as they are."""
    return values if rows is None else rows.rounded(values)


def grouped_mlp(
    recipe: Any, x: tuple[Tensor, Tensor | None], weights: tuple[Weight, Weight], ends: Sequence[int],
    biases: tuple[Any, Any], row_scale: Tensor | None, function: Activation, out: Tensor,
    preact: Tensor | None = None,
) -> None:  # fmt: skip
    """Writes out [T, H], and preact [T, 2I or I] unless None.

    x: rows, and their scales where they are in MXFP8; the rest as of `reference.grouped_mlp`.
    """
    data, scale = x
    rows = rounded(data, recipe.x) if scale is None else dequantized(data, scale.view(torch.uint8))
    reference.grouped_mlp(
        rows, *weights, ends, *biases, row_scale, function, out,
        preact=preact, rounded=lambda act: rounded(act, recipe.activation),
    )  # fmt: skip


def data_gradients(
    recipe: Any, dy: Tensor, weights: tuple[Weight | None, Weight], preact: Tensor, ends: Sequence[int],
    row_scale: Tensor | None, function: Activation, dpreact: Tensor, act: Tensor, dx: Tensor | None,
    d_row_scale: Tensor | None,
) -> None:  # fmt: skip
    """As `reference.grouped_dglu`, and dx [T, H] unless None. Weights (w1 for dx alone) are folded along their columns.

    dy is quantised as x is in forward, and so is what is stored of dpreact.
    """
    w1, w2 = weights
    reference.grouped_dglu(
        rounded(dy, recipe.x), w2, preact, ends, row_scale, function, dpreact, act, d_row_scale,
        transpose_w=True,
    )  # fmt: skip
    if dx is not None and w1 is not None:
        reference.grouped_mm(rounded(dpreact, recipe.x), w1, ends, None, None, False, dx)
