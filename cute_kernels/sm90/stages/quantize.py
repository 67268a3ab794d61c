"""MXFP8 copies of x, or its values in MXFP8."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ...specs import QuantizeMxfp8Spec
from ...tracing import DTYPES, Traced, traced
from ..quantize_mxfp8 import STRIP, Form, Outputs, QuantizeMxfp8, RoundMxfp8


class Quantize:
    """By both axes a kernel of its own, with larger tiles, serves plain scales of 32 elements."""

    def __init__(self, spec: QuantizeMxfp8Spec):
        dtype = DTYPES[spec.dtype]
        self.quantize = QuantizeMxfp8(spec.name, dtype, spec.axis)
        self.strips = QuantizeMxfp8(f"{spec.name}_strips", dtype, spec.axis, STRIP)
        self.has_strips = spec.axis == "both"

    @cute.jit
    def __call__(
        self, x: cute.Tensor, row_data: Int64, row_scale: Int64, col_data: Int64, col_scale: Int64, offs: Int64,
        num_groups: Int32, wide: Int32, swizzled: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if x.shape[0] > 0:
            outputs = Outputs(row_data, row_scale, col_data, col_scale)
            arguments = (x, outputs, offs, num_groups, Form(wide, swizzled), stream)
            if const_expr(not self.has_strips):
                self.quantize.launch(*arguments)
            elif (wide == 0) & (swizzled == 0):
                self.strips.launch(*arguments)
            else:
                self.quantize.launch(*arguments)


class Round:
    def __init__(self, spec: QuantizeMxfp8Spec):
        self.round = RoundMxfp8(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(self, x: cute.Tensor, out: cute.Tensor, offs: Int64, num_groups: Int32, stream: cuda.CUstream):
        if x.shape[0] > 0:
            outputs = Outputs(Int64(out.iterator.toint()), Int64(0), Int64(0), Int64(0))
            self.round.launch(x, outputs, offs, num_groups, Form(Int32(0), Int32(0)), stream)


def trace(spec: QuantizeMxfp8Spec) -> Traced:
    return traced(spec, (Round if spec.rounded else Quantize)(spec))
