"""dpreact, act and parts of d_row_scale = grouped_dglu(x, w, preact) in 16 bits: a launch of sm90's, with the GEMM of
this folder.
"""

from ...sm90.stages import dglu
from ...specs import DgluSpec
from ...tracing import Traced, traced
from ..dglu import Epilogue
from ..grouped_gemm import GroupedGemm


class Dglu(dglu.Dglu):
    gemm_type, epilogue_type = GroupedGemm, Epilogue


def trace(spec: DgluSpec) -> Traced:
    return traced(spec, Dglu(spec))
