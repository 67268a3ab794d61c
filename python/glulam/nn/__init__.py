"""Modules: grouped linear layers, their weights packed in one parameter or one an expert; hyper-connections."""

from .conversion import convert_optimizer_state, convert_state_dict
from .hyper_connection import HyperConnection
from .linear import GroupedLinear
from .mlp import GroupedMLP

__all__ = ["GroupedLinear", "GroupedMLP", "HyperConnection", "convert_optimizer_state", "convert_state_dict"]
