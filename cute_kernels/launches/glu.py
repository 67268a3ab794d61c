"""The launch of grouped_glu, a fused FC1, in 16 bits. act = grouped_glu(x, w); if the spec saves the preactivation, act
and preact are stored."""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ..activation import ActivationParams
from ..epilogue.activation import ActivationEpilogue
from ..epilogue.base import Inputs, OptionalInputs
from ..epilogue.natural_order import NATURAL_EPILOGUES
from ..memory.weights import gate_rows, low_weights, weight_rows
from ..specs import LAYOUT_FORMS, GroupedGluSpec
from ..tracing import DTYPES, Traced, traced


class Glu:
    """Host function that launches a grouped_glu that stores only the activation. `signatures._glu` describes its
    arguments: tensors, then addresses (0: not given) and numbers."""

    def __init__(self, spec: GroupedGluSpec, gemm_type: Any):
        dtype, self.transposed = DTYPES[spec.dtype], spec.transpose_w
        # The weights' halves may be two tensors.
        self.may_part = spec.gated and not spec.transpose_w and "concat" in LAYOUT_FORMS[spec.glu_layout]
        is_natural = spec.transpose_w and spec.glu_layout in NATURAL_EPILOGUES
        epilogue = (NATURAL_EPILOGUES[spec.glu_layout] if is_natural else ActivationEpilogue)(dtype, spec)
        self.gemm = gemm_type(spec, dtype, epilogue, spec.transpose_w)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, act: cute.Tensor, rows: Int64, groups: Int64, group_form: Int32,
        num_groups: Int32, tickets: Int64, w_table: Int64, w_up: Int64, bias: Int64, bias_table: Int64, scale: Int64,
        kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32, offset: Float32, num_sms: Int32,
        position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            optional, params = OptionalInputs(bias, bias_table, scale), ActivationParams(kind, (limit, alpha, offset))
            up = w_up if const_expr(self.may_part) else None
            inputs = self._inputs(w, up, optional, params, glu_layout)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(
                x, w, (act,), sizes, w_table, rows, inputs, num_sms, position, stream, w_up=up
            )  # fmt: skip

    def _inputs(
        self, w: cute.Tensor, up: Int64 | None, optional: OptionalInputs, params: ActivationParams, glu_layout: Int32
    ) -> Inputs:
        """Collect the epilogue's inputs.

        Args:
            w: the weights; only their sizes are used.
            up: the address of the linear half's weights; 0 or None: w has both halves.
            optional: addresses of biases and row scales.
            params: the activation's number and its constants.
            glu_layout: the number of the gate layout (`specs.LAYOUTS`).
        """
        n = w.shape[2] if self.transposed else weight_rows(w, up)
        return Inputs(optional, params, n, gate=gate_rows(glu_layout, n))


class GluPreact(Glu):
    """Host function that launches a grouped_glu that also stores the preactivation."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, act: cute.Tensor, preact: cute.Tensor, rows: Int64, groups: Int64,
        group_form: Int32, num_groups: Int32, tickets: Int64, w_table: Int64, w_up: Int64, bias: Int64,
        bias_table: Int64, scale: Int64, kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32,
        offset: Float32, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            optional, params = OptionalInputs(bias, bias_table, scale), ActivationParams(kind, (limit, alpha, offset))
            up = w_up if const_expr(self.may_part) else None
            inputs = self._inputs(w, up, optional, params, glu_layout)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(
                x, w, (act, preact), sizes, w_table, rows, inputs, num_sms, position, stream, w_up=up
            )  # fmt: skip


class GluPreactAdapted(Glu):
    """Host function that launches a grouped_glu with LoRA adapters of rank r, which also stores the preactivation. The
    GEMM adds low [T, r] times the experts' matrices, which begin at address `low_w`."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, act: cute.Tensor, preact: cute.Tensor, low: cute.Tensor, rows: Int64,
        groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64, w_table: Int64, w_up: Int64, low_w: Int64,
        bias: Int64, bias_table: Int64, scale: Int64, kind: Int32, glu_layout: Int32, limit: Float32, alpha: Float32,
        offset: Float32, num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            optional, params = OptionalInputs(bias, bias_table, scale), ActivationParams(kind, (limit, alpha, offset))
            up = w_up if const_expr(self.may_part) else None
            inputs = self._inputs(w, up, optional, params, glu_layout)
            sizes, pair = (
                (groups, group_form, num_groups, tickets),
                (low, low_weights(low, low_w, inputs.bias_size, self.transposed)),
            )
            self.gemm.launch(
                x, w, (act, preact), sizes, w_table, rows, inputs, num_sms, position, stream, w_up=up, low=pair
            )  # fmt: skip


def trace(spec: GroupedGluSpec, gemm_type: Any) -> Traced:
    """Return a pair to compile: the host function that launches the spec's kernel, and stand-ins for the function's
    arguments.

    gemm_type: the architecture's class of GEMM kernels.
    """
    kind = GluPreactAdapted if spec.adapted else GluPreact if spec.save_preact else Glu
    return traced(spec, kind(spec, gemm_type))
