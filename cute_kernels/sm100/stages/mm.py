"""Blackwell's grouped_mm in 16 bits: y = grouped_mm(x, w)."""

from ...launches import mm
from ...specs import GroupedMmSpec
from ...tracing import Traced
from ..grouped_gemm import GroupedGemm


def trace(spec: GroupedMmSpec) -> Traced:
    return mm.trace(spec, GroupedGemm)
