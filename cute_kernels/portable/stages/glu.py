"""act = grouped_glu(x, w) in 16 bits, with its preactivation or without: launches of sm90's, with this GEMM."""

from ...sm90.stages import glu
from ...specs import GroupedGluSpec
from ...tracing import Traced, traced
from ..grouped_gemm import GroupedGemm


class Glu(glu.Glu):
    gemm_type = GroupedGemm


class GluPreact(glu.GluPreact):
    gemm_type = GroupedGemm


def trace(spec: GroupedGluSpec) -> Traced:
    return traced(spec, (GluPreact if spec.save_preact else Glu)(spec))
