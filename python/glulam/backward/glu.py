"""The gradient of grouped_glu: act = activation(h) s, h = x w1_e^T + b_e.

Forward keeps h. What its gradient takes besides GEMMs is made by torch, element by element, in float32: fused into a
GEMM it is where another GEMM follows, in grouped_mlp.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from ..host.experts import GateUp
from ..ops.gate import gate_gradients
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_glu import grouped_glu
from .function import Formula
from .parts import Operators, Targets, form_of, groups_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Glu(Operators):
    """`form`: the activation, the layout of its gate and their numbers, as keywords."""

    form: dict[str, Any]
    return_preact: bool

    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Any, dict[str, Tensor]]:
        act, preact = grouped_glu(**given, **self.form, return_preact=True, transpose_w=self.transpose_w, out=out)
        return (act, preact) if self.return_preact else act, {"preact": preact}

    def reads(self, wanted: frozenset[str]) -> dict[str, bool]:
        return {"x": "w1" in wanted, "w1": "x" in wanted, "bias": False}


def _operators(call: Any) -> _Glu:
    in_halves, form = isinstance(call.w1, GateUp), form_of(call)
    return _Glu(transpose_w=call.transpose_w, in_halves=in_halves, form=form, return_preact=call.return_preact)


def _gradients(
    saved: dict[str, Any], operators: _Glu, targets: Targets, wanted: frozenset[str], d_act: Tensor, *d_preact: Tensor
) -> dict[str, Any]:
    groups = groups_of(saved)
    result: dict[str, Any] = {}
    of_scale = "row_scale" in wanted
    dpreact, d_scale = gate_gradients(d_act, saved["preact"], saved["row_scale"], of_scale, groups, **operators.form)
    if of_scale:
        result["row_scale"] = d_scale
    for of_preact in d_preact:
        dpreact = dpreact + of_preact
    if "bias" in wanted:
        result["bias"] = grouped_bias_grad(dpreact, **groups)
    if "w1" in wanted:
        result["w1"] = operators.weight_gradient(targets, "w1", dpreact, saved["x"], groups)
    if "x" in wanted:
        result["x"] = operators.data_gradient(targets, dpreact, saved["w1"], groups)
    return result


FORMULA = Formula(("x", "w1", "bias", "row_scale"), _operators, _gradients)
