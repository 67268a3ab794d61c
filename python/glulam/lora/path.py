"""Forward and backward of adapted_mlp, and of moe with adapters.

    low1 = s x a1_e^T                       dlow2 = s dy b2_e
    h = x w1_e^T + low1 b1_e^T + bias       dm = dy w2_e + dlow2 a2_e, in one kernel with the gradient of the activation
    m = activation(h) row_scale             dlow1 = s dh b1_e
    low2 = s m a2_e^T                       dx = dh w1_e + dlow1 a1_e
    y = m w2_e^T + low2 b2_e^T + bias       da = dlow^T (x or m), db = (dh or dy)^T low

Names: a1, b1 are the LoRA matrices of w1, and a2, b2 of w2. s is the adapters' scale; dh is the gradient of h, and so
on. low1 and low2, the low-rank halves of the adapters' products, are [T, r] with r the rank.

Each sum of two products is one GEMM whose kernel contracts both pairs. Forward saves x, h, low1 and low2; the kernel
that computes dm recomputes m.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from ..backward.data_path import NEED_ACT_GRADIENT, DataPath
from ..backward.entry import PATHS
from ..backward.parts import Targets, contracted, tensor_groups
from ..backward.path import grouped_by
from ..ops.adapted import AdaptedDgluCall, AdaptedGluCall, AdaptedMmCall
from ..ops.grouped_dglu import GroupedDgluCall
from ..ops.grouped_glu import GroupedGluCall
from ..ops.grouped_mm import GroupedMmCall
from ..ops.mlp_training import DataGradients
from .call import MATRICES, AdaptedMlpCall


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptedPath(DataPath):
    """Forward and backward of an MLP with adapters (a `Path`, see `backward.path`).

    Attributes:
        lora_scale: s, the factor of the adapters' products.
    """

    inputs: ClassVar[Any] = (*DataPath.inputs, *MATRICES)
    need_preact = NEED_ACT_GRADIENT | {"w2", *MATRICES}
    fuses = False
    lora_scale: float

    @classmethod
    def of(cls, call: Any) -> AdaptedPath:
        options, scale = call.function.keywords, call.lora_scale
        return cls(
            activation_options=options,
            transpose_w=call.transpose_w,
            recompute=False,
            tokens=call.tokens,
            lora_scale=scale,
        )

    def reads(self, wanted: frozenset[str]) -> dict[str, bool]:
        return {**super().reads(wanted), "x": not wanted.isdisjoint(("w1", "lora_a1"))}

    def gradients(
        self, saved: dict[str, Any], targets: Targets, wanted: frozenset[str], *dy: Tensor
    ) -> dict[str, Any]:  # fmt: skip
        of_matrices: dict[str, Tensor] = {}
        saved["of_matrices"] = of_matrices
        return {**super().gradients(saved, targets, wanted, *dy), **of_matrices}

    def _forward(
        self, given: dict[str, Any], keep_preact: bool, keep_act: bool, out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        groups, rows, kept = given["groups"], given.get("rows"), {}
        glu = {
            "x": given["x"], "w1": given["w1"], "bias": given["b1"], "row_scale": given["row_scale"], "rows": rows,
            "groups": groups,
        }  # fmt: skip
        if given["lora_a1"] is None:
            act, kept["preact"] = self._make("glu", GroupedGluCall, glu, return_preact=True, **self.activation_options)
        else:
            kept["low1"] = self._low("low1", groups, given["x"], given["lora_a1"], rows)
            glu.update(low=kept["low1"], low_w=self._as_weight(given["lora_b1"]))
            act, kept["preact"] = self._make("glu", AdaptedGluCall, glu, **self.activation_options)
        bias = given["b2"]
        scale = None if bias is None else given["row_scale"]
        fc2 = {"x": act, "w": given["w2"], "bias": bias, "bias_scale": scale, "groups": groups, "out": out}
        if given["lora_a2"] is None:
            return self._make("fc2", GroupedMmCall, fc2), kept
        kept["low2"] = self._low("low2", groups, act, given["lora_a2"])
        fc2.update(low=kept["low2"], low_w=self._as_weight(given["lora_b2"]))
        return self._make("fc2", AdaptedMmCall, fc2), kept

    def _gradients(
        self, saved: dict[str, Any], targets: Targets | None, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        groups, rows, x = saved["groups"], saved.get("rows"), saved.get("x")
        made: dict[str, Tensor] = saved["of_matrices"]
        dglu = {
            "dy": dy, "w2": saved["w2"], "preact": self._take_preact(saved), "rows": rows,
            "row_scale": saved["row_scale"], "groups": groups,
        }  # fmt: skip
        options = {**self.activation_options, "row_scale_grad": "row_scale" in wanted}
        if saved["lora_a2"] is None:
            dpreact, act, d_scale = self._make("dglu", GroupedDgluCall, dglu, **options)
        else:
            d_low = self._low_gradient("dlow2", groups, dy, saved["lora_b2"], rows)
            dglu.update(low=d_low, low_w=self._as_weight(saved["lora_a2"]))
            dpreact, act, d_scale = self._make("dglu", AdaptedDgluCall, dglu, **options)
            if "lora_a2" in wanted:
                made["lora_a2"] = self._of_matrix("lora_a2", groups, d_low, act)
            if "lora_b2" in wanted:
                made["lora_b2"] = self._of_matrix("lora_b2", groups, dy, saved["low2"], dy_rows=rows)
        of_x: Tensor | None = None
        if saved["lora_a1"] is not None:
            of_x = d_low = self._low_gradient("dlow1", groups, dpreact, saved["lora_b1"])
            if "lora_a1" in wanted:
                made["lora_a1"] = self._of_matrix("lora_a1", groups, d_low, x, x_rows=rows)
            if "lora_b1" in wanted:
                made["lora_b1"] = self._of_matrix("lora_b1", groups, dpreact, saved["low1"])
        dx = self._data_gradient(saved, targets, dpreact, of_x) if "x" in wanted else None
        return DataGradients(dpreact, act, dx, d_scale)

    def _data_gradient(
        self, saved: dict[str, Any], targets: Targets | None, dpreact: Tensor, d_low: Tensor | None
    ) -> Tensor:
        """Return dx, with a row for each row of dpreact (dh).

        d_low: dlow1; None: w1 has no adapter. targets: buffers for gradients; None: dx is a new tensor.
        """
        w1 = saved["w1"]
        out = None if targets is None else targets.new_grad_input(dpreact, contracted(w1, self.transpose_w))
        tensors = {"x": dpreact, "w": w1, "groups": saved["groups"], "out": out}
        if d_low is not None:
            tensors.update(low=d_low, low_w=self._as_weight(saved["lora_a1"]))
        kind = GroupedMmCall if d_low is None else AdaptedMmCall
        dx: Tensor = self.part("x", lambda: (kind, {"transpose_w": not self.transpose_w}))(**tensors)
        return dx

    def _make(self, part: str, kind: Any, tensors: dict[str, Any], **options: Any) -> Any:
        """Run one GEMM of this path as a call of type `kind`, and return its results. part: the GEMM's name."""
        return self.part(part, lambda: (kind, {**options, "transpose_w": self.transpose_w}))(**tensors)

    def _as_weight(self, matrix: Tensor) -> Tensor:
        """Return an adapter matrix in the orientation of its weight: a transposed copy if transpose_w is True."""
        return matrix.transpose(1, 2).contiguous() if self.transpose_w else matrix

    def _low(self, part: str, groups: Tensor, x: Tensor, a: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute s x a_e^T [T, r]: rows of x times the adapters' first matrices and scale.

        part: the name of this product. rows: indices of x's rows; None: in order.
        """
        low: Tensor = self.times_w(part, False)(x=x, w=a, rows=rows, groups=groups)
        return low.mul_(self.lora_scale)

    def _low_gradient(self, part: str, groups: Tensor, dy: Tensor, b: Tensor, rows: Tensor | None = None) -> Tensor:
        """Compute s dy b_e [T, r], the gradient of x a_e^T: rows of dy times the adapters' second matrices and scale.

        part: the name of this product. rows: indices of dy's rows; None: in order.
        """
        low: Tensor = self.times_w(part, True)(x=dy, w=b, rows=rows, groups=groups)
        return low.mul_(self.lora_scale)

    def _of_matrix(
        self, name: str, groups: Tensor, dy: Tensor, x: Any, dy_rows: Any = None, x_rows: Any = None
    ) -> Tensor:
        part = self.part(name, lambda: self.weight_gradient_call(name))
        made: Tensor = part(dy=dy, x=x, dy_rows=dy_rows, x_rows=x_rows, groups=groups)
        return made


def _by_parts(call: AdaptedMlpCall) -> Any:
    """Return the result of a checked call that needs no gradient, with one operator call for each GEMM."""
    path = dataclasses.replace(AdaptedPath.of(call), grouped_by=grouped_by(call))
    names = (*path.inputs, *(call.of_tokens or ("rows",)))
    given = {name: getattr(call, name) for name in names}
    (given["groups"],) = tensor_groups(call.op, call.offs, call.splits, call.x).values()
    return path.forward(given, frozenset(), call.out)[0]


AdaptedMlpCall.by_parts = staticmethod(_by_parts)
PATHS[AdaptedMlpCall] = AdaptedPath.of
