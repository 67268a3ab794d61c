"""Hopper's grouped_glu in 16 bits: act = grouped_glu(x, w), with or without the preactivation."""

from ...launches import glu
from ...specs import GroupedGluSpec
from ...tracing import Traced
from ..grouped_gemm import GroupedGemm


def trace(spec: GroupedGluSpec) -> Traced:
    return glu.trace(spec, GroupedGemm)
