"""The exported functions whose GEMMs multiply MXFP8 numbers: E4M3 tensors, and scale bytes by address.

Rows have plain scales, [T, K / 32], four equal ones for each 128 elements; weights are folded to one a row, [E, N].
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64

from .activation import ActivationParams
from .fakes import NO_PARAMS, Fakes, groups_fakes, tail_fakes
from .sm90.epilogue import Addends, Inputs, LinearEpilogue
from .sm90.grouped_gemm import GroupedGemm
from .sm90.quantize_mxfp8 import Form, Outputs, QuantizeMxfp8
from .sm90.quantizing_epilogue import QuantizingEpilogue
from .specs import GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
# Scales for 128 elements, in rows.
ROW_FORM = (1, 0)


def _mm(spec: GroupedMmSpec) -> GroupedGemm:
    epilogue = LinearEpilogue(DTYPES[spec.dtype], spec.tile, scales_columns=True)
    return GroupedGemm(spec.name, Float8E4M3FN, spec.tile, epilogue)


def _glu(spec: GroupedGluSpec) -> GroupedGemm:
    return GroupedGemm(spec.name, Float8E4M3FN, spec.tile, QuantizingEpilogue(DTYPES[spec.dtype], spec))


def _address(tensor: cute.Tensor) -> Int64:
    return Int64(tensor.iterator.toint())


class GroupedMmMxfp8Entry:
    """y = grouped_mm(x, w) of x in MXFP8 and folded w."""

    def __init__(self, spec: GroupedMmSpec):
        self.gemm = _mm(spec)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        x_scale: Int64, w_scale: Int64, bias: Int64, bias_table: Int64, scale: Int64, num_sms: Int32,
        do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            params = ActivationParams(*(Float32(p) for p in NO_PARAMS))
            inputs = Inputs(Addends(bias, bias_table, scale), params, y.shape[1], w_scale)
            sizes = (groups, group_form, num_groups)
            self.gemm.launch(x, w, (y,), sizes, Int64(0), inputs, num_sms, stream, x_scale=x_scale)


class GroupedMlpMxfp8Entry:
    """y = grouped_mlp(x, w1, w2): x is quantised, unless do_launch is 2; then FC1, whose activation is; then FC2.

    x8 [T,H] and mid8 [T,I] take the quantised rows, or x8 has them; x_scale and mid_scale are their scales' addresses.
    """

    def __init__(self, spec: GroupedMlpSpec):
        dtype = DTYPES[spec.dtype]
        self.quantize = QuantizeMxfp8(f"{spec.name}_quantize", dtype, "row")
        self.fc1 = _glu(spec.fc1)
        self.fc2 = _mm(spec.fc2)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w1: cute.Tensor, w2: cute.Tensor, x8: cute.Tensor, mid8: cute.Tensor, y: cute.Tensor,
        groups: Int64, group_form: Int32, num_groups: Int32, x_scale: Int64, mid_scale: Int64, w1_scale: Int64,
        b1: Int64, b1_table: Int64, w2_scale: Int64, b2: Int64, b2_table: Int64, scale: Int64, limit: Float32,
        alpha: Float32, offset: Float32, num_sms: Int32, do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            sizes = (groups, group_form, num_groups)
            params = ActivationParams(limit, alpha, offset)
            if do_launch == 1:
                outputs = Outputs(_address(x8), x_scale, Int64(0), Int64(0))
                form = Form(*(Int32(field) for field in ROW_FORM))
                self.quantize.launch(x, outputs, Int64(0), Int32(0), form, stream)
            inputs1 = Inputs(Addends(b1, b1_table, scale), params, w1.shape[1], w1_scale, mid_scale)
            inputs2 = Inputs(Addends(b2, b2_table, scale), params, y.shape[1], w2_scale)
            self.fc1.launch(x8, w1, (mid8,), sizes, Int64(0), inputs1, num_sms, stream, True, x_scale)
            self.fc2.launch(mid8, w2, (y,), sizes, Int64(0), inputs2, num_sms, stream, True, mid_scale)


def trace_mm_mxfp8(spec: GroupedMmSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    n, k = fakes.dim(), fakes.dim(32)
    tensors = fakes.matrix(k, Float8E4M3FN), fakes.weight(n, k, Float8E4M3FN), fakes.matrix(n)
    addresses = tuple(Int64(0) for _ in range(4))
    return GroupedMmMxfp8Entry(spec), (*tensors, *groups_fakes(), *addresses, *tail_fakes(False))


def trace_mlp_mxfp8(spec: GroupedMlpSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    hidden, intermediate, out = fakes.dim(32), fakes.dim(32), fakes.dim()
    w1_rows = fakes.dim() if spec.fc1.gated else intermediate
    weights = fakes.weight(w1_rows, hidden, Float8E4M3FN), fakes.weight(out, intermediate, Float8E4M3FN)
    eights = fakes.matrix(hidden, Float8E4M3FN), fakes.matrix(intermediate, Float8E4M3FN)
    tensors = fakes.matrix(fakes.dim()), *weights, *eights, fakes.matrix(out)
    addresses = tuple(Int64(0) for _ in range(8))
    return GroupedMlpMxfp8Entry(spec), (*tensors, *groups_fakes(), *addresses, *tail_fakes(True))
