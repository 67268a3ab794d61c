"""y = grouped_mm(x, w) of 16-bit rows and weights to be decoded: a launch of sm90's, with the GEMM of this folder."""

from ...sm90.epilogue.activation import LinearEpilogue
from ...sm90.stages import mm_decoded
from ...specs import GroupedMmSpec
from ...tracing import Traced, traced
from ..decoded_gemm import DecodedGemm


class Mm(mm_decoded.Mm):
    gemm_type, epilogue_type = DecodedGemm, LinearEpilogue


def trace(spec: GroupedMmSpec) -> Traced:
    return traced(spec, Mm(spec))
