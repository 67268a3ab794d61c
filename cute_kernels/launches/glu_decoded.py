"""The launch of grouped_glu with 16-bit x and quantised weights, which the kernel decodes: act = grouped_glu(x, w).

With operands "mxfp8_exact", act is rounded to MXFP8 values.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..activation import ActivationParams
from ..epilogue.base import GlobalScales, Inputs, OptionalInputs
from ..formats import OPERANDS
from ..memory.weights import gate_rows
from ..specs import GroupedGluSpec
from ..tracing import DTYPES, Traced, traced


class Glu:
    """Host function that launches a grouped_glu whose weights' format has no global scales. `signatures._glu` describes
    its arguments: tensors, then addresses (0: not given) and numbers."""

    def __init__(self, spec: GroupedGluSpec, gemm_type: Any, epilogue_type: Any):
        dtype, weights = DTYPES[spec.dtype], OPERANDS[spec.operands].w
        self.gemm = gemm_type(spec, dtype, epilogue_type(dtype, spec), weights)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, act: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, w_scale: Int64, bias: Int64, bias_table: Int64, scale: Int64, kind: Int32, glu_layout: Int32,
        limit: Float32, alpha: Float32, offset: Float32, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            params, gate = ActivationParams(kind, (limit, alpha, offset)), gate_rows(glu_layout, w.shape[1])
            inputs = Inputs(OptionalInputs(bias, bias_table, scale), params, w.shape[1], w_scale, gate=gate)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, act, sizes, inputs, num_sms, position, stream)


class GluWithGlobalScales(Glu):
    """Host function that launches a grouped_glu whose weights' format has float32 global scales
    (`Format.has_global`)."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, act: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, w_scale: Int64, w_global_scale: Int64, w_global_count: Int32, bias: Int64, bias_table: Int64,
        scale: Int64, kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32, offset: Float32, num_sms: Int32,
        position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            params, gate = ActivationParams(kind, (limit, alpha, offset)), gate_rows(glu_layout, w.shape[1])
            optional = OptionalInputs(bias, bias_table, scale)
            global_scales = GlobalScales(w_global_scale, w_global_count)
            inputs = Inputs(optional, params, w.shape[1], w_scale, gate=gate, global_scales=global_scales)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, act, sizes, inputs, num_sms, position, stream)


def trace(spec: GroupedGluSpec, gemm_type: Any, epilogue_type: Any) -> Traced:
    """Return a pair to compile: the host function that launches the spec's kernel, and stand-ins for the function's
    arguments.

    Args:
        gemm_type: the architecture's class of GEMM kernels with decoded weights.
        epilogue_type: the architecture's epilogue.
    """
    launch = GluWithGlobalScales if OPERANDS[spec.operands].w.has_global else Glu
    return traced(spec, launch(spec, gemm_type, epilogue_type))
