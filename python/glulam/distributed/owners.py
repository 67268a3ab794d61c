"""Which rank owns which expert. Plain arithmetic, for numbers and tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Owners(NamedTuple):
    """Rank r of `world` owns the experts floor(r E / world) to floor((r + 1) E / world) - 1, E = `num_experts`."""

    num_experts: int
    world: int

    def first(self, rank: int) -> int:
        """The first expert of a rank; `first(world)` is the number of experts."""
        return rank * self.num_experts // self.world

    def count(self, rank: int) -> int:
        return self.first(rank + 1) - self.first(rank)

    def ranks_of(self, ids: Tensor) -> Tensor:
        """int64, the rank that owns each expert; `world` for ids that are no expert's."""
        ids = ids.long()
        rank = ((ids + 1) * self.world - 1).div(self.num_experts, rounding_mode="floor")
        return rank.where((ids >= 0) & (ids < self.num_experts), self.world)

    def destinations(self, ids: Tensor) -> Tensor:
        """int32 [N, world] of the choices [N, K] of N tokens: r in column r where one lives on rank r, else -1."""
        goes = torch.zeros(len(ids), self.world + 1, dtype=torch.bool, device=ids.device)
        goes = goes.scatter_(1, self.ranks_of(ids), True)[:, : self.world]
        return torch.arange(self.world, dtype=torch.int32, device=ids.device).where(goes, -1)
