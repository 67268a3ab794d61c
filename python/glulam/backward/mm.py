"""The gradient of grouped_mm: y = x w_e^T + s b_e, where e is a row's expert, b the bias and s the row's bias_scale."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from ..ops.grouped_bias_grad import grouped_bias_grad
from .parts import Targets, scale_of_bias_grad
from .path import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class MmPath(Path):
    """The path (forward and gradients, see `path.Path`) of grouped_mm."""

    inputs: ClassVar = ("x", "w", "bias", "bias_scale")

    @classmethod
    def of(cls, call: Any) -> MmPath:
        """Return the path of a GroupedMmCall."""
        return cls(transpose_w=call.transpose_w)

    def forward(
        self, given: dict[str, Any], wanted: frozenset[str], out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return self.times_w("forward", self.transpose_w)(**given, out=out), {}

    def reads(self, wanted: frozenset[str]) -> dict[str, bool]:
        return {"x": "w" in wanted, "w": "x" in wanted, "bias": "bias_scale" in wanted, "bias_scale": "bias" in wanted}

    def gradients(
        self, saved: dict[str, Any], targets: Targets, wanted: frozenset[str], *dy: Tensor
    ) -> dict[str, Any]:  # fmt: skip
        (d_y,), groups, result = dy, saved["groups"], {}
        if "x" in wanted:
            result["x"] = self.gradient_of_x(saved, targets, d_y)
        if "w" in wanted:
            result["w"] = self.weight_gradient(targets, "w", d_y, saved["x"], groups)
        if "bias" in wanted:
            result["bias"] = grouped_bias_grad(d_y, row_scale=saved.get("bias_scale"), **self.sizes(groups))
        if "bias_scale" in wanted and saved["bias"] is not None:
            result["bias_scale"] = scale_of_bias_grad(d_y, saved["bias"], self.sizes(groups))
        return result

    def gradient_of_x(self, saved: dict[str, Any], targets: Targets, dy: Tensor) -> Tensor:
        """Compute dx = dy w_e, [T, K].

        Args:
            saved: saved arguments by name.
            targets: buffers for gradients.
            dy: the gradient of the result.
        """
        return self.data_gradient(targets, dy, saved["w"], saved["groups"])
