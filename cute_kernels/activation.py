"""Activation math, in one place, on float32 scalars of a thread.

`a` is the gate (activated half), `u` the linear half. Clamps are selects, not min/max instructions, so that a NaN
stays a NaN as it does in torch. sigmoid costs two MUFU operations (ex2, rcp) and is exact to about 2^-22;
tanh.approx would save one but errs by 2^-11, which float16 outputs would show.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

LOG2_E = 1.4426950408889634
SQRT_2_OVER_PI = 0.7978845608028654
SQRT_HALF = 0.7071067811865476


class ActivationParams(NamedTuple):
    """Run-time floats of clamped_swiglu; the other activations ignore them."""

    limit: Float32
    alpha: Float32
    offset: Float32


def _select(condition: cutlass.Boolean, if_true: Float32, if_false: Float32) -> Float32:
    return Float32(cutlass.select_(condition, if_true, if_false))


def _at_most(x: Float32, bound: Float32) -> Float32:
    return _select(x > bound, bound, x)


def _relu(x: Float32) -> Float32:
    return _select(x < Float32(0.0), Float32(0.0), x)


def _sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-LOG2_E), fastmath=True))


def _silu(x: Float32) -> Float32:
    return x * _sigmoid(x)


def _gelu_tanh(x: Float32) -> Float32:
    """0.5 x (1 + tanh z) = x sigmoid(2 z), z = sqrt(2/pi) (x + 0.044715 x^3)."""
    return x * _sigmoid(x * (Float32(2 * SQRT_2_OVER_PI) + Float32(2 * SQRT_2_OVER_PI * 0.044715) * x * x))


def _gelu(x: Float32) -> Float32:
    half = Float32(0.5) * x
    return half + half * cute.math.erf(x * Float32(SQRT_HALF))


def _clamped_swiglu(a: Float32, u: Float32, p: ActivationParams) -> Float32:
    gate = _at_most(a, p.limit)
    linear = -_at_most(-_at_most(u, p.limit), p.limit)
    return gate * _sigmoid(p.alpha * gate) * (linear + p.offset)


GATED: dict[str, Callable[[Float32, Float32, ActivationParams], Float32]] = {
    "swiglu": lambda a, u, p: _silu(a) * u,
    "clamped_swiglu": _clamped_swiglu,
    "geglu": lambda a, u, p: _gelu_tanh(a) * u,
    "reglu": lambda a, u, p: _relu(a) * u,
}

UNGATED: dict[str, Callable[[Float32], Float32]] = {
    "srelu": lambda a: _relu(a) * _relu(a),
    "silu": _silu,
    "gelu": _gelu,
    "none": lambda a: a,
}
