"""Registration of the operators as `torch.ops.glulam.*`.

With it, traces (torch.compile, torch.export, fake tensors) see each operator as one node. Eager calls do not use it.
The registered schemas differ from the public functions in three points:
- Schemas have no type "tensor or list". So weights, biases and their gradients are lists of tensors: a packed tensor is
a
  list of one tensor, recognised by its rank, and a GateUp (gate and up-projection in two tensors) is a list of two.
- Schemas have no optional results. So an operator is registered once for each set of results. Operators named `_out`
  write a buffer, and return only the results that are not in the buffer.
- Operators whose kernels take addresses (`addressed`) return a list of the requested results instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import mhc
from .backward.entry import requires_grad
from .calls import front
from .calls.call import Call
from .calls.roles import ROLES
from .formats.mxfp8 import quantize
from .host.device import PLAIN_TENSORS
from .host.experts import GateUp
from .host.groups import OF_A_TRACE, part_of
from .layer import choices, few_tokens
from .ops import adapted, gate, mlp_training

DEFINED_IN = adapted, choices, few_tokens, gate, mhc, mlp_training, quantize
"""Modules that register their operators when they are imported; they import the modules of all other operators."""
CALLS: tuple[type[Call], ...] = tuple(kind for kind in front.OPERATORS if kind.is_torch_op)


class TorchOp(NamedTuple):
    """One torch operator: a Call class with a fixed set of results.

    Attributes:
        call_type: the Call class.
        arguments, returns: schema text of the torch operator's arguments and results.
        fixed: arguments of the Call that are fixed by the choice of results.
    """

    call_type: type[Call]
    arguments: str
    returns: str
    fixed: dict[str, Any]

    def pending(self, values: tuple[Any, ...], named: dict[str, Any]) -> Call:
        """Return the Call for the torch operator's arguments.

        torch passes some arguments by position (`values`) and others by name (`named`).
        """
        given = {**dict(zip(self.names, values, strict=False)), **named}
        if "numbers" in given:
            given["numbers"] = tuple(given["numbers"])  # keys that contain it are hashed
        for names, rank in ((self.call_type.weights, 3), (self.call_type.biases, 2), (self.call_type.gradients, 3)):
            for name in names:
                if name in given:
                    given[name] = _unlisted(given[name], rank)
        return self.call_type(**self.fixed, **given)

    @property
    def names(self) -> list[str]:
        return [argument.split()[-1] for argument in self.arguments.split(", ")]


def _torch_ops(kind: type[Call]) -> dict[str, TorchOp]:
    """Return the torch operators of a Call class by name.

    For each set of results there is one without and, if the class has outputs, one with an `out` buffer.
    """
    found = {}
    for variant, count, fixed in _variants(kind):
        out_fixed = {**fixed, **kind.fixed_with_out}
        if kind.outputs:
            fixed = {**fixed, **dict.fromkeys(kind.outputs), **kind.fixed_without_out}
        found[f"{kind.torch_op}{variant}"] = _torch_op(kind, _tensors(count), fixed)
        if kind.outputs and kind.has_torch_out:
            others = 0 if count is None else count - 1
            found[f"{kind.torch_op}{variant}_out"] = _torch_op(kind, _tensors(others), out_fixed)
    return found


def _variants(kind: type[Call]) -> list[tuple[str, int | None, dict[str, Any]]]:
    """Return the sets of results of a Call class.

    Each entry is (suffix of the torch operator's name, number of results or None for a list, arguments that are fixed
    by the choice of this set).
    """
    if kind.returns_list():
        return [("", None, {})]
    count, optional = sum(made.returned for made in kind.definition.results), kind.optional_results()
    without = [("", count - 1, {made.when: False}) for made in optional]
    return [*without, *[(made.torch_suffix, count, {made.when: True}) for made in optional]] or [("", count, {})]


def _tensors(count: int | None) -> str:
    """Return schema text for this number of tensors; None: for a list of tensors."""
    if count is None:
        return "Tensor[]"
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def _type(kind: type[Call], name: str) -> str:
    """Return the schema type of an argument: the Call class's own type for it, or else the type of its role."""
    if name in kind.gradients:
        return "Tensor(a!)[]"
    return kind.torch_types[name] if name in kind.torch_types else ROLES[name].schema


def _torch_op(kind: type[Call], returns: str, fixed: dict[str, Any]) -> TorchOp:
    names = [name for name in kind.names if name not in fixed and name not in kind.outputs]
    arguments = [f"{_type(kind, name)} {name}" for name in names]
    written = [f"{_type(kind, name)} {name}" for name in kind.outputs if name not in fixed]
    return TorchOp(kind, ", ".join([*arguments, *written]), returns, fixed)


TORCH_OPS: dict[str, TorchOp] = {name: operator for kind in CALLS for name, operator in _torch_ops(kind).items()}
_library = torch.library.Library("glulam", "DEF")


def call(pending: Call) -> Any:
    """Run a Call through torch's dispatcher, so that traces record it."""
    operator = TORCH_OPS[pending.torch_name]
    arguments = {name: value for name, value in pending.arguments().items() if name in operator.names}
    for listed in (*pending.weights, *pending.biases, *pending.gradients):
        if isinstance(arguments.get(listed), Tensor):
            arguments[listed] = [arguments[listed]]
        elif isinstance(arguments.get(listed), GateUp):
            arguments[listed] = list(arguments[listed])
    splits = arguments.get("splits")
    if splits is not None and not isinstance(splits, Tensor):
        arguments["splits"] = torch.tensor(splits, dtype=torch.int64, device="cpu")
    return pending.assembled(getattr(torch.ops.glulam, pending.torch_name)(**arguments))


def _unlisted(tensors: Any, packed_rank: int) -> Any:
    if tensors is not None and len(tensors) == 2 and packed_rank == 3 and tensors[0].dim() == packed_rank:
        return GateUp(*tensors)
    if tensors is not None and len(tensors) == 1 and tensors[0].dim() == packed_rank:
        return tensors[0]
    return tensors


def _returned(operator: TorchOp, pending: Call, results: Any) -> Any:
    """Return a call's results as the torch operator's schema declares them, without the caller's buffers."""
    out = getattr(pending, "out", None)
    given = (out, *out) if isinstance(out, (list, tuple)) else (out,)
    results = results if isinstance(results, tuple) else (results,)
    fresh = [r for r in results if r is not None and all(r is not g for g in given)]
    if operator.returns == "Tensor[]":
        return fresh
    return tuple(fresh) if len(fresh) > 1 else next(iter(fresh), None)


def _as_data(value: Any) -> Any:
    """Return tensors, or lists of them, as plain Tensors.

    A tensor subclass needs no dispatch here: torch has dispatched it already, and the call only reads memory.
    """
    if isinstance(value, list):
        return [_as_data(one) for one in value]
    return value.as_subclass(Tensor) if isinstance(value, Tensor) and type(value) not in PLAIN_TENSORS else value


def _kernel(operator: TorchOp) -> Callable[..., Any]:
    def run(*values: Any, **named: Any) -> Any:
        pending = operator.pending(
            tuple(map(_as_data, values)), {name: _as_data(value) for name, value in named.items()}
        )
        with part_of(OF_A_TRACE):
            return _returned(operator, pending, pending.call_public_operator())

    return run


def _autograd(name: str, operator: TorchOp) -> Callable[..., Any]:
    """Return the function for torch's Autograd key.

    If a gradient is recorded, the function runs the call's differentiable version; otherwise the plain operator.
    """

    def run(*values: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            pending = operator.pending(values, named)
            if requires_grad(pending):
                return _returned(operator, pending, pending.with_backward(pending))
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.glulam, name).default(*values, **named)

    return run


def _fake(operator: TorchOp) -> Callable[..., Any]:
    def run(*values: Any, **named: Any) -> Any:
        pending = operator.pending(values, named)
        problem = pending.check()
        return None if operator.returns == "()" else _returned(operator, pending, pending.results(problem))

    return run


def _register() -> None:
    for name, operator in TORCH_OPS.items():
        _library.define(f"{name}({operator.arguments}) -> {operator.returns}", tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _library.impl(name, _kernel(operator), key)
        _library.impl(name, _autograd(name, operator), "Autograd")
        torch.library.register_fake(f"glulam::{name}", _fake(operator), lib=_library)


_register()
Call.through_torch = staticmethod(call)
