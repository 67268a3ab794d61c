"""Modules: grouped linear layers, their weights packed in one parameter or one an expert; a whole mixture-of-experts
layer; hyper-connections.
"""

from .hyper_connection import HyperConnection
from .hyper_streams import HyperStreams
from .linear import GroupedLinear
from .mlp import GroupedMLP
from .moe import MoE
from .state import convert_optimizer_state, convert_state_dict

__all__ = [
    "GroupedLinear",
    "GroupedMLP",
    "HyperConnection",
    "HyperStreams",
    "MoE",
    "convert_optimizer_state",
    "convert_state_dict",
]
