"""Replacement of torchtitan's grouped experts. Select it by torchtitan's own overrides:

    torchtitan ... --override.imports glulam.integrations.torchtitan.grouped_experts

Gate and up-projection stay two parameters, `w1_EFD` and `w3_EFD`, which kernels read in place; so state dicts,
state-dict adapters, initialisation and sharding stay as in torchtitan's module. Importing this file imports
torchtitan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.models.common.moe import GroupedExperts

from ..host.experts import GateUp
from ..ops.grouped_mlp import grouped_mlp


class GlulamExperts(GroupedExperts):
    """torchtitan's GroupedExperts, computed by one call of `glulam.grouped_mlp`: FC1, SwiGLU and FC2.

    As in torchtitan, it computes in bfloat16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """Return the experts' result [R, D], in x's dtype.

        Args:
            x_RD: [R, D], rows sorted by expert.
            num_tokens_per_expert_E: number of rows of each expert, on x's device.
        """
        gate, down, up = (_local(weight).bfloat16() for weight in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        offs = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)
        y: Tensor = grouped_mlp(x_RD.bfloat16(), GateUp(gate, up), down, offs=offs)
        return y.type_as(x_RD)


def _local(weight: Tensor) -> Tensor:
    """Return this rank's shard of a parameter: some of the experts, or a part of the experts' intermediate width."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


@override(
    target=GroupedExperts.Config,
    description="experts by Glulam's kernels: FC1, SwiGLU and FC2 in one call",
    exact=True,  # subclasses have other activations, or biases
)
def grouped_experts(config: Any) -> Any:
    return derive(config, GlulamExperts.Config)
