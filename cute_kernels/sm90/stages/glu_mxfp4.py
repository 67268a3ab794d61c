"""Hopper's act = grouped_glu(x, w) with x and act in MXFP8, and w in MXFP4, which the kernel decodes to FP8."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...activation import ActivationParams
from ...epilogue.base import Inputs, OptionalInputs
from ...memory.weights import gate_rows
from ...specs import GroupedGluSpec
from ...tracing import DTYPES, Traced, traced
from ..decoded_fp8_gemm import GroupedDecodedFp8Gemm, GroupedSwappedFp8Gemm
from ..epilogue.quantizing import QuantizingEpilogue
from ..epilogue.swapped_quantizing import SwappedQuantizingEpilogue


class Glu:
    """Host function that launches a grouped_glu of MXFP8 rows and MXFP4 weights. `signatures._glu` describes its
    arguments: tensors, then addresses (0: not given) and numbers."""

    def __init__(self, gemm: GroupedDecodedFp8Gemm):
        self.gemm = gemm

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, act: cute.Tensor, rows: Int64, groups: Int64, group_form: Int32,
        num_groups: Int32, tickets: Int64, x_scale: Int64, w_scale: Int64, w_global_scale: Int64, act_scale: Int64,
        bias: Int64, bias_table: Int64, scale: Int64, kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32,
        offset: Float32, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            params, gate = ActivationParams(kind, (limit, alpha, offset)), gate_rows(glu_layout, w.shape[1])
            optional, rows_of_w = OptionalInputs(bias, bias_table, scale), w.shape[1]
            inputs = Inputs(optional, params, rows_of_w, w_global_scale, act_scale, gate=gate)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(
                x, w, (act,), sizes, Int64(0), rows, inputs, num_sms, position, stream, x_scale, w_blocks=w_scale
            )


def trace(spec: GroupedGluSpec) -> Traced:
    dtype = DTYPES[spec.dtype]
    if spec.tile.swapped:
        return traced(spec, Glu(GroupedSwappedFp8Gemm(spec, SwappedQuantizingEpilogue(dtype, spec))))
    return traced(spec, Glu(GroupedDecodedFp8Gemm(spec, QuantizingEpilogue(dtype, spec))))
