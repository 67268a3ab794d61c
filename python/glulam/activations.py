"""What activations of the CPU reference are made of, and how two halves lie along 2I columns.

Those are the columns of a gated layer, as `split_halves` splits them. Plain torch operators, in whatever dtype they are
given; `cute_kernels.formulas` has the activations themselves.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.formulas import GATED, UNGATED
from cute_kernels.specs import KINDS, LAYOUTS

INTERLEAVED32_BLOCK = 32
FORMULAS = {**GATED, **UNGATED}


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


def _at_most(x: Tensor, bound: float) -> Tensor:
    return x.clamp(max=bound)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _with_d_gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = math.sqrt(2 / math.pi)
    tanh = torch.tanh(scale * (x + 0.044715 * x * x * x))
    slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * x * x)
    return _gelu_tanh(x), slope


def _normal(x: Tensor) -> tuple[Tensor, Tensor]:
    return 0.5 * (1 + torch.erf(x * math.sqrt(0.5))), torch.exp(-0.5 * x * x)


TORCH = SimpleNamespace(
    number=float, sigmoid=torch.sigmoid, relu=F.relu, at_most=_at_most, select=torch.where, gelu_tanh=_gelu_tanh,
    with_d_gelu_tanh=_with_d_gelu_tanh, normal=_normal,
)  # fmt: skip
"""What formulas compute with."""


def is_in_halves(activation: str, glu_layout: str) -> bool:
    """Return whether the first half of h's columns, and so of w1's rows, is a gate and the second the up-projection."""
    return glu_layout == "concat" and activation in GATED


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


def _parts(h: Tensor, activation: str, glu_layout: str) -> tuple[Tensor, ...]:
    return split_halves(h, glu_layout) if activation in GATED else (h,)


def activate(h: Tensor, activation: str, glu_layout: str, params: ActivationParams) -> Tensor:
    """The activation of a preactivation h [T, 2I] (gated) or [T, I]: [T, I]."""
    value: Tensor = FORMULAS[activation].value(TORCH, *_parts(h, activation, glu_layout), params)
    return value


def activate_backward(
    dm: Tensor, h: Tensor, activation: str, glu_layout: str, params: ActivationParams
) -> tuple[Tensor, Tensor]:
    """Given the gradient dm [T, I] of the activation of h: (gradient of h, the activation again)."""
    value, *slopes = FORMULAS[activation].with_slopes(TORCH, *_parts(h, activation, glu_layout), params)
    first, *others = (dm * slope for slope in slopes)
    return join_halves(first, others[0], glu_layout) if others else first, value
