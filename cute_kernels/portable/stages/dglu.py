"""The portable grouped_dglu(x, w, preact) in 16 bits: computes dpreact, act and partial sums of d_row_scale.

launches/dglu.py has the launch and its arguments.
"""

from ...launches import dglu
from ...specs import DgluSpec
from ...tracing import Traced
from ..dglu import Epilogue
from ..grouped_gemm import GroupedGemm


def trace(spec: DgluSpec) -> Traced:
    return dglu.trace(spec, GroupedGemm, Epilogue)
