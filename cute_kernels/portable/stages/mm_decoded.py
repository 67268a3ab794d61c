"""The portable grouped_mm with 16-bit x and quantised weights, which the kernel decodes: y = grouped_mm(x, w)."""

from ...epilogue.activation import LinearEpilogue
from ...launches import mm_decoded
from ...specs import GroupedMmSpec
from ...tracing import Traced
from ..decoded_gemm import DecodedGemm


def trace(spec: GroupedMmSpec) -> Traced:
    return mm_decoded.trace(spec, DecodedGemm, LinearEpilogue)
