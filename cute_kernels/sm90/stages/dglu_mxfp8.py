"""Hopper's grouped_dglu(x, w, preact) with x in MXFP8: computes dpreact, act and partial sums of d_row_scale.

w is [E, I, H] in E4M3, the transpose of the forward's weight w2, so that its rows lie along the contraction H. Each
weight row has one scale, into which block scales were folded (quantize/fold_mxfp8.py).
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...activation import ActivationParams
from ...epilogue.base import OptionalInputs
from ...epilogue.dglu import DgluInputs, RowParts
from ...specs import DgluSpec
from ...tracing import DTYPES, Traced, traced
from ..epilogue.dglu import DgluEpilogue
from ..grouped_gemm import GroupedFp8Gemm, GroupedGemm


class Dglu:
    """Host function that launches a grouped_dglu in MXFP8. `signatures._dglu` describes its arguments: tensors, then
    addresses (0: not given) and numbers."""

    def __init__(self, spec: DgluSpec, gemm: GroupedGemm):
        self.tile = spec.tile
        self.gemm = gemm

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, preact: cute.Tensor, dpreact: cute.Tensor, act: cute.Tensor,
        rows: Int64, groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64, x_scale: Int64,
        w_scale: Int64, scale: Int64, partials: Int64, limit: Float32, alpha: Float32, offset: Float32, num_sms: Int32,
        position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            sums = RowParts(partials, cute.ceil_div(act.shape[1], self.tile.n))
            optional = OptionalInputs(Int64(0), Int64(0), scale)
            params = ActivationParams(Int32(0), (limit, alpha, offset))
            inputs = DgluInputs(optional, params, act.shape[1], preact, sums, w_scale)
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, (dpreact, act), sizes, Int64(0), rows, inputs, num_sms, position, stream, x_scale)


def trace(spec: DgluSpec) -> Traced:
    return traced(spec, Dglu(spec, GroupedFp8Gemm(spec, DgluEpilogue(DTYPES[spec.dtype], spec))))
