"""A weight quantised and folded: E4M3 data, and one scale byte for each of its rows."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Int64

from ...specs import FoldMxfp8Spec
from ...tracing import DTYPES, Traced, traced
from ..fold_mxfp8 import FoldColumns, FoldRows


class Fold:
    def __init__(self, spec: FoldMxfp8Spec):
        kernel = FoldRows if spec.axis == "row" else FoldColumns
        self.fold = kernel(spec.name, DTYPES[spec.dtype])

    @cute.jit
    def __call__(self, w: cute.Tensor, data: cute.Tensor, scale: Int64, stream: cuda.CUstream):
        if w.shape[0] > 0:
            self.fold.launch(w, data, scale, stream)


def trace(spec: FoldMxfp8Spec) -> Traced:
    return traced(spec, Fold(spec))
