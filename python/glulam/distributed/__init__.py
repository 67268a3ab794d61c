"""Experts across GPUs: each rank of a group owns some, and tokens go to the ranks of the experts that they chose."""

from .parallel import ExpertParallel, PeerError
from .states import expert_parameters, gather_state_dict, shard_state_dict

__all__ = ["ExpertParallel", "PeerError", "expert_parameters", "gather_state_dict", "shard_state_dict"]
