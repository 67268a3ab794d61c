"""The launch of grouped_mm with 16-bit x and quantised weights, which the kernel decodes: y = grouped_mm(x, w).

The weights' scales are plain: [E, N, K / block].
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..activation import no_params
from ..epilogue.base import GlobalScales, Inputs, OptionalInputs
from ..formats import OPERANDS
from ..specs import GroupedMmSpec
from ..tracing import DTYPES, Traced, traced


class Mm:
    """Host function that launches a grouped_mm whose weights' format has no global scales. `signatures._mm` describes
    its arguments: tensors, then addresses (0: not given) and numbers."""

    def __init__(self, spec: GroupedMmSpec, gemm_type: Any, epilogue_type: Any):
        dtype, weights = DTYPES[spec.dtype], OPERANDS[spec.operands].w
        self.gemm = gemm_type(spec, dtype, epilogue_type(dtype, spec.tile, weights=weights), weights)
        self.transposed = spec.transpose_w

    def _columns(self, w: cute.Tensor, y: cute.Tensor) -> Int32:
        """Return the number of columns of y."""
        return y.shape[1] if self.transposed else w.shape[1]

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, w_scale: Int64, bias: Int64, bias_table: Int64, scale: Int64, num_sms: Int32, position: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            inputs = Inputs(OptionalInputs(bias, bias_table, scale), no_params(), self._columns(w, y), w_scale)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, y, sizes, inputs, num_sms, position, stream)


class MmWithGlobalScales(Mm):
    """Host function that launches a grouped_mm whose weights' format has float32 global scales
    (`Format.has_global`)."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, w_scale: Int64, w_global_scale: Int64, w_global_count: Int32, bias: Int64, bias_table: Int64,
        scale: Int64, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            optional = OptionalInputs(bias, bias_table, scale)
            global_scales = GlobalScales(w_global_scale, w_global_count)
            inputs = Inputs(optional, no_params(), self._columns(w, y), w_scale, global_scales=global_scales)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, y, sizes, inputs, num_sms, position, stream)


def trace(spec: GroupedMmSpec, gemm_type: Any, epilogue_type: Any) -> Traced:
    """Return a pair to compile: the host function that launches the spec's kernel, and stand-ins for the function's
    arguments.

    Args:
        gemm_type: the architecture's class of GEMM kernels with decoded weights.
        epilogue_type: the architecture's epilogue.
    """
    launch = MmWithGlobalScales if OPERANDS[spec.operands].w.has_global else Mm
    return traced(spec, launch(spec, gemm_type, epilogue_type))
