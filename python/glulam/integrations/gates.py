"""Recognition of another package's activation function by the values that it computes, and not by its name.

The function is called in float64, with gates and up-projections up to `FAR` in magnitude. If it returns the values of
one of Glulam's activations for all inputs, in tensors with several numbers of rows and columns, it is that activation.

The parameters (limit, alpha, ...) of a clamped SwiGLU follow from three values. With f(gate, up) and
s(g) = sigmoid(alpha g) g:

    f(1, 0) = s(1) offset,  f(1, 1) = s(1) (1 + offset),  f(1, far) = s(1) (limit + offset)

The parameters of situ, a SwiGLU with caps, follow from two values, since sigmoid and tanh are 1 far from 0:

    f(far, 1) = gate_cap up_cap tanh(1 / up_cap),  f(far, far) = gate_cap up_cap
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from cute_kernels.formulas import FORMULAS
from cute_kernels.specs import GATED, GLU_LAYOUTS, UNGATED

from ..activations import Activation, activate, join_halves, split_halves

Function = Callable[[Tensor], Tensor]

CLAMPED, CAPPED = "clamped_swiglu", "situ"
FAR = 1e8  # beyond any limit of a clamp; its cube is finite in float32
UNCLAMPED = 0.999 * FAR
POINTS, REACH = 64, 30.0
NEAREST_FAR = 4.0  # beyond offsets: float32 loses digits where up + offset is nearly 0 and the gate is large
UP_OF_ONE = 10.0  # up to this value of up, the tolerance is absolute
FAR_ROWS, MANY_ROWS = 16, 300
TOLERANCE = 1e-5  # functions may compute in float32
DIGITS = 9  # to which numbers derived from float64 values are rounded


def gate_of(function: Function, device: torch.device) -> Activation | None:
    """Find the gated activation that a function [T, 2I] -> [T, I] computes; None: Glulam has no such activation."""
    for layout in GLU_LAYOUTS:
        plain = (Activation.named(name, layout) for name in GATED if not FORMULAS[name].numbers)
        fitted = (fit(function, layout, device) for fit in (_clamped, _capped))
        if found := _equal(function, itertools.chain(plain, *fitted), device):
            return found
    return None


def activation_of(function: Function, device: torch.device) -> Activation | None:
    """Find the ungated activation that a function [T, I] -> [T, I] computes; None: Glulam has no such activation."""
    return _equal(function, (Activation.named(name) for name in UNGATED), device)


def _equal(function: Function, candidates: Iterable[Activation], device: torch.device) -> Activation | None:
    probes = _probes(device)
    values = [function(h) for h in probes]
    for candidate in candidates:
        if all(_is_value(got, h, candidate) for h, got in zip(probes, values, strict=True)):
            return candidate
    return None


def _probes(device: torch.device) -> list[Tensor]:
    """Return test inputs: several preactivations [T, 2I], with different T and I.

    Some rows have values near 0, the others a mixture of far values of either sign.
    """
    where: dict[str, Any] = {"dtype": torch.float64, "device": device}
    near = torch.linspace(-REACH, REACH, 2 * POINTS, **where)
    sizes = torch.logspace(math.log10(NEAREST_FAR), math.log10(FAR), POINTS, **where)
    far, generator = torch.cat((sizes, -sizes)), torch.Generator("cpu").manual_seed(0)
    orders = [torch.randperm(len(far), generator=generator, device="cpu").to(device) for _ in range(FAR_ROWS)]
    mixed = [far[order] for order in orders]
    # Interleaved layouts have blocks of up to 32: 64 columns are enough to tell the layouts apart.
    h = torch.stack([near, near.flip(0) * 1.7, near.roll(POINTS // 3) + 0.25, *mixed])
    return [h, h[:1], h.repeat(-(-MANY_ROWS // len(h)), 1), torch.cat((h, h.flip(0)), dim=1)]


def _is_value(got: Tensor, h: Tensor, candidate: Activation) -> bool:
    """Return True if `got` is, within the tolerance, the result of the activation `candidate` for preactivations h."""
    wanted = activate(h, *candidate)
    if got.shape != wanted.shape:
        return False
    scale = torch.ones_like(wanted)
    if candidate.name in GATED:  # 1e-7 of a gate's value in float32 becomes 1e-7 of up
        scale = (split_halves(h, candidate.glu_layout)[1].abs() / UP_OF_ONE).clamp(min=1.0)
    return torch.allclose(got.to(wanted.dtype) / scale, wanted / scale, TOLERANCE, TOLERANCE)


def _clamped(function: Function, layout: str, device: torch.device) -> Iterator[Activation]:
    """Yield the clamped SwiGLU of this layout that agrees with the function at three points; nothing if none does."""
    at = functools.partial(_value, function, layout, device, 1.0)
    at_zero, at_one, at_far = at(0.0), at(1.0), at(FAR)
    slope = at_one - at_zero
    if 0.0 < slope < 1.0:
        offset = at_zero / slope
        reached = at_far / slope - offset
        numbers = math.inf if reached > UNCLAMPED else reached, math.log(slope / (1.0 - slope)), offset
        yield Activation(CLAMPED, layout, tuple(round(number, DIGITS) for number in numbers))


def _capped(function: Function, layout: str, device: torch.device) -> Iterator[Activation]:
    """Yield the situ of this layout that agrees with the function at two points; nothing if none does."""
    at = functools.partial(_value, function, layout, device, FAR)
    at_one, at_far = at(1.0), at(FAR)
    if at_one > 0.0 and 1.0 < at_far / at_one < math.inf:
        up = 1.0 / math.atanh(at_one / at_far)
        numbers = at_far / min(up, FAR), up
        own = tuple(math.inf if number > UNCLAMPED else round(number, DIGITS) for number in numbers)
        yield Activation(CAPPED, layout, own)


def _value(function: Function, layout: str, device: torch.device, gate: float, up: float) -> float:
    a, u = (torch.full((1, POINTS), value, dtype=torch.float64, device="cpu") for value in (gate, up))
    return float(function(join_halves(a, u, layout).to(device))[0, 0])
