"""Experts across ranks that share a GPU, by gloo, and of one rank by NCCL, against the same layer in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.criterion import assert_close, same_bits
from support.ranks import run_ranks
from torch import Tensor

import glulam
from glulam.distributed import ExpertParallel

pytestmark = pytest.mark.gpu

BF16, F64 = torch.bfloat16, torch.float64
HIDDEN, INTER, EXPERTS, TOP_K, MOST = 128, 96, 10, 3, 300
COUNTS = ([300, 41], [0, 77], [1, 0])


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def layer_results(
    x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, mix: Tensor, parallel: Any = None
) -> list[Tensor]:  # fmt: skip
    """The result, and gradients of x, logits and experts' weights; of what has no rows zeros."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, logits, w1, w2)]
    with torch.enable_grad():
        routing = glulam.route(leaves[1], TOP_K)
        y = glulam.moe(leaves[0], routing, leaves[2], leaves[3], residual=leaves[0], parallel=parallel)
        y.backward(mix)
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


def against_one_process() -> None:
    torch.cuda.set_device(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=BF16)
    own = slice(ep.first, ep.first + ep.num_local)
    weights = (
        some(EXPERTS, 2 * INTER, HIDDEN, seed=1) * HIDDEN**-0.5,
        some(EXPERTS, HIDDEN, INTER, seed=2) * INTER**-0.5,
    )
    for counts in COUNTS:
        counts = counts[:world]
        x, mix = (torch.cat([some(n, HIDDEN, seed=seed + r) for r, n in enumerate(counts)]) for seed in (10, 20))
        logits = torch.cat([some(n, EXPERTS, seed=30 + r).float() for r, n in enumerate(counts)])
        given = [x, logits, *weights, mix]
        exact = layer_results(*(t.to(F64) for t in given))
        alone = layer_results(*(t.cuda() for t in given))
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        shared = [x[mine].cuda(), logits[mine].cuda(), *(w[own].cuda() for w in weights), mix[mine].cuda()]
        got, again = (layer_results(*shared, ep) for _ in range(2))
        assert all(map(same_bits, got, again))
        for place, (one, wanted, same) in enumerate(zip(got, exact, alone, strict=True)):
            part = mine if place < 3 else own
            got_part, wanted, same = (t.cpu().reshape(1, -1) for t in (one, wanted[part], same[part]))
            assert not got_part[wanted == 0].any()
            if wanted.any():
                assert_close(got_part, wanted, same, rows=1)


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_of_gloo(world: int) -> None:
    run_ranks(world, against_one_process)


def test_one_rank_of_nccl(tmp_path: Path) -> None:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        against_one_process()
    finally:
        dist.destroy_process_group()
