"""Blackwell's grouped_dglu in MXFP8: dpreact, act and partial sums of d_row_scale from x, w and preact. x and w
[E, I, H] (w2 transposed) are quantised along the contraction H."""

from ...sm90.stages.dglu_mxfp8 import Dglu
from ...specs import DgluSpec
from ...tracing import DTYPES, Traced, traced
from ..epilogue.dglu import DgluEpilogue
from ..grouped_gemm import GroupedMxfp8Gemm


def trace(spec: DgluSpec) -> Traced:
    """Make the launch for a spec and the stand-in arguments with which it is compiled."""
    return traced(spec, Dglu(spec, GroupedMxfp8Gemm(spec, DgluEpilogue(DTYPES[spec.dtype], spec))))
