"""Manifold-constrained hyper-connections: n residual streams, mixed by matrices that Sinkhorn keeps balanced."""

from ..registration import register
from .aggregate import AGGREGATE, AGGREGATE_BACKWARD, aggregate
from .post_mix import POST_MIX, POST_MIX_BACKWARD, post_mix
from .pre import PreResults, pre
from .project import PROJECT, PROJECT_BACKWARD, Coefficients, project
from .sinkhorn import SINKHORN, SINKHORN_BACKWARD, sinkhorn

register(
    SINKHORN, SINKHORN_BACKWARD, AGGREGATE, AGGREGATE_BACKWARD, POST_MIX, POST_MIX_BACKWARD, PROJECT, PROJECT_BACKWARD
)

__all__ = ["Coefficients", "PreResults", "aggregate", "post_mix", "pre", "project", "sinkhorn"]
