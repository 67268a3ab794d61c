"""Blackwell's grouped_mm with x and w in MXFP8 and plain scales, [T, K / 32] and [E, N, K / 32]: y = grouped_mm(x,
w)."""

from ...epilogue.activation import LinearEpilogue
from ...sm90.stages.mm_mxfp8 import Mm
from ...specs import GroupedMmSpec
from ...tracing import DTYPES, Traced, traced
from ..grouped_gemm import GroupedMxfp8Gemm


def trace(spec: GroupedMmSpec) -> Traced:
    """Make the launch for a spec and the stand-in arguments with which it is compiled."""
    return traced(spec, Mm(GroupedMxfp8Gemm(spec, LinearEpilogue(DTYPES[spec.dtype], spec.tile))))
