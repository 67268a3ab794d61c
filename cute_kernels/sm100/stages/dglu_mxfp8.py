"""Blackwell's grouped_dglu in MXFP8: dpreact, act and partial sums of d_row_scale from x, w and preact. x and w
[E, I, H] (w2 transposed) are quantised along the contraction H."""

from ...sm90.stages.dglu_mxfp8 import Dglu
from ...specs import DgluSpec
from ...tracing import DTYPES, Traced, traced
from ..epilogue.dglu import DgluEpilogue
from ..grouped_gemm import GroupedMxfp8Gemm


def trace(spec: DgluSpec) -> Traced:
    """Return (host function that launches the spec's kernel, stand-ins for its arguments), from which to compile."""
    return traced(spec, Dglu(spec, GroupedMxfp8Gemm(spec, DgluEpilogue(DTYPES[spec.dtype], spec))))
