"""act = grouped_glu(x, w) in 16 bits, alone or with its preactivation."""

from typing import Any

from ...sm90.epilogue.activation import ActivationEpilogue
from ...sm90.stages import glu
from ...specs import LAYOUT_FORMS, GroupedGluSpec
from ...tracing import DTYPES, Traced, traced
from ..grouped_gemm import GroupedGemm


class _Glu:
    """What a launch of sm90's needs, with the GEMM of this folder."""

    gemm: Any

    def __init__(self, spec: GroupedGluSpec):
        dtype = DTYPES[spec.dtype]
        self.transposed, self.may_part = False, spec.gated and "concat" in LAYOUT_FORMS[spec.glu_layout]
        self.gemm = GroupedGemm(spec, dtype, ActivationEpilogue(dtype, spec))


class Glu(_Glu, glu.Glu):
    pass


class GluPreact(_Glu, glu.GluPreact):
    pass


def trace(spec: GroupedGluSpec) -> Traced:
    return traced(spec, (GluPreact if spec.save_preact else Glu)(spec))
