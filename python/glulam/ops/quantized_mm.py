"""grouped_mm with quantised weights, which kernels decode on the way."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import recipes, reference
from ..calls.checks import check_out, mismatch, runs_kernels
from ..calls.launch import Made
from ..calls.quantized import Quantized
from ..choose.problem import Problem, dtype_name
from ..formats.fp8_block import FP8BlockTensor
from ..formats.mxfp4 import MXFP4Tensor
from ..formats.mxfp8 import MXFP8Tensor
from ..formats.nvfp4 import NVFP4Tensor
from ..host.groups import UNINITIALISED
from ..recipes import Recipe
from .quantized_weights import (
    READY_AS,
    check_weight,
    global_counts,
    look_at_scales,
    ready,
    weight_as_read,
    weight_parts,
    with_parts_as_read,
)


class QuantizedMmCall(Quantized):
    """A call of grouped_mm of which w is quantised."""

    in_parts: ClassVar = {"w": 3}
    unwraps = "x", "w", "w_scale", "w_global_scale"
    settles = ("rows",)
    classes = frozenset((MXFP8Tensor, FP8BlockTensor, MXFP4Tensor, NVFP4Tensor))

    op = "grouped_mm"
    after_groups = UNINITIALISED
    differentiable = True
    torch_op = "grouped_mm_mxfp4"
    sources = {"scale": "bias_scale"}
    makes = (Made("out", "y", ("num_rows", "out_features")),)
    ready, ready_as = staticmethod(ready), READY_AS
    recipe_of, recipes = staticmethod(recipes.find), recipes.RECIPES

    @classmethod
    def unwrap(cls, recipe: Recipe, x: Any, w: Any, rows: Any) -> tuple[Any, ...]:
        """The parts, with rows that come by index in order."""
        if rows is not None:
            x = cls.rows_in_order(x, rows)
        return x, *weight_parts(cls.op, "w", w, recipe)

    def refuse_gradients(self) -> None:
        self.refuse_trained_weights()

    def check(self) -> Problem:
        columns, like = self.check_lead()
        recipe = recipes.find(self.op, self.recipe)
        self.check_options()
        experts, n, k = check_weight(self, "w", "E N K", recipe)
        contracted, width = (n, k) if self.transpose_w else (k, n)
        if contracted != columns:
            wanted = (experts, columns, k) if self.transpose_w else (experts, n, columns)
            other = f", or give transpose_w={not self.transpose_w}" if width == columns else ""
            mismatch(self.op, "w", (experts, n, k), wanted, f"x has {columns} columns{other}")
        recipes.check_fits(self.op, recipe, dtype_name(self.x.dtype), runs_kernels(self.x))
        self.check_addends(experts, "w", like, bias=width)
        check_out(self.op, "out", self.out, like, width)
        return self.problem(experts, columns, out_features=width, operands=recipe.operands)

    def constants(self, problem: Problem) -> dict[str, Any]:
        return {**super().constants(problem), **global_counts(self)}

    @classmethod
    def look(cls, op: str, outs: list[Any], **read: Any) -> None:
        super().look(op, outs, **read)
        look_at_scales(op, cls.labels, read)

    def prepared(self) -> Any:
        """Prepare the call as any operator's, with w as kernels read it."""
        return super(QuantizedMmCall, with_parts_as_read(self)).prepared()

    def reference(self, problem: Problem) -> Tensor:
        out: Tensor = self.results(problem)
        w: Any = weight_as_read(self, "w")
        reference.grouped_mm(self.x, w, self.host_ends(), self.bias, self.bias_scale, self.transpose_w, out)
        return out
