"""The layer, from tokens to tokens: routing, rows of experts, and their sums."""

from .few_tokens import RouterCall
from .losses import load_balancing_loss, router_z_loss
from .moe import moe
from .routing import RouteBackwardCall, RouteCall, Routing, RowWeightsBackwardCall, SortCall, route
from .rows import CombineCall, PermuteCall, combine, permute

CALLS = RouteCall, RouterCall, RouteBackwardCall, SortCall, RowWeightsBackwardCall, PermuteCall, CombineCall
"""Those of kernels around the experts."""

__all__ = ["Routing", "combine", "load_balancing_loss", "moe", "permute", "route", "router_z_loss"]
