"""The symmetric transport with several ranks on one GPU, each with its own window and stream, against the same layer on
one rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.rank_layers import (
    BF16,
    COUNTS,
    EXPERTS,
    F64,
    HIDDEN,
    MOST,
    TOP_K,
    assert_another_operation_is_told,
    assert_like_one,
    assert_refusal_is_told,
    cast,
    folded,
    forward,
    forward_in_steps,
    in_16_bits,
    in_steps,
    inputs,
    layer,
    layers,
    near,
    ranks_of,
    some,
    ways_of,
    weights_of,
    with_choices,
)
from support.virtual_ranks import VirtualRank, each, virtual_ranks
from torch import Tensor

import glulam
from cute_kernels.windows import STATE, WORDS
from glulam.distributed import PeerError
from glulam.distributed.window import Sizes

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, scope="module")
def all_kernels() -> None:
    """Load all kernels first, because loading one would wait for a running kernel that waits for other ranks."""
    glulam.preload()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_layer(world: int) -> None:
    w1, w2 = (w.cuda() for w in weights_of())
    ranks = ranks_of(world)
    for kind in ("all", "some", "one", "none"):
        for counts in COUNTS:
            tokens = [[t.cuda() for t in inputs(counts[rank], rank, kind)] for rank in range(world)]
            made = layers(ranks, tokens, w1, w2)
            again = layers(ranks, tokens, w1, w2)
            assert all(same_bits(a, b) for a, b in zip(sum(made, []), sum(again, []), strict=True))
            if sum(counts[:world]):
                assert_like_one(made, tokens, w1, w2)
    for ep in ranks:
        ep.check()


def test_without_gradients_the_bits_are_those_with() -> None:
    w1, w2 = (w.cuda() for w in weights_of())
    ranks = ranks_of(3)
    tokens = [[t.cuda() for t in inputs(count, rank, "all")] for rank, count in enumerate((70, 0, 33))]
    trained = layers(ranks, tokens, w1, w2)
    made = each(ranks, lambda ep: forward(tokens[ep.rank], w1, w2, ep))
    for y, (wanted, *_) in zip(made, trained, strict=True):
        assert same_bits(y, wanted)


@pytest.mark.parametrize("k", [TOP_K, 1])
def test_combine_of_sums_and_of_rows(k: int) -> None:
    """Both are told apart by shape, or by `summed` where a token has one choice and so one row."""
    w1, w2 = (w.cuda() for w in weights_of())
    for ranks in (ranks_of(1, k=k), ranks_of(3, k=k)):  # one rank first, which loads torch's kernels
        for kind, counts in (("all", COUNTS[0]), ("some", COUNTS[1]), ("one", COUNTS[0]), ("none", COUNTS[2])):
            tokens = [[t.cuda() for t in with_choices(inputs(counts[ep.rank], ep.rank, kind), k)] for ep in ranks]
            for form, summed in ways_of(k):

                def step(ep: VirtualRank, function: Any, tokens: Any = tokens, way: Any = (form, summed)) -> Any:
                    return function(tokens[ep.rank], w1[ep.own], w2[ep.own], ep, *way)

                trained = each(ranks, partial(step, function=in_steps))
                alone = each(ranks, partial(step, function=forward_in_steps))
                assert all(near(y, results[0]) for y, results in zip(alone, trained, strict=True))
                if sum(counts[: len(ranks)]):
                    assert_like_one(trained, tokens, w1, w2)
        for ep in ranks:
            ep.check()


@pytest.mark.parametrize("k", [TOP_K, 1])
@pytest.mark.parametrize("function", [forward_in_steps, in_steps])
def test_graphs_of_sums_and_of_rows(function: Any, k: int) -> None:
    """Captured forward alone, and with backward, and replayed for other routings and numbers of tokens."""
    w1, w2 = (w.cuda() for w in weights_of())
    ranks = ranks_of(2, k=k)
    held = [[t.cuda() for t in with_choices(inputs(MOST, rank, "none"), k)] for rank in range(2)]

    def step(ep: VirtualRank, way: Any) -> list[Tensor]:
        made = function(held[ep.rank], w1[ep.own], w2[ep.own], ep, *way)
        return [made] if isinstance(made, Tensor) else made

    for way in ways_of(k):
        of = partial(step, way=way)
        each(ranks, of)
        graphs, results = [], []
        for ep in ranks:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=ep.stream):
                results.append(of(ep))
            graphs.append(graph)
        for place, kind in enumerate(("all", "some", "one", "none")):
            for rank in range(2):
                new = with_choices(inputs(MOST, rank, kind, seed=100 * place), k)
                for old, tensor in zip(held[rank], new, strict=True):
                    old.copy_(tensor)
                held[rank][1][MOST - 7 * place - rank :] = -1
            torch.cuda.synchronize()
            each(ranks, lambda ep, graphs=graphs: graphs[ep.rank].replay())
            replayed = [[tensor.clone() for tensor in made] for made in results]
            for made, eager in zip(replayed, each(ranks, of), strict=True):
                assert all(map(same_bits, made, eager)) and not torch.isnan(made[0]).any()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_in_mxfp8(world: int, dtype: torch.dtype) -> None:
    """Tokens that travel in MXFP8 give the bits of 16-bit ones, which are quantised where they go."""
    ranks = ranks_of(world, dtype)
    w1, w2 = (folded(ranks, w.cuda().to(dtype)) for w in weights_of())
    for kind in ("all", "some", "one", "none"):
        for counts in COUNTS:
            tokens = [[t.cuda() for t in cast(inputs(counts[rank], rank, kind), dtype)] for rank in range(world)]
            made = each(ranks, lambda ep, given=tokens: forward(given[ep.rank], w1, w2, ep, "mxfp8"))
            with in_16_bits():
                wanted = each(ranks, lambda ep, given=tokens: forward(given[ep.rank], w1, w2, ep, "mxfp8"))
            for y, other, given in zip(made, wanted, tokens, strict=True):
                assert same_bits(y, other) and y.dtype is dtype and not torch.isnan(y).any()
                assert kind != "all" or not len(y) or (y - given[3]).abs().max() > 0.01
    for ep in ranks:
        ep.check()


def test_tokens_that_are_in_mxfp8() -> None:
    """Those of a caller give the bits of the layer's own, and residuals a gradient."""
    given = [[t.cuda() for t in inputs(count, rank, "some")] for rank, count in enumerate((70, 0, 33))]
    quantised = [[glulam.quantize_mxfp8(x, block="1x128"), *rest] for x, *rest in given]
    for ranks in (ranks_of(1), ranks_of(3)):  # one rank first, which loads torch's kernels
        w1, w2 = (folded(ranks, w.cuda()) for w in weights_of())

        @torch.enable_grad()
        def recorded(ep: VirtualRank, weights: tuple[Any, Any] = (w1, w2)) -> tuple[Tensor, Tensor]:
            x, ids, scales, residual, mix = quantised[ep.rank]
            leaf = residual.clone().requires_grad_()
            routing = glulam.Routing.from_topk(ids, scales, EXPERTS)
            own = [w[ep.rank] for w in weights]
            y = glulam.moe(x, routing, *own, residual=leaf, recipe="mxfp8", parallel=ep)
            y.backward(mix)
            return y.detach(), leaf.grad

        wanted = each(ranks, lambda ep, w1=w1, w2=w2: forward(given[ep.rank], w1, w2, ep, "mxfp8"))
        made = each(ranks, lambda ep, w1=w1, w2=w2: forward(quantised[ep.rank], w1, w2, ep, "mxfp8"))
        trained = each(ranks, recorded)
        for ep, y, one, (two, gradient) in zip(ranks, wanted, made, trained, strict=True):
            assert same_bits(y, one) and same_bits(y, two) and torch.equal(gradient, given[ep.rank][4])


@pytest.mark.parametrize("hidden", [128, 384, 2176, 7168])
@pytest.mark.parametrize("counts", [(700, 3, 650), (0, 700, 1), (0, 0, 0)])
def test_bytes_and_scales_arrive(hidden: int, counts: tuple[int, ...]) -> None:
    """Whole, in their places, and nowhere else: of widths of one part and several, with more parts than warps."""
    most = 700
    ranks = virtual_ranks(EXPERTS, Sizes(3, most, TOP_K, hidden, BF16))
    sent = []
    for rank, count in enumerate(counts):
        x, (_, ids, weights, *_) = some(count, hidden, seed=rank).cuda(), inputs(count, rank, "some")
        # Scales that differ within a token, so that one in another's place shows.
        x = x * torch.logspace(-8, 8, hidden // 128, base=2, device="cuda").repeat_interleave(128)
        sent.append((glulam.quantize_mxfp8(x.to(BF16), block="1x128"), ids.cuda(), weights.cuda()))

    @torch.no_grad()
    def one_way(ep: VirtualRank) -> None:
        ep.dispatch(*sent[ep.rank])

    for _ in range(2):  # the second after an exchange of `enter`
        each(ranks, one_way)
        for ep in ranks:
            window = ep._way.window
            data = window.in_mxfp8.data.view(torch.uint8).view(3, most, hidden)
            for rank, (q, ids, _) in enumerate(sent):
                goes = ((ids >= ep.first) & (ids < ep.first + ep.num_local)).any(1)
                for came, was in ((data, q.data), (window.scales.view(3, most, -1), q.scale)):
                    mine = came[rank, : len(goes)]
                    assert torch.equal(mine[goes], was.view(torch.uint8)[goes])
                    assert (mine[~goes] == 0xFF).all() and (came[rank, len(goes) :] == 0xFF).all()
            assert (window.rows.view(torch.uint8).flatten()[data.numel() :] == 0xFF).all()
            ep.check()


def test_ranks_whose_tokens_have_other_forms() -> None:
    ranks = ranks_of(2, timeout=5)
    x, ids, weights, *_ = (t.cuda() for t in inputs(30, 0, "all"))
    forms = [x, glulam.quantize_mxfp8(x, block="1x128")]

    @torch.no_grad()
    def part(ep: VirtualRank) -> None:
        ep.dispatch(forms[ep.rank], ids, weights)

    each(ranks, part)
    for ep in ranks:
        with pytest.raises(PeerError, match=f"dispatch, operation .*rank {1 - ep.rank} has tokens in another form"):
            ep.check()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_graphs_replay_other_routings_and_counts(recipe: str) -> None:
    ranks = ranks_of(2)
    w1, w2 = (w.cuda() for w in weights_of())
    if recipe == "mxfp8":
        w1, w2 = (folded(ranks, w) for w in (w1, w2))
    held = [[t.cuda() for t in inputs(MOST, rank, "none")] for rank in range(2)]
    graphs, results = [], []

    def of(ep: VirtualRank) -> Tensor:
        return forward(held[ep.rank], w1, w2, ep, recipe)

    each(ranks, of)
    for ep in ranks:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=ep.stream):
            results.append(of(ep))
        graphs.append(graph)
    for step, kind in enumerate(("all", "some", "one", "none", "all")):
        for rank in range(2):
            for place, new in zip(held[rank], inputs(MOST, rank, kind, seed=100 * step), strict=True):
                place.copy_(new)
            held[rank][1][MOST - 7 * step - rank :] = -1
        torch.cuda.synchronize()
        each(ranks, lambda ep: graphs[ep.rank].replay())
        replayed = [result.clone() for result in results]
        for y, eager in zip(replayed, each(ranks, of), strict=True):
            assert same_bits(y, eager) and not torch.isnan(y).any()


def test_dispatches_that_no_combine_follows() -> None:
    """Two dispatches, then their combines in either order: here ranks wait for each other once more."""
    ranks = ranks_of(2)
    tokens = [[[t.cuda() for t in inputs(40 + rank, rank, "all", seed)] for rank in range(2)] for seed in (0, 500)]

    @torch.no_grad()
    def twice(ep: VirtualRank, order: tuple[int, ...]) -> list[Tensor]:
        begun = []
        for given in tokens:
            x, ids, weights, _, _ = given[ep.rank]
            x_here, here, handle = ep.dispatch(x, ids, weights)
            begun.append((glulam.permute(x_here, here) * here.weight_of_row[:, None].to(BF16), handle))
        return [ep.combine(*begun[place]) for place in order]

    each(ranks_of(1), partial(twice, order=(0, 1)))  # loads torch's kernels, too
    for order in ((0, 1), (1, 0), (0, 0), (1, 1)):
        for ep, made in zip(ranks, each(ranks, partial(twice, order=order)), strict=True):
            for place, y in zip(order, made, strict=True):
                x, ids, weights, _, _ = tokens[place][ep.rank]
                wanted = (weights.to(BF16)[..., None] * x[:, None]).float().sum(1)
                torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)


def test_numbers_of_operations_wrap() -> None:
    w1, w2 = (w.cuda() for w in weights_of())
    ranks = ranks_of(2)
    tokens = [[t.cuda() for t in inputs(30, rank, "all")] for rank in range(2)]
    wanted = layers(ranks, tokens, w1, w2)
    for ep in ranks:
        epoch = 2**40 - 3
        ep._way._state[STATE.index("epoch")] = epoch
        ep._way.window.words[: WORDS.index("enter")] = epoch - 2**40 << 24
    torch.cuda.synchronize()
    for _ in range(3):
        for made, before in zip(layers(ranks, tokens, w1, w2), wanted, strict=True):
            assert all(map(same_bits, made, before))


@pytest.mark.parametrize("missing_in", ["dispatch", "combine"])
def test_a_rank_that_does_not_come(missing_in: str) -> None:
    w1, w2 = (w.cuda() for w in weights_of())
    ranks = ranks_of(3, timeout=0.3)
    tokens = [[t.cuda() for t in inputs(30, rank, "all")] for rank in range(3)]
    layers(ranks, tokens, w1, w2)

    @torch.no_grad()
    def one_way(ep: VirtualRank) -> Tensor | None:
        x, ids, weights, residual, _ = tokens[ep.rank]
        if ep.rank == 1 and missing_in == "dispatch":
            return None
        x_here, here, handle = ep.dispatch(x, ids, weights)
        if ep.rank == 1:
            return None
        return ep.collect(x_here, handle, residual)

    made = each(ranks, one_way)
    for ep in (ranks[0], ranks[2]):
        assert torch.isnan(made[ep.rank]).all(), "never a result that is not whole"
        with pytest.raises(PeerError, match=f"{missing_in}, operation .*rank 1 did not come within 0.3 s"):
            ep.check()
        with pytest.raises(PeerError, match="rank 1"):
            layer(tokens[ep.rank], w1[ep.own], w2[ep.own], ep)


def test_a_rank_in_another_operation() -> None:
    tokens = [[t.cuda() for t in inputs(30, rank, "all")] for rank in range(2)]
    assert_another_operation_is_told(ranks_of(2, timeout=0.3), tokens)


def test_a_rank_that_is_refused() -> None:
    assert_refusal_is_told(ranks_of(2, timeout=0.3), [t.cuda() for t in inputs(MOST, 0, "all")])


def test_many_steps_with_ranks_that_sleep() -> None:
    """Rows, sums and words of one step are never another's, whoever is late."""
    ranks = ranks_of(4)
    generator = torch.Generator().manual_seed(7)
    held = [[t.cuda() for t in inputs(MOST, rank, "all")] for rank in range(4)]
    wrong = torch.zeros(4, device="cuda")

    @torch.no_grad()
    def step(ep: VirtualRank) -> None:
        x, _, weights, _, _ = held[ep.rank]
        count = int(torch.randint(MOST + 1, (1,), generator=generator))
        ids = torch.rand(count, EXPERTS, device="cuda").argsort(1)[:, :TOP_K].int()
        x = torch.randn(count, HIDDEN, device="cuda").to(BF16)
        if torch.rand(1, generator=generator) < 0.5:
            torch.cuda._sleep(int(torch.randint(200_000, (1,), generator=generator)))
        x_here, here, handle = ep.dispatch(x, ids, weights[:count])
        y = ep.combine((glulam.permute(x_here, here) * here.weight_of_row[:, None]).to(BF16), handle)
        total = (weights[:count].to(F64)[..., None] * x[:, None].to(F64)).sum(1)
        wrong[ep.rank] += ((y.to(F64) - total).abs() > 0.05 * total.abs() + 0.05).sum() + torch.isnan(y).sum()

    for members in (ranks_of(1), *[ranks] * 50):  # one rank first, which loads torch's kernels
        each(members, step)
    assert not wrong.any()
