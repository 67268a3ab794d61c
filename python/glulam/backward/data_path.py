"""What both directions of a grouped_mlp compute but for gradients of weights and biases, by recipe.

What is quantised, in a recipe that does, is this: the rows of both directions and the weights that they meet. Gradients
of weights are GEMMs of what is stored in 16 bits in any recipe.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..calls.checks import any_requires_grad
from ..choose.problem import changed
from ..host.experts import GateUp
from ..ops import mlp_training as mxfp8
from ..ops.grouped_dglu import grouped_dglu
from ..ops.grouped_glu import grouped_glu
from ..ops.grouped_mlp_mxfp8 import Mxfp8MlpCall
from ..ops.grouped_mm import grouped_mm
from .parts import Targets, contracted, groups_of

BEHIND_THE_ACTIVATION = frozenset({"x", "w1", "b1", "row_scale"})
"""Arguments whose gradients need that of the activation."""

DataGradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Of h; the activation again; of x and of row_scale (but for b2's share), where they are wanted."""


@dataclasses.dataclass(frozen=True)
class DataPath:
    """In 16 bits. `form`, everywhere: the activation and its numbers, as keywords of the operators.

    Attributes:
        need_preact: arguments for whose gradients forward keeps h.
        wide: names of weights whose gradients are float32 although x is 16-bit.
        transpose_w: whether weights are [E, H, 2I or I] and [E, I, H]; `in_halves`: whether w1 is a GateUp.
    """

    need_preact: ClassVar[frozenset[str]] = BEHIND_THE_ACTIVATION
    wide: frozenset[str] = frozenset()
    transpose_w: bool = False
    in_halves: bool = False

    def forward(
        self, given: dict[str, Any], form: dict[str, Any], keep_preact: bool, keep_act: bool, out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The result; and what is kept: "preact", or else "act"."""
        groups, scale = groups_of(given), given["row_scale"]
        hidden = {"bias": given["b1"], "row_scale": scale, "rows": given.get("rows"), **groups, **form}
        act = grouped_glu(
            given["x"], given["w1"], return_preact=keep_preact, transpose_w=self.transpose_w, **hidden
        )  # fmt: skip
        kept = {}
        if keep_preact:
            act, kept["preact"] = act
        elif keep_act:
            kept["act"] = act
        scale_of_b2 = None if given["b2"] is None else scale
        y = grouped_mm(
            act, given["w2"], bias=given["b2"], bias_scale=scale_of_b2, transpose_w=self.transpose_w, out=out, **groups
        )
        return y, kept

    def copies(self, x: Tensor, row_of: Any, w2: Any) -> bool:
        """Whether GEMMs read a copy of each row's token, made by `rows`."""
        return False

    def rows(self, x: Tensor, row_of: Any) -> Tensor:
        raise NotImplementedError

    def gathered(self, saved: dict[str, Any], dy: Tensor) -> Tensor:
        """dy as the GEMMs read it, and what was saved as well, in place."""
        return dy

    def new_dx(self, targets: Targets, dy: Tensor, columns: int) -> Tensor | None:
        """A buffer for x's gradient by rows; None allocates one."""
        return targets.new_grad_input(dy, columns)

    def take_preact(self, saved: dict[str, Any], form: dict[str, Any]) -> Tensor:
        """h, which leaves `saved`, or is made again."""
        preact: Tensor | None = saved.pop("preact", None)
        return self.new_preact(saved, form) if preact is None else preact

    def new_preact(self, saved: dict[str, Any], form: dict[str, Any]) -> Tensor:
        if self.in_halves:  # which grouped_glu alone multiplies in one call
            hidden = {"bias": saved["b1"], "rows": saved.get("rows"), **groups_of(saved), **form}
            preact: Tensor = grouped_glu(saved["x"], saved["w1"], return_preact=True, **hidden)[1]
            return preact
        return grouped_mm(
            saved["x"], saved["w1"], bias=saved["b1"], rows=saved.get("rows"), transpose_w=self.transpose_w,
            **groups_of(saved),
        )  # fmt: skip

    def new_act(self, saved: dict[str, Any], form: dict[str, Any]) -> Tensor:
        """The activation, made again."""
        act: Tensor = grouped_glu(
            saved["x"], saved["w1"], bias=saved["b1"], row_scale=saved["row_scale"], rows=saved.get("rows"),
            transpose_w=self.transpose_w, **groups_of(saved), **form,
        )  # fmt: skip
        return act

    def gradients(
        self, saved: dict[str, Any], form: dict[str, Any], targets: Targets, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        groups, dx = groups_of(saved), None
        dpreact, act, d_scale = grouped_dglu(
            dy, saved["w2"], self.take_preact(saved, form), rows=saved.get("rows"), row_scale=saved["row_scale"],
            row_scale_grad="row_scale" in wanted, transpose_w=self.transpose_w, **groups, **form,
        )  # fmt: skip
        if "x" in wanted:
            dx = self.new_dx(targets, dy, contracted(saved["w1"], self.transpose_w))
            dx = grouped_mm(dpreact, saved["w1"], transpose_w=not self.transpose_w, out=dx, **groups)
        return dpreact, act, dx, d_scale


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantisedPath(DataPath):
    """In MXFP8. `trained`: whether a weight is."""

    recipe: str
    trained: bool

    need_preact = BEHIND_THE_ACTIVATION | {"w2"}  # the activation was never there in 16 bits

    def forward(
        self, given: dict[str, Any], form: dict[str, Any], keep_preact: bool, keep_act: bool, out: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        y, preact = self._forward(given, form, given["b2"], out)
        return y, {"preact": preact} if keep_preact else {}

    def _forward(
        self, given: dict[str, Any], form: dict[str, Any], b2: Any, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return mxfp8.forward(
            given["x"], given["w1"], given["w2"], **groups_of(given), row_scale=given["row_scale"], b1=given["b1"],
            b2=b2, recipe=self.recipe, trained=self.trained, out=out, rows=given.get("rows"), **form,
        )  # fmt: skip

    def new_preact(self, saved: dict[str, Any], form: dict[str, Any]) -> Tensor:
        return self._forward(saved, form, None, None)[1]

    def new_dx(self, targets: Targets, dy: Tensor, columns: int) -> Tensor | None:
        return None if targets.grad_input is None else targets.given_grad_input(dy)

    def gradients(
        self, saved: dict[str, Any], form: dict[str, Any], targets: Targets, dy: Tensor, wanted: frozenset[str]
    ) -> DataGradients:
        dx = self.new_dx(targets, dy, contracted(saved["w1"], self.transpose_w)) if "x" in wanted else None
        return mxfp8.backward(
            dy, saved.get("w1"), saved["w2"], self.take_preact(saved, form), **groups_of(saved),
            row_scale=saved["row_scale"], recipe=self.recipe, trained=self.trained, input_grad="x" in wanted,
            row_scale_grad="row_scale" in wanted, out=dx, rows=saved.get("rows"), **form,
        )  # fmt: skip


IN_16_BITS = DataPath()


def path_of(call: Any) -> DataPath:
    """Of a GroupedMlpCall or Mxfp8MlpCall."""
    if not isinstance(call, Mxfp8MlpCall):
        in_halves = isinstance(call.w1, GateUp)
        return changed(call.data_path or IN_16_BITS, transpose_w=call.transpose_w, in_halves=in_halves)
    weights = {"w1": call.w1, "w2": call.w2}
    is_16_bit = call.x.dtype.itemsize == 2
    wide = frozenset(name for name, w in weights.items() if is_16_bit and _dtype(w) == torch.float32)
    kind = call.data_path or QuantisedPath
    trained = any_requires_grad(*weights.values())
    quantised: DataPath = kind(recipe=call.recipe, trained=trained, wide=wide)
    return quantised


def _dtype(w: Any) -> torch.dtype:
    dtype: torch.dtype = (w if isinstance(w, Tensor) else w[0]).dtype
    return dtype
