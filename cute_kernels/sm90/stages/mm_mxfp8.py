"""Hopper's y = grouped_mm(x, w) with x in MXFP8 and w in E4M3.

Scales of x are [T, K / 32]; the four scales of each 128 elements are equal. Scales of w are [E, N], one for each weight
row, into which block scales were folded (quantize/fold_mxfp8.py).
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...activation import no_params
from ...epilogue.activation import LinearEpilogue
from ...epilogue.base import Inputs, OptionalInputs
from ...formats import OPERANDS
from ...specs import GroupedMmSpec
from ...tracing import DTYPES, Traced, traced
from ..grouped_gemm import GroupedFp8Gemm, GroupedGemm


class Mm:
    """Host function that launches a grouped_mm in MXFP8. `signatures._mm` describes its arguments: tensors, then
    addresses (0: not given) and numbers."""

    def __init__(self, gemm: GroupedGemm):
        self.gemm = gemm

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, rows: Int64, groups: Int64, group_form: Int32,
        num_groups: Int32, tickets: Int64, x_scale: Int64, w_scale: Int64, bias: Int64, bias_table: Int64, scale: Int64,
        num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if y.shape[0] > 0:
            inputs = Inputs(OptionalInputs(bias, bias_table, scale), no_params(), y.shape[1], w_scale)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, (y,), sizes, Int64(0), rows, inputs, num_sms, position, stream, x_scale)


def trace(spec: GroupedMmSpec) -> Traced:
    epilogue = LinearEpilogue(DTYPES[spec.dtype], spec.tile, weights=OPERANDS[spec.operands].w)
    return traced(spec, Mm(GroupedFp8Gemm(spec, epilogue)))
