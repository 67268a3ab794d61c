"""Activations in kernels: the device functions by which `formulas` computes, on float32 scalars of a thread.

As in `formulas`, a is the gate (or the only argument, without a gate) and u the linear half.

Clamps are selects, not min/max instructions, so that NaN stays NaN as in torch. sigmoid takes two MUFU operations (ex2,
rcp) and is exact to about 2^-22. tanh.approx would save one operation, but its error is 2^-11, which would be visible
in float16 outputs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from .device.select import select
from .formulas import FORMULAS, MOST_NUMBERS
from .specs import ACTIVATION_FORMS, KINDS

LOG2_E = 1.4426950408889634
SQRT_2_OVER_PI = 0.7978845608028654
SQRT_HALF = 0.7071067811865476
# Abramowitz and Stegun 7.1.26: erfc(z) = exp(-z^2) (c1 t + ... + c5 t^5), t = 1 / (1 + step z), to 1.5e-7.
ERFC_STEP = 0.3275911
ERFC = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
# tanh x = x + x^3 (c1 + c2 x^2 + ...) up to NEAR_0, with a relative error of 2^-24. Beyond NEAR_0, tanh x is 1 minus a
# number less than a half, with an error of 2^-23; near 0 that difference would lose all digits.
NEAR_0 = 0.55
TANH = (-0.33332946598706675, 0.1332072434610987, -0.05267177420885967, 0.01643751419837277)


class ActivationParams(NamedTuple):
    """An activation that is chosen at run time, with its constants (such as the limit of clamped_swiglu).

    Attributes:
        kind: the activation's number in specs.KINDS.
        numbers: MOST_NUMBERS values. The first len(Formula.numbers) are the activation's constants; it ignores the
            other values.
    """

    kind: Int32
    numbers: tuple[Float32, ...]


def no_params() -> ActivationParams:
    """Return placeholder parameters, all 0, for a kernel without activation."""
    return ActivationParams(Int32(0), tuple(Float32(0.0) for _ in range(MOST_NUMBERS)))


def _at_most(x: Float32, bound: Float32) -> Float32:
    return select(x > bound, bound, x)


def _relu(x: Float32) -> Float32:
    return select(x < Float32(0.0), Float32(0.0), x)


def _sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(Float32(1.0) + cute.math.exp2(x * Float32(-LOG2_E), fastmath=True))


def _tanh(x: Float32) -> Float32:
    magnitude, square = cute.arch.fmax(x, -x, nan=True), x * x
    cubic = Float32(0.0)
    for coefficient in reversed(TANH):
        cubic = cubic * square + Float32(coefficient)
    power = cute.math.exp2(magnitude * Float32(2.0 * LOG2_E), fastmath=True)
    far = Float32(1.0) - Float32(2.0) * cute.arch.rcp_approx(Float32(1.0) + power)
    return select(magnitude < Float32(NEAR_0), x + x * square * cubic, select(x < Float32(0.0), -far, far))


def _gelu_tanh(x: Float32) -> Float32:
    """Return gelu by tanh: 0.5 x (1 + tanh z) = x sigmoid(2 z), with z = sqrt(2/pi) (x + 0.044715 x^3)."""
    return x * _sigmoid(x * (Float32(2 * SQRT_2_OVER_PI) + Float32(2 * SQRT_2_OVER_PI * 0.044715) * x * x))


def _normal(x: Float32) -> tuple[Float32, Float32]:
    """Return the normal distribution's cdf at x, with an error of 1e-7, and sqrt(2 pi) times the distribution's
    density. This takes half the instructions of erf."""
    magnitude = cute.arch.fmax(x, -x, nan=True)
    t = cute.arch.rcp_approx(Float32(1.0) + magnitude * Float32(ERFC_STEP * SQRT_HALF))
    density = cute.math.exp2(x * x * Float32(-0.5 * LOG2_E), fastmath=True)
    tail = Float32(0.0)
    for coefficient in reversed(ERFC):
        tail = (tail + Float32(0.5 * coefficient)) * t
    tail = tail * density
    return select(x < Float32(0.0), tail, Float32(1.0) - tail), density


def _with_d_gelu_tanh(x: Float32) -> tuple[Float32, Float32]:
    """Return gelu_tanh and its derivative: x s and s + x s (1 - s) 2 z'. Here s = sigmoid(2 z), with the z of
    `_gelu_tanh`."""
    linear, cubic = Float32(2 * SQRT_2_OVER_PI), Float32(2 * SQRT_2_OVER_PI * 0.044715)
    sigmoid = _sigmoid(x * (linear + cubic * x * x))
    slope = linear + Float32(3.0) * cubic * x * x
    return x * sigmoid, sigmoid + x * sigmoid * (Float32(1.0) - sigmoid) * slope


DEVICE = SimpleNamespace(
    number=Float32, sigmoid=_sigmoid, tanh=_tanh, relu=_relu, reciprocal=cute.arch.rcp_approx, at_most=_at_most,
    select=select, gelu_tanh=_gelu_tanh, with_d_gelu_tanh=_with_d_gelu_tanh, normal=_normal,
)  # fmt: skip
"""The functions (sigmoid, tanh, select, ...) that kernels pass to formulas as their argument `m`."""


def activate(served: str, parts: tuple, params: ActivationParams) -> cute.Tensor:
    """Compute the activation of every element, in float32.

    Args:
        served: a key of specs.ACTIVATION_FORMS, which names one or several activations. If it names several, `params`
            chooses one at run time.
        parts: register tensors of one size: (a, u), the activated and the linear half, or (a,) if the activation has no
            gate.
        params: the activation's number in specs.KINDS, and its constants.

    Returns:
        A float32 register tensor with one value for each element of a.
    """
    return activate_one_of(ACTIVATION_FORMS[served], parts, params)


def activate_one_of(names: tuple[str, ...], parts: tuple, params: ActivationParams) -> cute.Tensor:
    """Compute the activation among `names` that `params` selects at run time. `activate` describes the arguments and
    the result."""
    outputs = cute.make_rmem_tensor(cute.size(parts[0]), Float32)
    _fill_one_of(outputs, names, parts, params)
    return outputs


@cute.jit
def _fill_one_of(outputs: cute.Tensor, names: cutlass.Constexpr, parts: tuple, params: ActivationParams):
    """Fill `outputs` with the activation that `params` selects among `names`.

    There is one branch for all elements together. So each activation runs the same instructions as in a kernel for it
    alone.

    parts: the preactivation: [a, u] with a gate, else [a].
    """
    if const_expr(len(names) == 1):
        _fill(outputs, names[0], parts, params)
    elif params.kind == KINDS[names[0]]:
        _fill(outputs, names[0], parts, params)
    else:
        _fill_one_of(outputs, names[1:], parts, params)


def _fill(outputs: cute.Tensor, name: str, parts: tuple, params: ActivationParams) -> None:
    """Set each element of `outputs` to the activation `name` of the same element of `parts`, [a, u] or [a]."""
    formula = FORMULAS[name]
    numbers = params.numbers[: len(formula.numbers)]
    for i in range(cute.size(outputs)):
        outputs[i] = formula.value(DEVICE, *(part[i] for part in parts), *numbers)


def slopes(name: str, parts: list[Float32], params: ActivationParams) -> tuple[Float32, ...]:
    """Return the value of an activation and its derivatives: a tuple of the value, the derivative by a and, with a
    gate, the derivative by u.

    name: the activation. parts: [a, u] or [a].
    """
    formula = FORMULAS[name]
    return formula.with_slopes(DEVICE, *parts, *params.numbers[: len(formula.numbers)])
