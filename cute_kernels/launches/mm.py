"""The launch of grouped_mm in 16 bits: y = grouped_mm(x, w)."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int32, Int64

from ..activation import no_params
from ..epilogue.activation import LinearEpilogue
from ..epilogue.base import Inputs, OptionalInputs
from ..memory.weights import low_weights
from ..specs import GroupedMmSpec
from ..tracing import DTYPES, Traced, traced


class Mm:
    """Host function that launches a grouped_mm without adapters. `signatures._mm` describes its arguments: tensors,
    then addresses (0: not given) and numbers."""

    def __init__(self, spec: GroupedMmSpec, gemm_type: Any):
        dtype = DTYPES[spec.dtype]
        epilogue = LinearEpilogue(dtype, spec.tile)
        self.gemm = gemm_type(spec, dtype, epilogue, spec.transpose_w, spec.in_halves)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, rows: Int64, groups: Int64, group_form: Int32,
        num_groups: Int32, tickets: Int64, w_table: Int64, bias: Int64, bias_table: Int64, scale: Int64, num_sms: Int32,
        position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if y.shape[0] > 0:
            inputs = Inputs(OptionalInputs(bias, bias_table, scale), no_params(), y.shape[1])
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, (y,), sizes, w_table, rows, inputs, num_sms, position, stream)


class MmInHalves(Mm):
    """Host function that launches y = x[:, :P/2] w + x[:, P/2:] w_up for x [T, P], with two weights of one shape. y is
    the data gradient of a gated FC1 whose w1 is two tensors."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, w_up: Int64, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if y.shape[0] > 0:
            none = Int64(0)
            inputs = Inputs(OptionalInputs(none, none, none), no_params(), y.shape[1])
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, (y,), sizes, none, none, inputs, num_sms, position, stream, w_up=w_up)


class MmAdapted(Mm):
    """Host function that launches a grouped_mm with LoRA adapters of rank r. The GEMM also adds low [T, r] times the
    experts' matrices, which begin at address `low_w`."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, low: cute.Tensor, rows: Int64, groups: Int64,
        group_form: Int32, num_groups: Int32, tickets: Int64, w_table: Int64, low_w: Int64, bias: Int64,
        bias_table: Int64, scale: Int64, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if y.shape[0] > 0:
            inputs = Inputs(OptionalInputs(bias, bias_table, scale), no_params(), y.shape[1])
            sizes = (groups, group_form, num_groups, tickets)
            pair = low, low_weights(low, low_w, y.shape[1], self.gemm.transposed)
            self.gemm.launch(x, w, (y,), sizes, w_table, rows, inputs, num_sms, position, stream, low=pair)


def trace(spec: GroupedMmSpec, gemm_type: Any) -> Traced:
    """Return a pair to compile: the host function that launches the spec's kernel, and stand-ins for the function's
    arguments.

    gemm_type: the architecture's class of GEMM kernels.
    """
    kind = MmInHalves if spec.in_halves else MmAdapted if spec.adapted else Mm
    return traced(spec, kind(spec, gemm_type))
