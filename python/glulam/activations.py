"""Activation functions of the CPU reference with their derivatives, and how two halves lie along 2I columns.

Those are the columns of a gated layer, as `split_halves` splits them. Plain torch operators, in whatever dtype they are
given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.specs import KINDS, LAYOUTS

INTERLEAVED32_BLOCK = 32


class ActivationParams(NamedTuple):
    """Run-time numbers of clamped_swiglu; the other activations ignore them."""

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0


class KernelParams(NamedTuple):
    """What kernels are told of an activation: its number and its gate layout's, and `ActivationParams` as floats."""

    kind: int
    glu_layout: int
    limit: float
    alpha: float
    offset: float


def kernel_params(activation: str, glu_layout: str, params: ActivationParams) -> KernelParams:
    return KernelParams(KINDS[activation], LAYOUTS[glu_layout], *map(float, params))


def _d_silu(a: Tensor) -> Tensor:
    sigmoid = torch.sigmoid(a)
    return sigmoid * (1 + a * (1 - sigmoid))


def _d_gelu_tanh(a: Tensor) -> Tensor:
    scale = math.sqrt(2 / math.pi)
    tanh = torch.tanh(scale * (a + 0.044715 * a * a * a))
    return 0.5 * (1 + tanh) + 0.5 * a * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * a * a)


def _d_gelu(a: Tensor) -> Tensor:
    cdf = 0.5 * (1 + torch.erf(a * math.sqrt(0.5)))
    return cdf + a * torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)


Function = Callable[[Tensor], Tensor]
_SILU: tuple[Function, Function] = F.silu, _d_silu

UNGATED: dict[str, tuple[Function, Function]] = {
    "srelu": (lambda a: F.relu(a).square(), lambda a: 2 * F.relu(a)),
    "silu": _SILU,
    "gelu": (F.gelu, _d_gelu),
    "none": (lambda a: a, torch.ones_like),
}
"""Activations and their derivatives; relu's is zero at its kink."""

GATES: dict[str, tuple[Function, Function]] = {
    "swiglu": _SILU,
    "geglu": (lambda a: F.gelu(a, approximate="tanh"), _d_gelu_tanh),
    "reglu": (F.relu, lambda a: (a > 0).to(a.dtype)),
}
"""What multiplies the linear half, of the activated one; "clamped_swiglu" is by itself."""


def split_halves(h: Tensor, glu_layout: str, dim: int = 1) -> tuple[Tensor, Tensor]:
    """h [T, 2I] as its activated and its linear half, each [T, I]; or of any tensor with 2I along `dim`."""
    if glu_layout == "concat":
        a, u = h.chunk(2, dim=dim)
        return a, u
    block = 1 if glu_layout == "interleaved" else INTERLEAVED32_BLOCK
    a, u = h.unflatten(dim, (-1, 2, block)).unbind(dim + 1)
    return a.flatten(dim, dim + 1), u.flatten(dim, dim + 1)


def join_halves(a: Tensor, u: Tensor, glu_layout: str, dim: int = 1) -> Tensor:
    """What `split_halves` splits."""
    if glu_layout == "concat":
        return torch.cat((a, u), dim=dim)
    block = 1 if glu_layout == "interleaved" else INTERLEAVED32_BLOCK
    halves = [half.unflatten(dim, (-1, block)) for half in (a, u)]
    return torch.stack(halves, dim=dim + 1).flatten(dim, dim + 2)


def _gate_and_linear(activation: str, a: Tensor, u: Tensor, p: ActivationParams) -> tuple[Tensor, Tensor]:
    """The two factors of a gated activation."""
    if activation in GATES:
        return GATES[activation][0](a), u
    a = a.clamp(max=p.limit)
    return a * torch.sigmoid(p.alpha * a), u.clamp(-p.limit, p.limit) + p.offset


def activate(h: Tensor, activation: str, glu_layout: str, params: ActivationParams) -> Tensor:
    """The activation of a preactivation h [T, 2I] (gated) or [T, I]: [T, I]."""
    if activation in UNGATED:
        return UNGATED[activation][0](h)
    gate, linear = _gate_and_linear(activation, *split_halves(h, glu_layout), params)
    return gate * linear


def activate_backward(
    dm: Tensor, h: Tensor, activation: str, glu_layout: str, params: ActivationParams
) -> tuple[Tensor, Tensor]:
    """Given the gradient dm [T, I] of the activation of h: (gradient of h, the activation again)."""
    if activation in UNGATED:
        function, slope = UNGATED[activation]
        return dm * slope(h), function(h)
    a, u = split_halves(h, glu_layout)
    gate, linear = _gate_and_linear(activation, a, u, params)
    if activation in GATES:
        d_a, d_u = GATES[activation][1](a) * linear, gate
    else:  # a sigmoid(alpha a) has silu's slope at alpha a; zero where clamped
        d_a = (_d_silu(params.alpha * a) * linear).masked_fill(a > params.limit, 0.0)
        d_u = gate.masked_fill(u.abs() > params.limit, 0.0)
    return join_halves(dm * d_a, dm * d_u, glu_layout), gate * linear
