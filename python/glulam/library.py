"""The operators as `torch.ops.glulam.*`, so that traces (torch.compile, torch.export, fake tensors) see each as one.

Eager calls do not come here. Schemas have no "tensor or list", so weights and biases are lists of tensors: a packed
tensor is a list of that one, told by its rank. Each operator has a functional form and an `_out` form, which writes
its buffer and returns nothing; grouped_glu has both with and without the preactivation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .call import Call
from .device import PLAIN_TENSORS
from .ops.grouped_glu import GroupedGluCall
from .ops.grouped_mlp import GroupedMlpCall
from .ops.grouped_mm import GroupedMmCall

_GROUPS = "Tensor? offs, Tensor? splits"
_ACTIVATION = "str activation, str glu_layout, float limit, float alpha, float offset"
SCHEMAS: dict[str, tuple[type[Call], str]] = {
    "grouped_mm": (
        GroupedMmCall,
        f"Tensor x, Tensor[] w, {_GROUPS}, Tensor[]? bias, Tensor? bias_scale, bool transpose_w",
    ),
    "grouped_glu": (
        GroupedGluCall,
        f"Tensor x, Tensor[] w1, {_GROUPS}, Tensor[]? bias, Tensor? row_scale, {_ACTIVATION}",
    ),
    "grouped_glu_preact": (
        GroupedGluCall,
        f"Tensor x, Tensor[] w1, {_GROUPS}, Tensor[]? bias, Tensor? row_scale, {_ACTIVATION}",
    ),
    "grouped_mlp": (
        GroupedMlpCall,
        f"Tensor x, Tensor[] w1, Tensor[] w2, {_GROUPS}, Tensor? row_scale, Tensor[]? b1, Tensor[]? b2, "
        f"{_ACTIVATION}, str recipe",
    ),
}
_PREACT = "_preact"
_library = torch.library.Library("glulam", "DEF")


def call(pending: Call) -> Any:
    """A call, through torch's dispatcher."""
    arguments = pending.arguments()
    name = pending.op
    for listed in (*pending.weights, *pending.biases):
        if isinstance(arguments[listed], Tensor):
            arguments[listed] = [arguments[listed]]
    splits = arguments["splits"]
    if splits is not None and not isinstance(splits, Tensor):
        arguments["splits"] = torch.tensor(splits, dtype=torch.int64)
    if arguments.pop("return_preact", False):
        name += _PREACT
    out = arguments.pop("out")
    if out is None:
        return getattr(torch.ops.glulam, name)(**arguments)
    preact = getattr(torch.ops.glulam, name + "_out")(**arguments, out=out)
    return out if preact is None else (out, preact)


def _pending(name: str, arguments: dict[str, Any]) -> Call:
    """The call that the arguments of torch.ops.glulam.`name` stand for."""
    call_type = SCHEMAS[name][0]
    for listed in call_type.weights:
        arguments[listed] = _unlisted(arguments[listed], packed_rank=3)
    for listed in call_type.biases:
        arguments[listed] = _unlisted(arguments[listed], packed_rank=2)
    if call_type is GroupedGluCall:
        arguments["return_preact"] = name.endswith(_PREACT)
    return call_type(**arguments)


def _unlisted(tensors: Any, packed_rank: int) -> Any:
    if tensors is not None and len(tensors) == 1 and tensors[0].dim() == packed_rank:
        return tensors[0]
    return tensors


def _kernel(name: str, has_out: bool) -> Callable[..., Any]:
    def run(*values: Any, **named: Any) -> Any:
        pending = _pending(name, _bind(name, has_out, values, named))
        result = pending.again() if type(pending.x) in PLAIN_TENSORS else pending.execute()
        if not has_out:
            return result
        return result[1] if isinstance(result, tuple) else None

    return run


def _fake(name: str, has_out: bool) -> Callable[..., Any]:
    def run(*values: Any, **named: Any) -> Any:
        pending = _pending(name, _bind(name, has_out, values, named))
        problem = pending.check()
        widths = [problem.out_features or problem.intermediate]
        if problem.save_preact:
            widths.append(problem.w1_rows)
        results = [pending.x.new_empty(problem.rows, width) for width in widths]
        if has_out:
            return results[1] if problem.save_preact else None
        return tuple(results) if problem.save_preact else results[0]

    return run


def _bind(name: str, has_out: bool, values: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; torch drops the names of positional ones."""
    overload = getattr(torch.ops.glulam, name + "_out" if has_out else name).default
    names = [argument.name for argument in overload._schema.arguments]
    return {"out": None, **dict(zip(names, values, strict=False)), **named}


def _register() -> None:
    for name, (_, arguments) in SCHEMAS.items():
        preact = name.endswith(_PREACT)
        returns = {False: "(Tensor, Tensor)" if preact else "Tensor", True: "Tensor" if preact else "()"}
        for has_out, returned in returns.items():
            full = name + "_out" if has_out else name
            out = ", Tensor(a!) out" if has_out else ""
            _library.define(f"{full}({arguments}{out}) -> {returned}", tags=(torch.Tag.pt2_compliant_tag,))
            for key in ("CPU", "CUDA"):
                _library.impl(full, _kernel(name, has_out), key)
            torch.library.register_fake(f"glulam::{full}", _fake(name, has_out), lib=_library)


_register()
