"""Blackwell's grouped_mm with x and w in MXFP8 and plain scales, [T, K / 32] and [E, N, K / 32]: y = grouped_mm(x,
w)."""

from ...epilogue.activation import LinearEpilogue
from ...sm90.stages.mm_mxfp8 import Mm
from ...specs import GroupedMmSpec
from ...tracing import DTYPES, Traced, traced
from ..grouped_gemm import GroupedMxfp8Gemm


def trace(spec: GroupedMmSpec) -> Traced:
    """Return (host function that launches the spec's kernel, stand-ins for its arguments), from which to compile."""
    return traced(spec, Mm(GroupedMxfp8Gemm(spec, LinearEpilogue(DTYPES[spec.dtype], spec.tile))))
