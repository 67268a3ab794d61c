"""What a layer's results are held to: float64 on the same inputs, one expert after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .layer_cases import TRAIN
from .layer_data import LayerData, choose, sort_choices
from .training import Results


def _halves(h: Tensor, glu_layout: str) -> Sequence[Tensor]:
    """The activated and the linear half of a preactivation."""
    if glu_layout == "interleaved":
        return h[:, 0::2], h[:, 1::2]
    if glu_layout == "interleaved32, linear first":
        linear, activated = h.view(len(h), -1, 2, 32).unbind(2)
        return activated.flatten(1), linear.flatten(1)
    return h.chunk(2, dim=1)


def _expert(x: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, glu_layout: str) -> Tensor:
    activated, linear = _halves(x @ w1.mT, glu_layout)
    return (F.silu(activated) * linear * weights[:, None]) @ w2.mT


@torch.enable_grad()
def expected(d: LayerData, op: str, glu_layout: str = "concat") -> Results:
    """In float64, one expert after the other: y, and of TRAIN the gradients of x, router, w1 and w2. The latter two are
    rounded to their dtype, for room.
    """
    b, k = d.batches[0], d.case.top_k
    logits = F.linear(b.x, d.router).detach().double().requires_grad_()
    weights, ids = choose(logits, k)
    order, offs = sort_choices(ids, d.case.experts)
    weights_of_row = weights.reshape(-1)[order].detach()
    y, d_x = (torch.zeros_like(b.x, dtype=torch.float64) for _ in range(2))
    d_weights, d_w1, d_w2 = torch.zeros_like(weights), None, None
    if op == TRAIN:
        d_w1, d_w2 = torch.zeros_like(d.w1), torch.zeros_like(d.w2)
    starts = [0, *offs.tolist()]
    for e, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if start == end:
            continue
        choice = order[start:end]
        token = choice // k
        given = (b.x[token], d.w1[e], d.w2[e], weights_of_row[start:end])
        leaves = [t.detach().double().requires_grad_(op == TRAIN) for t in given]
        y_e = _expert(*leaves, glu_layout)  # type: ignore[call-arg, arg-type]
        y.index_add_(0, token, y_e.detach())
        if d_w1 is not None and d_w2 is not None:
            gradients = torch.autograd.grad(y_e, leaves, b.d_y[token].double())
            d_x.index_add_(0, token, gradients[0])
            d_w1[e], d_w2[e] = gradients[1], gradients[2]
            d_weights.view(-1)[choice] = gradients[3]
    if d_w1 is None or d_w2 is None:
        return (y,)
    (d_logits,) = torch.autograd.grad(weights, logits, d_weights)
    with torch.no_grad():
        d_x += d_logits @ d.router.double()
        return y, d_x, d_logits.mT @ b.x.double(), d_w1, d_w2
