"""dpreact, act and parts of d_row_scale = grouped_dglu(x, w, preact), with x and w [E, I, H] (w2 transposed) in MXFP8
along the contraction."""

from ...sm90.stages.dglu_mxfp8 import Dglu
from ...specs import DgluSpec
from ...tracing import DTYPES, Traced, traced
from ..epilogue.dglu import DgluEpilogue
from ..grouped_gemm import GroupedMxfp8Gemm


def trace(spec: DgluSpec) -> Traced:
    return traced(spec, Dglu(spec, GroupedMxfp8Gemm(spec, DgluEpilogue(DTYPES[spec.dtype], spec))))
