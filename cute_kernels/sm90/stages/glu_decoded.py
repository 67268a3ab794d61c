"""act = grouped_glu(x, w) of 16-bit rows and quantised weights, which the kernel decodes."""

from ...launches import glu_decoded
from ...specs import GroupedGluSpec
from ...tracing import Traced
from ..epilogue.swapped import SwappedActivationEpilogue
from ..swapped_gemm import SwappedGemm


def trace(spec: GroupedGluSpec) -> Traced:
    return glu_decoded.trace(spec, SwappedGemm, SwappedActivationEpilogue)
