"""Modules: grouped linear layers and gated MLPs of experts, a whole mixture-of-experts layer, and hyper-connections.

The weights of a layer's experts are one packed parameter or one parameter for each expert.
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
