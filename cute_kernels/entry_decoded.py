"""The exported functions whose weights are MXFP8 and whose rows are 16-bit: E4M3 weights, scale bytes by address.

Weights have plain scales, [E, N, K / 32]. Where they are "mxfp8_exact", x holds MXFP8 values already.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64

from .activation import ActivationParams, no_params
from .fakes import Fakes, address_fakes, groups_fakes, tail_fakes
from .sm90.epilogue import Addends, Inputs
from .sm90.swapped_epilogue import SwappedActivationEpilogue, SwappedLinearEpilogue
from .sm90.swapped_gemm import SwappedGemm
from .sm90.weights import gate_rows
from .specs import GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, Spec
from .tiles import SpecError

DTYPE = cutlass.BFloat16
E4M3 = Float8E4M3FN
BLOCK = 32


def _mm(spec: GroupedMmSpec) -> SwappedGemm:
    return SwappedGemm(spec.name, DTYPE, spec.tile, SwappedLinearEpilogue(DTYPE, spec.tile))


def _glu(spec: GroupedGluSpec) -> SwappedGemm:
    return SwappedGemm(spec.name, DTYPE, spec.tile, SwappedActivationEpilogue(DTYPE, spec))


class GroupedMmDecodedEntry:
    """y = grouped_mm(x, w)."""

    def __init__(self, spec: GroupedMmSpec):
        self.gemm = _mm(spec)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, w_scale: Int64, bias: Int64, bias_table: Int64, scale: Int64, num_sms: Int32, do_launch: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            params = no_params()
            inputs = Inputs(Addends(bias, bias_table, scale), params, w.shape[1], w_scale)
            self.gemm.launch(x, w, y, (groups, group_form, num_groups, tickets), inputs, num_sms, stream)


class GroupedMlpDecodedEntry:
    """y = grouped_mlp(x, w1, w2): two launches in one call; the second starts while the first drains."""

    def __init__(self, spec: GroupedMlpSpec):
        self.fc1 = _glu(spec.fc1)
        self.fc2 = _mm(spec.fc2)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w1: cute.Tensor, w2: cute.Tensor, mid: cute.Tensor, y: cute.Tensor, groups: Int64,
        group_form: Int32, num_groups: Int32, tickets: Int64, w1_scale: Int64, b1: Int64, b1_table: Int64,
        w2_scale: Int64, b2: Int64, b2_table: Int64, scale: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32, offset: Float32,
        num_sms: Int32, do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            sizes = (groups, group_form, num_groups, tickets)
            params = ActivationParams(kind, limit, alpha, offset)
            gate = gate_rows(glu_layout, w1.shape[1])
            inputs1 = Inputs(Addends(b1, b1_table, scale), params, w1.shape[1], w1_scale, gate=gate)
            inputs2 = Inputs(Addends(b2, b2_table, scale), params, w2.shape[1], w2_scale)
            self.fc1.launch(x, w1, mid, sizes, inputs1, num_sms, stream)
            self.fc2.launch(mid, w2, y, sizes, inputs2, num_sms, stream, after_launch=True)


def _trace_mm(spec: GroupedMmSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPE)
    n, k = fakes.dim(), fakes.dim(BLOCK)
    tensors = fakes.matrix(k), fakes.weight(n, k, E4M3), fakes.matrix(n)
    return GroupedMmDecodedEntry(spec), (*tensors, *groups_fakes(), *address_fakes(3), *tail_fakes(False))


def _trace_mlp(spec: GroupedMlpSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPE)
    hidden, intermediate, out = fakes.dim(BLOCK), fakes.dim(BLOCK), fakes.dim()
    w1_rows = fakes.dim() if spec.fc1.gated else intermediate
    weights = fakes.weight(w1_rows, hidden, E4M3), fakes.weight(out, intermediate, E4M3)
    tensors = fakes.matrix(hidden), *weights, fakes.matrix(intermediate), fakes.matrix(out)
    return GroupedMlpDecodedEntry(spec), (*tensors, *groups_fakes(), *address_fakes(6), *tail_fakes(True))


def trace(spec: Spec) -> tuple[Any, tuple]:
    """The host function of a spec whose operands are decoded, and the fake arguments to compile it with."""
    if isinstance(spec, GroupedMmSpec):
        return _trace_mm(spec)
    if isinstance(spec, GroupedMlpSpec):
        return _trace_mlp(spec)
    raise SpecError(f"{spec.op} has no function of its own for MXFP8 weights alone; choose grouped_mm or grouped_mlp")
