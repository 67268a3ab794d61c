"""The CPU reference of grouped_mlp and its data gradients with quantised operands, for each recipe.

x and the weights are rounded bit for bit as the kernels round them. The activation is rounded from float32 by the same
rules. But kernels sum in another order, so an activation close to the midpoint of two E4M3 numbers may round to the
other one. Products are accumulated in float32, or in float64 if x is float64.
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
    """A quantised weight for the CPU reference: `weight[expert]` is an expert's weight [N, K], dequantised to float32.

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
    """Round `values` to the format in which kernels multiply rows.

    Args:
        values: rows of x or of the activation.
        rows: the rows' format, a recipe's `x` or `activation`. None: no rounding.
    """
    return values if rows is None else rows.rounded(values)


def grouped_mlp(
    recipe: Any, x: tuple[Tensor, Tensor | None], weights: tuple[Weight, Weight], ends: Sequence[int],
    biases: tuple[Any, Any], row_scale: Tensor | None, function: Activation, out: Tensor,
    preact: Tensor | None = None,
) -> None:  # fmt: skip
    """Compute grouped_mlp, and write the results: out [T, H], and preact [T, 2I or I] unless it is None.

    Args:
        recipe: the recipe object.
        x: (rows, scales) if x is in MXFP8, else (rows, None).
        weights: w1 and w2.
        ends: for each group, the index after its last row.
        biases: b1 and b2.
        row_scale: [T], a factor of the activation and of the second bias. None: 1.
        function: the activation with its layout and constants.
        out, preact: buffers.
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
    """Compute the data gradients of grouped_mlp: dpreact, act and d_row_scale, and dx [T, H] unless it is None.

    dy and dpreact are rounded to the format of x before they are multiplied.

    Args:
        recipe: the recipe object.
        dy: gradient of the result, [T, H].
        weights: w1 and w2, quantised along their columns (N); w1 is needed only for dx.
        ends: for each group, the index after its last row.
        preact, row_scale, function: the preactivation [T, 2I or I], the factors of rows [T] or None, the activation.
        dpreact, d_row_scale: buffers for the gradients of preact and row_scale; d_row_scale None: not wanted.
        act: [T, I], the activation times row_scale.
    """
    w1, w2 = weights
    reference.grouped_dglu(
        rounded(dy, recipe.x), w2, preact, ends, row_scale, function, dpreact, act, d_row_scale,
        transpose_w=True,
    )  # fmt: skip
    if dx is not None and w1 is not None:
        reference.grouped_mm(rounded(dpreact, recipe.x), w1, ends, None, None, False, dx)
