"""Activation functions of the CPU reference, their derivatives, and how two halves lie along 2I columns.

That is the columns of a gated layer, as `split_halves` splits them.

Plain torch operators, in whatever dtype they are given.
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


def _clamped_swiglu(a: Tensor, u: Tensor, p: ActivationParams) -> Tensor:
    gate = a.clamp(max=p.limit)
    linear = u.clamp(-p.limit, p.limit) + p.offset
    return gate * torch.sigmoid(p.alpha * gate) * linear


GATED: dict[str, Callable[[Tensor, Tensor, ActivationParams], Tensor]] = {
    "swiglu": lambda a, u, p: F.silu(a) * u,
    "clamped_swiglu": _clamped_swiglu,
    "geglu": lambda a, u, p: F.gelu(a, approximate="tanh") * u,
    "reglu": lambda a, u, p: F.relu(a) * u,
}

UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "srelu": lambda a: F.relu(a).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "none": lambda a: a,
}


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


def activate(h: Tensor, activation: str, glu_layout: str, params: ActivationParams) -> Tensor:
    """The activation of a preactivation h [T, 2I] (gated) or [T, I]: [T, I]."""
    if activation in GATED:
        return GATED[activation](*split_halves(h, glu_layout), params)
    return UNGATED[activation](h)


def _with_d_silu(a: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = torch.sigmoid(a)
    return a * sigmoid, sigmoid * (1 + a * (1 - sigmoid))


def _with_d_gelu_tanh(a: Tensor) -> tuple[Tensor, Tensor]:
    scale = math.sqrt(2 / math.pi)
    tanh = torch.tanh(scale * (a + 0.044715 * a * a * a))
    slope = scale * (1 + 3 * 0.044715 * a * a)
    return 0.5 * a * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * a * (1 - tanh * tanh) * slope


def _with_d_gelu(a: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(a * math.sqrt(0.5)))
    pdf = torch.exp(-0.5 * a * a) / math.sqrt(2 * math.pi)
    return a * cdf, cdf + a * pdf


def _gate(act: Tensor, slope: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return act * u, slope * u, act


def _d_clamped_swiglu(a: Tensor, u: Tensor, p: ActivationParams) -> tuple[Tensor, Tensor, Tensor]:
    gate, linear = a.clamp(max=p.limit), u.clamp(-p.limit, p.limit) + p.offset
    sigmoid = torch.sigmoid(p.alpha * gate)
    slope = sigmoid * (1 + p.alpha * gate * (1 - sigmoid))
    d_a = (slope * linear).masked_fill(a > p.limit, 0.0)
    return gate * sigmoid * linear, d_a, (gate * sigmoid).masked_fill(u.abs() > p.limit, 0.0)


GATED_BACKWARD: dict[str, Callable[[Tensor, Tensor, ActivationParams], tuple[Tensor, Tensor, Tensor]]] = {
    "swiglu": lambda a, u, p: _gate(*_with_d_silu(a), u),
    "clamped_swiglu": _d_clamped_swiglu,
    "geglu": lambda a, u, p: _gate(*_with_d_gelu_tanh(a), u),
    "reglu": lambda a, u, p: _gate(F.relu(a), (a > 0).to(a.dtype), u),
}
"""The activation and its derivatives by a and by u; zero where clamped, and at relu's kink."""

UNGATED_BACKWARD: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "srelu": lambda a: (F.relu(a).square(), 2 * F.relu(a)),
    "silu": _with_d_silu,
    "gelu": _with_d_gelu,
    "none": lambda a: (a, torch.ones_like(a)),
}


def activate_backward(
    dm: Tensor, h: Tensor, activation: str, glu_layout: str, params: ActivationParams
) -> tuple[Tensor, Tensor]:
    """Given the gradient dm [T, I] of the activation of h: (gradient of h, the activation again)."""
    if activation in GATED_BACKWARD:
        act, d_a, d_u = GATED_BACKWARD[activation](*split_halves(h, glu_layout), params)
        return join_halves(dm * d_a, dm * d_u, glu_layout), act
    act, slope = UNGATED_BACKWARD[activation](h)
    return dm * slope, act
