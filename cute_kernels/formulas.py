"""Activations, each written once: a kernel computes them of a thread's float32 scalars, the CPU reference of tensors.

A formula is given what computes, `m`: `activation.DEVICE` in kernels, `glulam.activations.TORCH` for tensors. Both have

    number(x), of a Python number; sigmoid(x), relu(x), at_most(x, bound), select(condition, if_true, if_false),
    gelu_tanh(x), and with_d_gelu_tanh(x), with its slope,
    normal(x): the normal distribution's cdf, and sqrt(2 pi) times its density.

`a` is the activated half (the gate), or all there is, `u` the linear half, `p` the numbers of clamped_swiglu. Plain
Python: names are asked for where no compiler is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

INV_SQRT_2_PI = 0.3989422804014327


class Formula(NamedTuple):
    """value: of (m, a[, u], p). with_slopes: of the same, the value and its derivatives by a[ and by u]."""

    value: Callable[..., Any]
    with_slopes: Callable[..., tuple[Any, ...]]


def _silu(m: Any, a: Any) -> Any:
    return a * m.sigmoid(a)


def _with_d_silu(m: Any, a: Any) -> tuple[Any, Any]:
    sigmoid = m.sigmoid(a)
    silu = a * sigmoid
    return silu, sigmoid + silu * (m.number(1.0) - sigmoid)


def _d_swiglu(m: Any, a: Any, u: Any, p: Any) -> tuple[Any, Any, Any]:
    silu, slope = _with_d_silu(m, a)
    return silu * u, u * slope, silu


def _clamped_swiglu(m: Any, a: Any, u: Any, p: Any) -> Any:
    gate = m.at_most(a, p.limit)
    linear = -m.at_most(-m.at_most(u, p.limit), p.limit)
    return gate * m.sigmoid(p.alpha * gate) * (linear + p.offset)


def _d_clamped_swiglu(m: Any, a: Any, u: Any, p: Any) -> tuple[Any, Any, Any]:
    """Zero where it clamps."""
    zero = m.number(0.0)
    gate = m.at_most(a, p.limit)
    linear = -m.at_most(-m.at_most(u, p.limit), p.limit)
    sigmoid = m.sigmoid(p.alpha * gate)
    d_gate = sigmoid + p.alpha * gate * sigmoid * (m.number(1.0) - sigmoid)
    d_a = m.select(a > p.limit, zero, (linear + p.offset) * d_gate)
    d_u = m.select(u > p.limit, zero, m.select(u < -p.limit, zero, gate * sigmoid))
    return gate * sigmoid * (linear + p.offset), d_a, d_u


def _d_geglu(m: Any, a: Any, u: Any, p: Any) -> tuple[Any, Any, Any]:
    gelu, slope = m.with_d_gelu_tanh(a)
    return gelu * u, u * slope, gelu


def _d_reglu(m: Any, a: Any, u: Any, p: Any) -> tuple[Any, Any, Any]:
    """Zero at the kink."""
    relu = m.relu(a)
    return relu * u, m.select(a > m.number(0.0), u, m.number(0.0)), relu


def _d_srelu(m: Any, a: Any, p: Any) -> tuple[Any, Any]:
    relu = m.relu(a)
    return relu * relu, m.number(2.0) * relu


def _d_gelu(m: Any, a: Any, p: Any) -> tuple[Any, Any]:
    """gelu = a Phi(a); derivative Phi(a) + a phi(a)."""
    cdf, density = m.normal(a)
    return a * cdf, cdf + a * density * m.number(INV_SQRT_2_PI)


GATED: dict[str, Formula] = {
    "swiglu": Formula(lambda m, a, u, p: _silu(m, a) * u, _d_swiglu),
    "clamped_swiglu": Formula(_clamped_swiglu, _d_clamped_swiglu),
    "geglu": Formula(lambda m, a, u, p: m.gelu_tanh(a) * u, _d_geglu),
    "reglu": Formula(lambda m, a, u, p: m.relu(a) * u, _d_reglu),
}

UNGATED: dict[str, Formula] = {
    "srelu": Formula(lambda m, a, p: m.relu(a) * m.relu(a), _d_srelu),
    "silu": Formula(lambda m, a, p: _silu(m, a), lambda m, a, p: _with_d_silu(m, a)),
    "gelu": Formula(lambda m, a, p: a * m.normal(a)[0], _d_gelu),
    "none": Formula(lambda m, a, p: a, lambda m, a, p: (a, m.number(1.0))),
}
