"""A layer's data: tokens, a router whose loads are skewed as wanted, and experts.

All contestants begin with the same router GEMM by torch. Its 16-bit logits decide who is chosen, so tokens are drawn
until the best and the others lie apart: whoever chooses otherwise is wrong, not unlucky.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .layer_cases import LayerCase, logit_offsets
from .problem import TOKENS, normals

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
    for _ in range(REDRAWS if case.experts > case.top_k else 0):
        best = F.linear(x, router).float().topk(case.top_k + 1).values
        close = (best[:, -2] - best[:, -1] < GAP).nonzero().squeeze(1)
        if not len(close):
            return x
        x[close, 1:] = random(len(close), case.hidden - 1)
    if case.experts > case.top_k:
        raise RuntimeError(f"{case.label}: after {REDRAWS} draws some tokens' best logits are closer than {GAP}")
    return x


def _batch(case: LayerCase, router: Tensor, random: Callable[..., Tensor]) -> Batch:
    x, d_y = _draw_tokens(case, router, random), random(case.tokens, case.hidden)
    weights, ids = choose(F.linear(x, router), case.top_k)
    order, offs = sort_choices(ids, case.experts)
    token = order // case.top_k
    return Batch(
        x.requires_grad_(), d_y, x.detach()[token].requires_grad_(), d_y[token], offs,
        weights.reshape(-1)[order].requires_grad_(), token,
    )  # fmt: skip


def make_layer(case: LayerCase, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> LayerData:
    """The case's tensors, normal random with logits and results of scale 1, the same for the same case and seed."""
    experts, hidden, inner = case.experts, case.hidden, case.intermediate
    generator = torch.Generator(device).manual_seed(case.seed)

    random = normals(generator, dtype)
    router = random(experts, hidden, scale=hidden**-0.5)
    router[:, 0] = torch.tensor(logit_offsets(case))
    w1 = random(experts, 2 * inner, hidden, scale=hidden**-0.5)
    w2 = random(experts, hidden, inner, scale=inner**-0.5)
    batches = [_batch(case, router, random) for _ in range(TOKENS if case.decode else 1)]
    return LayerData(case, router.requires_grad_(), w1.requires_grad_(), w2.requires_grad_(), batches)
