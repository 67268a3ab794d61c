"""Hopper's grouped_glu with 16-bit x and quantised w, which the kernel decodes: act = grouped_glu(x, w)."""

from ...launches import glu_decoded
from ...specs import GroupedGluSpec
from ...tracing import Traced
from ..epilogue.swapped import SwappedActivationEpilogue
from ..swapped_gemm import SwappedGemm


def trace(spec: GroupedGluSpec) -> Traced:
    return glu_decoded.trace(spec, SwappedGemm, SwappedActivationEpilogue)
