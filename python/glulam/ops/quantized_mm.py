"""grouped_mm with quantised weights, which kernels decode inside the GEMM."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from .. import recipes, reference
from ..calls.checks import runs_kernels
from ..calls.definition import Definition
from ..calls.launch import ResultTensor
from ..calls.weight_checks import check_contraction
from ..choose.problem import Problem, dtype_name
from ..formats.fp8_block import FP8BlockTensor
from ..formats.mxfp4 import MXFP4Tensor
from ..formats.mxfp8 import MXFP8Tensor
from ..formats.nvfp4 import NVFP4Tensor
from ..recipes import Recipe
from .quantized_weights import (
    ReadsQuantized,
    check_weight,
    global_counts,
    look_at_scales,
    weight_as_read,
    weight_parts,
)


def _reference(call: Any, problem: Problem, out: Tensor) -> None:
    w: Any = weight_as_read(call, "w")
    reference.grouped_mm(call.x, w, call.host_ends(), call.bias, call.bias_scale, call.transpose_w, out)


class QuantizedMmCall(ReadsQuantized):
    """A call of grouped_mm with a quantised w."""

    in_parts: ClassVar = {"w": 3}
    unwraps = "x", "w", "w_scale", "w_global_scale"
    uses_up = ("rows",)
    classes = frozenset((MXFP8Tensor, FP8BlockTensor, MXFP4Tensor, NVFP4Tensor))

    op = "grouped_mm"
    torch_op = "grouped_mm_mxfp4"
    sources = {"scale": "bias_scale"}
    definition = Definition(
        results=(ResultTensor("out", "y", ("num_rows", "out_features")),),
        constants=(global_counts,),
        address_checks=(look_at_scales,),
        reference=_reference,
    )

    @classmethod
    def unwrap(cls, recipe: Recipe, x: Any, w: Any, rows: Any) -> tuple[Any, ...]:
        """Return x, and w's elements, scales and global scale.

        With `rows`, x is a copy of the selected rows, in their order.
        """
        if rows is not None:
            x = cls.rows_in_order(x, rows)
        return x, *weight_parts(cls.op, "w", w, recipe)

    def refuse_gradients(self) -> None:
        self.refuse_trained_weights()

    def check(self) -> Problem:
        columns, like = self.check_lead()
        recipe = recipes.find(self.op, self.recipe)
        self.check_options()
        experts, *_ = shape = check_weight(self, "w", "E N K", recipe)
        width = check_contraction(self.op, "w", shape, columns, self.transpose_w, self.transpose_w)
        recipes.check_fits(self.op, recipe, dtype_name(self.x.dtype), runs_kernels(self.x))
        self.check_addends(experts, "w", like, bias=width)
        self.check_result(width, like)
        return self.problem(experts, columns, out_features=width, operands=recipe.operands)
