"""Hopper's y = grouped_mm(x, w, transpose_w=True) with 16-bit x and quantised w, which the kernel decodes."""

from ...epilogue.activation import LinearEpilogue
from ...launches import mm_decoded
from ...specs import GroupedMmSpec
from ...tracing import Traced
from ..decoded_lines_gemm import DecodedLinesGemm


def trace(spec: GroupedMmSpec) -> Traced:
    return mm_decoded.trace(spec, DecodedLinesGemm, LinearEpilogue)
