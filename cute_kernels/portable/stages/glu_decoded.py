"""act = grouped_glu(x, w) with 16-bit x and weights to be decoded."""

from ...launches import glu_decoded
from ...specs import GroupedGluSpec
from ...tracing import Traced
from ..decoded_gemm import DecodedGemm, RoundingEpilogue


def trace(spec: GroupedGluSpec) -> Traced:
    return glu_decoded.trace(spec, DecodedGemm, RoundingEpilogue)
