"""Blackwell's grouped_dglu in 16 bits: dpreact, act and partial sums of d_row_scale from x, w and preact
(launches/dglu.py)."""

from ...launches import dglu
from ...specs import DgluSpec
from ...tracing import Traced
from ..epilogue.dglu import DgluEpilogue
from ..grouped_gemm import GroupedGemm


def trace(spec: DgluSpec) -> Traced:
    """Return (host function that launches the spec's kernel, stand-ins for its arguments), from which to compile."""
    return dglu.trace(spec, GroupedGemm, DgluEpilogue)
