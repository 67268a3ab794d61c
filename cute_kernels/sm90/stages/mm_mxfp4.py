"""Hopper's y = grouped_mm(x, w) with x in MXFP8 and w in MXFP4, which the kernel decodes to FP8.

Weights have a scale for each block (w_scale) and, in addition, a power of two for each weight row (w_global_scale).
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
from ..decoded_fp8_gemm import GroupedDecodedFp8Gemm, GroupedSwappedFp8Gemm
from ..epilogue.swapped import SwappedLinearEpilogue


class Mm:
    """Host function that launches a grouped_mm of MXFP8 rows and MXFP4 weights. `signatures._mm` describes its
    arguments: tensors, then addresses (0: not given) and numbers."""

    def __init__(self, gemm: GroupedDecodedFp8Gemm):
        self.gemm = gemm

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, rows: Int64, groups: Int64, group_form: Int32,
        num_groups: Int32, tickets: Int64, x_scale: Int64, w_scale: Int64, w_global_scale: Int64, bias: Int64,
        bias_table: Int64, scale: Int64, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if y.shape[0] > 0:
            inputs = Inputs(OptionalInputs(bias, bias_table, scale), no_params(), y.shape[1], w_global_scale)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(
                x, w, (y,), sizes, Int64(0), rows, inputs, num_sms, position, stream, x_scale, w_blocks=w_scale
            )


def trace(spec: GroupedMmSpec) -> Traced:
    dtype, weights = DTYPES[spec.dtype], OPERANDS[spec.operands].w
    if spec.tile.swapped:
        return traced(spec, Mm(GroupedSwappedFp8Gemm(spec, SwappedLinearEpilogue(dtype, spec.tile, weights=weights))))
    return traced(spec, Mm(GroupedDecodedFp8Gemm(spec, LinearEpilogue(dtype, spec.tile, weights=weights))))
