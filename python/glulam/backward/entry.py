"""The way from a call to its differentiable form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..call import Call
from ..signature import any_requires_grad, refuse_gradients, refuse_out
from . import mlp, mm

APPLY: dict[str, Callable[..., Any]] = {mm.OP: mm.apply, mlp.OP: mlp.apply}


def requires_grad(call: Call) -> bool:
    """Whether an argument of the call requires a gradient."""
    names = (*call.matrices, *call.weights, *call.biases, *call.scales)
    return any_requires_grad(*(getattr(call, name) for name in names))


def differentiate(call: Any, **how: Any) -> Any:
    """The result of a call of which an argument requires a gradient, with a backward.

    Args:
        call: of any operator.
        **how: grad_of_w (grouped_mm), grad_of_w1, grad_of_w2 (grouped_mlp): other ways to make a weight's gradient.

    Raises:
        GradientNotSupported: the operator has no gradient, or `out` is given.
        ValueError, TypeError: an argument does not fit.
    """
    if call.op not in APPLY:
        refuse_gradients(call.op, *(getattr(call, name) for name in (*call.matrices, *call.weights, *call.biases)))
        refuse_gradients(call.op, *(getattr(call, name) for name in call.scales))
    refuse_out(call.op, call.out)
    try:
        return APPLY[call.op](call, **how)
    except Exception:
        call.check()  # so that the error names this operator and its arguments, not those that it is made of
        call.check_addresses()
        raise
