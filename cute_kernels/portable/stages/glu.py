"""The portable grouped_glu in 16 bits: act = grouped_glu(x, w), with or without the preactivation."""

from ...launches import glu
from ...specs import GroupedGluSpec
from ...tracing import Traced
from ..grouped_gemm import GroupedGemm


def trace(spec: GroupedGluSpec) -> Traced:
    """Return (host function that launches the spec's kernel, stand-ins for its arguments), from which to compile."""
    return glu.trace(spec, GroupedGemm)
