"""Expert parallelism over a gloo group, against the same layer in one process, on the CPU."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import os
import pickle
import re
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.criterion import same_bits
from support.rank_layers import forward_in_steps, in_steps, ways_of, with_choices
from support.ranks import run_ranks
from torch import Tensor

import glulam
from glulam import GradientNotSupported, MXFP8Tensor, Routing
from glulam.distributed import (
    ExpertParallel,
    PeerError,
    all_to_all,
    expert_parameters,
    gather_state_dict,
    shard_state_dict,
)
from glulam.distributed.owners import Owners
from glulam.host import groups
from glulam.nn import MoE

BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64
HIDDEN, INTER, EXPERTS, TOP_K, MOST = 16, 12, 10, 3, 9


def some(*shape: int, seed: int, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def choices(rank: int, tokens: int, kind: str) -> Tensor:
    """Return expert ids [tokens, K] of a rank's tokens, distributed as `kind` says."""
    generator = torch.Generator().manual_seed(100 + rank)
    ids = torch.stack(
        [torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(tokens)] or [torch.empty(0, 3)]
    )
    ids = ids.long()[:tokens].view(tokens, TOP_K)
    if kind == "one":
        ids[:] = torch.tensor([EXPERTS - 1, EXPERTS - 2, -1])
    if kind == "none":
        ids[:] = torch.tensor([-1, EXPERTS, 2**40])
    if kind == "some" and tokens:
        ids[::2, 1] = -1
    return ids


def weights_of() -> tuple[Tensor, Tensor]:
    """Return w1 and w2 of all experts, which differ in scale."""
    scale = torch.logspace(-0.5, 0.5, EXPERTS, dtype=F64)[:, None, None]
    return some(EXPERTS, 2 * INTER, HIDDEN, seed=1) * scale, some(EXPERTS, HIDDEN, INTER, seed=2) * scale


def inputs(rank: int, tokens: int, kind: str) -> list[Tensor]:
    """Return a rank's x, ids, weights of choices and residual."""
    weights = some(tokens, TOP_K, seed=30 + rank).abs() + 0.1
    return [
        some(tokens, HIDDEN, seed=10 + rank),
        choices(rank, tokens, kind),
        weights,
        some(tokens, HIDDEN, seed=20 + rank),
    ]


def layer_results(given: list[Tensor], w1: Tensor, w2: Tensor, mix: Tensor, parallel: Any = None) -> list[Tensor]:
    """Return the layer's result and the gradients of x, the choices' weights, the residual and expert weights."""
    x, ids, weights, residual = given
    leaves = [t.clone().requires_grad_() for t in (x, weights, residual, w1, w2)]
    routing = Routing.from_topk(ids, leaves[1], EXPERTS)
    y = glulam.moe(leaves[0], routing, leaves[3], leaves[4], residual=leaves[2], parallel=parallel)
    (y * mix).sum().backward()
    return [y.detach(), *(leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for leaf in leaves)]


COUNTS = ([5, 0, 7, 3], [0, 0, 0, 0], [1, 9, 9, 0], [0, 4, 0, 0])


def against_one_process() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    own = slice(ep.first, ep.first + ep.num_local)
    w1, w2 = weights_of()
    for kind in ("all", "some", "one", "none"):
        for counts in COUNTS:
            each = [inputs(r, counts[r], kind) for r in range(world)]
            mixes = [some(counts[r], HIDDEN, seed=40 + r) for r in range(world)]
            whole = layer_results([torch.cat(parts) for parts in zip(*each, strict=True)], w1, w2, torch.cat(mixes))
            begin = sum(counts[:rank])
            mine = slice(begin, begin + counts[rank])
            wanted = [*(part[mine] for part in whole[:4]), *(part[own] for part in whole[4:])]
            got = layer_results(each[rank], w1[own], w2[own], mixes[rank], ep)
            for one, exact in zip(got, wanted, strict=True):
                torch.testing.assert_close(one, exact, rtol=1e-10, atol=1e-10)
            if sum(counts) and kind == "all":
                assert whole[0].abs().max() > 1 and whole[5].abs().max() > 0.1
            again = layer_results(each[rank], w1[own], w2[own], mixes[rank], ep)
            assert all(map(same_bits, got, again))


def what_goes_where() -> None:
    """Check dispatch and combine: each token is sent to a rank once, received rows are sorted by rank and token, and
    combine returns them to their tokens.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=torch.float32, transport="all_to_all")
    tokens = [inputs(r, 5 + r, "some") for r in range(world)]
    x, ids, weights, residual = (t.float() if t.is_floating_point() else t for t in tokens[rank])
    x_here, here, handle = ep.dispatch(x, ids, weights)
    theirs = [
        (t[0][n].float(), t[1][n], t[2][n].float())
        for t in tokens
        for n in range(len(t[0]))
        if any(ep.first <= e < ep.first + ep.num_local for e in t[1][n].tolist())
    ]
    assert torch.equal(x_here, torch.stack([t[0] for t in theirs])) and here.num_experts == ep.num_local
    assert here.world_experts == Owners(EXPERTS, world).spread_of_arrived(rank, TOP_K) <= EXPERTS
    assert torch.equal(here.weights, torch.stack([t[2] for t in theirs]))
    assert torch.equal(here.ids.long(), torch.stack([t[1] for t in theirs]))
    y_here = glulam.permute(x_here, here) * here.weight_of_row[:, None]
    y = ep.combine(y_here, handle, residual)
    chosen = (weights * (ids >= 0)).sum(1, keepdim=True)
    torch.testing.assert_close(y, x * chosen + residual)


def sums_or_rows() -> None:
    """Check that combine accepts sums and rows. It tells them apart by shape, or if a token has one choice and thus one
    row, by `summed`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    w1, w2 = weights_of()
    for k in (TOP_K, 1):
        ep = ExpertParallel(None, EXPERTS, k, HIDDEN, MOST, dtype=F64)
        own = slice(ep.first, ep.first + ep.num_local)
        for kind, place in (("all", 0), ("all", 1), ("some", 2), ("one", 0), ("none", 2)):
            counts = COUNTS[place]
            each = [with_choices(inputs(r, counts[r], kind), k) for r in range(world)]
            mixes = [some(counts[r], HIDDEN, seed=40 + r) for r in range(world)]
            whole = layer_results([torch.cat(parts) for parts in zip(*each, strict=True)], w1, w2, torch.cat(mixes))
            begin = sum(counts[:rank])
            mine = slice(begin, begin + counts[rank])
            wanted = [*(part[mine] for part in whole[:4]), *(part[own] for part in whole[4:])]
            for way in ways_of(k):
                given = [*each[rank], mixes[rank]], w1[own], w2[own], ep, *way
                got = in_steps(*given)
                for one, exact in zip(got, wanted, strict=True):
                    torch.testing.assert_close(one, exact, rtol=1e-10, atol=1e-10)
                assert same_bits(forward_in_steps(*given), got[0])


def neither_sums_nor_rows() -> None:
    """Check that combine's error for other shapes names both valid ones, nothing is sent, and the call can be
    repeated.
    """
    rank = dist.get_rank()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    x, ids, weights, _ = inputs(rank, 5, "all")
    x_here, here, handle = ep.dispatch(x, ids, weights)
    tokens, rows = len(x_here), TOP_K * len(x_here)
    sums_text, rows_text = rf"\[{tokens}, H\], a sum for each token here", rf"\[{rows}, H\], a row for each"
    for y_here, summed, error, text in (
        (x.new_zeros(rows + 1, HIDDEN), None, ValueError, f"{sums_text} or {rows_text}"),
        (x.new_zeros(tokens), None, ValueError, f"{sums_text} or {rows_text}"),
        (x.new_zeros(rows, HIDDEN), True, ValueError, f"it must be {sums_text}, since summed=True"),
        (x.new_zeros(tokens, HIDDEN), False, ValueError, f"it must be {rows_text}.*, since summed=False"),
        (x.new_zeros(HIDDEN, tokens).mT, None, ValueError, r"not contiguous .*call .contiguous\(\)"),
        (x.new_zeros(tokens, HIDDEN), 1, TypeError, "summed is 1; give True or False"),
        ([1.0], None, TypeError, r"y_here is a list; give a tensor \[tokens here, H\] or \[T, H\]"),
    ):
        with pytest.raises(error, match=f"^combine: .*{text}"):
            ep.combine(y_here, handle, summed=summed)
    assert ep.combine(glulam.combine(glulam.permute(x_here, here), here), handle).shape == x.shape


def spare_rows() -> None:
    """Check that rows after the last group cause no warning with a dispatched routing, which always may have such
    rows.
    """
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    own = slice(ep.first, ep.first + ep.num_local)
    w1, w2 = (w[own] for w in weights_of())
    x, ids, weights, _ = inputs(ep.rank, 7, "some")
    groups.forget_warnings()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*the groups end at row")
        for name in ("offs", "splits"):
            x_here, here, handle = ep.dispatch(x.requires_grad_(), ids, weights)
            assert int(here.offs[-1]) < len(here.token_of_row)
            by = {name: here.offs if name == "offs" else here.counts}
            y_here = glulam.grouped_mlp(glulam.permute(x_here, here), w1, w2, row_scale=here.weight_of_row, **by)
            ep.combine(y_here, handle).sum().backward()


PAGE = Path(__file__).parents[1] / "docs" / "distributed.md"


def the_page_s_first_example() -> None:
    """Run the docs page's first example, which must define all its names; all its ways must give the same bits."""
    text = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *_, **__: None)
        patch.setenv("LOCAL_RANK", str(dist.get_rank()))
        exec(text, names)
    x, y, in_three_steps, by_rows = (names[name] for name in ("x", "y", "in_three_steps", "by_rows"))
    assert x.shape == y.shape and 0 < float(y.detach().float().norm()) < float("inf")
    assert same_bits(y.detach(), in_three_steps.detach()) and same_bits(y.detach(), by_rows.detach())


def with_a_default_device() -> None:
    """Check that torch's default device does not affect a layer's results."""
    rank = dist.get_rank()
    tokens = [*inputs(rank, 6, "some"), some(6, HIDDEN, seed=rank)]
    w1, w2 = weights_of()
    results = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
            own = slice(ep.first, ep.first + ep.num_local)
            results.append(in_steps(tokens, w1[own], w2[own], ep, "sums"))
    assert all(map(same_bits, *results)) and results[0][0].abs().max() > 0.1


def bad_input_ends_everywhere() -> None:
    rank = dist.get_rank()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    tokens = MOST + 1 if rank == 1 else 4
    x, ids, weights, _ = inputs(rank, tokens, "all")
    error, text = (
        (ValueError, f"x has {tokens} tokens, and max_tokens is {MOST}") if rank == 1 else (PeerError, "rank 1")
    )
    with pytest.raises(error, match=text):
        ep.dispatch(x, ids, weights)
    x, ids, weights, _ = inputs(rank, 4, "all")
    assert ep.dispatch(x, ids, weights)[0].shape[1] == HIDDEN, "the next call goes on"


def refusal(bad: bool, error: type[Exception], text: str, others: str) -> Any:
    """Expect the error of the bad rank on that rank, and a PeerError on the others."""
    return pytest.raises(error, match=text) if bad else pytest.raises(PeerError, match=others)


def made_by(ep: ExpertParallel, seed: int = 0) -> Tensor:
    """Return a layer's result, which differs if ranks are out of step."""
    w1, w2 = (w[ep.first : ep.first + ep.num_local] for w in weights_of())
    x, ids, weights, _ = inputs(ep.rank + seed, 5, "all")
    return glulam.moe(x, Routing.from_topk(ids, weights, EXPERTS), w1, w2, parallel=ep)


def arguments_that_do_not_fit_here() -> None:
    """Check that a bad argument on one rank raises on all before anything is sent, and that the next call is right."""
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    module = MoE(HIDDEN, INTER, EXPERTS, TOP_K, parallel=ep, dtype=F64)
    bad = ep.rank == 1
    w1, w2 = (w[ep.first : ep.first + ep.num_local] for w in weights_of())
    x, ids, weights, residual = inputs(ep.rank, 5, "all")
    routing = Routing.from_topk(ids, weights, EXPERTS)
    fewer = Routing.from_topk(ids[1:], weights[1:], EXPERTS)
    wanted = made_by(ep)
    for change, error, text in (
        ({"w1": w1[1:]}, ValueError, "w1|w2"),
        ({"w2": w2.float()}, TypeError, "w2"),
        ({"w1": list(w1)[1:], "w2": list(w2)}, ValueError, "w"),
        ({"b1": w1[:, 0]}, ValueError, "b1"),
        ({"activation": "smoke"}, ValueError, "activation"),
        ({"recipe": "smoke"}, ValueError, "recipe"),
        ({"routing": fewer}, ValueError, "x has 5 tokens, but routing is of 4"),
        ({"routing": None}, TypeError, "routing is a NoneType"),
        ({"out": x}, ValueError, "out is given, and so is parallel"),
        ({"x": x.float()}, TypeError, "x is torch.float32"),
    ):
        given: dict[str, Any] = {"x": x, "routing": routing, "w1": w1, "w2": w2, **(change if bad else {})}
        for _ in range(2):
            with refusal(bad, error, text, "^dispatch: the tokens of rank 1 were refused"):
                glulam.moe(**given, parallel=ep)
        assert torch.equal(made_by(ep), wanted)
    with refusal(bad, ValueError, r"x is \[5, 3\]", "^dispatch: the tokens of rank 1 were refused"):
        module(x[:, :3] if bad else x)
    for wrong, error in ((residual[1:], ValueError), (residual.float(), TypeError)):
        with refusal(bad, error, "residual", "^combine: rank 1 failed between dispatch and combine"):
            glulam.moe(x, routing, w1, w2, residual=wrong if bad else residual, parallel=ep)
    assert torch.equal(made_by(ep), wanted) and module(x).shape == x.shape


def experts_that_fail() -> None:
    """Check that if a rank's experts fail after dispatch, the others raise in combine, and that the next call is
    right.
    """
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    x, ids, weights, _ = inputs(ep.rank, 5, "all")
    routing, bad = Routing.from_topk(ids, weights, EXPERTS), ep.rank == 1

    def experts(x: Tensor, here: Routing, is_summed: bool) -> Tensor:
        if bad and len(x):
            raise torch.cuda.OutOfMemoryError("no memory for experts")
        return x if is_summed else glulam.permute(x, here)

    wanted = made_by(ep)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            with refusal(bad, RuntimeError, "no memory for experts", "^combine: rank 1 failed between dispatch and"):
                ep.layer("moe", "bf16", experts, {}, x, routing)
            assert torch.equal(made_by(ep), wanted)


def ranks_out_of_step() -> None:
    """Check that ranks in different operations all raise an error that names both, never mix up bytes, and that the
    object is unusable afterwards.
    """
    bad = dist.get_rank() == 1
    x, ids, weights, _ = inputs(dist.get_rank(), 5, "all")
    leaf = x.clone().requires_grad_()

    def skip_combine(ep: ExpertParallel) -> None:
        x_here, _, handle = ep.dispatch(x, ids, weights)
        ep.dispatch(x, ids, weights) if bad else ep.combine(x_here, handle)

    def skip_backward(ep: ExpertParallel) -> None:
        x_here, _, handle = ep.dispatch(leaf, ids, weights)
        y = ep.combine(x_here, handle)
        made_by(ep) if bad else y.sum().backward()

    def dispatch_twice(ep: ExpertParallel) -> None:
        handles = [ep.dispatch(x, ids, weights) for _ in range(2)]
        x_here, _, handle = handles[bad]
        ep.combine(x_here, handle)

    def another_object(ep: ExpertParallel) -> None:
        other = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
        made_by(ep)
        made_by(other)
        made_by(other if bad else ep)

    for step, text in (
        (skip_combine, r"rank \d is in (dispatch|combine of dispatch 1) \(operation 2\), this rank in "),
        (skip_backward, r"rank \d is in (dispatch|backward of combine of dispatch 1) \(operation 3\), this rank in "),
        (dispatch_twice, r"rank \d is in combine of dispatch \d \(operation 3\), this rank in combine of dispatch \d "),
        (another_object, r"rank \d is in a call of another ExpertParallel"),
    ):
        ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
        with pytest.raises(PeerError, match=text + ".*all ranks must make the same calls in one order"):
            step(ep)
        if step is not another_object:
            with pytest.raises(PeerError, match="make a new object on all ranks"):
                made_by(ep)
            with pytest.raises(PeerError, match="make a new object on all ranks"):
                ep.check()


def rows_in_other_forms() -> None:
    """Check that routing weights are sent as float32 whatever dtype ranks pass, and that every rank raises if results
    differ in dtype between ranks.
    """
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    bad = ep.rank == 1
    x, ids, weights, _ = inputs(ep.rank, 5, "all")
    exact = weights.bfloat16().to(F64)
    _, here, _ = ep.dispatch(x, ids, exact)
    for given in (exact.bfloat16() if bad else exact.float(), exact if bad else exact.bfloat16()):
        assert torch.equal(ep.dispatch(x, ids, given)[1].weights, here.weights) and here.weights.abs().max() > 0.1
    with refusal(bad, TypeError, "weights is torch.int32", "the tokens of rank 1 were refused"):
        ep.dispatch(x, ids, weights.int() if bad else weights)
    for change in (lambda y: y.float(), lambda y: torch.cat([y, y], 1)):
        x_here, _, handle = ep.dispatch(x, ids, weights)
        with pytest.raises(PeerError, match=r"^combine: rank \d sends rows of \d+ torch.float\d\d, this rank rows of "):
            ep.combine(change(x_here) if bad else x_here, handle)
    leaf, trained = x.clone().requires_grad_(), weights.clone().requires_grad_(bad)
    x_here, _, handle = ep.dispatch(leaf, ids, trained)
    with pytest.raises(
        PeerError, match="^backward of dispatch: rank . sends rows of .* with gradients of weights|this ra"
    ):
        ep.combine(x_here, handle).sum().backward()
    made_by(ep)


def two_threads() -> None:
    """Check that a second thread in a layer is refused, and the object is unusable on every rank afterwards."""
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    x, ids, weights, _ = inputs(ep.rank, 5, "all")
    routing, bad = Routing.from_topk(ids, weights, EXPERTS), ep.rank == 1
    made_by(ep)

    def experts(x: Tensor, here: Routing, _: bool) -> Tensor:
        if bad and len(x):
            with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError, match="two threads used one object"):
                threads.submit(made_by, ep).result()
        return x

    with refusal(bad, RuntimeError, "two threads used one object", "^combine: rank 1 failed"):
        ep.layer("moe", "bf16", experts, {}, x, routing)
    if bad:
        with pytest.raises(PeerError, match="two threads used one object.*; make a new object|make new ones"):
            ep.check()


def modules() -> None:
    """Check nn.MoE: gradients, and loading state dicts of whole models, packed or not."""
    rank, world = dist.get_rank(), dist.get_world_size()
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    options: dict[str, Any] = {"dtype": F64, "shared_intermediate_size": 8, "bias": True, "router_bias": True}
    torch.manual_seed(0)
    whole = MoE(HIDDEN, INTER, EXPERTS, TOP_K, **options)
    xs = [some(6, HIDDEN, seed=50 + r) for r in range(world)]
    wanted = whole(torch.cat(xs))
    wanted.sin().sum().backward()
    for packed in (True, False):
        module = MoE(HIDDEN, INTER, EXPERTS, TOP_K, parallel=ep, packed=packed, **options)
        assert module.experts.fc1.num_experts == ep.num_local
        module.load_state_dict(shard_state_dict(whole.state_dict(), ep))
        y = module(xs[rank])
        torch.testing.assert_close(y, wanted[6 * rank : 6 * rank + 6], rtol=1e-10, atol=1e-10)
        y.sin().sum().backward()
        gathered = gather_state_dict(module.state_dict(), ep)
        other = MoE(HIDDEN, INTER, EXPERTS, TOP_K, **options)
        other.load_state_dict(gathered)
        assert all(torch.equal(value, whole.state_dict()[key]) for key, value in other.state_dict().items())
        own = expert_parameters(torch.nn.Sequential(module))
        assert own.keys() == {f"0.experts.{name}" for name, _ in module.experts.named_parameters()}
        grads = {name: parameter.grad for name, parameter in module.named_parameters()}
        for name in sorted(grads.keys() - expert_parameters(module).keys()):
            dist.all_reduce(grads[name])
        found = glulam.nn.convert_state_dict(gather_state_dict(grads, ep), whole)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-9)


def without_gradients() -> None:
    """Check that without gradients, where rows are added while they are received, results have the bits of those with
    gradients.

    Covers all recipes, the function and the module. By "mxfp8" tokens are then sent in MXFP8, if their width allows it.
    """
    inter = 64
    for dtype, recipe, hidden in (
        (F64, "bf16", 32), (BF16, "bf16", 32), (BF16, "mxfp8_weight_only", 32), (BF16, "mxfp8_exact", 128),
        (BF16, "mxfp8", 32), (BF16, "mxfp8", 128), (F16, "mxfp8", 128), (torch.float32, "mxfp8", 256),
    ):  # fmt: skip
        ep = ExpertParallel(None, EXPERTS, TOP_K, hidden, MOST, dtype=dtype)
        torch.manual_seed(0)
        module = MoE(hidden, inter, EXPERTS, TOP_K, parallel=ep, dtype=dtype, recipe=recipe).requires_grad_(False)
        x = some(1 + 2 * ep.rank, hidden, seed=50 + ep.rank, dtype=dtype)
        with torch.no_grad():
            routing = module.route(x)
            given = x, routing, *(module.experts.arguments()[name] for name in ("w1", "w2"))
            with forms_sent() as forms:
                rows = [module(x), glulam.moe(*given, residual=x, recipe=recipe, parallel=ep)]
            in_mxfp8 = recipe == "mxfp8" and hidden % 128 == 0
            assert forms == [MXFP8Tensor if in_mxfp8 else Tensor] * 2
        with torch.enable_grad():
            sums = [module(x), glulam.moe(*given, residual=x, recipe=recipe, parallel=ep)]
        assert all(map(same_bits, rows, sums)) and all(y.abs().max() > 1e-3 for y in rows)


@contextlib.contextmanager
def forms_sent() -> Iterator[list[type]]:
    """Context that collects the type of the tokens that each dispatch sends."""
    found: list[type] = []
    send = all_to_all._Rows._tokens_forth

    def noted(rows: Any, x: Any) -> Any:
        found.append(type(x))
        return send(rows, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(all_to_all._Rows, "_tokens_forth", noted)
        yield found


def bytes_of(x: MXFP8Tensor) -> list[Tensor]:
    return [x.data.view(torch.uint8), x.scale.view(torch.uint8)]


def tokens_in_mxfp8() -> None:
    """Check tokens passed in MXFP8: their bytes are sent as 16-bit rows are, and results follow from their values."""
    hidden, inter = 128, 64
    ep = ExpertParallel(None, EXPERTS, TOP_K, hidden, MOST, dtype=BF16)
    own, tokens = slice(ep.first, ep.first + ep.num_local), 4 * (ep.rank != 1)
    x, ids = some(tokens, hidden, seed=50 + ep.rank, dtype=BF16), choices(ep.rank, tokens, "some")
    weights, residual = torch.rand(tokens, TOP_K), some(tokens, hidden, seed=60 + ep.rank, dtype=BF16)
    w1, w2 = (some(EXPERTS, *shape, seed=7, dtype=BF16)[own] / 8 for shape in ((2 * inter, hidden), (hidden, inter)))
    q = glulam.quantize_mxfp8(x, block="1x128")
    places = ep.dispatch(torch.arange(tokens * hidden).view(tokens, hidden).to(BF16), ids, weights)[1]
    for part, came in zip(bytes_of(q), bytes_of(ep.dispatch(q, ids, weights)[0]), strict=True):
        wide = torch.zeros(tokens, hidden, dtype=BF16)
        wide[:, : part.shape[1]] = part.to(BF16)  # bytes are exact in it
        x_here, here, _ = ep.dispatch(wide, ids, weights)
        assert torch.equal(x_here[:, : part.shape[1]], came.to(BF16)) and torch.equal(here.row_of, places.row_of)
    routing = Routing.from_topk(ids, weights, EXPERTS)
    given: dict[str, Any] = {"routing": routing, "w1": w1, "w2": w2, "residual": residual, "parallel": ep}
    for recipe, block, layout in itertools.product(("mxfp8", "mxfp8_exact"), ("1x32", "1x128"), ("plain", "swizzled")):
        q = glulam.quantize_mxfp8(x, block=block, scale_layout=layout)
        values = q.dequantize(BF16)
        with torch.no_grad(), forms_sent() as forms:
            wanted = glulam.moe(values, recipe=recipe, **given)
            made = glulam.moe(q, recipe=recipe, **given)
        assert same_bits(made, wanted) and made.dtype is BF16 and forms[1] is (MXFP8Tensor, Tensor)[recipe != "mxfp8"]
        leaf = residual.clone().requires_grad_()
        y = glulam.moe(q, recipe=recipe, **{**given, "residual": leaf})
        y.backward(torch.ones_like(y))
        assert same_bits(y.detach(), wanted) and leaf.grad is not None and (leaf.grad == 1).all()
    wrong_tokens_in_mxfp8(ep, x, ids, weights, given)


def wrong_tokens_in_mxfp8(ep: ExpertParallel, x: Tensor, ids: Tensor, weights: Tensor, given: dict[str, Any]) -> None:
    """Check that wrong MXFP8 tokens raise on every rank, and that the next call is right."""
    q = glulam.quantize_mxfp8(x, block="1x128")
    narrow = ExpertParallel(None, EXPERTS, TOP_K, 96, MOST, dtype=BF16)
    scale = torch.empty(*q.scale.shape, 2, dtype=torch.uint8)[..., 0].view(q.scale.dtype)
    for this, tokens, error, text in (
        (ep, glulam.quantize_mxfp8(x), ValueError, "must have axis 'row', block '1x128' and plain scales, as quantize"),
        (ep, q.swizzled(), ValueError, "block '1x128' and plain scales"),
        (ep, glulam.quantize_mxfp8(x, axis="col"), ValueError, "axis 'row'"),
        (ep, glulam.quantize_mxfp8(x[:, :64], block="1x128"), ValueError, r"\[\d, 64\]; it must be \[N, 128\]"),
        (narrow, glulam.quantize_mxfp8(x[:, :96], block="1x128"), ValueError, r"96 columns.*give x.dequantize\("),
        (ep, MXFP8Tensor(q.data, scale, "row", "1x128"), ValueError, "x's scale is not contiguous"),
    ):  # fmt: skip
        if tokens.shape[0] or "contiguous" not in text:
            with pytest.raises(error, match=text):
                this.dispatch(tokens, ids, weights)
        else:
            with pytest.raises(PeerError):
                this.dispatch(tokens, ids, weights)
    with pytest.raises(GradientNotSupported, match="dispatch: x is in MXFP8, and an argument requires a gradient"):
        ep.dispatch(q, ids, weights.clone().requires_grad_())
    with pytest.raises(TypeError, match="x is an MXFP8Tensor, but recipe 'bf16' takes 16-bit rows"):
        glulam.moe(q, **given)
    with pytest.raises(GradientNotSupported, match="moe: x is in MXFP8, and an argument requires a gradient"):
        glulam.moe(q, recipe="mxfp8", **{**given, "w1": given["w1"].clone().requires_grad_()})
    other = 0 if ep.rank else 1
    with pytest.raises(PeerError, match=f"dispatch: rank {other} has tokens in another form; give 16-bit ones on all"):
        ep.dispatch(x if ep.rank else q, ids, weights)
    assert isinstance(ep.dispatch(q, ids, weights)[0], MXFP8Tensor)


def copies_of_modules() -> None:
    """Check that copies of modules share the ranks' object and show it in their repr, and that no file stores it."""
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    module = MoE(HIDDEN, INTER, EXPERTS, TOP_K, parallel=ep, dtype=F64)
    assert f"parallel={ep!r}" in repr(module) and "parallel" not in repr(MoE(HIDDEN, INTER, EXPERTS, TOP_K, dtype=F64))
    twin = copy.deepcopy(module)
    assert twin.parallel is ep and twin.router.weight is not module.router.weight
    for save in (pickle.dumps, copy.copy, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(TypeError, match=r"process group, which no file holds; save the module's state_dict\(\)"):
            save(module if save is not copy.copy else ep)
    torch.save(module.state_dict(), io.BytesIO())


def bad_options() -> None:
    """Check that each bad constructor option raises before anything is sent."""
    options: dict[str, Any] = {"dtype": F64, "transport": "auto"}
    sizes = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": HIDDEN, "max_tokens": MOST}
    for change, error, text in (
        ({"num_experts": 1, "top_k": 1}, ValueError, "ranks for 1 experts"),
        ({"top_k": 33, "num_experts": 64}, ValueError, "top_k is 33"),
        ({"max_tokens": 0}, ValueError, "max_tokens is 0"),
        ({"hidden_size": 2.0}, TypeError, "hidden_size is 2.0"),
        ({"transport": "smoke"}, ValueError, "transport='smoke'; choose 'auto' or 'symmetric' or 'all_to_all'"),
        ({"dtype": torch.int32}, TypeError, "dtype is torch.int32"),
    ):
        with pytest.raises(error, match=text):
            ExpertParallel(None, **{**sizes, **options, **change})
        bad = dist.get_rank() == 1
        with refusal(bad, error, text, "ExpertParallel: the options of rank 1 were refused: .*" + re.escape(text)):
            ExpertParallel(None, **{**sizes, **options, **(change if bad else {})})
    ep = ExpertParallel(None, **sizes, **options)
    with pytest.raises(ValueError, match="top_k is 2, and that of parallel 3"):
        MoE(HIDDEN, INTER, EXPERTS, 2, parallel=ep)
    with pytest.raises(TypeError, match="parallel is a int"):
        MoE(HIDDEN, INTER, EXPERTS, TOP_K, parallel=2)
    x, ids, weights, _ = inputs(0, 4, "all")
    w1, w2 = weights_of()
    with pytest.raises(ValueError, match="routing is to 9 experts from 1 on; with parallel give one to all 10"):
        glulam.moe(x, Routing.from_topk(ids, weights, 9, first=1), w1, w2, parallel=ep)
    mapped = Routing.from_topk(ids, weights, EXPERTS, expert_map=torch.arange(EXPERTS, dtype=torch.int32))
    with pytest.raises(ValueError, match="moe: routing has an expert_map, and with parallel"):
        glulam.moe(x, mapped, w1, w2, parallel=ep)


def ranks_that_disagree() -> None:
    """Check that if ranks pass different options, all raise the same error, and none waits for another."""
    sizes: dict[str, Any] = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden_size": 16, "dtype": torch.bfloat16}
    last = dist.get_rank() == dist.get_world_size() - 1
    with pytest.raises(ValueError, match=f"rank {dist.get_world_size() - 1} gives .*, and rank 0 .*; all ranks must"):
        ExpertParallel(None, **sizes, max_tokens=MOST + last)
    with pytest.raises(ValueError, match='"symmetric" cannot work: the group\'s back end is gloo'):
        ExpertParallel(None, **sizes, max_tokens=MOST, transport="symmetric")
    with pytest.raises(ValueError, match='"symmetric" cannot work: dtype is torch.float64'):
        ExpertParallel(None, **{**sizes, "dtype": F64}, max_tokens=MOST, transport="symmetric")
    ep = ExpertParallel(None, **sizes, max_tokens=MOST)
    assert ep.transport == "all_to_all" and ep.timeout is None
    with pytest.raises(ValueError, match="time-out of all_to_all is torch.distributed's"):
        ep.timeout = 1.0
    ep.check()


def a_rank_that_ends() -> None:
    """Check that the others' error names the call in which an ended rank was missing."""
    ep = ExpertParallel(None, EXPERTS, TOP_K, HIDDEN, MOST, dtype=F64)
    x, ids, weights, _ = inputs(dist.get_rank(), 5, "all")
    x_here, here, handle = ep.dispatch(x, ids, weights)
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(PeerError, match="^combine: a rank has ended, or did not come"):
        for _ in range(50):  # the others may not see it at once
            ep.combine(glulam.permute(x_here, here), handle)


def test_a_rank_ends() -> None:
    run_ranks(2, a_rank_that_ends)


def everything() -> None:
    bad_options()
    ranks_that_disagree()
    against_one_process()
    what_goes_where()
    sums_or_rows()
    neither_sums_nor_rows()
    spare_rows()
    the_page_s_first_example()
    with_a_default_device()
    bad_input_ends_everywhere()
    arguments_that_do_not_fit_here()
    experts_that_fail()
    ranks_out_of_step()
    rows_in_other_forms()
    two_threads()
    modules()
    copies_of_modules()
    without_gradients()
    tokens_in_mxfp8()


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world: int) -> None:
    """All of the above in the same processes, since importing torch takes them longest."""
    run_ranks(world, everything)


@pytest.mark.parametrize(("experts", "world"), [(10, 4), (7, 7), (256, 8), (9, 2), (5, 1)])
def test_every_expert_has_one_owner(experts: int, world: int) -> None:
    owners = Owners(experts, world)
    ids = torch.arange(-2, experts + 3)
    wanted = [
        next((r for r in range(world) if owners.first(r) <= e < owners.first(r + 1)), world) for e in ids.tolist()
    ]
    assert owners.ranks_of(ids).tolist() == wanted and sum(map(owners.count, range(world))) == experts
    to = owners.destinations(torch.tensor([[0, 0], [experts - 1, -1], [-1, experts]]))
    assert to[0].tolist() == [0] + [-1] * (world - 1) and to[1, -1] == world - 1 and to[2].tolist() == [-1] * world
