"""Expert parallelism: each rank of a group owns some experts, and tokens are sent to the ranks of their experts."""

from .parallel import ExpertParallel, PeerError
from .states import expert_parameters, gather_state_dict, shard_state_dict

__all__ = ["ExpertParallel", "PeerError", "expert_parameters", "gather_state_dict", "shard_state_dict"]
