"""Activation functions of the CPU reference, and how the two halves of a gated layer lie along 2I columns.

Plain torch operators, in whatever dtype they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

INTERLEAVED32_BLOCK = 32


class ActivationParams(NamedTuple):
    """Run-time numbers of clamped_swiglu; the other activations ignore them."""

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0


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


def split_halves(h: Tensor, glu_layout: str) -> tuple[Tensor, Tensor]:
    """h [T, 2I] as its activated and its linear half, each [T, I]."""
    if glu_layout == "concat":
        a, u = h.chunk(2, dim=1)
        return a, u
    block = 1 if glu_layout == "interleaved" else INTERLEAVED32_BLOCK
    blocks = h.unflatten(1, (-1, 2, block))
    return blocks[:, :, 0].flatten(1), blocks[:, :, 1].flatten(1)


def activate(h: Tensor, activation: str, glu_layout: str, params: ActivationParams) -> Tensor:
    """The activation of a preactivation h [T, 2I] (gated) or [T, I]: [T, I]."""
    if activation in GATED:
        return GATED[activation](*split_halves(h, glu_layout), params)
    return UNGATED[activation](h)
