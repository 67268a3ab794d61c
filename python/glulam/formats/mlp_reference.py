"""The CPU reference of grouped_mlp with quantised operands, for each recipe.

Operands are rounded as the kernels round them: x and weights to the bit, the activation from float32. Products are
accumulated in float32, or in float64 if x is float64. Kernels sum in another order, so an activation close to the
midpoint of two E4M3 numbers may round to the other one.
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
    """A weight for the CPU reference; indexed by an expert's number, it gives that expert's weight in float32.

    Attributes:
        form: the format and layout of `parts`.
        parts: the weight's tensors.
    """

    form: Form
    parts: Parts

    def __getitem__(self, expert: int) -> Tensor:
        """Return an expert's weight [N, K], dequantised to float32."""
        return self.form.values(self.parts, expert)


def rounded(values: Tensor, rows: Any) -> Tensor:
    """Return `values` rounded as kernels round rows before multiplying them.

    Args:
        rows: the rows' format, a recipe's `x` or `activation`. None: no rounding.
    """
    return values if rows is None else rows.rounded(values)


def grouped_mlp(
    recipe: Any, x: tuple[Tensor, Tensor | None], weights: tuple[Weight, Weight], ends: Sequence[int],
    biases: tuple[Any, Any], row_scale: Tensor | None, function: Activation, out: Tensor,
    preact: Tensor | None = None,
) -> None:  # fmt: skip
    """Write the results of grouped_mlp: out [T, H], and preact [T, 2I or I] unless it is None.

    Args:
        recipe: the recipe object.
        x: rows, and their scales if they are in MXFP8, else None.
        weights: w1 and w2.
        ends: each group's end.
        biases: b1 and b2.
        row_scale, function, out, preact: see `reference.grouped_mlp`.
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
    """Write dpreact, act and d_row_scale as `reference.grouped_dglu` does, and dx [T, H] unless it is None.

    dy and the stored dpreact are quantised as x is in forward.

    Args:
        recipe: the recipe object.
        weights: w1 and w2, prepared along their columns; w1 is needed only for dx.
        ends: each group's end.
    """
    w1, w2 = weights
    reference.grouped_dglu(
        rounded(dy, recipe.x), w2, preact, ends, row_scale, function, dpreact, act, d_row_scale,
        transpose_w=True,
    )  # fmt: skip
    if dx is not None and w1 is not None:
        reference.grouped_mm(rounded(dpreact, recipe.x), w1, ends, None, None, False, dx)
