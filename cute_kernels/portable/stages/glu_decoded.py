"""act = grouped_glu(x, w) of 16-bit rows and weights to be decoded: sm90's launch, with the GEMM of this folder."""

from ...sm90.stages import glu_decoded
from ...specs import GroupedGluSpec
from ...tracing import Traced, traced
from ..decoded_gemm import DecodedGemm, RoundingEpilogue


class Glu(glu_decoded.Glu):
    gemm_type, epilogue_type = DecodedGemm, RoundingEpilogue


def trace(spec: GroupedGluSpec) -> Traced:
    return traced(spec, Glu(spec))
