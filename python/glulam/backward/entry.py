"""`differentiate`: computes a call whose gradient is recorded.

It chooses the operator's path (a description of forward and gradients, see `path.Path`), checks the caller's buffers,
and runs a planned step if the call is common, else public operators.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

from ..calls.call import Call
from ..calls.checks import any_requires_grad, refuse_out, refuse_rows
from ..calls.quantized import Quantized
from ..calls.sharding import refuse_dtensors
from ..errors import ARGUMENT_ERRORS, GradientNotSupported
from ..host.experts import GateUp
from ..ops.grouped_glu import GroupedGluCall
from ..ops.grouped_mlp import GroupedMlpCall
from ..ops.grouped_mm import GroupedMmCall
from ..ops.quantized_mlp import QuantizedMlpCall
from ..ops.quantized_mm import QuantizedMmCall
from ..ops.quantized_weights import with_parts_as_read
from . import planned
from .frozen import FrozenMm
from .function import apply
from .glu import GluPath
from .mm import MmPath
from .parts import ORDINARY, Targets, check_targets
from .path import Path, grouped_by
from .paths import path_of

PATHS: dict[type[Call], Callable[[Any], Path]] = {
    GroupedMmCall: MmPath.of,
    GroupedGluCall: GluPath.of,
    GroupedMlpCall: path_of,
    QuantizedMlpCall: path_of,
    QuantizedMmCall: FrozenMm.of,
}
"""{class of call: function that makes the `Path` of a call}, for all differentiable grouped operators."""


def requires_grad(call: Call) -> bool:
    """Return True if an argument of the call requires a gradient."""
    names = (*call.matrices, *call.weights, *call.biases, *call.scales)
    return any_requires_grad(*(getattr(call, name) for name in names))


def differentiate(call: Any, key: Hashable = None, targets: Targets = ORDINARY) -> Any:
    """Compute a call with an argument that requires a gradient; return a result that autograd can differentiate.

    Args:
        call: a call of any operator.
        key: key under which the planned step is kept for later calls. None: none is kept.
        targets: buffers for the result and gradients. Keys of `targets.weights` are "w" (grouped_mm), or "w1" and "w2"
            (grouped_mlp).

    Raises:
        GradientNotSupported: the operator is not differentiable, or not for these arguments, or `out` is given.
        ValueError, TypeError: an argument does not fit.
    """
    if call.indices is not None and not call.of_tokens:
        refuse_rows(call.op)
    if isinstance(call, GroupedMmCall) and isinstance(call.w, GateUp):
        raise GradientNotSupported(
            f"{call.op}: an argument requires a gradient, and a GateUp has none here; call it under torch.no_grad()"
        )
    path_of_kind = next((PATHS[kind] for kind in type(call).__mro__ if kind in PATHS), None)
    if path_of_kind is None or isinstance(call, Quantized):  # weights of a Quantized call may be frozen
        call.refuse_gradients()
    refuse_out(call.op, call.out)
    assert path_of_kind is not None  # refuse_gradients raised for operators without a path
    try:
        if targets is not ORDINARY:
            refuse_dtensors(
                call,
                "the result or a gradient goes into a buffer (out, grad_input, main_grad) or is delayed (delay_wgrad)",
            )
            call.check_plain()
            check_targets(call, targets)
        as_called = call
        if isinstance(call, Quantized) and call.is_frozen and not call.is_traced():
            call = with_parts_as_read(call)
        path = dataclasses.replace(path_of_kind(call), grouped_by=grouped_by(call))
        result = planned.run(call, key, targets, path, as_called)
        return apply(call, path, targets) if result is NotImplemented else result
    except ARGUMENT_ERRORS:
        call.check_after_failure()  # so that the error names this operator and its arguments, not those of its parts
        raise


Call.with_backward = staticmethod(differentiate)
