"""Hopper's act = grouped_glu(x, w) with x and act in MXFP8, with or without the preactivation.

w is in E4M3, with one scale for each weight row, into which block scales were folded (quantize/fold_mxfp8.py).
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...activation import ActivationParams
from ...epilogue.base import Inputs, OptionalInputs
from ...memory.weights import gate_rows
from ...specs import GroupedGluSpec
from ...tracing import DTYPES, Traced, traced
from ..epilogue.quantizing import QuantizingEpilogue
from ..grouped_gemm import GroupedFp8Gemm, GroupedGemm


class Glu:
    """Host function that launches a grouped_glu in MXFP8 that stores only the activation. `signatures._glu` describes
    its arguments: tensors, then addresses (0: not given) and numbers."""

    def __init__(self, gemm: GroupedGemm):
        self.gemm = gemm

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, act: cute.Tensor, rows: Int64, groups: Int64, group_form: Int32,
        num_groups: Int32, tickets: Int64, x_scale: Int64, w_scale: Int64, act_scale: Int64, bias: Int64,
        bias_table: Int64, scale: Int64, kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32,
        offset: Float32, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            params, gate = ActivationParams(kind, (limit, alpha, offset)), gate_rows(glu_layout, w.shape[1])
            inputs = Inputs(OptionalInputs(bias, bias_table, scale), params, w.shape[1], w_scale, act_scale, gate=gate)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, (act,), sizes, Int64(0), rows, inputs, num_sms, position, stream, x_scale)


class GluPreact(Glu):
    """Host function that launches a grouped_glu in MXFP8 that also stores the preactivation."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, act: cute.Tensor, preact: cute.Tensor, rows: Int64, groups: Int64,
        group_form: Int32, num_groups: Int32, tickets: Int64, x_scale: Int64, w_scale: Int64, act_scale: Int64,
        bias: Int64, bias_table: Int64, scale: Int64, kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32,
        offset: Float32, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            params, gate = ActivationParams(kind, (limit, alpha, offset)), gate_rows(glu_layout, w.shape[1])
            inputs = Inputs(OptionalInputs(bias, bias_table, scale), params, w.shape[1], w_scale, act_scale, gate=gate)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, (act, preact), sizes, Int64(0), rows, inputs, num_sms, position, stream, x_scale)


def trace(spec: GroupedGluSpec) -> Traced:
    gemm = GroupedFp8Gemm(spec, QuantizingEpilogue(DTYPES[spec.dtype], spec))
    return traced(spec, (GluPreact if spec.save_preact else Glu)(gemm))
