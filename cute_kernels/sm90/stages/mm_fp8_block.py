"""y = grouped_mm(x, w) with x and w in E4M3 and float32 scales: one for each 128 elements of a row of x, one for each
128 x 128 of w."""

from ...epilogue.activation import LinearEpilogue
from ...specs import GroupedMmSpec
from ...tracing import DTYPES, Traced, traced
from ..block_fp8_gemm import GroupedBlockFp8Gemm
from .mm_mxfp8 import Mm


def trace(spec: GroupedMmSpec) -> Traced:
    return traced(spec, Mm(GroupedBlockFp8Gemm(spec, LinearEpilogue(DTYPES[spec.dtype], spec.tile))))
