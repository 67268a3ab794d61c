"""Manifold-constrained hyper-connections: n residual streams, mixed by matrices that Sinkhorn keeps balanced."""

from .mixing import AggregateBackwardCall, AggregateCall, PostMixBackwardCall, PostMixCall, aggregate, post_mix
from .pre import PreResults, pre
from .project import Coefficients, ProjectBackwardCall, ProjectCall, project
from .sinkhorn import SinkhornBackwardCall, SinkhornCall, sinkhorn

CALLS = (
    SinkhornCall, SinkhornBackwardCall, AggregateCall, AggregateBackwardCall, PostMixCall, PostMixBackwardCall,
    ProjectCall, ProjectBackwardCall,
)  # fmt: skip
"""Those that are operators of torch's; `pre` is several of them there."""

__all__ = ["Coefficients", "PreResults", "aggregate", "post_mix", "pre", "project", "sinkhorn"]
