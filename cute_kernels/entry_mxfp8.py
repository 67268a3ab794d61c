"""The exported functions whose GEMMs multiply MXFP8 numbers: E4M3 tensors, and scale bytes by address.

Rows have plain scales, [T, K / 32], four equal ones for each 128 elements; weights are folded to one a row, [E, N].
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float8E4M3FN, Float32, Int32, Int64

from .activation import ActivationParams, no_params
from .fakes import Fakes, address_fakes, groups_fakes, tail_fakes
from .sm90.dglu_epilogue import DgluEpilogue, DgluInputs
from .sm90.epilogue import Addends, Inputs, LinearEpilogue
from .sm90.grouped_gemm import GroupedFp8Gemm
from .sm90.quantize_mxfp8 import Form, Outputs, QuantizeMxfp8
from .sm90.quantizing_epilogue import QuantizingEpilogue
from .sm90.tail import BackwardTail, RowSums
from .sm90.tickets import after
from .sm90.tile_scheduler import Groups
from .sm90.weights import gate_rows
from .specs import GroupedDgluSpec, GroupedGluSpec, GroupedMlpSpec, GroupedMmSpec, Spec

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
# Scales for 128 elements, in rows.
ROW_FORM = (1, 0)
E4M3 = Float8E4M3FN
BLOCK = 32


def _mm(spec: GroupedMmSpec) -> GroupedFp8Gemm:
    epilogue = LinearEpilogue(DTYPES[spec.dtype], spec.tile, scales_columns=True)
    return GroupedFp8Gemm(spec.name, spec.tile, epilogue)


def _glu(spec: GroupedGluSpec) -> GroupedFp8Gemm:
    return GroupedFp8Gemm(spec.name, spec.tile, QuantizingEpilogue(DTYPES[spec.dtype], spec))


def _quantize(spec: GroupedMlpSpec | GroupedGluSpec | GroupedDgluSpec) -> QuantizeMxfp8:
    return QuantizeMxfp8(f"{spec.name}_quantize", DTYPES[spec.dtype], "row")


def _quantize_rows(
    kernel: QuantizeMxfp8, x: cute.Tensor, data: cute.Tensor, scale: Int64, stream: cuda.CUstream
) -> None:
    """All T rows: what lies behind the last group is read by nobody."""
    outputs = Outputs(Int64(data.iterator.toint()), scale, Int64(0), Int64(0))
    kernel.launch(x, outputs, Int64(0), Int32(0), Form(*(Int32(field) for field in ROW_FORM)), stream)


class GroupedMmMxfp8Entry:
    """y = grouped_mm(x, w) of x in MXFP8 and folded w."""

    def __init__(self, spec: GroupedMmSpec):
        self.gemm = _mm(spec)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, x_scale: Int64, w_scale: Int64, bias: Int64, bias_table: Int64, scale: Int64, num_sms: Int32,
        do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            params = no_params()
            inputs = Inputs(Addends(bias, bias_table, scale), params, y.shape[1], w_scale)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, (y,), sizes, Int64(0), inputs, num_sms, stream, x_scale=x_scale)


class GroupedMlpMxfp8Entry:
    """y = grouped_mlp(x, w1, w2): x is quantised, unless do_launch is 2; then FC1, whose activation is; then FC2.

    x8 [T,H] and mid8 [T,I] take the quantised rows, or x8 has them; x_scale and mid_scale are their scales' addresses.
    """

    def __init__(self, spec: GroupedMlpSpec):
        self.quantize = _quantize(spec)
        self.fc1 = _glu(spec.fc1)
        self.fc2 = _mm(spec.fc2)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w1: cute.Tensor, w2: cute.Tensor, x8: cute.Tensor, mid8: cute.Tensor, y: cute.Tensor,
        groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64, x_scale: Int64, mid_scale: Int64,
        w1_scale: Int64, b1: Int64, b1_table: Int64, w2_scale: Int64, b2: Int64, b2_table: Int64, scale: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32, offset: Float32, num_sms: Int32,
        do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            sizes = (groups, group_form, num_groups, tickets)
            params = ActivationParams(kind, limit, alpha, offset)
            if do_launch == 1:
                _quantize_rows(self.quantize, x, x8, x_scale, stream)
            gate = gate_rows(glu_layout, w1.shape[1])
            inputs1 = Inputs(Addends(b1, b1_table, scale), params, w1.shape[1], w1_scale, mid_scale, gate)
            inputs2 = Inputs(Addends(b2, b2_table, scale), params, y.shape[1], w2_scale)
            self.fc1.launch(x8, w1, (mid8,), sizes, Int64(0), inputs1, num_sms, stream, True, x_scale)
            self.fc2.launch(mid8, w2, (y,), after(sizes), Int64(0), inputs2, num_sms, stream, True, mid_scale)


class GroupedGluPreactMxfp8Entry:
    """As GroupedMlpMxfp8Entry, and FC1 stores its preactivation as well: the forward of training."""

    def __init__(self, spec: GroupedGluSpec):
        self.quantize = _quantize(spec)
        self.fc1 = _glu(spec)
        self.fc2 = _mm(GroupedMmSpec(spec.dtype, False, spec.tile, spec.arch, spec.operands))

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w1: cute.Tensor, w2: cute.Tensor, x8: cute.Tensor, mid8: cute.Tensor,
        preact: cute.Tensor, y: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64,
        x_scale: Int64, mid_scale: Int64, w1_scale: Int64, b1: Int64, b1_table: Int64, w2_scale: Int64, b2: Int64,
        b2_table: Int64, scale: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32, offset: Float32, num_sms: Int32,
        do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            sizes = (groups, group_form, num_groups, tickets)
            params = ActivationParams(kind, limit, alpha, offset)
            if do_launch == 1:
                _quantize_rows(self.quantize, x, x8, x_scale, stream)
            gate = gate_rows(glu_layout, w1.shape[1])
            inputs1 = Inputs(Addends(b1, b1_table, scale), params, w1.shape[1], w1_scale, mid_scale, gate)
            inputs2 = Inputs(Addends(b2, b2_table, scale), params, y.shape[1], w2_scale)
            self.fc1.launch(x8, w1, (mid8, preact), sizes, Int64(0), inputs1, num_sms, stream, True, x_scale)
            self.fc2.launch(mid8, w2, (y,), after(sizes), Int64(0), inputs2, num_sms, stream, True, mid_scale)


class GroupedDgluMxfp8Entry:
    """As the 16-bit grouped_dglu, of weights folded along their rows: dy is quantised first, and dpreact for dx.

    w2 [E,I,H] and w1 [E,H,2I or I] are transposed: they lie along the contraction of a data gradient.
    """

    def __init__(self, spec: GroupedDgluSpec):
        self.tile = spec.tile
        dtype = DTYPES[spec.dtype]
        self.quantize = _quantize(spec)
        self.quantize_dpreact = _quantize(spec)
        self.dglu = GroupedFp8Gemm(spec.name, spec.tile, DgluEpilogue(dtype, spec))
        self.dgrad = _mm(GroupedMmSpec(spec.dtype, False, spec.dgrad, spec.arch, spec.operands))
        self.tail = BackwardTail(spec.name, dtype)

    @cute.jit
    def __call__(
        self, dy: cute.Tensor, w2: cute.Tensor, preact: cute.Tensor, dpreact: cute.Tensor, act: cute.Tensor,
        w1: cute.Tensor, dx: cute.Tensor, dy8: cute.Tensor, dpreact8: cute.Tensor, groups: Int64, group_form: Int32,
        num_groups: Int32, tickets: Int64, dy_scale: Int64, dpreact_scale: Int64, w2_scale: Int64, w1_scale: Int64,
        scale: Int64, d_scale: Int64, partials: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32, offset: Float32, num_sms: Int32,
        do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (dy.shape[0] > 0):
            sizes = (groups, group_form, num_groups, tickets)
            params = ActivationParams(kind, limit, alpha, offset)
            _quantize_rows(self.quantize, dy, dy8, dy_scale, stream)
            sums = RowSums(d_scale, partials, cute.ceil_div(act.shape[1], self.tile.n))
            inputs = DgluInputs(
                Addends(Int64(0), Int64(0), scale), params, act.shape[1], preact, sums,
                w2_scale,
            )  # fmt: skip
            self.dglu.launch(dy8, w2, (dpreact, act), sizes, Int64(0), inputs, num_sms, stream, True, dy_scale)
            dx_columns = Int32(0)
            if do_launch > 1:
                dx_columns = dx.shape[1]
                _quantize_rows(self.quantize_dpreact, dpreact, dpreact8, dpreact_scale, stream)
                no_addends = Addends(Int64(0), Int64(0), Int64(0))
                inputs_dx = Inputs(no_addends, params, dx.shape[1], w1_scale)
                self.dgrad.launch(
                    dpreact8, w1, (dx,), after(sizes), Int64(0), inputs_dx, num_sms, stream, True, dpreact_scale
                )
            if (dx_columns > 0) | (d_scale != 0):
                self.tail.launch(dx, dx_columns, sums, Groups(*sizes, dy.shape[0]), num_sms, stream)


def _trace_mm(spec: GroupedMmSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    n, k = fakes.dim(), fakes.dim(BLOCK)
    tensors = fakes.matrix(k, E4M3), fakes.weight(n, k, E4M3), fakes.matrix(n)
    return GroupedMmMxfp8Entry(spec), (*tensors, *groups_fakes(), *address_fakes(4), *tail_fakes(False))


def _trace_mlp(spec: GroupedMlpSpec | GroupedGluSpec) -> tuple[Any, tuple]:
    glu = spec.fc1 if isinstance(spec, GroupedMlpSpec) else spec
    fakes = Fakes(DTYPES[spec.dtype])
    hidden, intermediate, out = fakes.dim(BLOCK), fakes.dim(BLOCK), fakes.dim()
    w1_rows = fakes.dim() if glu.gated else intermediate
    weights = fakes.weight(w1_rows, hidden, E4M3), fakes.weight(out, intermediate, E4M3)
    quantised = fakes.matrix(hidden, E4M3), fakes.matrix(intermediate, E4M3)
    preact = (fakes.matrix(w1_rows),) if glu.save_preact else ()
    tensors = fakes.matrix(fakes.dim()), *weights, *quantised, *preact, fakes.matrix(out)
    entry = GroupedMlpMxfp8Entry(spec) if isinstance(spec, GroupedMlpSpec) else GroupedGluPreactMxfp8Entry(spec)
    return entry, (*tensors, *groups_fakes(), *address_fakes(8), *tail_fakes(True))


def _trace_dglu(spec: GroupedDgluSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    hidden, width = fakes.dim(BLOCK), fakes.dim(BLOCK)
    columns = fakes.dim(BLOCK) if spec.gated else width
    tensors: tuple = fakes.matrix(hidden), fakes.weight(width, hidden, E4M3)
    tensors += fakes.matrix(columns), fakes.matrix(columns), fakes.matrix(width)
    tensors += fakes.weight(fakes.dim(), columns, E4M3), fakes.matrix(fakes.dim())
    tensors += fakes.matrix(hidden, E4M3), fakes.matrix(columns, E4M3)
    return GroupedDgluMxfp8Entry(spec), (*tensors, *groups_fakes(), *address_fakes(6), *tail_fakes(True))


def trace(spec: Spec) -> tuple[Any, tuple]:
    """The host function of a spec with operands "mxfp8" and the fake arguments to compile it with."""
    if isinstance(spec, GroupedMmSpec):
        return _trace_mm(spec)
    if isinstance(spec, GroupedDgluSpec):
        return _trace_dglu(spec)
    assert isinstance(spec, (GroupedMlpSpec, GroupedGluSpec))
    return _trace_mlp(spec)
