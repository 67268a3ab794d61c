"""Manifold-constrained hyper-connections (mHC): n residual streams instead of one residual vector per token.

A token's state is n streams [n, C] (in `boundary` [n, D]). Coefficients are computed from the streams. They weigh the
sum that a sublayer reads, and mix the streams when the sublayer's output is added. The mixing matrices are made doubly
stochastic by Sinkhorn steps.
"""

from .boundary import BoundaryResults, boundary
from .boundary_mxfp8 import QuantizedBoundaryResults
from .mixing import aggregate, post_mix
from .pre import PreResults, pre
from .project import Coefficients, project
from .sinkhorn import sinkhorn

__all__ = [
    "BoundaryResults",
    "Coefficients",
    "PreResults",
    "QuantizedBoundaryResults",
    "aggregate",
    "boundary",
    "post_mix",
    "pre",
    "project",
    "sinkhorn",
]
