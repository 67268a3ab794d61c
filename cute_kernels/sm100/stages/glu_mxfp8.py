"""Blackwell's grouped_glu with x, w and act in MXFP8: act = grouped_glu(x, w), with or without the preactivation."""

from ...sm90.stages.glu_mxfp8 import Glu, GluPreact
from ...specs import GroupedGluSpec
from ...tracing import DTYPES, Traced, traced
from ..epilogue.quantizing import QuantizingEpilogue
from ..grouped_gemm import GroupedMxfp8Gemm


def trace(spec: GroupedGluSpec) -> Traced:
    gemm = GroupedMxfp8Gemm(spec, QuantizingEpilogue(DTYPES[spec.dtype], spec))
    return traced(spec, (GluPreact if spec.save_preact else Glu)(gemm))
