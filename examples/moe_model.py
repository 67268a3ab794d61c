"""A byte-level language model: a decoder-only transformer whose MLPs are mixtures of experts.

Parameters are float32 and are cast to the model's dtype where they are used, so that autograd hands the optimizer
float32 gradients of float32 masters. How a mixture is computed is an argument: by Glulam, or by torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import glulam
from glulam import Routing
from glulam.distributed import ExpertParallel
from glulam.names import RecipeName
from glulam.nn import GroupedMLP, MoE

BYTES = 256

Layer = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""A function (a mixture, tokens [N,H]) -> result [N,H], and the auxiliary loss, which is 1 if experts get equal
shares.
"""


@dataclasses.dataclass(frozen=True)
class Size:
    """The sizes of a model. On a GPU all widths are multiples of 64."""

    layers: int
    width: int
    heads: int
    experts: int
    top_k: int
    intermediate: int
    context: int


def glulam_layer(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Call `glulam.nn.MoE` with its experts' weights cast to x's dtype."""
    weights = {f"experts.{name}": weight.to(x.dtype) for name, weight in layer.experts.named_parameters()}
    y = functional_call(layer, weights, x)
    return y, glulam.load_balancing_loss(layer.routing)  # type: ignore[arg-type]


def parallel_layer(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor]:
    """Call `glulam_layer` with experts across ranks. The auxiliary loss's mean over ranks is the loss of all their
    tokens.
    """
    y, _ = glulam_layer(layer, x)
    routing = cast(Routing, layer.routing)
    shares = routing.counts.float()
    dist.all_reduce(shares, group=cast(ExpertParallel, layer.parallel).group)
    probabilities = cast(Tensor, routing.logits).softmax(dim=-1).mean(dim=0)
    return y, layer.num_experts * (shares / shares.sum() * probabilities).sum()


def torch_layer(layer: MoE, x: Tensor, scaled: str = "activation") -> tuple[Tensor, Tensor]:
    """Compute the mixture with torch's own operators, each of which rounds to x's dtype. `scaled`: see `torch_experts`.

    Rows are repeated before they are sorted: the gradient of a gather that repeats rows would be added up in an order
    that changes from run to run.
    """
    probabilities = F.linear(x.float(), layer.router.weight).softmax(dim=-1)
    weights, chosen = probabilities.topk(layer.top_k, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)

    experts, order = chosen.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    offs = torch.searchsorted(experts, torch.arange(layer.num_experts, device=x.device), right=True, out_int32=True)
    rows = x.repeat_interleave(layer.top_k, dim=0).index_select(0, order)
    y = torch_experts(layer.experts, rows, offs, weights.flatten().index_select(0, order), scaled)

    shares = offs.diff(prepend=offs.new_zeros(1)) / len(order)
    balance = layer.num_experts * (shares * probabilities.mean(dim=0)).sum()
    return y.index_select(0, inverse).view(-1, layer.top_k, x.shape[1]).sum(dim=1), balance


def torch_experts(experts: GroupedMLP, x: Tensor, offs: Tensor, scale: Tensor, scaled: str) -> Tensor:
    """Return the experts' results [T,H] for rows x [T,H] sorted by expert.

    scale [T], the rows' weights, multiplies the "activation", or a factor of it, "up", or the "result", as `scaled`
    says. All three are the same function; they differ in what is rounded, and when.

    torch's grouped_mm does not write the weight gradient of an expert without rows.
    """
    w1, w2 = (linear.experts("weight").to(x.dtype) for linear in (experts.fc1, experts.fc2))
    scale = scale.to(x.dtype)[:, None]
    gate, up = F.grouped_mm(x, w1.mT, offs=offs).chunk(2, dim=-1)
    act = F.silu(gate) * (up * scale if scaled == "up" else up)
    y = F.grouped_mm(act * scale if scaled == "activation" else act, w2.mT, offs=offs)
    return y * scale if scaled == "result" else y


def matrix(*shape: int, gain: float = 1.0) -> nn.Parameter:
    """Return a normal random parameter whose product with an input has the input's scale, times `gain`."""
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
        """Return attention's result for x; both are [sequences, positions, width]."""
        heads = F.linear(x, self.qkv.to(x.dtype)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(mixed.transpose(1, 2).flatten(2), self.out.to(x.dtype))


def mixture(size: Size, recipe: RecipeName, dtype: torch.dtype, parallel: ExpertParallel | None = None) -> MoE:
    """Return a mixture of experts that computes in `dtype`, with parameters in float32. The experts are the same for
    any number of ranks.

    Args:
        recipe: the experts' recipe, which only Glulam's layer heeds.
        parallel: says which experts are on which rank; None: all are here.
    """
    with torch.random.fork_rng():  # whose own weights are as many random numbers as it has experts
        layer = MoE(
            size.width, size.intermediate, size.experts, size.top_k, router_dtype=torch.float32, recipe=recipe,
            parallel=parallel, dtype=dtype,
        )  # fmt: skip
    layer.router.weight = matrix(size.experts, size.width)
    fc1 = matrix(size.experts, 2 * size.intermediate, size.width)
    fc2 = matrix(size.experts, size.width, size.intermediate, gain=(2 * size.layers) ** -0.5)
    own = slice(None) if parallel is None else slice(parallel.first, parallel.first + parallel.num_local)
    for linear, weight in ((layer.experts.fc1, fc1), (layer.experts.fc2, fc2)):
        linear.weight = nn.Parameter(weight.detach()[own].clone())
    return layer


class LanguageModel(nn.Module):
    """Predicts each byte from those before it.

    Args:
        layer: computes the mixtures of experts.
        dtype: of activations and of the weights in a product; parameters are float32.
        make: a layer's mixture, as `mixture` makes it.
    """

    def __init__(self, size: Size, layer: Layer, dtype: torch.dtype, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer, self.dtype = layer, dtype
        self.bytes, self.positions = embedding(BYTES, size.width), embedding(size.context, size.width)
        self.attention = nn.ModuleList(Attention(size) for _ in range(size.layers))
        self.mixture = nn.ModuleList(make() for _ in range(size.layers))
        self.head = matrix(BYTES, size.width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Map tokens int64 [sequences, positions + 1] to the cross entropy in nats a byte, and the layers' mean
        auxiliary loss.
        """
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = (F.embedding(inputs, self.bytes) + self.positions[: inputs.shape[1]]).to(self.dtype)
        balances = []
        for attention, mixture in zip(self.attention, self.mixture, strict=True):
            x = x + attention(normalised(x))
            y, balance = self.layer(mixture, normalised(x).flatten(0, 1))
            x = x + y.view_as(x)
            balances.append(balance)
        logits = F.linear(normalised(x), self.head.to(x.dtype)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), torch.stack(balances).mean()
