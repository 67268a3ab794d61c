"""Ownership of experts: plain arithmetic that tells which rank owns which experts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Owners(NamedTuple):
    """The distribution of experts over ranks.

    Rank r of `world` owns the experts floor(r E / world) to floor((r + 1) E / world) - 1, E = `num_experts`.
    """

    num_experts: int
    world: int

    def first(self, rank: int) -> int:
        """Return the first expert of a rank; `first(world)` is the number of experts."""
        return rank * self.num_experts // self.world

    def count(self, rank: int) -> int:
        return self.first(rank + 1) - self.first(rank)

    def spread_of_arrived(self, rank: int, top_k: int) -> int:
        """Return `Routing.world_experts` for the tokens that arrive at `rank` with the all_to_all transport.

        By this number the choice of kernels estimates how many rows this rank's experts get. Only tokens that chose an
        expert of this rank arrive, so the arrived tokens have more rows here than average tokens. With L of the E
        experts here, a share 1 - C(E - L, K) / C(E, K) of all tokens arrives (C: the binomial coefficient, K choices).
        The result is E times this share, but at least L.
        """
        here, chosen = self.count(rank), math.comb(self.num_experts, top_k)
        share = 1 - math.comb(self.num_experts - here, top_k) / chosen
        return max(here, round(self.num_experts * share))

    def spread_in_room(self, tokens: int, most: int) -> int:
        """Return `Routing.world_experts` for the receiving buffer of the symmetric transport.

        By this number the choice of kernels estimates how many rows this rank's experts get. The buffer has room for
        `most` tokens of each rank, but is only partly filled: if each rank has n tokens, the result is E most / n. The
        other ranks' numbers are not known, so n is this rank's number `tokens`, rounded up to a power of two, so that
        few numbers of tokens need plans (kept launches) of their own. If `tokens` is 0, n is `most`.
        """
        used = min(1 << (tokens - 1).bit_length(), most) if tokens else most
        return self.num_experts * most // used

    def ranks_of(self, ids: Tensor) -> Tensor:
        """Return the rank, int64, that owns each expert in `ids`; `world` for an id that is no expert."""
        ids = ids.long()
        rank = ((ids + 1) * self.world - 1).div(self.num_experts, rounding_mode="floor")
        return rank.where((ids >= 0) & (ids < self.num_experts), self.world)

    def destinations(self, ids: Tensor) -> Tensor:
        """Return the ranks to which each token goes, int32 [N, world].

        Column r is r if one of the token's choices is on rank r, else -1. So the result is like the ids of a routing in
        which ranks take the place of experts.

        Args:
            ids: the choices [N, K].
        """
        goes = torch.zeros(len(ids), self.world + 1, dtype=torch.bool, device=ids.device)
        goes = goes.scatter_(1, self.ranks_of(ids), True)[:, : self.world]
        return torch.arange(self.world, dtype=torch.int32, device=ids.device).where(goes, -1)
