"""Blackwell's grouped_dglu in 16 bits: dpreact, act and partial sums of d_row_scale from x, w and preact
(launches/dglu.py)."""

from ...launches import dglu
from ...specs import DgluSpec
from ...tracing import Traced
from ..epilogue.dglu import DgluEpilogue
from ..grouped_gemm import GroupedGemm


def trace(spec: DgluSpec) -> Traced:
    """Make the launch for a spec and the stand-in arguments with which it is compiled."""
    return dglu.trace(spec, GroupedGemm, DgluEpilogue)
