"""moe: the whole layer from tokens to tokens, given its routing."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_dynamo_compiling

from .. import device as gpus
from ..ops.grouped_mlp import grouped_mlp
from ..recipes import BF16, Recipe
from ..signature import any_requires_grad
from .routing import Routing
from .rows import combine, permute, row_indices


def moe(
    x: Tensor, routing: Routing, w1: Any, w2: Any, *, b1: Any = None, b2: Any = None, activation: str = "swiglu",
    glu_layout: str = "concat", limit: float = 7.0, alpha: float = 1.702, offset: float = 1.0,
    recipe: str | Recipe = "bf16", recompute: bool = False, residual: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """out[n] = residual[n] + sum over a token's choices of weight * MLP of the chosen expert (x[n]). Differentiable.

    With recipe "bf16" and no gradient, the first GEMM reads rows of x by index. Otherwise they are gathered first.
    That copy is not saved for a backward: x, the preactivation and the routing are, and backward gathers again.
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
    weights = routing.weight_of_row if isinstance(routing, Routing) else None
    is_trained = is_grad_enabled() and any_requires_grad(x, w1, w2, b1, b2, weights)
    if not is_trained and recipe in (BF16.name, BF16):
        rows, indices = x, row_indices("moe", x, routing)
    else:
        rows, indices = permute(x, routing), None
    with _saving_tokens(x, rows, routing) if is_trained else nullcontext():
        y = grouped_mlp(
            rows, w1, w2, offs=routing.offs, rows=indices, row_scale=routing.weight_of_row, b1=b1, b2=b2,
            activation=activation, glu_layout=glu_layout, limit=limit, alpha=alpha, offset=offset, recipe=recipe,
            recompute=recompute,
        )  # fmt: skip
    return combine(y, routing, residual, out=out)


def _saving_tokens(x: Tensor, rows: Tensor, routing: Routing) -> AbstractContextManager[Any]:
    """Where `rows` are saved for a backward, x is in their place: K times less memory, for one permutation more.

    A trace has no addresses to tell tensors by, so it sees no hook, and saves what it finds best.
    """
    if is_dynamo_compiling() or gpus.is_traced(rows):
        return nullcontext()
    tokens, version, at = x.detach(), x._version, rows.data_ptr()
    shape = rows.shape

    def pack(saved: Tensor) -> Tensor | None:
        return None if saved.shape == shape and saved.data_ptr() == at else saved

    def unpack(packed: Tensor | None) -> Tensor:
        if packed is not None:
            return packed
        if tokens._version != version:
            raise RuntimeError(
                "moe: x was modified in place after the forward, and the backward needs it as it was; give x.clone()"
            )
        with torch.no_grad():
            return permute(tokens, routing)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
