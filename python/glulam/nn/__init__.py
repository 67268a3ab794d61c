"""Modules of grouped linear layers: weights packed in one parameter, or one parameter an expert."""

from .conversion import convert_optimizer_state, convert_state_dict
from .linear import GroupedLinear
from .mlp import GroupedMLP

__all__ = ["GroupedLinear", "GroupedMLP", "convert_optimizer_state", "convert_state_dict"]
