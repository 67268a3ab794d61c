"""Expert parallelism against one process: ranks share a GPU, by gloo, or have one each, by either transport."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.criterion import assert_close, same_bits
from support.rank_layers import forward_in_steps, in_16_bits, in_steps, inputs, layer, near, ways_of, with_choices
from support.ranks import run_ranks
from torch import Tensor

import glulam
from glulam.distributed import ExpertParallel, PeerError, shard_state_dict

pytestmark = pytest.mark.gpu

BF16, F64 = torch.bfloat16, torch.float64
HIDDEN, INTER, EXPERTS, TOP_K, MOST = 128, 96, 10, 3, 300
COUNTS = ([300, 41], [0, 77], [1, 0])


def some(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def layer_results(
    x: Tensor, logits: Tensor, w1: Tensor, w2: Tensor, mix: Tensor, parallel: Any = None
) -> list[Tensor]:  # fmt: skip
    """Return the layer's result and the gradients of x, logits and expert weights; zeros where there is no gradient."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, logits, w1, w2)]
    with torch.enable_grad():
        routing = glulam.route(leaves[1], TOP_K)
        y = glulam.moe(leaves[0], routing, leaves[2], leaves[3], residual=leaves[0], parallel=parallel)
        y.backward(mix)
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


def against_one_process(transport: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=BF16, transport=transport)
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


def sums_or_rows(transport: str) -> None:
    """Check dispatch, experts and combine as three steps: combining sums gives the layer's bits, combining rows is
    close.
    """
    rank = dist.get_rank()
    w1 = (some(EXPERTS, 2 * INTER, HIDDEN, seed=1) * HIDDEN**-0.5).cuda()
    w2 = (some(EXPERTS, HIDDEN, INTER, seed=2) * INTER**-0.5).cuda()
    for k in (TOP_K, 1):
        ep = ExpertParallel(None, EXPERTS, k, HIDDEN, MOST, dtype=BF16, transport=transport)
        own = slice(ep.first, ep.first + ep.num_local)
        for counts in COUNTS:
            tokens = (*counts, 17, 0)[rank]
            given = [t.cuda() for t in with_choices(inputs(tokens, rank, "some"), k)]
            wanted = layer(given, w1[own], w2[own], ep)
            assert not tokens or (wanted[0] - given[3]).abs().max() > 0.01
            for form, summed in ways_of(k):
                steps = given, w1[own], w2[own], ep, form, summed
                assert all(map(same_bits if form == "sums" else near, in_steps(*steps), wanted))
                assert near(forward_in_steps(*steps), wanted[0])
        ep.check()


@torch.no_grad()
def in_mxfp8(transport: str) -> None:
    """Check recipe "mxfp8": tokens sent or given in MXFP8 give the same bits as 16-bit tokens."""
    rank = dist.get_rank()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=BF16, transport=transport)
    if transport == "symmetric":
        ep._way.poison = True
    own = slice(ep.first, ep.first + ep.num_local)
    w1, w2 = some(EXPERTS, 2 * INTER, HIDDEN, seed=1)[own], some(EXPERTS, HIDDEN, INTER, seed=2)[own]
    weights = [glulam.prepare_mxfp8_weight(w.cuda() * 0.1) for w in (w1, w2)]
    for counts in COUNTS:
        tokens = (*counts, 17, 0)[rank]
        x, routing = some(tokens, HIDDEN, seed=10 + rank).cuda(), some(tokens, EXPERTS, seed=30 + rank).float().cuda()
        given = glulam.route(routing, TOP_K), *weights
        q = glulam.quantize_mxfp8(x, block="1x128")
        made = [glulam.moe(one, *given, residual=x, recipe="mxfp8", parallel=ep) for one in (x, q)]
        with in_16_bits():
            wanted = glulam.moe(x, *given, residual=x, recipe="mxfp8", parallel=ep)
        assert all(same_bits(y, wanted) for y in made) and not torch.isnan(wanted).any()
        assert not tokens or (wanted - x).abs().max() > 0.1
    torch.cuda.synchronize()
    ep.check()


@torch.no_grad()
def with_a_shared_expert(transport: str) -> None:
    """Check nn.MoE with a shared expert against the same module on one rank: few tokens, many tokens, and in a CUDA
    graph.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=BF16, transport=transport)
    options: dict[str, Any] = {
        "shared_intermediate_size": 160, "shared_gate": True, "router_dtype": torch.float32, "dtype": BF16,
    }  # fmt: skip
    torch.manual_seed(0)
    whole = glulam.nn.MoE(HIDDEN, INTER, EXPERTS, TOP_K, **options)
    alone, exact = copy.deepcopy(whole).cuda(), copy.deepcopy(whole).to(F64)
    part = glulam.nn.MoE(HIDDEN, INTER, EXPERTS, TOP_K, parallel=ep, **options)
    part.load_state_dict(shard_state_dict(whole.state_dict(), ep))
    part.cuda()
    held = some(40, HIDDEN, seed=9).cuda()
    if transport == "symmetric":
        part(held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = part(held)
    for step, counts in enumerate((*COUNTS, [257, 256])):
        x = some((*counts, 3, 40)[rank], HIDDEN, seed=100 * step + rank).cuda()
        got = part(x)
        assert same_bits(got, part(x))
        assert_close(got.cpu(), exact(x.cpu().to(F64)), alone(x).cpu(), rows=len(x))
        if transport == "symmetric":
            held.copy_(some(40, HIDDEN, seed=100 * step + world + rank))
            graph.replay()
            assert same_bits(replayed, part(held)) and replayed.abs().max() > 0.01


@torch.no_grad()
def a_rank_fails(transport: str) -> None:
    """Check that every rank raises, and none returns wrong rows, if a rank's experts fail or it makes another call than
    the others.
    """
    bad = dist.get_rank() == 1
    x, ids = some(40, HIDDEN, seed=1).cuda(), torch.arange(40 * TOP_K, device="cuda").view(40, TOP_K).int() % EXPERTS
    weights = torch.full(ids.shape, 1 / TOP_K, device="cuda")
    routing = glulam.Routing.from_topk(ids, weights, EXPERTS)
    failing = False

    def experts(x: Tensor, here: glulam.Routing, _: bool) -> Tensor:
        if failing and bad:
            raise torch.cuda.OutOfMemoryError("no memory for experts")
        return (glulam.permute(x, here) * here.weight_of_row[:, None]).to(BF16)

    def calls(ep: ExpertParallel, text: str, step: Callable[[], Any]) -> None:
        with pytest.raises(PeerError, match=text):
            step()
            torch.cuda.synchronize()
            ep.check()

    def out_of_step(ep: ExpertParallel) -> None:
        x_here, _, handle = ep.dispatch(x, ids, weights)
        ep.dispatch(x, ids, weights) if bad else ep.collect(x_here, handle)

    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=BF16, transport=transport)
    wanted = ep.layer("moe", "bf16", experts, {}, x, routing)
    assert near(wanted, x)
    failing = True
    if bad:
        with pytest.raises(torch.cuda.OutOfMemoryError, match="no memory for experts"):
            ep.layer("moe", "bf16", experts, {}, x, routing)
    else:
        calls(ep, "rank 1 (failed|was in another op)", lambda: ep.layer("moe", "bf16", experts, {}, x, routing))
    failing = False
    if transport == "all_to_all":
        assert same_bits(ep.layer("moe", "bf16", experts, {}, x, routing), wanted), "the next call is right"
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=BF16, transport=transport)
    calls(ep, "all ranks must make the same calls in one order", lambda: out_of_step(ep))


@torch.no_grad()
def random_steps(steps: int) -> None:
    """Check random tokens and counts at each step; received rows are overwritten as soon as that is allowed."""
    rank = dist.get_rank()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=BF16, transport="symmetric")
    ep._way.poison = True
    host = torch.Generator().manual_seed(rank)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(steps):
        count = int(torch.randint(MOST + 1, (1,), generator=host)) * int(torch.rand(1, generator=host) < 0.9)
        x = torch.randn(count, HIDDEN, device="cuda").to(BF16)
        ids = torch.rand(count, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int()
        weights = torch.rand(count, TOP_K, device="cuda") + 0.1
        if torch.rand(1, generator=host) < 0.1:
            torch.cuda._sleep(int(torch.randint(500_000, (1,), generator=host)))
        x_here, here, handle = ep.dispatch(x, ids, weights)
        y = ep.combine((glulam.permute(x_here, here) * here.weight_of_row[:, None]).to(BF16), handle)
        exact = (weights.double()[..., None] * x[:, None].double()).sum(1)
        wrong += (~((y.double() - exact).abs() <= 0.03 * exact.abs() + 1e-3)).sum()
    torch.cuda.synchronize()
    ep.check()
    assert not wrong.item()


def a_rank_ends() -> None:
    """Check that if a rank ends instead of making any one of its calls, the others raise in time and return no
    result.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=BF16, transport="symmetric")
    ep.timeout = 1.0
    x, ids = some(40, HIDDEN, seed=rank).cuda(), torch.arange(40 * TOP_K, device="cuda").view(40, TOP_K).int() % EXPERTS
    x_here, _, handle = ep.dispatch(x, ids, torch.ones(ids.shape, device="cuda"))
    torch.cuda.synchronize()
    dist.barrier()
    if rank == world - 1:
        os._exit(0)  # without a word, between its calls
    time.sleep(1)
    y = ep.collect(x_here, handle)
    torch.cuda.synchronize()
    assert torch.isnan(y).all()
    with pytest.raises(PeerError, match=f"combine, operation .*: rank {world - 1} did not come within 1 s"):
        ep.check()
    os._exit(0)  # NCCL would wait for the one that ended


@torch.no_grad()
def a_rank_ends_within_a_call() -> None:
    """End a rank while kernels of all ranks run; the others' results must be whole up to some step, and NaN after
    it.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    hidden, tokens = 4096, 2048
    ep = ExpertParallel(None, EXPERTS, TOP_K, hidden, tokens, dtype=BF16, transport="symmetric")
    ep.timeout = 1.0
    x = some(tokens, hidden, seed=rank).cuda()
    ids = torch.arange(tokens * TOP_K, device="cuda").view(tokens, TOP_K).int() % EXPERTS
    weights = torch.full(ids.shape, 1 / TOP_K, device="cuda")
    steps: list[Tensor] = []

    def step() -> None:
        x_here, here, handle = ep.dispatch(x, ids, weights)
        y = ep.combine((glulam.permute(x_here, here) * here.weight_of_row[:, None]).to(BF16), handle)
        steps.append(torch.stack([((y - x).abs() <= 0.03 * x.abs() + 1e-3).all(), torch.isnan(y).all()]))

    step()
    torch.cuda.synchronize()
    dist.barrier()
    if rank == world - 1:
        threading.Timer(0.5, os._exit, (0,)).start()
    with pytest.raises(PeerError, match=f"rank {world - 1} did not come within 1 s"):
        while len(steps) < 100_000:
            step()
    torch.cuda.synchronize()
    whole, lost = torch.stack(steps).int().cpu().unbind(1)
    assert torch.equal(lost, 1 - whole) and torch.equal(lost, lost.cummax(0).values) and 10 < whole.sum() < len(steps)
    os._exit(0)  # NCCL would wait for the one that ended


@pytest.mark.parametrize("function", [against_one_process, sums_or_rows, in_mxfp8, with_a_shared_expert])
@pytest.mark.parametrize("world", [1, 2])
def test_ranks_of_gloo(world: int, function: Callable[[str], None]) -> None:
    run_ranks(world, function, "all_to_all")


@pytest.mark.parametrize("function", [against_one_process, sums_or_rows, in_mxfp8, with_a_shared_expert])
@pytest.mark.parametrize("transport", ["symmetric", "all_to_all"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_of_nccl(world: int, transport: str, function: Callable[[str], None]) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"there are not {world} GPUs")
    run_ranks(world, function, transport, backend="nccl")


def test_a_rank_that_fails_by_gloo() -> None:
    run_ranks(2, a_rank_fails, "all_to_all")


@pytest.mark.parametrize("transport", ["symmetric", "all_to_all"])
def test_a_rank_that_fails(transport: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there are not 2 GPUs")
    run_ranks(2, a_rank_fails, transport, backend="nccl")


def test_random_steps() -> None:
    run_ranks(max(torch.cuda.device_count(), 1), random_steps, 500, backend="nccl")


@pytest.mark.parametrize("function", [a_rank_ends, a_rank_ends_within_a_call])
def test_a_rank_that_ends(function: Callable[[], None]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there are not 2 GPUs")
    run_ranks(2, function, backend="nccl")
