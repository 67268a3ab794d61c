"""The operators as `torch.ops.glulam.*`, so that traces (torch.compile, torch.export, fake tensors) see each as one.

Eager calls do not come here. Schemas have no "tensor or list", so weights, biases and their gradients are lists of
tensors: a packed tensor is a list of that one, told by its rank, and a GateUp one of its two. Schemas have no optional
results either, so an operator has a form for each set of results: `_out` forms write a buffer and return only what is
not in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backward.entry import differentiate, requires_grad
from .call import Call
from .device import PLAIN_TENSORS
from .experts import GateUp
from .groups import OF_A_TRACE, part_of
from .layer.moe import MoeCall, Mxfp8MoeCall
from .mxfp8.quantize import QuantizeMxfp8Call
from .ops.grouped_dglu import GroupedDgluCall
from .ops.grouped_glu import GroupedGluCall
from .ops.grouped_mlp import GroupedMlpCall
from .ops.grouped_mlp_mxfp8 import Mxfp8MlpCall
from .ops.grouped_mlp_mxfp8_training import BackwardCall, ForwardCall
from .ops.grouped_mm import GroupedMmCall
from .ops.grouped_wgrad import GroupedWgradCall

_GROUPS = "Tensor? offs, Tensor? splits"
_ACTIVATION = "str activation, str glu_layout, float limit, float alpha, float offset"
_MM = f"Tensor x, Tensor[] w, {_GROUPS}, Tensor[]? bias, Tensor? bias_scale, bool transpose_w, Tensor? rows"
_GLU = (
    f"Tensor x, Tensor[] w1, {_GROUPS}, Tensor[]? bias, Tensor? row_scale, {_ACTIVATION}, Tensor? rows, "
    "bool transpose_w"
)
_MLP = (
    f"Tensor x, Tensor[] w1, Tensor[] w2, {_GROUPS}, Tensor? row_scale, Tensor[]? b1, Tensor[]? b2, {_ACTIVATION}, "
    "str recipe, bool recompute, Tensor? rows, bool transpose_w"
)
_MOE = f"{_MLP}, Tensor row_of, Tensor? residual"
_MLP_MXFP8 = (
    "Tensor x, Tensor? x_scale, Tensor[] w1, Tensor? w1_scale, Tensor[] w2, Tensor? w2_scale, "
    f"{_GROUPS}, Tensor? row_scale, Tensor[]? b1, Tensor[]? b2, {_ACTIVATION}, str recipe, bool recompute, "
    "ScalarType? dtype, Tensor? rows"
)
_MOE_MXFP8 = f"{_MLP_MXFP8}, Tensor row_of, Tensor? residual"
_MLP_FORWARD = (
    f"Tensor x, Tensor[] w1, Tensor[] w2, {_GROUPS}, Tensor? row_scale, Tensor[]? b1, Tensor[]? b2, {_ACTIVATION}, "
    "str recipe, bool trained, Tensor? rows"
)
_MLP_BACKWARD = (
    f"Tensor dy, Tensor[]? w1, Tensor[] w2, Tensor preact, {_GROUPS}, Tensor? row_scale, {_ACTIVATION}, str recipe, "
    "bool trained, bool input_grad, bool row_scale_grad, Tensor? rows"
)
_IN_16_BITS = {"x_scale": None, "w1_scale": None, "w2_scale": None, "dtype": None, "recompute": False}
_DGLU = (
    f"Tensor dy, Tensor[] w2, Tensor preact, {_GROUPS}, Tensor? row_scale, {_ACTIVATION}, Tensor? rows, "
    "bool transpose_w"
)
_WGRAD = f"Tensor dy, Tensor x, {_GROUPS}, Tensor? dy_rows, Tensor? x_rows"
_QUANTIZE = "Tensor x, str axis, Tensor? offs, str block, str scale_layout"
_OUT = "Tensor(a!) out"


class Form(NamedTuple):
    """An operator of torch's: what it takes and returns, and the fields of the call that its name settles."""

    call_type: type[Call]
    arguments: str
    returns: str
    settled: dict[str, Any]

    def pending(self, values: tuple[Any, ...], named: dict[str, Any]) -> Call:
        """The call that arguments stand for; torch drops the names of positional ones."""
        given = {**dict(zip(self.names, values, strict=False)), **named}
        for names, rank in ((self.call_type.weights, 3), (self.call_type.biases, 2), (self.call_type.gradients, 3)):
            for name in names:
                if name in given:
                    given[name] = _unlisted(given[name], rank)
        return self.call_type(**self.settled, **given)

    @property
    def names(self) -> list[str]:
        return [argument.split()[-1] for argument in self.arguments.split(", ")]


FORMS: dict[str, Form] = {
    "grouped_mm": Form(GroupedMmCall, _MM, "Tensor", {"out": None}),
    "grouped_mm_out": Form(GroupedMmCall, f"{_MM}, {_OUT}", "()", {}),
    "grouped_glu": Form(GroupedGluCall, _GLU, "Tensor", {"return_preact": False, "out": None}),
    "grouped_glu_out": Form(GroupedGluCall, f"{_GLU}, {_OUT}", "()", {"return_preact": False}),
    "grouped_glu_preact": Form(GroupedGluCall, _GLU, "(Tensor, Tensor)", {"return_preact": True, "out": None}),
    "grouped_glu_preact_out": Form(GroupedGluCall, f"{_GLU}, {_OUT}", "Tensor", {"return_preact": True}),
    "grouped_mlp": Form(GroupedMlpCall, _MLP, "Tensor", {"out": None}),
    "grouped_mlp_out": Form(GroupedMlpCall, f"{_MLP}, {_OUT}", "()", {}),
    "moe": Form(MoeCall, _MOE, "Tensor", {"out": None}),
    "moe_out": Form(MoeCall, f"{_MOE}, {_OUT}", "()", {}),
    "grouped_mlp_mxfp8": Form(Mxfp8MlpCall, _MLP_MXFP8, "Tensor", {"out": None}),
    "grouped_mlp_mxfp8_out": Form(Mxfp8MlpCall, f"{_MLP_MXFP8}, {_OUT}", "()", {}),
    "moe_mxfp8": Form(Mxfp8MoeCall, _MOE_MXFP8, "Tensor", {"out": None}),
    "moe_mxfp8_out": Form(Mxfp8MoeCall, f"{_MOE_MXFP8}, {_OUT}", "()", {}),
    "grouped_mlp_mxfp8_preact": Form(ForwardCall, _MLP_FORWARD, "(Tensor, Tensor)", {"out": None, **_IN_16_BITS}),
    "grouped_mlp_mxfp8_preact_out": Form(ForwardCall, f"{_MLP_FORWARD}, {_OUT}", "Tensor", _IN_16_BITS),
    "grouped_mlp_mxfp8_backward": Form(BackwardCall, _MLP_BACKWARD, "Tensor[]", {"out": None}),
    "grouped_mlp_mxfp8_backward_out": Form(BackwardCall, f"{_MLP_BACKWARD}, {_OUT}", "Tensor[]", {}),
    "grouped_dglu": Form(GroupedDgluCall, _DGLU, "(Tensor, Tensor)", {"row_scale_grad": False}),
    "grouped_dglu_scale": Form(GroupedDgluCall, _DGLU, "(Tensor, Tensor, Tensor)", {"row_scale_grad": True}),
    "grouped_wgrad": Form(
        GroupedWgradCall,
        f"{_WGRAD}, ScalarType? out_dtype",
        "Tensor",
        {"out": None, "accumulate": False, "mask": None},
    ),
    "grouped_wgrad_out": Form(
        GroupedWgradCall,
        f"{_WGRAD}, bool accumulate, Tensor? mask, Tensor(a!)[] out",
        "()",
        {"out_dtype": None},
    ),
    "quantize_mxfp8": Form(QuantizeMxfp8Call, _QUANTIZE, "Tensor[]", {"out": None}),
    "quantize_mxfp8_out": Form(QuantizeMxfp8Call, f"{_QUANTIZE}, Tensor(a!)[] out", "()", {}),
}
_library = torch.library.Library("glulam", "DEF")


def call(pending: Call) -> Any:
    """A call, through torch's dispatcher."""
    form = FORMS[pending.form]
    arguments = {name: value for name, value in pending.arguments().items() if name in form.names}
    for listed in (*pending.weights, *pending.biases, *pending.gradients):
        if isinstance(arguments.get(listed), Tensor):
            arguments[listed] = [arguments[listed]]
        elif isinstance(arguments.get(listed), GateUp):
            arguments[listed] = list(arguments[listed])
    splits = arguments.get("splits")
    if splits is not None and not isinstance(splits, Tensor):
        arguments["splits"] = torch.tensor(splits, dtype=torch.int64)
    return pending.assembled(getattr(torch.ops.glulam, pending.form)(**arguments))


def _unlisted(tensors: Any, packed_rank: int) -> Any:
    if tensors is not None and len(tensors) == 2 and packed_rank == 3 and tensors[0].dim() == packed_rank:
        return GateUp(*tensors)
    if tensors is not None and len(tensors) == 1 and tensors[0].dim() == packed_rank:
        return tensors[0]
    return tensors


def _returned(pending: Call, results: Any) -> Any:
    """The results that are not in given buffers."""
    out = getattr(pending, "out", None)
    given = (out, *out) if isinstance(out, (list, tuple)) else (out,)
    results = results if isinstance(results, tuple) else (results,)
    fresh = [r for r in results if r is not None and all(r is not g for g in given)]
    return tuple(fresh) if len(fresh) > 1 else next(iter(fresh), None)


def _as_data(value: Any) -> Any:
    """A tensor without its subclass, which torch has heard by now: what comes here is numbers in memory."""
    if isinstance(value, list):
        return [_as_data(one) for one in value]
    return value.as_subclass(Tensor) if isinstance(value, Tensor) and type(value) not in PLAIN_TENSORS else value


def _kernel(form: Form) -> Callable[..., Any]:
    def run(*values: Any, **named: Any) -> Any:
        pending = form.pending(tuple(map(_as_data, values)), {name: _as_data(value) for name, value in named.items()})
        with part_of(OF_A_TRACE):
            return _returned(pending, pending.again())

    return run


def _autograd(name: str, form: Form) -> Callable[..., Any]:
    """Where a gradient is recorded; the operators that the differentiable form is made of are traced in its place."""

    def run(*values: Any, **named: Any) -> Any:
        if torch.is_grad_enabled():
            pending = form.pending(values, named)
            if requires_grad(pending):
                return differentiate(pending)
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(torch.ops.glulam, name).default(*values, **named)

    return run


def _fake(form: Form) -> Callable[..., Any]:
    def run(*values: Any, **named: Any) -> Any:
        pending = form.pending(values, named)
        problem = pending.check()
        return None if form.returns == "()" else _returned(pending, pending.results(problem))

    return run


def _register() -> None:
    for name, form in FORMS.items():
        _library.define(f"{name}({form.arguments}) -> {form.returns}", tags=(torch.Tag.pt2_compliant_tag,))
        for key in ("CPU", "CUDA"):
            _library.impl(name, _kernel(form), key)
        _library.impl(name, _autograd(name, form), "Autograd")
        torch.library.register_fake(f"glulam::{name}", _fake(form), lib=_library)


_register()
Call.through_torch = staticmethod(call)
