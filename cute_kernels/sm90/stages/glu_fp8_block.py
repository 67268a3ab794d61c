"""Hopper's act = grouped_glu(x, w) with x, w and act in FP8 with float32 block scales.

act is in E4M3, with a float32 scale for each 128 elements of a row.
"""

from ...specs import GroupedGluSpec
from ...tracing import DTYPES, Traced, traced
from ..block_fp8_gemm import GroupedBlockFp8Gemm
from ..epilogue.block_quantizing import BlockQuantizingEpilogue
from .glu_mxfp8 import Glu


def trace(spec: GroupedGluSpec) -> Traced:
    return traced(spec, Glu(GroupedBlockFp8Gemm(spec, BlockQuantizingEpilogue(DTYPES[spec.dtype], spec))))
