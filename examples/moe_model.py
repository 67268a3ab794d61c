"""A byte-level language model: a decoder-only transformer whose MLPs are mixtures of experts.

Parameters are float32 and are cast to the model's dtype where they are used, so that autograd hands the optimizer
float32 gradients of float32 masters. How the experts' MLP is computed is an argument: by Glulam, or by torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import glulam

BYTES = 256

Experts = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(x [T,H] sorted by expert, w1 [E,2I,H], w2 [E,H,I], offs int32 [E], scale float32 [T]) -> [T,H]."""


@dataclasses.dataclass(frozen=True)
class Size:
    """Of a model. On a GPU all widths are multiples of 64."""

    layers: int
    width: int
    heads: int
    experts: int
    top_k: int
    intermediate: int
    context: int


# The experts' MLP: act = silu(gate) * up * scale, y = act w2^T. All three of torch's orders are the same function; what
# they round, and when, differs. torch's grouped_mm does not write the weight gradient of an expert without rows.


def glulam_experts(x: Tensor, w1: Tensor, w2: Tensor, offs: Tensor, scale: Tensor, recipe: str = "bf16") -> Tensor:
    """Two launches; the activation and the scale are applied in float32 before anything is rounded."""
    return glulam.grouped_mlp(x, w1, w2, offs=offs, row_scale=scale, recipe=recipe)


def torch_experts(x: Tensor, w1: Tensor, w2: Tensor, offs: Tensor, scale: Tensor) -> Tensor:
    """torch's own operators, each of which rounds to x's dtype."""
    gate, up = F.grouped_mm(x, w1.mT, offs=offs).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up * scale.to(x.dtype)[:, None], w2.mT, offs=offs)


def torch_experts_scaled_first(x: Tensor, w1: Tensor, w2: Tensor, offs: Tensor, scale: Tensor) -> Tensor:
    """The same, with the scale in the product's other factor."""
    gate, up = F.grouped_mm(x, w1.mT, offs=offs).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * (up * scale.to(x.dtype)[:, None]), w2.mT, offs=offs)


def torch_experts_scaled_last(x: Tensor, w1: Tensor, w2: Tensor, offs: Tensor, scale: Tensor) -> Tensor:
    """The same, with the scale on the experts' results."""
    gate, up = F.grouped_mm(x, w1.mT, offs=offs).chunk(2, dim=-1)
    return F.grouped_mm(F.silu(gate) * up, w2.mT, offs=offs) * scale.to(x.dtype)[:, None]


class Routing(NamedTuple):
    """Token copies sorted by expert: sorted copy i is copy order[i] of [tokens, top_k]; inverse undoes order.

    order, inverse: int64 [T]; offs: int32 [E], each expert's end; scale: float32 [T]; balance: the auxiliary loss,
    1 where experts get equal shares.
    """

    order: Tensor
    inverse: Tensor
    offs: Tensor
    scale: Tensor
    balance: Tensor


def route(x: Tensor, router: Tensor, top_k: int) -> Routing:
    """Chooses experts for the tokens x [tokens, H]. Group sizes stay on the device: the host waits for nothing."""
    probabilities = F.linear(x.float(), router).softmax(dim=-1)
    weights, chosen = probabilities.topk(top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)

    experts, order = chosen.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    offs = torch.searchsorted(experts, torch.arange(len(router), device=x.device), right=True, out_int32=True)

    shares = offs.diff(prepend=offs.new_zeros(1)) / len(order)
    balance = len(router) * (shares * probabilities.mean(dim=0)).sum()
    return Routing(order, inverse, offs, weights.flatten().gather(0, order), balance)


class Dispatch(torch.autograd.Function):
    """[tokens, H] -> [T,H]: each token's copies, sorted by expert. The gradient is `Collect`: a gather as well, where
    autograd's own would add into rows in an order that changes from run to run.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x[order // top_k]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        copies = dy[inverse].view(-1, ctx.top_k, dy.shape[1])
        return copies.sum(dim=1), None, None, None


class Collect(torch.autograd.Function):
    """[T,H] -> [tokens, H]: the sum of each token's copies. The gradient is `Dispatch`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        copies = y[inverse].view(-1, top_k, y.shape[1])
        return copies.sum(dim=1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return dy[order // ctx.top_k], None, None, None


def matrix(*shape: int, gain: float = 1.0) -> nn.Parameter:
    """Normal, so that a product with it has its input's scale, times `gain`."""
    return nn.Parameter(torch.randn(shape) * gain * shape[-1] ** -0.5)


def embedding(count: int, width: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(count, width) * 0.5)


def normalised(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = matrix(3 * size.width, size.width)
        self.out = matrix(size.width, size.width, gain=(2 * size.layers) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """[sequences, positions, width] -> the same."""
        heads = F.linear(x, self.qkv.to(x.dtype)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out.to(x.dtype))


class MixtureOfExperts(nn.Module):
    def __init__(self, size: Size, experts: Experts) -> None:
        super().__init__()
        self.top_k, self.experts = size.top_k, experts
        self.router = matrix(size.experts, size.width)
        self.w1 = matrix(size.experts, 2 * size.intermediate, size.width)
        self.w2 = matrix(size.experts, size.width, size.intermediate, gain=(2 * size.layers) ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[sequences, positions, width] -> the same, and the auxiliary loss."""
        tokens = x.flatten(0, 1)
        r = route(tokens, self.router, self.top_k)
        copies = Dispatch.apply(tokens, r.order, r.inverse, self.top_k)  # type: ignore[no-untyped-call]
        y = self.experts(copies, self.w1.to(x.dtype), self.w2.to(x.dtype), r.offs, r.scale)
        y = Collect.apply(y, r.order, r.inverse, self.top_k)  # type: ignore[no-untyped-call]
        return y.view_as(x), r.balance


class LanguageModel(nn.Module):
    """Predicts each byte from those before it.

    Args:
        dtype: of activations and of the weights in a product; parameters are float32.
    """

    def __init__(self, size: Size, experts: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.bytes, self.positions = embedding(BYTES, size.width), embedding(size.context, size.width)
        self.attention = nn.ModuleList(Attention(size) for _ in range(size.layers))
        self.mixture = nn.ModuleList(MixtureOfExperts(size, experts) for _ in range(size.layers))
        self.head = matrix(BYTES, size.width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """int64 [sequences, positions + 1] -> cross entropy in nats a byte, and the layers' mean auxiliary loss."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = (F.embedding(inputs, self.bytes) + self.positions[: inputs.shape[1]]).to(self.dtype)
        balances = []
        for attention, mixture in zip(self.attention, self.mixture, strict=True):
            x = x + attention(normalised(x))
            y, balance = mixture(normalised(x))
            x = x + y
            balances.append(balance)
        logits = F.linear(normalised(x), self.head.to(x.dtype)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), torch.stack(balances).mean()
