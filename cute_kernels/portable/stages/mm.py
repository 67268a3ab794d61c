"""y = grouped_mm(x, w) in 16 bits: launches of sm90's, with the GEMM of this folder."""

from ...sm90.stages import mm
from ...specs import GroupedMmSpec
from ...tracing import Traced, traced
from ..grouped_gemm import GroupedGemm


class Mm(mm.Mm):
    gemm_type = GroupedGemm


class MmInHalves(mm.MmInHalves):
    gemm_type = GroupedGemm


def trace(spec: GroupedMmSpec) -> Traced:
    return traced(spec, (MmInHalves if spec.in_halves else Mm)(spec))
