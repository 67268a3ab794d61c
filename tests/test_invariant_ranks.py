"""Batch invariance across ranks, on the CPU: with the switch a token's sum has the order that docs/batch-invariance.md
states, in groups of 1, 2 and 4 ranks, on whichever rank and among whichever tokens it lies.

The CPU refuses products with the switch, so each expert multiplies its rows by a number: what a row is does not depend
on other rows, and the sums' order is all that could differ.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from support.criterion import same_bits
from support.ranks import run_ranks
from torch import Tensor

import glulam
from glulam.distributed import ExpertParallel

EXPERTS, TOP_K, HIDDEN, TOKENS = 8, 4, 64, 12
BF16 = torch.bfloat16
OF_ONE_RANK = 4
"""The first tokens have all choices at experts that lie together in groups of up to four ranks."""


def values(*shape: int, seed: int) -> Tensor:
    """bfloat16 numbers of several binades and both signs, so that a sum shows its order."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-16, 17, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * torch.exp2(exponents.float())).bfloat16()


def tokens() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, ids, weights and residual of all tokens. Residuals cancel the sums, so that what rounding left is seen."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
    ids[:OF_ONE_RANK] = torch.tensor([[2 * pair, 2 * pair + 1, -1, -1] for pair in range(OF_ONE_RANK)])
    weights = values(TOKENS, TOP_K, seed=4).float()
    x = values(TOKENS, HIDDEN, seed=5)
    exact = sum(rows_of_choice(x, ids, weights, k).double() for k in range(TOP_K))
    return x, ids.int(), weights, -exact.bfloat16()


def expert(rows: Tensor, number: Tensor) -> Tensor:
    """Return each row times a number of its expert, rounded. number: an expert for each row."""
    return (rows.float() * (1.25 + number[:, None] / EXPERTS)).bfloat16()


def rows_of_choice(x: Tensor, ids: Tensor, weights: Tensor, k: int) -> Tensor:
    """Return float32 [N, H]: each token's row of choice k, rounded; zeros without one."""
    rows = (expert(x, ids[:, k]).float() * weights[:, k, None]).bfloat16().float()
    return rows * (ids[:, k, None] >= 0)


def declared(world: int, is_reversed: bool = False) -> Tensor:
    """Return every token's sum in the declared order: over a rank's experts in the order of choices, rounded; then
    the residual and the ranks' sums. is_reversed: the other order of ranks.
    """
    x, ids, weights, residual = tokens()
    made = residual.float()
    for rank in reversed(range(world)) if is_reversed else range(world):
        own = torch.zeros_like(made)
        for k in range(TOP_K):
            is_here = ids[:, k, None].long() * world // EXPERTS == rank
            own = own + rows_of_choice(x, ids, weights, k) * is_here
        made = made + own.bfloat16().float()
    return made.bfloat16()


def in_ranks(some: Tensor) -> Tensor:
    """Return sums of this rank's tokens, of which `some` are numbers."""
    x, ids, weights, residual = (part[some] for part in tokens())
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, TOKENS, dtype=BF16, transport="all_to_all")
    x_here, here, handle = ep.dispatch(x, ids, weights)
    ends = here.offs[: ep.num_local].long()
    number = ep.first + torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)
    copies = glulam.permute(x_here, here)
    rows = torch.zeros_like(copies)  # also of the choices of experts elsewhere, which nobody reads
    ours = expert(copies[: len(number)], number)
    rows[: len(number)] = (ours.float() * here.weight_of_row[: len(number), None]).bfloat16()
    return ep.combine(rows, handle, residual, summed=False)


def order_of_ranks(folder: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    wanted = declared(world)
    everyone = torch.arange(TOKENS)
    ways = (
        everyone.chunk(world)[rank],
        everyone.flip(0).chunk(world)[rank],  # on another rank, in another order
        everyone[rank::world][: 1 + rank],  # in a small batch
        everyone if rank == world - 1 else everyone[:0],  # all on one rank
    )
    with glulam.batch_invariant(True):
        for some in ways:
            assert same_bits(in_ranks(some), wanted[some]), f"rank {rank} of {world}, tokens {some.tolist()}"
    if rank == 0:
        torch.save(wanted, Path(folder, f"{world}.pt"))


def test_a_token_s_sum_has_the_declared_order(tmp_path: Path) -> None:
    """Groups of another size round otherwise, except for a token whose experts lie on one rank in each of them."""
    worlds = (1, 2, 4)
    for world in worlds:
        run_ranks(world, order_of_ranks, str(tmp_path))
    one, two, four = (torch.load(tmp_path / f"{world}.pt") for world in worlds)
    for other in (two, four):
        assert same_bits(one[:OF_ONE_RANK], other[:OF_ONE_RANK])
        assert not same_bits(one[OF_ONE_RANK:], other[OF_ONE_RANK:])
    assert not same_bits(four, declared(4, is_reversed=True)), "no sum shows the order of ranks"
