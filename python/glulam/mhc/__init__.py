"""Manifold-constrained hyper-connections (mHC): n residual streams instead of one residual vector per token.

A token's state is n streams [n, C] (in `boundary` [n, D]). Coefficients are computed from the streams: `pre` [n] are
the weights of the sum of streams that a sublayer reads; `post` [n] and `res` or `comb` [n, n] update the streams with
the sublayer's output. The matrices are made doubly stochastic by Sinkhorn steps. In `project` each of the three has a
trained factor, its alpha.
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
