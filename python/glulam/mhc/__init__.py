"""Manifold-constrained hyper-connections: n residual streams, mixed by matrices that Sinkhorn keeps balanced."""

from .boundary import BoundaryResults, boundary
from .mixing import aggregate, post_mix
from .pre import PreResults, pre
from .project import Coefficients, project
from .sinkhorn import sinkhorn

__all__ = [
    "BoundaryResults",
    "Coefficients",
    "PreResults",
    "aggregate",
    "boundary",
    "post_mix",
    "pre",
    "project",
    "sinkhorn",
]
