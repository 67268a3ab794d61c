"""y = grouped_mm(x, w) in 16 bits."""

from typing import Any

from ...sm90.epilogue.activation import LinearEpilogue
from ...sm90.stages import mm
from ...specs import GroupedMmSpec
from ...tracing import DTYPES, Traced, traced
from ..grouped_gemm import GroupedGemm


class Mm(mm.Mm):
    gemm: Any

    def __init__(self, spec: GroupedMmSpec):
        dtype = DTYPES[spec.dtype]
        self.gemm = GroupedGemm(spec, dtype, LinearEpilogue(dtype, spec.tile))


def trace(spec: GroupedMmSpec) -> Traced:
    return traced(spec, Mm(spec))
