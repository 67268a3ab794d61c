"""The portable grouped_glu with 16-bit x and quantised weights, which the kernel decodes: act = grouped_glu(x, w)."""

from ...launches import glu_decoded
from ...specs import GroupedGluSpec
from ...tracing import Traced
from ..decoded_gemm import DecodedGemm, RoundingEpilogue


def trace(spec: GroupedGluSpec) -> Traced:
    return glu_decoded.trace(spec, DecodedGemm, RoundingEpilogue)
