"""The way from a call to its differentiable form."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from ..call import Call
from ..signature import any_requires_grad, refuse_gradients, refuse_out
from . import fused_mlp, mlp, mm

APPLY: dict[str, Callable[..., Any]] = {mm.OP: mm.apply, mlp.OP: mlp.apply}
PLAN: dict[str, Callable[[Any], Any]] = {mlp.OP: fused_mlp.make_plan}
"""Operators of which common calls have a plan for forward and backward together."""


def requires_grad(call: Call) -> bool:
    """Whether an argument of the call requires a gradient."""
    names = (*call.matrices, *call.weights, *call.biases, *call.scales)
    return any_requires_grad(*(getattr(call, name) for name in names))


def differentiate(
    call: Any, key: Hashable = None, plan: Any = None, failure: Exception | None = None, **how: Any
) -> Any:
    """The result of a call of which an argument requires a gradient, with a backward.

    Args:
        call: of any operator.
        key, plan, failure: see `Call.settle`.
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
        if plan is not None and failure is not None:
            raise failure
        if key is not None and call.op in PLAN and (made := PLAN[call.op](call)) is not None:
            call.plans.keep(key, made)
            return call.run(made)
        return APPLY[call.op](call, **how)
    except Exception:
        call.check()  # so that the error names this operator and its arguments, not those that it is made of
        call.check_addresses()
        raise
