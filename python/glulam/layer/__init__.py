"""The MoE layer, from tokens to tokens: routing, permute, the experts' MLPs, and combine."""

from .losses import load_balancing_loss, router_z_loss
from .moe import moe
from .routing import Routing, route
from .rows import combine, permute

__all__ = ["Routing", "combine", "load_balancing_loss", "moe", "permute", "route", "router_z_loss"]
