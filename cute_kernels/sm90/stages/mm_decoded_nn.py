"""Hopper's y = grouped_mm(x, w, transpose_w=True) with 16-bit x and quantised w, which the kernel decodes."""

from ...epilogue.activation import LinearEpilogue
from ...launches import mm_decoded
from ...specs import GroupedMmSpec
from ...tracing import Traced
from ..decoded_lines_gemm import DecodedLinesGemm


def trace(spec: GroupedMmSpec) -> Traced:
    """Return the host function that launches the spec's kernel, and stand-ins for its arguments to compile it with."""
    return mm_decoded.trace(spec, DecodedLinesGemm, LinearEpilogue)
