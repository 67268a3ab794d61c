"""Blackwell's y = grouped_mm(x, w) with x and w in MXFP8. Scales of x are [T, K / 32], scales of w [E, N, K / 32]."""

from ...epilogue.activation import LinearEpilogue
from ...sm90.stages.mm_mxfp8 import Mm
from ...specs import GroupedMmSpec
from ...tracing import DTYPES, Traced, traced
from ..grouped_gemm import GroupedMxfp8Gemm


def trace(spec: GroupedMmSpec) -> Traced:
    return traced(spec, Mm(GroupedMxfp8Gemm(spec, LinearEpilogue(DTYPES[spec.dtype], spec.tile))))
