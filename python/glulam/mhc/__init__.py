"""Manifold-constrained hyper-connections: n residual streams, mixed by matrices that Sinkhorn keeps balanced."""

from .mixing import aggregate, post_mix
from .pre import PreResults, pre
from .project import Coefficients, project
from .sinkhorn import sinkhorn

__all__ = ["Coefficients", "PreResults", "aggregate", "post_mix", "pre", "project", "sinkhorn"]
