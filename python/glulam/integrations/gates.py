"""Which of Glulam's activations a foreign function is, told by what it computes and not by its name.

A function is asked for its values at gates and ups far apart, in float64, and is an activation where it has that one's
values at all of them. A clamped SwiGLU's numbers follow from three values: with s(g) = sigmoid(alpha g) g,

    f(1, 0) = s(1) offset,  f(1, 1) = s(1) (1 + offset),  f(1, far) = s(1) (limit + offset)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.specs import GATED, GLU_LAYOUTS, UNGATED

from ..activations import ActivationParams, activate, join_halves

Function = Callable[[Tensor], Tensor]

CLAMPED = "clamped_swiglu"
FAR = 1e4  # beyond any limit of a clamp
POINTS, REACH = 64, 30.0
TOLERANCE = 1e-5  # functions may compute in float32
DIGITS = 9  # of what follows from values in float64


class Form(NamedTuple):
    """An activation as operators are told of it."""

    activation: str
    glu_layout: str
    params: ActivationParams


def gate_of(function: Function, device: torch.device) -> Form | None:
    """The gated activation [T, 2I] -> [T, I] that a function is; None where it is none that Glulam has."""
    for layout in GLU_LAYOUTS:
        plain = (Form(name, layout, ActivationParams()) for name in GATED if name != CLAMPED)
        if found := _equal(function, itertools.chain(plain, _clamped(function, layout, device)), device):
            return found
    return None


def activation_of(function: Function, device: torch.device) -> Form | None:
    """The same of one without a gate, [T, I] -> [T, I]."""
    return _equal(function, (Form(name, "concat", ActivationParams()) for name in UNGATED), device)


def _equal(function: Function, forms: Iterable[Form], device: torch.device) -> Form | None:
    gate = torch.linspace(-REACH, REACH, 2 * POINTS, dtype=torch.float64, device=device)
    # Interleaved layouts have blocks of 32: 64 columns are enough to tell them apart.
    h = torch.stack([gate, gate.flip(0) * 1.7, gate.roll(POINTS // 3) + 0.25])
    got = function(h)
    for form in forms:
        wanted = activate(h, form.activation, form.glu_layout, form.params)
        if got.shape == wanted.shape and torch.allclose(got.to(wanted.dtype), wanted, TOLERANCE, TOLERANCE):
            return form
    return None


def _clamped(function: Function, layout: str, device: torch.device) -> Iterator[Form]:
    """The clamped SwiGLU of a layout that has the function's values at three points, if there is one."""

    def at(gate: float, up: float) -> float:
        a, u = (torch.full((1, POINTS), value, dtype=torch.float64, device="cpu") for value in (gate, up))
        return float(function(join_halves(a, u, layout).to(device))[0, 0])

    at_zero, at_one, at_far = at(1.0, 0.0), at(1.0, 1.0), at(1.0, FAR)
    slope = at_one - at_zero
    if 0.0 < slope < 1.0:
        offset = at_zero / slope
        reached = at_far / slope - offset
        numbers = math.inf if reached > FAR / 2 else reached, math.log(slope / (1.0 - slope)), offset
        yield Form(CLAMPED, layout, ActivationParams(*(round(number, DIGITS) for number in numbers)))
