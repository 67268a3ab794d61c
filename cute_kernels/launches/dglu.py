"""The launch of grouped_dglu in 16 bits: (dpreact, act, partials) = grouped_dglu(x, w, preact).

x [T, H] is the gradient of FC2's result. w is FC2's weight w2. preact is the preactivation that FC1 saved. `partials`
is float32 [tiles of columns, T]; its sum over tiles is the gradient of the row scale. FC2 contracts over I and this
GEMM over H, so exactly one of the two transposes w: this GEMM if `spec.transpose_w` is False.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..activation import ActivationParams
from ..epilogue.base import OptionalInputs
from ..epilogue.dglu import DgluEpilogue, DgluInputs, RowParts
from ..memory.weights import low_weights
from ..specs import DgluSpec
from ..tracing import DTYPES, Traced, traced


class Dglu:
    """Host function that launches a grouped_dglu without adapters. `signatures._dglu` describes its arguments: tensors,
    then addresses (0: not given) and numbers."""

    def __init__(self, spec: DgluSpec, gemm_type: Any, epilogue_type: type[DgluEpilogue]):
        self.tile = spec.tile
        dtype = DTYPES[spec.dtype]
        self.gemm = gemm_type(spec, dtype, epilogue_type(dtype, spec), not spec.transpose_w)

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, preact: cute.Tensor, dpreact: cute.Tensor, act: cute.Tensor,
        rows: Int64, groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64, w_table: Int64, scale: Int64,
        partials: Int64, limit: Float32, alpha: Float32, offset: Float32, num_sms: Int32, position: Int32,
        stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            inputs = self._inputs(act, preact, scale, partials, (limit, alpha, offset))
            sizes = (groups, group_form, num_groups, tickets)
            self.gemm.launch(x, w, (dpreact, act), sizes, w_table, rows, inputs, num_sms, position, stream)

    def _inputs(
        self, act: cute.Tensor, preact: cute.Tensor, scale: Int64, partials: Int64, numbers: tuple[Float32, ...]
    ) -> DgluInputs:
        """Collect the epilogue's inputs.

        Args:
            act: the result act [T, I]; only its number of columns is used.
            preact: the preactivation that FC1 saved, [T, 2I], or [T, I] without a gate.
            scale: the address of float32 [T], the row scale, by which act is multiplied; 0: none.
            partials: the address of float32 [tiles of columns, T], to which the partial sums of the row scale's
                gradient are written; 0: this gradient is not wanted.
            numbers: the activation's constants limit, alpha and offset.
        """
        sums = RowParts(partials, cute.ceil_div(act.shape[1], self.tile.n))
        optional = OptionalInputs(Int64(0), Int64(0), scale)
        return DgluInputs(optional, ActivationParams(Int32(0), numbers), act.shape[1], preact, sums)


class DgluAdapted(Dglu):
    """Host function that launches a grouped_dglu with LoRA adapters of rank r. The GEMM also adds low [T, r] times the
    experts' matrices, which begin at address `low_w`."""

    @cute.jit
    def __call__(
        self, x: cute.Tensor, w: cute.Tensor, preact: cute.Tensor, dpreact: cute.Tensor, act: cute.Tensor,
        low: cute.Tensor, rows: Int64, groups: Int64, group_form: Int32, num_groups: Int32, tickets: Int64,
        w_table: Int64, low_w: Int64, scale: Int64, partials: Int64, limit: Float32, alpha: Float32, offset: Float32,
        num_sms: Int32, position: Int32, stream: cuda.CUstream,
    ):  # fmt: skip
        if act.shape[0] > 0:
            inputs = self._inputs(act, preact, scale, partials, (limit, alpha, offset))
            sizes = (groups, group_form, num_groups, tickets)
            pair = low, low_weights(low, low_w, act.shape[1], self.gemm.transposed)
            self.gemm.launch(x, w, (dpreact, act), sizes, w_table, rows, inputs, num_sms, position, stream, low=pair)


def trace(spec: DgluSpec, gemm_type: Any, epilogue_type: type[DgluEpilogue]) -> Traced:
    """Return a pair to compile: the host function that launches the spec's kernel, and stand-ins for the function's
    arguments.

    Args:
        gemm_type: the architecture's class of GEMM kernels.
        epilogue_type: the architecture's epilogue of grouped_dglu.
    """
    kind = DgluAdapted if spec.adapted else Dglu
    return traced(spec, kind(spec, gemm_type, epilogue_type))
