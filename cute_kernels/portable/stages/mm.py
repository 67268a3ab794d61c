"""The portable grouped_mm in 16 bits: y = grouped_mm(x, w)."""

from ...launches import mm
from ...specs import GroupedMmSpec
from ...tracing import Traced
from ..grouped_gemm import GroupedGemm


def trace(spec: GroupedMmSpec) -> Traced:
    """Return (host function that launches the spec's kernel, stand-ins for its arguments), from which to compile."""
    return mm.trace(spec, GroupedGemm)
