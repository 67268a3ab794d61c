"""The way from a call to its differentiable form."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ..calls.call import Call
from ..calls.checks import any_requires_grad, refuse_out, refuse_rows
from ..calls.quantized import Quantized
from ..errors import ARGUMENT_ERRORS, GradientNotSupported
from ..host.experts import GateUp
from ..ops.grouped_glu import GroupedGluCall
from ..ops.grouped_mlp import GroupedMlpCall
from ..ops.grouped_mm import GroupedMmCall
from ..ops.quantized_mlp import QuantizedMlpCall
from ..ops.quantized_mm import QuantizedMmCall
from ..ops.quantized_weights import with_parts_as_read
from . import frozen, glu, planned
from .function import Formula, apply
from .mm import MmPlan
from .parts import ORDINARY, Targets, check_targets
from .planned_mlp import MlpPlan

HOW: dict[type[Call], type[planned.TrainingPlan] | Formula] = {
    GroupedMmCall: MmPlan,
    GroupedGluCall: glu.FORMULA,
    GroupedMlpCall: MlpPlan,
    QuantizedMlpCall: MlpPlan,
    QuantizedMmCall: frozen.MM,
}
"""How calls are differentiated: common ones by a plan for forward and backward together, others by a formula."""


def has_data_gradients_apart(call: Call) -> bool:
    """Whether no plan serves a call, since x's gradient is a call of its own: of an MLP whose weights lie otherwise."""
    return isinstance(call, GroupedMlpCall) and (call.transpose_w or isinstance(call.w1, GateUp))


def requires_grad(call: Call) -> bool:
    """Whether an argument of the call requires a gradient."""
    names = (*call.matrices, *call.weights, *call.biases, *call.scales)
    return any_requires_grad(*(getattr(call, name) for name in names))


def differentiate(call: Any, key: Hashable = None, targets: Targets = ORDINARY) -> Any:
    """The result of a call of which an argument requires a gradient, with a backward.

    Args:
        call: of any operator.
        key: see `Call.answer`.
        targets: where the result and gradients go; weights are "w" (grouped_mm), "w1" and "w2" (grouped_mlp).

    Raises:
        GradientNotSupported: the operator has no gradient, or `out` is given.
        ValueError, TypeError: an argument does not fit.
    """
    if call.indices is not None and not call.of_tokens:
        refuse_rows(call.op)
    if isinstance(call, GroupedMmCall) and isinstance(call.w, GateUp):
        raise GradientNotSupported(
            f"{call.op}: an argument requires a gradient, and a GateUp has none here; call it under torch.no_grad()"
        )
    how = next((HOW[kind] for kind in type(call).__mro__ if kind in HOW), None)
    if how is None or isinstance(call, Quantized):  # whose weights may be frozen
        call.refuse_gradients()
    refuse_out(call.op, call.out)
    assert how is not None  # of the others, none was left
    try:
        if targets is not ORDINARY:
            call.check_plain()
            check_targets(call, targets)
        if isinstance(call, Quantized) and call.is_frozen and not call.is_traced():
            call = with_parts_as_read(call)
        if isinstance(how, Formula):
            return apply(call, how, targets)
        if not has_data_gradients_apart(call):
            result = planned.run(call, key, targets, how)
            if result is not NotImplemented:
                return result
        return apply(call, how.formula, targets)
    except ARGUMENT_ERRORS:
        call.judge()  # so that the error names this operator and its arguments, not those that it is made of
        raise


Call.with_backward = staticmethod(differentiate)
