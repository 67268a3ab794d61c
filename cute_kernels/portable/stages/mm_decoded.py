"""y = grouped_mm(x, w) with 16-bit x and weights to be decoded."""

from ...epilogue.activation import LinearEpilogue
from ...launches import mm_decoded
from ...specs import GroupedMmSpec
from ...tracing import Traced
from ..decoded_gemm import DecodedGemm


def trace(spec: GroupedMmSpec) -> Traced:
    return mm_decoded.trace(spec, DecodedGemm, LinearEpilogue)
