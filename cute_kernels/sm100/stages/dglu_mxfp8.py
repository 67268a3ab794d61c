"""Blackwell's grouped_dglu(x, w, preact) with x and w in MXFP8: computes dpreact, act and partial sums of d_row_scale.

w is [E, I, H], the transpose of w2. x and w are quantised along the contraction H.
"""

from ...sm90.stages.dglu_mxfp8 import Dglu
from ...specs import DgluSpec
from ...tracing import DTYPES, Traced, traced
from ..epilogue.dglu import DgluEpilogue
from ..grouped_gemm import GroupedMxfp8Gemm


def trace(spec: DgluSpec) -> Traced:
    return traced(spec, Dglu(spec, GroupedMxfp8Gemm(spec, DgluEpilogue(DTYPES[spec.dtype], spec))))
