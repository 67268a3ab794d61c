"""moe: the whole layer from tokens to tokens, given its routing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.grouped_mlp import grouped_mlp
from .routing import Routing
from .rows import combine, permute


def moe(
    x: Tensor, routing: Routing, w1: Any, w2: Any, *, b1: Any = None, b2: Any = None, activation: str = "swiglu",
    glu_layout: str = "concat", limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0, recipe: str = "bf16",
    recompute: bool = False, residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[n] = residual[n] + sum over a token's choices of weight * MLP of the chosen expert (x[n]). Differentiable.

    The sum is in float32, in the order of the choices, and rounded once. Tokens without a row give the residual, or 0.

    Args:
        x: tokens [N, H], contiguous; as of `grouped_mlp`.
        routing: of these tokens, from `route` or `Routing.from_topk`; differentiable in its weights.
        w1, w2, b1, b2, activation, glu_layout, limit, alpha, offset, recipe, recompute: as of `grouped_mlp`.
        residual: [N, H] in the dtype of the result.
        out: the result's buffer, contiguous; only where no gradient is recorded.

    Returns:
        [N, H'], H' the number of w2's rows, in x's dtype.

    Raises:
        As `grouped_mlp`, `permute` and `combine`.
    """
    rows = permute(x, routing)
    y = grouped_mlp(
        rows, w1, w2, offs=routing.offs, row_scale=routing.weight_of_row, b1=b1, b2=b2, activation=activation,
        glu_layout=glu_layout, limit=limit, alpha=alpha, offset=offset, recipe=recipe, recompute=recompute,
    )  # fmt: skip
    return combine(y, routing, residual, out=out)
