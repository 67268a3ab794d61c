"""The symmetric transport on the CPU: one thread per rank, with kernels computed on the CPU, against one rank alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from support.criterion import same_bits
from support.fake_gpu import FakeGpu, install
from support.rank_layers import (
    BF16,
    COUNTS,
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
    ranks_of,
    ways_of,
    weights_of,
    with_choices,
)
from support.virtual_ranks import VirtualRank, each
from torch import Tensor

import glulam
from cute_kernels.windows import STATE, WORDS
from glulam.distributed import PeerError
from glulam.host.plans import forget_plans


@pytest.fixture
def played() -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch with a fake GPU installed, undone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield patch
    forget_plans()


@pytest.fixture
def fake() -> Iterator[FakeGpu]:
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch)
    forget_plans()


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("kind", ["all", "some", "one", "none"])
def test_the_layer(world: int, kind: str, played: pytest.MonkeyPatch) -> None:
    """Forward and backward, with ranks that have few tokens or none."""
    w1, w2 = weights_of()
    ranks, made = ranks_of(world, device="cpu"), []
    for counts in COUNTS:
        tokens = [inputs(counts[rank], rank, kind) for rank in range(world)]
        results = layers(ranks, tokens, w1, w2)
        alone = each(ranks, lambda ep, given=tokens: forward(given[ep.rank], w1, w2, ep))
        assert all(same_bits(y, trained[0]) for y, trained in zip(alone, results, strict=True))
        made.append((results, tokens))
    for ep in ranks:
        ep.check()
    played.undo()
    forget_plans()
    for results, tokens in made:
        if sum(map(len, (given[0] for given in tokens))):
            assert_like_one(results, tokens, w1, w2)


@pytest.mark.parametrize("k", [TOP_K, 1])
@pytest.mark.parametrize("world", [1, 3])
def test_combine_of_sums_and_of_rows(world: int, k: int, played: pytest.MonkeyPatch) -> None:
    """Both are told apart by shape, or by `summed` where a token has one choice and so one row."""
    w1, w2 = weights_of()
    ranks, made = ranks_of(world, k=k, device="cpu"), []
    for kind, counts in (("all", COUNTS[0]), ("some", COUNTS[1]), ("one", COUNTS[0]), ("none", COUNTS[2])):
        tokens = [with_choices(inputs(counts[rank], rank, kind), k) for rank in range(world)]
        for form, summed in ways_of(k):

            def step(ep: VirtualRank, function: Any, tokens: Any = tokens, way: Any = (form, summed)) -> Any:
                return function(tokens[ep.rank], w1[ep.own], w2[ep.own], ep, *way)

            results = each(ranks, partial(step, function=in_steps))
            alone = each(ranks, partial(step, function=forward_in_steps))
            assert all(same_bits(y, trained[0]) for y, trained in zip(alone, results, strict=True))
            made.append((results, tokens))
    for ep in ranks:
        ep.check()
    played.undo()
    forget_plans()
    for results, tokens in made:
        if sum(map(len, (given[0] for given in tokens))):
            assert_like_one(results, tokens, w1, w2)


def test_combine_refuses_what_kernels_would_misread(played: pytest.MonkeyPatch) -> None:
    """Shapes, and dtypes, which all_to_all would move; nothing was sent, so that the right call is still possible."""
    (ep,) = ranks_of(1, device="cpu")
    x, ids, weights, residual, _ = inputs(30, 0, "all")

    def zeros(rows: int, width: int = HIDDEN, dtype: torch.dtype = BF16) -> Tensor:
        return torch.zeros(rows, width, dtype=dtype)

    with torch.no_grad():
        _, _, handle = ep.dispatch(x, ids, weights)
        shapes = rf"\[{MOST}, H\], a sum for each token here or \[{TOP_K * MOST}, H\], a row for each of their choices"
        for y_here, error, text in (
            (zeros(30), ValueError, rf"y_here has shape \[30, {HIDDEN}\]; it must be {shapes}"),
            (zeros(MOST, 64), ValueError, rf"y_here has shape \[{MOST}, 64\]; it must be \[{MOST}, {HIDDEN}\]"),
            (zeros(TOP_K * MOST, 64), ValueError, rf"must be \[{TOP_K * MOST}, {HIDDEN}\], since hidden_size"),
            (zeros(MOST, dtype=torch.float32), TypeError, "y_here is torch.float32; it must be torch.bfloat16"),
            (zeros(TOP_K * MOST, dtype=torch.float32), TypeError, "y_here is torch.float32; it must be torch.bfloat16"),
        ):
            with pytest.raises(error, match=f"^combine: .*{text}"):
                ep.combine(y_here, handle)
        assert torch.equal(ep.combine(zeros(MOST), handle, residual), residual)
        for wrong, error, text in (
            (residual[1:], ValueError, r"residual has shape \[29, 128\]; it must be \[30, 128\]"),
            (residual.float(), TypeError, "residual is torch.float32"),
        ):
            with pytest.raises(error, match=f"^combine: .*{text}"):
                ep.combine(zeros(MOST), handle, wrong)


def test_another_default_device(played: pytest.MonkeyPatch) -> None:
    """What the device writes errors to is memory of the host, whatever torch makes tensors on by default."""
    w1, w2 = weights_of()
    tokens = inputs(30, 0, "all")
    (wanted,) = layers(ranks_of(1, device="cpu"), [tokens], w1, w2)
    with torch.device("meta"):
        ranks = ranks_of(2, timeout=0.3, device="cpu")
        (alone,) = ranks_of(1, device="cpu")
    assert all(ep._way._state[STATE.index("mirror")] for ep in (alone, *ranks))
    assert all(map(same_bits, layer(tokens, w1, w2, alone), wanted))
    ranks[0].dispatch(*tokens[:3])
    with pytest.raises(PeerError, match="rank 1 did not come"):
        ranks[0].check()


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_rows_in_mxfp8(world: int, dtype: torch.dtype, fake: FakeGpu) -> None:
    """They are quantised once, on their own rank, and give the bits of 16-bit rows."""
    ranks = ranks_of(world, dtype, device="cpu")
    w1, w2 = (folded(ranks, w.to(dtype)) for w in weights_of())
    for kind in ("all", "some", "one", "none"):
        for counts in COUNTS:
            tokens = [cast(inputs(counts[rank], rank, kind), dtype) for rank in range(world)]
            fake.launches.clear()
            made = each(ranks, lambda ep, given=tokens: forward(given[ep.rank], w1, w2, ep, "mxfp8"))
            quantised = [len(call["x"]) for call in fake.launches if "row_data" in call]
            assert sorted(quantised) == sorted(count for count in counts[:world] if count)
            with in_16_bits():
                wanted = each(ranks, lambda ep, given=tokens: forward(given[ep.rank], w1, w2, ep, "mxfp8"))
            assert all(map(same_bits, made, wanted))
            assert all(y.dtype is dtype and not torch.isnan(y).any() for y in made)
            if kind == "all" and counts is COUNTS[0]:
                assert all((y - given[3]).abs().max() > 0.1 for y, given in zip(made, tokens, strict=True))
    for ep in ranks:
        ep.check()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_exact"])
def test_tokens_that_are_in_mxfp8(recipe: str, played: pytest.MonkeyPatch) -> None:
    """Of any block and layout; those that the recipe reads in 16 bits travel so."""
    w1, w2 = weights_of()
    ranks = ranks_of(2, device="cpu")
    tokens = [inputs(30 + 9 * rank, rank, "all") for rank in range(2)]
    for block, scale_layout in (("1x128", "plain"), ("1x32", "plain"), ("1x128", "swizzled")):
        given = [[glulam.quantize_mxfp8(x, block=block, scale_layout=scale_layout), *rest] for x, *rest in tokens]
        values = [[x.dequantize(BF16), *rest] for x, *rest in given]
        made = each(ranks, lambda ep, given=given: forward(given[ep.rank], w1, w2, ep, recipe))
        wanted = each(ranks, lambda ep, given=values: forward(given[ep.rank], w1, w2, ep, recipe))
        assert all(map(same_bits, made, wanted)) and all(y.dtype is BF16 for y in made)


def test_a_dispatch_in_mxfp8(played: pytest.MonkeyPatch) -> None:
    """What comes is what was sent, by rank and number, a view without gradients and a copy with them."""
    ranks = ranks_of(2, device="cpu")
    tokens = [inputs(30 + 9 * rank, rank, "some") for rank in range(2)]
    sent = [glulam.quantize_mxfp8(x, block="1x128") for x, *_ in tokens]

    def one_way(ep: VirtualRank) -> None:
        x_here, here, handle = ep.dispatch(sent[ep.rank], *tokens[ep.rank][1:3])
        assert (x_here.axis, x_here.block, x_here.scale_layout) == ("row", "1x128", "plain")
        assert (x_here.data.data_ptr() == ep._way.window.rows.data_ptr()) is not torch.is_grad_enabled()
        for rank, x in enumerate(sent):
            mine = (here.row_of[rank * MOST : rank * MOST + x.shape[0]] >= 0).any(1)
            for got, wanted in ((x_here.data, x.data), (x_here.scale, x.scale)):
                got, wanted = (part.view(torch.uint8) for part in (got[rank * MOST :][: x.shape[0]], wanted))
                assert torch.equal(got[mine], wanted[mine]) and mine.any()
                assert not torch.equal(got[~mine], wanted[~mine]), "tokens that have no expert here"
        ep.combine(torch.zeros(here.row_of.numel(), ep.hidden_size, dtype=BF16), handle)

    for recorded in (False, True):
        each(ranks, torch.set_grad_enabled(recorded)(one_way))  # a mode of the thread that calls


def test_ranks_whose_tokens_have_other_forms(played: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(2, timeout=5, device="cpu")
    tokens = [inputs(30, rank, "all") for rank in range(2)]

    @torch.no_grad()
    def part(ep: VirtualRank) -> None:
        x, ids, weights, *_ = tokens[ep.rank]
        ep.dispatch(glulam.quantize_mxfp8(x, block="1x128") if ep.rank else x, ids, weights)

    each(ranks, part)
    for ep in ranks:
        with pytest.raises(PeerError, match=f"dispatch, operation .*rank {1 - ep.rank} has tokens in another form"):
            ep.check()


def test_dispatches_that_no_combine_follows(played: pytest.MonkeyPatch) -> None:
    ranks = ranks_of(2, device="cpu")
    tokens = [[inputs(40 + rank, rank, "all", seed) for rank in range(2)] for seed in (0, 500)]

    @torch.no_grad()
    def twice(ep: VirtualRank, order: tuple[int, ...]) -> list[Tensor]:
        begun = []
        for given in tokens:
            x_here, here, handle = ep.dispatch(*given[ep.rank][:3])
            begun.append((glulam.permute(x_here, here) * here.weight_of_row[:, None].to(BF16), handle))
        return [ep.combine(*begun[place]) for place in order]

    for order in ((0, 1), (1, 0), (0, 0), (1, 1)):
        for ep, made in zip(ranks, each(ranks, lambda ep, order=order: twice(ep, order)), strict=True):
            for place, y in zip(order, made, strict=True):
                x, _, weights, *_ = tokens[place][ep.rank]
                wanted = (weights.to(BF16)[..., None] * x[:, None]).float().sum(1)
                torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)


def test_rows_are_expected_as_of_ranks_with_as_many_tokens(played: pytest.MonkeyPatch) -> None:
    """Of the room for all ranks' tokens; with a power of two of them, so that most numbers have a plan."""
    (ep,) = ranks_of(1, device="cpu")
    with torch.no_grad():
        for count, used in ((1, 1), (3, 4), (30, 32), (MOST, MOST), (0, MOST)):
            _, here, _ = ep.dispatch(*inputs(count, 0, "all")[:3])
            assert here.world_experts == ep.num_experts * MOST // used


def test_numbers_of_operations_wrap(played: pytest.MonkeyPatch) -> None:
    w1, w2 = weights_of()
    ranks = ranks_of(2, device="cpu")
    tokens = [inputs(30, rank, "all") for rank in range(2)]
    wanted = layers(ranks, tokens, w1, w2)
    for ep in ranks:
        ep._way._state[STATE.index("epoch")] = 2**40 - 3
        ep._way.window.words[: WORDS.index("enter")] = -3 << 24
    for _ in range(2):
        for made, before in zip(layers(ranks, tokens, w1, w2), wanted, strict=True):
            assert all(map(same_bits, made, before))


@pytest.mark.parametrize("missing_in", ["dispatch", "combine"])
def test_a_rank_that_does_not_come(missing_in: str, played: pytest.MonkeyPatch) -> None:
    """It is named, results are NaN, and no later call is made."""
    w1, w2 = weights_of()
    ranks = ranks_of(3, timeout=0.3, device="cpu")
    tokens = [inputs(30, rank, "all") for rank in range(3)]

    @torch.no_grad()
    def one_way(ep: VirtualRank) -> Tensor | None:
        if ep.rank == 1 and missing_in == "dispatch":
            return None
        x, ids, weights, residual, _ = tokens[ep.rank]
        x_here, _, handle = ep.dispatch(x, ids, weights)
        if ep.rank == 1:
            return None
        handle.exchange.transport.check = lambda: None  # on a GPU the host is ahead of what the device finds
        return ep.collect(x_here, handle, residual)

    made = each(ranks, one_way)
    for ep in (ranks[0], ranks[2]):
        del ep._way.check
        assert torch.isnan(made[ep.rank]).all(), "never a result that is not whole"
        with pytest.raises(PeerError, match=f"{missing_in}, operation .*rank 1 did not come within 0.3 s"):
            ep.check()
        with pytest.raises(PeerError, match="rank 1"):
            layer(tokens[ep.rank], w1[ep.own], w2[ep.own], ep)


def test_a_rank_in_another_operation(played: pytest.MonkeyPatch) -> None:
    assert_another_operation_is_told(
        ranks_of(2, timeout=0.3, device="cpu"), [inputs(30, rank, "all") for rank in range(2)]
    )


def test_a_rank_that_is_refused(played: pytest.MonkeyPatch) -> None:
    assert_refusal_is_told(ranks_of(2, timeout=5, device="cpu"), inputs(MOST, 0, "all"))


def test_experts_that_fail(played: pytest.MonkeyPatch) -> None:
    """The others are told at once, in place of a combine, rather than after a time-out."""
    ranks = ranks_of(2, timeout=600, device="cpu")
    x, ids, weights, *_ = inputs(MOST, 0, "all")
    routing = glulam.Routing.from_topk(ids, weights, ranks[0].num_experts)

    @torch.no_grad()
    def part(ep: VirtualRank) -> None:
        def experts(x: Tensor, here: glulam.Routing, _: bool) -> Tensor:
            if ep.rank == 1 and len(x):
                raise RuntimeError("no memory for experts")
            return x.new_zeros(len(here.token_of_row), HIDDEN)

        if ep.rank == 1:
            with pytest.raises(RuntimeError, match="no memory for experts"):
                ep.layer("moe", "bf16", experts, {}, x, routing)
        else:
            assert ep.layer("moe", "bf16", experts, {}, x, routing).isnan().any()

    each(ranks, part)
    with pytest.raises(PeerError, match="rank 1 was in another operation, or its experts failed"):
        ranks[0].check()


def test_arguments_that_do_not_fit_here(played: pytest.MonkeyPatch) -> None:
    """They are checked before tokens are sent: a rank whose experts are too few refuses, and the others are told so."""
    w1, w2 = weights_of()
    ranks = ranks_of(2, timeout=600, device="cpu")
    tokens = [inputs(COUNTS[0][rank], rank, "all") for rank in range(2)]

    def part(ep: VirtualRank) -> None:
        if ep.rank == 1:
            with pytest.raises(ValueError, match="w1|w2"):
                forward(tokens[1], w1[1:], w2, ep)
        else:
            with contextlib.suppress(PeerError):  # on a GPU the host would not know yet
                forward(tokens[0], w1, w2, ep)

    each(ranks, part)
    with pytest.raises(PeerError, match="tokens of rank 1 were refused"):
        ranks[0].check()


def test_two_threads(played: pytest.MonkeyPatch) -> None:
    """The second is refused, and the object ends."""
    (ep,) = ranks_of(1, device="cpu")
    x, ids, weights, *_ = inputs(MOST, 0, "all")
    told = pytest.raises(RuntimeError, match="two threads used one object at once")
    with ep._way.turn, ThreadPoolExecutor(1) as threads, told:
        threads.submit(ep.dispatch, x, ids, weights).result()
    for _ in range(2):
        with pytest.raises((RuntimeError, PeerError)):
            ep.dispatch(x, ids, weights)
