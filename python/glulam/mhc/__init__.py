"""Manifold-constrained hyper-connections: n residual streams, mixed by doubly stochastic matrices from Sinkhorn steps.

A token's state is n streams [n, C] (in `boundary` [n, D]) instead of one residual vector. Coefficients computed from
the streams weigh the sum that a sublayer reads, and mix the streams when the sublayer's output is added.
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
