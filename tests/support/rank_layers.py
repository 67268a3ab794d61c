"""A layer on several virtual ranks and on one: its inputs, results and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import glulam
from glulam import Routing
from glulam.distributed import ExpertParallel, PeerError, parallel
from glulam.distributed.window import Sizes

from .criterion import assert_close
from .virtual_ranks import VirtualRank, each, virtual_ranks

BF16, F64 = torch.bfloat16, torch.float64
HIDDEN, INTER, EXPERTS, TOP_K, MOST = 128, 96, 10, 3, 70
COUNTS = ([70, 41, 3, 70], [0, 70, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0])
"""Sets of test sizes: the number of tokens on each of four ranks."""


def some(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def choices(tokens: int, seed: int, kind: str = "all") -> Tensor:
    """Return ids [tokens, K].

    kind: "all": random experts; "some": the same, with every other token's second id -1; "one": expert E - 1 and
    invalid ids; "none": only invalid ids.
    """
    ids = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, :TOP_K].int()
    if kind == "one":
        ids[:] = torch.tensor([EXPERTS - 1, -1, EXPERTS + 7])
    if kind == "none":
        ids[:] = torch.tensor([-1, EXPERTS, 2**31 - 1])
    if kind == "some":
        ids[::2, 1] = -1
    return ids


def weights_of() -> list[Tensor]:
    scale = torch.logspace(-0.5, 0.5, EXPERTS)[:, None, None]
    w1 = some(EXPERTS, 2 * INTER, HIDDEN, seed=1).float() * HIDDEN**-0.5 * scale
    w2 = some(EXPERTS, HIDDEN, INTER, seed=2).float() * INTER**-0.5 * scale
    return [w1.to(BF16), w2.to(BF16)]


def inputs(tokens: int, rank: int, kind: str, seed: int = 0) -> list[Tensor]:
    """Return x, ids, weights of choices, residual, and the incoming gradient. Tokens differ in scale."""
    scale = torch.logspace(-1, 1, max(tokens, 1))[:tokens, None]
    x = (some(tokens, HIDDEN, seed=seed + 10 + rank).float() * scale).to(BF16)
    weights = some(tokens, TOP_K, seed=seed + 20 + rank, dtype=torch.float32).abs() + 0.1
    residual, mix = some(tokens, HIDDEN, seed=seed + 30 + rank), some(tokens, HIDDEN, seed=seed + 40 + rank)
    return [x, choices(tokens, seed + 50 + rank, kind), weights, residual, mix]


@torch.enable_grad()
def layer(given: list[Tensor], w1: Tensor, w2: Tensor, parallel: Any = None) -> list[Tensor]:
    """Return a layer's result, and the gradients of x, the choices' weights, the residual, w1 and w2."""
    x, ids, weights, residual, mix = given
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, residual, w1, w2)]
    routing = Routing.from_topk(ids, leaves[1], EXPERTS)
    y = glulam.moe(leaves[0], routing, leaves[3], leaves[4], residual=leaves[2], parallel=parallel)
    y.backward(mix)
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


@torch.enable_grad()
def in_steps(
    given: list[Tensor], w1: Tensor, w2: Tensor, ep: ExpertParallel, form: str, summed: bool | None = None
) -> list[Tensor]:  # fmt: skip
    """Compute `layer` in separate steps: dispatch, the rank's own experts, and combine.

    form: "sums": `moe` sums each token's rows on this rank before combine; "rows": combine gets single rows.
    """
    x, ids, weights, residual, mix = given
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights, residual, w1, w2)]
    y = _in_steps(leaves, ids, ep, form, summed)
    y.backward(mix)
    return [y.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)]


@torch.no_grad()
def forward_in_steps(
    given: list[Tensor], w1: Tensor, w2: Tensor, ep: ExpertParallel, form: str, summed: bool | None = None
) -> Tensor:  # fmt: skip
    """Return only the result of `in_steps`."""
    x, ids, weights, residual, _ = given
    return _in_steps([x, weights, residual, w1, w2], ids, ep, form, summed)


def _in_steps(leaves: list[Tensor], ids: Tensor, ep: ExpertParallel, form: str, summed: bool | None) -> Tensor:
    x, weights, residual, w1, w2 = leaves
    x_here, here, handle = ep.dispatch(x, ids, weights)
    if form == "sums":
        y_here = glulam.moe(x_here, here, w1, w2)
    else:
        rows = glulam.permute(x_here, here)
        y_here = glulam.grouped_mlp(rows, w1, w2, offs=here.offs, row_scale=here.weight_of_row)
    return ep.combine(y_here, handle, residual, summed=summed)


def near(one: Tensor, other: Tensor) -> bool:
    """Return True if two 16-bit results agree up to the rounding of different kernels."""
    return bool((one.double() - other.double()).norm() <= 0.02 * other.double().norm())


def ways_of(k: int) -> list[tuple[str, bool | None]]:
    """Return the valid arguments (form, summed) of `combine` for tokens with k choices."""
    return [("sums", None), ("rows", None)] if k > 1 else [("sums", None), ("sums", True), ("rows", False)]


def with_choices(given: list[Tensor], k: int) -> list[Tensor]:
    """Return inputs that keep only the first k choices of each token."""
    x, ids, weights, *rest = given
    return [x, ids[:, :k].contiguous(), weights[:, :k].contiguous(), *rest]


def ranks_of(world: int, dtype: torch.dtype = BF16, k: int = TOP_K, **options: Any) -> list[VirtualRank]:
    return virtual_ranks(EXPERTS, Sizes(world, MOST, k, HIDDEN, dtype), **options)


@torch.no_grad()
def forward(given: list[Any], w1: Any, w2: Any, ep: Any, recipe: str = "bf16") -> Tensor:
    """Return the result of this rank's layer.

    w1, w2: weights of all experts, or a list with each rank's prepared weights.
    """
    x, ids, weights, residual, _ = given
    routing = Routing.from_topk(ids, weights, EXPERTS)
    own = [w[ep.own] if isinstance(w, Tensor) else w[ep.rank] for w in (w1, w2)]
    return glulam.moe(x, routing, *own, residual=residual, recipe=recipe, parallel=ep)


def folded(ranks: list[VirtualRank], w: Tensor) -> list[Any]:
    """Return each rank's weights, folded for recipe "mxfp8".

    They are folded before a test: during it, folding would wait for a kernel that waits itself.
    """
    return [glulam.prepare_mxfp8_weight(w[ep.own]) for ep in ranks]


def cast(given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the inputs cast to another 16-bit dtype."""
    return [t.to(dtype) if t.dtype is BF16 else t for t in given]


@contextlib.contextmanager
def in_16_bits() -> Iterator[None]:
    """Context in which tokens are sent in 16 bits, whatever the recipe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "quantizes", lambda *_: False)
        yield


def layers(ranks: list[VirtualRank], tokens: list[list[Tensor]], w1: Tensor, w2: Tensor) -> list[list[Tensor]]:
    return each(ranks, lambda ep: layer(tokens[ep.rank], w1[ep.own], w2[ep.own], ep))


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU, floating-point numbers in float64."""
    return tensor.to("cpu", F64 if tensor.is_floating_point() else None)


def assert_like_one(made: list[list[Tensor]], tokens: list[list[Tensor]], w1: Tensor, w2: Tensor) -> None:
    """Check that the ranks' results together equal those of one layer with all tokens and experts."""
    whole = [torch.cat(parts) for parts in zip(*tokens, strict=True)]
    exact = layer([wide(t) for t in whole], wide(w1), wide(w2))
    alone = layer(whole, w1, w2)
    for one, wanted, same in zip(map(torch.cat, zip(*made, strict=True)), exact, alone, strict=True):
        assert not torch.isnan(one).any()
        if wanted.any():
            got = one.cpu().reshape(1, -1)
            assert_close(got, wanted.reshape(1, -1), same.cpu().reshape(1, -1), rows=1)
        else:
            assert not one.any()


def assert_another_operation_is_told(ranks: list[VirtualRank], tokens: list[list[Tensor]]) -> None:
    """Check that both of two ranks are told if one dispatches again where the other collects."""

    @torch.no_grad()
    def part(ep: VirtualRank) -> None:
        x, ids, weights, *_ = tokens[ep.rank]
        _, _, handle = ep.dispatch(x, ids, weights)
        if ep.rank == 0:
            ep.dispatch(x, ids, weights)
        else:
            ep.collect(ep._way.window.rows, handle)

    each(ranks, part)
    for ep in ranks:
        with pytest.raises(PeerError, match="did not come|in another operation"):
            ep.check()


def assert_refusal_is_told(ranks: list[VirtualRank], given: list[Tensor]) -> None:
    """Check that both of two ranks are told if one has more tokens than the other has room for."""
    x, ids, weights, *_ = given

    @torch.no_grad()
    def part(ep: VirtualRank) -> None:
        if ep.rank == 1:
            with pytest.raises(ValueError, match=f"max_tokens is {MOST}"):
                ep.dispatch(torch.cat([x, x]), torch.cat([ids, ids]), torch.cat([weights, weights]))
        else:
            ep.dispatch(x, ids, weights)

    each(ranks, part)
    for ep in ranks:
        with pytest.raises(PeerError, match="tokens of rank 1 were refused"):
            ep.dispatch(x, ids, weights)
