"""A layer's data: tokens, a router whose loads are skewed as wanted, and experts; and what its results are held to.

All contestants begin with the same router GEMM by torch. Its 16-bit logits decide who is chosen, so tokens are drawn
until the best and the others lie apart: whoever chooses otherwise is wrong, not unlucky.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import TRAIN, LayerCase
from .contest import Results
from .mlp import CONCAT, TOKENS, normals, swiglu, weights_of
from .routing import logit_offsets

GAP = 2.0**-5  # of a token's K-th logit to the next: two steps of bfloat16 between 2 and 4
REDRAWS = 100  # of what is closer, some 40 % of the tokens left each time


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens, x [N,H] and the gradient of their results d_y [N,H]; and the same as sorted rows, for the MLP alone:
    rows and d_rows [T,H], offs int32 [E], weights float32 [T], token int64 [T]. x, rows and weights are leaves.
    """

    x: Tensor
    d_y: Tensor
    rows: Tensor
    d_rows: Tensor
    offs: Tensor
    weights: Tensor
    token: Tensor


@dataclasses.dataclass(frozen=True)
class LayerData:
    """A layer, leaves router [E,H], w1 [E,2I,H] and w2 [E,H,I], with its batches, which take turns in decoding."""

    case: LayerCase
    router: Tensor
    w1: Tensor
    w2: Tensor
    batches: list[Batch]

    @property
    def loads(self) -> list[int]:
        """Rows of each expert, of the first batch."""
        offs = self.batches[0].offs
        loads: list[int] = offs.diff(prepend=offs.new_zeros(1)).tolist()
        return loads


def choose(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Weights and experts [N,K]: softmax over all in at least float32, the k best, divided by their sum. A single one
    keeps its probability: divided by itself, it would be 1 and train no router.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    weights, ids = wide.softmax(-1).topk(k)
    return (weights / weights.sum(-1, keepdim=True) if k > 1 else weights), ids


def sort_choices(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Choices in the order of experts, and where each expert's end."""
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    bounds = torch.arange(experts, device=ids.device)
    return order, torch.searchsorted(sorted_ids, bounds, right=True, out_int32=True)


def _draw_tokens(case: LayerCase, router: Tensor, random: Callable[..., Tensor]) -> Tensor:
    """x [N,H] whose choices no rounding changes. The first feature is 1: the router's column of it is an offset."""
    x = random(case.tokens, case.hidden)
    x[:, 0] = 1
    if case.experts == case.top_k:
        return x
    for _ in range(REDRAWS):
        best = F.linear(x, router).float().topk(case.top_k + 1).values
        close = (best[:, -2] - best[:, -1] < GAP).nonzero().squeeze(1)
        if not len(close):
            return x
        x[close, 1:] = random(len(close), case.hidden - 1)
    raise RuntimeError(f"{case.label}: after {REDRAWS} draws some tokens' best logits are closer than {GAP}")


def _batch(case: LayerCase, router: Tensor, random: Callable[..., Tensor]) -> Batch:
    x, d_y = _draw_tokens(case, router, random), random(case.tokens, case.hidden)
    weights, ids = choose(F.linear(x, router), case.top_k)
    order, offs = sort_choices(ids, case.experts)
    token = order // case.top_k
    rows, row_weights = x[token].requires_grad_(), weights.reshape(-1)[order].requires_grad_()
    return Batch(x.requires_grad_(), d_y, rows, d_y[token], offs, row_weights, token)


def make_layer(case: LayerCase, device: str = "cuda") -> LayerData:
    """The case's tensors, normal random with logits and results of scale 1, the same for the same case and seed."""
    random = normals(torch.Generator(device).manual_seed(case.seed))
    router = random(case.experts, case.hidden, scale=case.hidden**-0.5)
    router[:, 0] = torch.tensor(logit_offsets(case))
    w1, w2 = weights_of(case, random)
    batches = [_batch(case, router, random) for _ in range(TOKENS if case.decode else 1)]
    return LayerData(case, router.requires_grad_(), w1.requires_grad_(), w2.requires_grad_(), batches)


@torch.enable_grad()
def expected(d: LayerData, op: str, glu_layout: str = CONCAT) -> Results:
    """In float64, one expert after the other: y, and of TRAIN the gradients of x, router, w1 and w2. The latter two are
    rounded to their dtype, for room.
    """
    b, k, trains = d.batches[0], d.case.top_k, op == TRAIN
    logits = F.linear(b.x, d.router).detach().double().requires_grad_()
    weights, ids = choose(logits, k)
    order, offs = sort_choices(ids, d.case.experts)
    weights_of_row = weights.reshape(-1)[order].detach()
    y, d_x = (torch.zeros_like(b.x, dtype=torch.float64) for _ in range(2))
    d_weights = torch.zeros_like(weights)
    d_w1, d_w2 = (torch.zeros_like(w) if trains else w for w in (d.w1, d.w2))
    starts = [0, *offs.tolist()]
    for e, (start, end) in enumerate(zip(starts, starts[1:], strict=False)):
        if start == end:
            continue
        choice = order[start:end]
        token = choice // k
        given = (b.x[token], d.w1[e], d.w2[e], weights_of_row[start:end])
        x, w1, w2, scale = leaves = [t.detach().double().requires_grad_(trains) for t in given]
        y_e = (swiglu(x @ w1.mT, glu_layout) * scale[:, None]) @ w2.mT
        y.index_add_(0, token, y_e.detach())
        if trains:
            gradients = torch.autograd.grad(y_e, leaves, b.d_y[token].double())
            d_x.index_add_(0, token, gradients[0])
            d_w1[e], d_w2[e] = gradients[1], gradients[2]
            d_weights.view(-1)[choice] = gradients[3]
    if not trains:
        return (y,)
    (d_logits,) = torch.autograd.grad(weights, logits, d_weights)
    with torch.no_grad():
        d_x += d_logits @ d.router.double()
        return y, d_x, d_logits.mT @ b.x.double(), d_w1, d_w2
