"""Activations, each written once. Kernels compute them on a thread's float32 scalars, the CPU reference on tensors.

A formula's first argument `m` has the functions to compute with. It is `activation.DEVICE` in kernels, and
`glulam.activations.TORCH` for tensors. Both have

    number(x), which converts a Python number; sigmoid(x), tanh(x), relu(x), reciprocal(x), at_most(x, bound),
    select(condition, if_true, if_false), gelu_tanh(x); with_d_gelu_tanh(x): gelu_tanh and its slope;
    normal(x): the normal distribution's cdf, and sqrt(2 pi) times its density.

The next arguments are `a` and `u`. `a` is the activated half (the gate), or the only argument of an activation without
a gate; `u` is the linear half. A formula's own constants (`Formula.numbers`) follow. Plain Python, since formulas'
names are also needed where there is no compiler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

INV_SQRT_2_PI = 0.3989422804014327


class Number(NamedTuple):
    """A constant of a formula, such as the limit of clamped_swiglu. Operators and modules take the constant at run
    time, as a keyword argument of the same name.

    Attributes:
        default: the value if none is given.
        is_valid: returns True if a formula can compute with a value.
        remedy: the end of the error message for an invalid value: why it is invalid, and what to give instead.
        none: the value that is used if a caller passes None; if `none` itself is None, callers may not pass None.
    """

    default: float
    is_valid: Callable[[float], bool] = lambda value: True
    remedy: str = ""
    none: float | None = None


class Formula(NamedTuple):
    """The definition of an activation.

    Attributes:
        is_gated: True if the activation takes two halves, a and u.
        value: a function of (m, a, u, *numbers), without u if not gated, that returns the activation.
        with_slopes: a function of the same arguments that returns the activation and its derivatives by a and u.
        numbers: the activation's own constants by keyword, in the order in which `value` takes them; at most
            MOST_NUMBERS.
        is_merged: True if kernels that choose among activations at run time include this activation; False if it has
            its own kernels.
    """

    is_gated: bool
    value: Callable[..., Any]
    with_slopes: Callable[..., tuple[Any, ...]]
    numbers: Mapping[str, Number] = {}
    is_merged: bool = True


def _silu(m: Any, a: Any) -> Any:
    return a * m.sigmoid(a)


def _with_d_silu(m: Any, a: Any) -> tuple[Any, Any]:
    sigmoid = m.sigmoid(a)
    silu = a * sigmoid
    return silu, sigmoid + silu * (m.number(1.0) - sigmoid)


def _d_swiglu(m: Any, a: Any, u: Any) -> tuple[Any, Any, Any]:
    silu, slope = _with_d_silu(m, a)
    return silu * u, u * slope, silu


def _clamped_swiglu(m: Any, a: Any, u: Any, limit: Any, alpha: Any, offset: Any) -> Any:
    gate = m.at_most(a, limit)
    linear = -m.at_most(-m.at_most(u, limit), limit)
    return gate * m.sigmoid(alpha * gate) * (linear + offset)


def _d_clamped_swiglu(m: Any, a: Any, u: Any, limit: Any, alpha: Any, offset: Any) -> tuple[Any, Any, Any]:
    """Return clamped_swiglu and its derivatives by a and u. The derivative by an argument that was clamped is 0."""
    zero = m.number(0.0)
    gate = m.at_most(a, limit)
    linear = -m.at_most(-m.at_most(u, limit), limit)
    sigmoid = m.sigmoid(alpha * gate)
    d_gate = sigmoid + alpha * gate * sigmoid * (m.number(1.0) - sigmoid)
    d_a = m.select(a > limit, zero, (linear + offset) * d_gate)
    d_u = m.select(u > limit, zero, m.select(u < -limit, zero, gate * sigmoid))
    return gate * sigmoid * (linear + offset), d_a, d_u


def _d_geglu(m: Any, a: Any, u: Any) -> tuple[Any, Any, Any]:
    gelu, slope = m.with_d_gelu_tanh(a)
    return gelu * u, u * slope, gelu


def _d_reglu(m: Any, a: Any, u: Any) -> tuple[Any, Any, Any]:
    """Return reglu and its derivatives by a and u; the derivative by a is 0 at a = 0."""
    relu = m.relu(a)
    return relu * u, m.select(a > m.number(0.0), u, m.number(0.0)), relu


def _d_srelu(m: Any, a: Any) -> tuple[Any, Any]:
    relu = m.relu(a)
    return relu * relu, m.number(2.0) * relu


def _d_gelu(m: Any, a: Any) -> tuple[Any, Any]:
    """Return gelu = a Phi(a) and its derivative Phi(a) + a phi(a)."""
    cdf, density = m.normal(a)
    return a * cdf, cdf + a * density * m.number(INV_SQRT_2_PI)


def _capped(m: Any, x: Any, cap: Any) -> tuple[Any, Any]:
    """Return cap tanh(x / cap) and its derivative by x. If the cap is infinite, return x and 1."""
    tanh, is_capped = m.tanh(x * m.reciprocal(cap)), cap < m.number(math.inf)
    return m.select(is_capped, cap * tanh, x), m.select(is_capped, m.number(1.0) - tanh * tanh, m.number(1.0))


def _situ(m: Any, a: Any, u: Any, gate_cap: Any, up_cap: Any) -> Any:
    return _capped(m, a, gate_cap)[0] * m.sigmoid(a) * _capped(m, u, up_cap)[0]


def _d_situ(m: Any, a: Any, u: Any, gate_cap: Any, up_cap: Any) -> tuple[Any, Any, Any]:
    (gate, d_gate), (linear, d_linear) = _capped(m, a, gate_cap), _capped(m, u, up_cap)
    sigmoid = m.sigmoid(a)
    gated = gate * sigmoid
    return gated * linear, (d_gate * sigmoid + gated * (m.number(1.0) - sigmoid)) * linear, gated * d_linear


def _is_positive(value: float) -> bool:
    return value > 0.0


FORMULAS: dict[str, Formula] = {
    "swiglu": Formula(True, lambda m, a, u: _silu(m, a) * u, _d_swiglu),
    "clamped_swiglu": Formula(
        True,
        _clamped_swiglu,
        _d_clamped_swiglu,
        {
            "limit": Number(
                7.0, lambda value: value >= 0.0, "values are clamped to [-limit, limit], so give 0 or more"
            ),
            "alpha": Number(1.702),
            "offset": Number(1.0),
        },
    ),
    "geglu": Formula(True, lambda m, a, u: m.gelu_tanh(a) * u, _d_geglu),
    "reglu": Formula(True, lambda m, a, u: m.relu(a) * u, _d_reglu),
    "srelu": Formula(False, lambda m, a: m.relu(a) * m.relu(a), _d_srelu),
    "silu": Formula(False, lambda m, a: _silu(m, a), lambda m, a: _with_d_silu(m, a)),
    "gelu": Formula(False, lambda m, a: a * m.normal(a)[0], _d_gelu),
    "none": Formula(False, lambda m, a: a, lambda m, a: (a, m.number(1.0))),
    "situ": Formula(
        True,
        _situ,
        _d_situ,
        {
            "gate_cap": Number(4.0, _is_positive, "the gate stays within it, so give a number above 0"),
            "up_cap": Number(
                25.0, _is_positive, "the linear half stays within it, so give a number above 0, or None", none=math.inf
            ),
        },
        is_merged=False,  # in merged kernels, its two tanh would take registers from all activations
    ),
}
"""Formulas by name. Append new formulas at the end: compiled kernels that choose at run time know a formula by its
position here."""
NUMBERS: dict[str, Number] = {name: number for one in FORMULAS.values() for name, number in one.numbers.items()}
"""The constants of all formulas, by the keyword by which operators take them."""
MOST_NUMBERS = 3
"""The number of constants that every exported function with an activation takes. No formula may have more."""
