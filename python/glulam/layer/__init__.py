"""The layer, from tokens to tokens: routing, rows of experts, and their sums."""

from ..registration import register
from .losses import load_balancing_loss, router_z_loss
from .moe import moe
from .routing import ROUTE, ROUTE_BACKWARD, ROW_WEIGHTS_BACKWARD, SORT, Routing, route
from .rows import COMBINE, PERMUTE, combine, permute

register(ROUTE, ROUTE_BACKWARD, SORT, ROW_WEIGHTS_BACKWARD, PERMUTE, COMBINE)

__all__ = ["Routing", "combine", "load_balancing_loss", "moe", "permute", "route", "router_z_loss"]
