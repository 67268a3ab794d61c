"""From a spec to what the compiler needs: a host function and fake arguments with run-time shapes.

The exported functions are positional. Tensors are checked by TVM-FFI at each call (dtype, rank, strides, alignment,
equal dimensions, device); everything optional or of varying type is an address, 0 where absent.
"""

from __future__ import annotations

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream

from . import entry_decoded, entry_mxfp8
from .activation import ActivationParams, no_params
from .fakes import Fakes, address_fakes, groups_fakes, tail_fakes, weight_fakes
from .sm90.dglu_epilogue import DgluEpilogue, DgluInputs
from .sm90.epilogue import ActivationEpilogue, Addends, Inputs, LinearEpilogue
from .sm90.fold_mxfp8 import FoldColumns, FoldRows
from .sm90.grouped_gemm import GroupedGemm
from .sm90.grouped_wgrad import GroupedWgrad
from .sm90.mhc.aggregate import Aggregate, AggregateBackward
from .sm90.mhc.post_mix import PostMix, PostMixBackward
from .sm90.mhc.pre import Pre
from .sm90.mhc.project import Project
from .sm90.mhc.project_backward import PreBackward, ProjectBackward
from .sm90.mhc.sinkhorn import Sinkhorn, SinkhornBackward
from .sm90.quantize_mxfp8 import STRIP, Form, Outputs, QuantizeMxfp8, RoundMxfp8
from .sm90.tail import BackwardTail, RowSums
from .sm90.tickets import after
from .sm90.tile_scheduler import Groups
from .sm90.weights import gate_rows
from .specs import (
    DECODED,
    FoldMxfp8Spec,
    GroupedDgluSpec,
    GroupedGluSpec,
    GroupedMlpSpec,
    GroupedMmSpec,
    GroupedWgradSpec,
    MhcSpec,
    QuantizeMxfp8Spec,
    Spec,
    operands_of,
)

DTYPES = {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}
MHC = {
    "sinkhorn": Sinkhorn,
    "sinkhorn_backward": SinkhornBackward,
    "aggregate": Aggregate,
    "aggregate_backward": AggregateBackward,
    "post_mix": PostMix,
    "post_mix_backward": PostMixBackward,
    "project": Project,
    "project_backward": ProjectBackward,
    "pre": Pre,
    "pre_backward": PreBackward,
}
OUT_DTYPES = {**DTYPES, "float32": Float32}


def _mm(spec: GroupedMmSpec) -> GroupedGemm:
    dtype = DTYPES[spec.dtype]
    epilogue = LinearEpilogue(dtype, spec.tile)
    return GroupedGemm(spec.name, dtype, spec.tile, epilogue, transposed=spec.transpose_w)


def _glu(spec: GroupedGluSpec) -> GroupedGemm:
    dtype = DTYPES[spec.dtype]
    return GroupedGemm(spec.name, dtype, spec.tile, ActivationEpilogue(dtype, spec))


def _no_addends() -> Addends:
    return Addends(Int64(0), Int64(0), Int64(0))


class GroupedMmEntry:
    """y = grouped_mm(x, w). The last two integers: SM count, and 0 to load the kernel without launching it."""

    def __init__(self, spec: GroupedMmSpec):
        self.gemm = _mm(spec)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, y: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, w_table: Int64, bias: Int64, bias_table: Int64, scale: Int64, num_sms: Int32, do_launch: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            self.gemm.launch(
                x, w, (y,), (groups, group_form, num_groups, tickets), w_table,
                Inputs(Addends(bias, bias_table, scale), no_params(), y.shape[1]), num_sms, stream,
            )  # fmt: skip


class GroupedGluEntry:
    """act = grouped_glu(x, w1)."""

    def __init__(self, spec: GroupedGluSpec):
        self.gemm = _glu(spec)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w1: cute.Tensor, act: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, w_table: Int64, bias: Int64, bias_table: Int64, scale: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32,
        offset: Float32, num_sms: Int32, do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            params, addends = ActivationParams(kind, limit, alpha, offset), Addends(bias, bias_table, scale)
            self.gemm.launch(
                x, w1, (act,), (groups, group_form, num_groups, tickets), w_table,
                Inputs(addends, params, w1.shape[1], gate=gate_rows(glu_layout, w1.shape[1])),
                num_sms, stream,
            )  # fmt: skip


class GroupedGluPreactEntry:
    """act, preact = grouped_glu(x, w1, return_preact=True); where do_launch is 2 also y = grouped_mm(act, w2).

    Where it is 1, w2 and y are any tensors of their ranks: nothing looks at them.
    """

    def __init__(self, spec: GroupedGluSpec):
        self.fc1 = _glu(spec)
        self.fc2 = _mm(GroupedMmSpec(spec.dtype, False, spec.tile, spec.arch))

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w1: cute.Tensor, act: cute.Tensor, preact: cute.Tensor, w2: cute.Tensor, y: cute.Tensor,
        groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64, w1_table: Int64, b1: Int64,
        b1_table: Int64, w2_table: Int64, b2: Int64, b2_table: Int64, scale: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32,
        offset: Float32, num_sms: Int32, do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            sizes = (groups, group_form, num_groups, tickets)
            params = ActivationParams(kind, limit, alpha, offset)
            gate = gate_rows(glu_layout, w1.shape[1])
            inputs1 = Inputs(Addends(b1, b1_table, scale), params, w1.shape[1], gate=gate)
            self.fc1.launch(x, w1, (act, preact), sizes, w1_table, inputs1, num_sms, stream)
            if do_launch > 1:
                inputs2 = Inputs(Addends(b2, b2_table, scale), params, y.shape[1])
                self.fc2.launch(act, w2, (y,), after(sizes), w2_table, inputs2, num_sms, stream, after_launch=True)


class GroupedMlpEntry:
    """y = grouped_mlp(x, w1, w2): two launches in one call; the second starts while the first drains."""

    def __init__(self, spec: GroupedMlpSpec):
        self.fc1 = _glu(spec.fc1)
        self.fc2 = _mm(spec.fc2)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w1: cute.Tensor, w2: cute.Tensor, mid: cute.Tensor, y: cute.Tensor, groups: Int64,
        group_form: Int32, num_groups: Int32, tickets: Int64, w1_table: Int64, b1: Int64, b1_table: Int64,
        w2_table: Int64, b2: Int64, b2_table: Int64, scale: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32, offset: Float32,
        num_sms: Int32, do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            sizes = (groups, group_form, num_groups, tickets)
            params = ActivationParams(kind, limit, alpha, offset)
            gate = gate_rows(glu_layout, w1.shape[1])
            inputs1 = Inputs(Addends(b1, b1_table, scale), params, w1.shape[1], gate=gate)
            inputs2 = Inputs(Addends(b2, b2_table, scale), params, y.shape[1])
            self.fc1.launch(x, w1, (mid,), sizes, w1_table, inputs1, num_sms, stream)
            self.fc2.launch(mid, w2, (y,), after(sizes), w2_table, inputs2, num_sms, stream, after_launch=True)


class GroupedDgluEntry:
    """dpreact, act[, d_row_scale] = grouped_dglu(dy, w2, preact); where do_launch is 2 also dx = dpreact w1_e.

    Where it is 1, w1 and dx are any tensors of their ranks: nothing looks at them. d_row_scale and dx are zero behind
    the last group.

    `d_scale`: float32 [T] or 0. `partials`: float32 workspace of ceil(I / tile.n) T.
    """

    def __init__(self, spec: GroupedDgluSpec):
        self.tile = spec.tile
        dtype = DTYPES[spec.dtype]
        self.dglu = GroupedGemm(spec.name, dtype, spec.tile, DgluEpilogue(dtype, spec), transposed=True)
        self.dgrad = _mm(GroupedMmSpec(spec.dtype, True, spec.dgrad, spec.arch))
        self.tail = BackwardTail(spec.name, dtype)

    @cute.jit
    def __call__(
        self, dy: cute.Tensor, w2: cute.Tensor, preact: cute.Tensor, dpreact: cute.Tensor, act: cute.Tensor,
        w1: cute.Tensor, dx: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64,
        w2_table: Int64, w1_table: Int64, scale: Int64, d_scale: Int64, partials: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32,
        alpha: Float32, offset: Float32, num_sms: Int32, do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (dy.shape[0] > 0):
            sizes = (groups, group_form, num_groups, tickets)
            params = ActivationParams(kind, limit, alpha, offset)
            sums = RowSums(d_scale, partials, cute.ceil_div(act.shape[1], self.tile.n))
            inputs = DgluInputs(
                Addends(Int64(0), Int64(0), scale), params, w2.shape[1], preact, sums
            )  # fmt: skip
            self.dglu.launch(dy, w2, (dpreact, act), sizes, w2_table, inputs, num_sms, stream)
            dx_columns = Int32(0)
            if do_launch > 1:
                dx_columns = dx.shape[1]
                inputs_dx = Inputs(_no_addends(), params, dx.shape[1])
                self.dgrad.launch(
                    dpreact, w1, (dx,), after(sizes), w1_table, inputs_dx, num_sms, stream, after_launch=True
                )
            if (dx_columns > 0) | (d_scale != 0):
                self.tail.launch(dx, dx_columns, sums, Groups(*sizes, dy.shape[0]), num_sms, stream)


class GroupedWgradEntry:
    """dw = grouped_wgrad(dy, x). `mask`: bool [E], or `accumulate` for all groups; T = 0 is the caller's."""

    def __init__(self, spec: GroupedWgradSpec):
        self.wgrad = GroupedWgrad(spec.name, DTYPES[spec.dtype], OUT_DTYPES[spec.out_dtype], spec.tile)

    @cute.jit
    def __call__(
        self, dy: cute.Tensor, x: cute.Tensor, dw: cute.Tensor, groups: Int64, group_form: Int32, num_groups: Int32,
        tickets: Int64, dw_table: Int64, mask: Int64, accumulate: Int32, num_sms: Int32, do_launch: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            sizes = (groups, group_form, num_groups, tickets)
            self.wgrad.launch(dy, x, dw, sizes, dw_table, mask, accumulate, num_sms, stream)


class QuantizeMxfp8Entry:
    """MXFP8 copies of x: addresses of E4M3 data [T,K] and E8M0 scales by rows and by columns, 0 where not asked for.

    `offs`: int32 [E] or 0. `wide`: blocks of 128 instead of 32. `swizzled`: scales in 128 x 4 atoms.
    """

    def __init__(self, spec: QuantizeMxfp8Spec):
        dtype = OUT_DTYPES[spec.dtype]
        self.quantize = QuantizeMxfp8(spec.name, dtype, spec.axis)
        self.strips = QuantizeMxfp8(f"{spec.name}_strips", dtype, spec.axis, STRIP)
        self.has_strips = spec.axis == "both"

    @cute.jit
    def __call__(
        self, x: cute.Tensor, row_data: Int64, row_scale: Int64, col_data: Int64, col_scale: Int64, offs: Int64,
        num_groups: Int32, wide: Int32, swizzled: Int32, do_launch: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            outputs = Outputs(row_data, row_scale, col_data, col_scale)
            arguments = (x, outputs, offs, num_groups, Form(wide, swizzled), stream)
            if const_expr(not self.has_strips):
                self.quantize.launch(*arguments)
            elif (wide == 0) & (swizzled == 0):
                self.strips.launch(*arguments)
            else:
                self.quantize.launch(*arguments)


class RoundMxfp8Entry:
    """out[T,K] = the values of x in MXFP8, by rows in blocks of 32, to where groups end. `offs`: int32 [E] or 0."""

    def __init__(self, spec: QuantizeMxfp8Spec):
        self.round = RoundMxfp8(spec.name, OUT_DTYPES[spec.dtype])

    @cute.jit
    def __call__(
        self, x: cute.Tensor, out: cute.Tensor, offs: Int64, num_groups: Int32, do_launch: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if (do_launch > 0) & (x.shape[0] > 0):
            outputs = Outputs(Int64(out.iterator.toint()), Int64(0), Int64(0), Int64(0))
            self.round.launch(x, outputs, offs, num_groups, Form(Int32(0), Int32(0)), stream)


class FoldMxfp8Entry:
    """A weight quantised and folded: E4M3 data, and one scale byte for each of its rows, at an address."""

    def __init__(self, spec: FoldMxfp8Spec):
        kernel = FoldRows if spec.axis == "row" else FoldColumns
        self.fold = kernel(spec.name, OUT_DTYPES[spec.dtype])

    @cute.jit
    def __call__(
        self, w: cute.Tensor, data: cute.Tensor, scale: Int64, do_launch: Int32, stream: cuda.CUstream
    ):  # fmt: skip
        if do_launch > 0:
            self.fold.launch(w, data, scale, stream)


def _trace_mm(spec: GroupedMmSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    n, k = fakes.dim(), fakes.dim()
    x_cols, y_cols = (n, k) if spec.transpose_w else (k, n)
    tensors = fakes.matrix(x_cols), fakes.weight(n, k), fakes.matrix(y_cols)
    return GroupedMmEntry(spec), (*tensors, *groups_fakes(), *weight_fakes(), *tail_fakes(False))


def _trace_glu(spec: GroupedGluSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    hidden, intermediate = fakes.dim(), fakes.dim()
    w1_rows = fakes.dim() if spec.gated else intermediate
    tensors: tuple = fakes.matrix(hidden), fakes.weight(w1_rows, hidden), fakes.matrix(intermediate)
    if not spec.save_preact:
        return GroupedGluEntry(spec), (*tensors, *groups_fakes(), *weight_fakes(), *tail_fakes(True))
    tensors += fakes.matrix(w1_rows), fakes.weight(fakes.dim(), fakes.dim()), fakes.matrix(fakes.dim())
    return GroupedGluPreactEntry(spec), (
        *tensors, *groups_fakes(), *weight_fakes(), *weight_fakes(), *tail_fakes(True),
    )  # fmt: skip


def _trace_mlp(spec: GroupedMlpSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    hidden, intermediate, out = fakes.dim(), fakes.dim(), fakes.dim()
    w1_rows = fakes.dim() if spec.fc1.gated else intermediate
    weights = fakes.weight(w1_rows, hidden), fakes.weight(out, intermediate)
    tensors = fakes.matrix(hidden), *weights, fakes.matrix(intermediate), fakes.matrix(out)
    return GroupedMlpEntry(spec), (
        *tensors, *groups_fakes(), *weight_fakes(), *weight_fakes(), *tail_fakes(True),
    )  # fmt: skip


def _trace_dglu(spec: GroupedDgluSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    hidden, width = fakes.dim(), fakes.dim()
    preact_cols = fakes.dim() if spec.gated else width
    preact, dpreact = fakes.matrix(preact_cols), fakes.matrix(preact_cols)
    tensors: tuple = fakes.matrix(hidden), fakes.weight(hidden, width), preact, dpreact, fakes.matrix(width)
    tensors += fakes.weight(fakes.dim(), fakes.dim()), fakes.matrix(fakes.dim())
    return GroupedDgluEntry(spec), (*tensors, *groups_fakes(), *address_fakes(4), *tail_fakes(True))


def _trace_wgrad(spec: GroupedWgradSpec) -> tuple[Any, tuple]:
    fakes = Fakes(DTYPES[spec.dtype])
    n, k = fakes.dim(), fakes.dim()
    tensors = fakes.matrix(n), fakes.matrix(k), fakes.weight(n, k, OUT_DTYPES[spec.out_dtype])
    rest = Int64(0), Int64(0), Int32(0), Int32(0), Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True)
    return GroupedWgradEntry(spec), (*tensors, *groups_fakes(), *rest)


def _trace_quantize(spec: QuantizeMxfp8Spec) -> tuple[Any, tuple]:
    fakes = Fakes(OUT_DTYPES[spec.dtype])
    columns = fakes.dim(32)
    x, stream = fakes.matrix(columns), make_fake_stream(use_tvm_ffi_env_stream=True)
    if spec.rounded:
        return RoundMxfp8Entry(spec), (x, fakes.packed(columns), Int64(0), Int32(0), Int32(0), stream)
    numbers = tuple(Int32(0) for _ in range(4))
    return QuantizeMxfp8Entry(spec), (x, *address_fakes(5), *numbers, stream)


def _trace_fold(spec: FoldMxfp8Spec) -> tuple[Any, tuple]:
    fakes = Fakes(OUT_DTYPES[spec.dtype])
    n, k = fakes.dim(32), fakes.dim(32)
    e4m3 = cutlass.Float8E4M3FN
    if spec.axis == "row":
        tensors = fakes.matrix(k), fakes.packed(k, e4m3)
    else:
        tensors = fakes.weight(n, k), fakes.weight(k, n, e4m3)
    return FoldMxfp8Entry(spec), (*tensors, Int64(0), Int32(0), make_fake_stream(use_tvm_ffi_env_stream=True))


def _trace_mhc(spec: MhcSpec) -> tuple[Any, tuple]:
    """Nothing but numbers: the stream is the last of them, since no tensor tells it."""
    wanted = spec.arguments
    kinds = (wanted.addresses, Int64), (wanted.integers, Int32), (wanted.floats, Float32)
    fakes = tuple(kind(0) for names, kind in kinds for _ in names)
    return MHC[spec.kernel](spec.name, OUT_DTYPES[spec.dtype], spec.n), (*fakes, Int32(0), make_fake_stream())


def trace(spec: Spec) -> tuple[Any, tuple]:
    """The host function of a spec and the fake arguments to compile it with."""
    if operands_of(spec) == "mxfp8":
        return entry_mxfp8.trace(spec)
    if operands_of(spec) in DECODED:
        return entry_decoded.trace(spec)
    if isinstance(spec, MhcSpec):
        return _trace_mhc(spec)
    if isinstance(spec, FoldMxfp8Spec):
        return _trace_fold(spec)
    if isinstance(spec, GroupedMmSpec):
        return _trace_mm(spec)
    if isinstance(spec, GroupedGluSpec):
        return _trace_glu(spec)
    if isinstance(spec, GroupedMlpSpec):
        return _trace_mlp(spec)
    if isinstance(spec, GroupedDgluSpec):
        return _trace_dglu(spec)
    if isinstance(spec, GroupedWgradSpec):
        return _trace_wgrad(spec)
    return _trace_quantize(spec)
