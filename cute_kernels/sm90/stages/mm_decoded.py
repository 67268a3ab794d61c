"""Hopper's grouped_mm with 16-bit x and quantised w, which the kernel decodes: y = grouped_mm(x, w)."""

from ...launches import mm_decoded
from ...specs import GroupedMmSpec
from ...tracing import Traced
from ..epilogue.swapped import SwappedLinearEpilogue
from ..swapped_gemm import SwappedGemm


def trace(spec: GroupedMmSpec) -> Traced:
    return mm_decoded.trace(spec, SwappedGemm, SwappedLinearEpilogue)
