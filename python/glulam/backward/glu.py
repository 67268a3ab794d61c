"""The gradient of grouped_glu: act = activation(h) s, h = x w1_e^T + b_e, where s is the row's row_scale.

Forward keeps h. The gradient of the activation is a separate kernel here. (In grouped_mlp it comes after a GEMM, and is
fused into it.)
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from ..host.experts import GateUp
from ..ops.gate import gate_gradients
from ..ops.grouped_bias_grad import grouped_bias_grad
from ..ops.grouped_glu import GroupedGluCall
from .parts import Targets
from .path import Declared, Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class GluPath(Path):
    """The path (forward and gradients, see `path.Path`) of grouped_glu.

    Attributes:
        activation_options: activation, glu_layout and the activation's numbers, as keywords of the operators.
        return_preact: True: the call also returns h, so backward adds h's incoming gradient.
    """

    inputs: ClassVar = ("x", "w1", "bias", "row_scale")
    activation_options: dict[str, Any]
    return_preact: bool

    @classmethod
    def of(cls, call: Any) -> GluPath:
        """Return the path of a GroupedGluCall."""
        in_halves, options = isinstance(call.w1, GateUp), call.function.keywords
        return cls(
            transpose_w=call.transpose_w,
            in_halves=in_halves,
            activation_options=options,
            return_preact=call.return_preact,
        )

    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Any, dict[str, Tensor]]:
        act, preact = self.part("forward", self._call)(**given, out=out)
        return (act, preact) if self.return_preact else act, {"preact": preact}

    def _call(self) -> Declared:
        return GroupedGluCall, {**self.activation_options, "return_preact": True, "transpose_w": self.transpose_w}

    def reads(self, wanted: frozenset[str]) -> dict[str, bool]:
        return {"x": "w1" in wanted, "w1": "x" in wanted, "bias": False}

    def gradients(
        self, saved: dict[str, Any], targets: Targets, wanted: frozenset[str], *dy: Tensor
    ) -> dict[str, Any]:  # fmt: skip
        d_act, *d_preact = dy
        groups = saved["groups"]
        sizes = self.sizes(groups)
        result: dict[str, Any] = {}
        of_scale = "row_scale" in wanted
        dpreact, d_scale = gate_gradients(
            d_act, saved["preact"], saved["row_scale"], of_scale, sizes, **self.activation_options
        )
        if of_scale:
            result["row_scale"] = d_scale
        for of_preact in d_preact:
            dpreact = dpreact + of_preact
        if "bias" in wanted:
            result["bias"] = grouped_bias_grad(dpreact, **sizes)
        if "w1" in wanted:
            result["w1"] = self.weight_gradient(targets, "w1", dpreact, saved["x"], groups)
        if "x" in wanted:
            result["x"] = self.data_gradient(targets, dpreact, saved["w1"], groups)
        return result
