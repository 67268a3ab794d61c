"""Batch invariance on a GPU: a row has the same bits in batches of every size and beside any other rows, eager and
replayed, by every recipe, forward and backward.

Batch sizes lie around every row count at which the dispatcher switches kernels.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import batches
from support.criterion import same_bits
from torch import Tensor

import glulam
from cute_kernels.formats import OPERANDS
from glulam import contract
from glulam.choose import choose
from glulam.choose.problem import Problem, changed
from glulam.ops.quantized_weights import FORMS
from glulam.recipes import RECIPES, Recipe

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
EXPERTS, HIDDEN, INTER, TOP_K = 8, 512, 512, 2
MOST = 8192
PROBES = 8
"""Rows, or tokens, whose bits are compared: the first of every batch that has so many."""
COLUMNS = {arch: column for column, arch in contract.COLUMNS.items()}


def arch() -> str:
    """Return the architecture whose kernels are tested, from the option --arch."""
    return os.environ.get("GLULAM_ARCH", "sm_90a")


def column() -> str:
    return COLUMNS[arch()]


def sizes_around(problem: Problem) -> list[int]:
    """Return row counts at which the dispatcher switches kernels, their neighbours, and powers of two."""
    found = {1 << power for power in range(14)} | {3, 17, 24, 100, 1000}
    before = None
    for rows in range(1, MOST + 1):
        name = choose(dataclasses.replace(problem, rows=rows), arch()).spec.name
        if before not in (None, name):
            found |= {rows - 1, rows, rows + 1}
        before = name
    return sorted(rows for rows in found if rows <= MOST)


@functools.cache
def sizes_of(op: str, recipe: str) -> tuple[int, ...]:
    problems = list(contract.problems(op, RECIPES[recipe], arch(), experts=EXPERTS))
    return tuple(sorted({rows for one in problems for rows in sizes_around(one)}))


def served(op: str) -> list[str]:
    """Return the recipes by which Hopper's kernels have an operator. Portable kernels lack some, whose tests are
    skipped.
    """
    return [name for name, recipe in RECIPES.items() if list(contract.problems(op, recipe, "sm_90a"))]


def skip_what_is_not_here(op: str, recipe: str) -> None:
    if contract.tiled(op, recipe, column()).verdict == contract.NONE:
        pytest.skip(f"{arch()} has no kernels of it")


def is_default(op: str, recipe: str) -> bool:
    return contract.tiled(op, recipe, column()).verdict == contract.YES


def weight(recipe: Recipe, rows: int, depth: int, seed: int, is_gate: bool = False) -> Any:
    """Return experts' weights: 16-bit if the recipe trains, else quantised in the recipe's format."""
    w = batches.weights_of(EXPERTS, rows, depth, seed=seed)
    if recipe.trains:
        return w.cuda()
    form = FORMS[recipe.operands]
    made = (form.of_gate(rows) if is_gate and OPERANDS[recipe.operands].w.rows > 1 else form).quantized_tensor(w)
    return made.to("cuda")


def batch(rows: int, expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Choose a batch's rows, sorted by expert: the probe rows and random others. Return row indices, positions of the
    probes, and group ends.
    """
    generator = torch.Generator().manual_seed(rows)
    others = PROBES + torch.randperm(MOST - PROBES, generator=generator)[: max(rows - PROBES, 0)]
    chosen = torch.cat((torch.arange(min(rows, PROBES)), others))
    chosen = chosen[torch.randperm(len(chosen), generator=generator)]
    chosen = chosen[expert[chosen].argsort(stable=True)]
    places = torch.stack([(chosen == probe).nonzero()[0, 0] for probe in range(min(rows, PROBES))])
    offs = torch.bincount(expert[chosen], minlength=EXPERTS).cumsum(0).int()
    return chosen.cuda(), places.cuda(), offs.cuda()


def check_rows(call: Callable[[Tensor, Tensor], list[Tensor]], x: Tensor, sizes: tuple[int, ...]) -> None:
    """Compare the probe rows' results in every batch with those of the largest batch. call: function of rows and group
    ends.
    """
    expert = torch.randint(EXPERTS, (MOST,), generator=torch.Generator().manual_seed(5))
    chosen, places, offs = batch(MOST, expert)
    wanted = [one[places].clone() for one in call(x[chosen], offs)]
    assert all(one.isfinite().all() and (one != 0).any() for one in wanted)
    for rows in sizes:
        chosen, places, offs = batch(rows, expert)
        for place, one in enumerate(call(x[chosen], offs)):
            assert same_bits(one[places], wanted[place][: len(places)]), f"result {place} of a batch of {rows} rows"


def each_setting(op: str, recipe: str) -> list[bool]:
    """Return settings of the batch-invariance switch to test: both if invariance holds by default, else only on."""
    return [False, True] if is_default(op, recipe) else [True]


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("recipe", served("grouped_mm"))
def test_grouped_mm(recipe: str, transpose_w: bool) -> None:
    skip_what_is_not_here("grouped_mm", recipe)
    form = RECIPES[recipe]
    w = weight(form, INTER, HIDDEN, seed=1)
    x = batches.rows_of(MOST, INTER if transpose_w else HIDDEN).cuda()
    for mode in each_setting("grouped_mm", recipe):
        with glulam.batch_invariant(mode):
            given = w.mT.contiguous() if transpose_w and form.trains else w
            rows = x if not (transpose_w and form.trains) else batches.rows_of(MOST, HIDDEN).cuda()
            check_rows(
                lambda x, offs, w=given: [glulam.grouped_mm(x, w, offs=offs, transpose_w=transpose_w)],
                rows, sizes_of("grouped_mm", recipe),
            )  # fmt: skip


@pytest.mark.parametrize("recipe", served("grouped_mlp"))
def test_grouped_mlp(recipe: str) -> None:
    skip_what_is_not_here("grouped_mlp", recipe)
    form = RECIPES[recipe]
    w1, w2 = weight(form, 2 * INTER, HIDDEN, seed=1, is_gate=True), weight(form, HIDDEN, INTER, seed=3)
    x = batches.rows_of(MOST, HIDDEN).cuda()
    for mode in each_setting("grouped_mlp", recipe):
        with glulam.batch_invariant(mode):
            check_rows(
                lambda x, offs: [glulam.grouped_mlp(x, w1, w2, offs=offs, recipe=recipe)], x,
                sizes_of("grouped_mlp", recipe),
            )  # fmt: skip


def has_gradients(recipe: str) -> bool:
    return RECIPES[recipe].trains or RECIPES[recipe].freezes_weights


@pytest.mark.parametrize("recipe", [name for name in served("grouped_mlp") if has_gradients(name)])
def test_a_training_step(recipe: str) -> None:
    """The result has inference's bits, and x's gradient those of every other batch; backward runs after the block."""
    skip_what_is_not_here("grouped_mlp", recipe)
    form = RECIPES[recipe]
    w1, w2 = weight(form, 2 * INTER, HIDDEN, seed=1, is_gate=True), weight(form, HIDDEN, INTER, seed=3)
    x = batches.values(MOST, HIDDEN, seed=0).cuda()

    def step(x: Tensor, offs: Tensor) -> list[Tensor]:
        with glulam.batch_invariant():
            with torch.no_grad():
                inference = glulam.grouped_mlp(x, w1, w2, offs=offs, recipe=recipe)
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                y = glulam.grouped_mlp(leaf, w1, w2, offs=offs, recipe=recipe)
        assert same_bits(y.detach(), inference)
        (dx,) = torch.autograd.grad(y, leaf, x[:, : y.shape[1]].contiguous())
        return [y.detach(), dx]

    check_rows(step, x, sizes_of("grouped_mlp", recipe))


def check_tokens(call: Callable[[Tensor, Tensor], Tensor], sizes: tuple[int, ...]) -> None:
    """Compare the probe tokens' results as `check_rows` does for rows. call: function of tokens and logits."""
    x, logits = batches.values(MOST, HIDDEN, seed=1).cuda(), torch.randn(MOST, EXPERTS).cuda()
    wanted = call(x, logits)[:PROBES].clone()
    assert wanted.isfinite().all() and (wanted != 0).any()
    for tokens in sizes:
        for first in {0, max(0, PROBES - 1 - tokens // 2)}:  # probes at the front of a batch, and within it
            order = torch.cat((torch.arange(PROBES, PROBES + first), torch.arange(min(tokens, PROBES))))
            rest = torch.arange(2 * PROBES, 2 * PROBES + max(tokens - PROBES, 0))
            chosen = torch.cat((order, rest))[:MOST].cuda() % MOST
            made = call(x[chosen], logits[chosen])[first : first + min(tokens, PROBES)]
            assert same_bits(made, wanted[: len(made)]), f"a batch of {len(chosen)} tokens"


@pytest.mark.parametrize("recipe", served("grouped_mlp"))
def test_moe(recipe: str) -> None:
    skip_what_is_not_here("grouped_mlp", recipe)
    form = RECIPES[recipe]
    w1, w2 = weight(form, 2 * INTER, HIDDEN, seed=1, is_gate=True), weight(form, HIDDEN, INTER, seed=3)

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        return glulam.moe(x, glulam.route(logits, TOP_K), w1, w2, recipe=recipe)

    for mode in each_setting("grouped_mlp", recipe):
        with glulam.batch_invariant(mode):
            check_tokens(layer, sizes_of("grouped_mlp", recipe))


@pytest.mark.parametrize("recipe", served("grouped_mlp"))
def test_a_graph_replayed_with_other_groups(recipe: str) -> None:
    skip_what_is_not_here("grouped_mlp", recipe)
    form = RECIPES[recipe]
    w1, w2 = weight(form, 2 * INTER, HIDDEN, seed=1, is_gate=True), weight(form, HIDDEN, INTER, seed=3)
    x = batches.values(MOST, HIDDEN, seed=0).cuda()
    expert = torch.randint(EXPERTS, (MOST,), generator=torch.Generator().manual_seed(5))
    with glulam.batch_invariant():
        chosen, places, offs = batch(MOST, expert)
        wanted = glulam.grouped_mlp(x[chosen], w1, w2, offs=offs, recipe=recipe)[places].clone()
        for room in (16, 300, 4096):
            held, ends = x[:room].clone(), torch.full((EXPERTS,), room, dtype=torch.int32, device="cuda")
            glulam.grouped_mlp(held, w1, w2, offs=ends, recipe=recipe)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = glulam.grouped_mlp(held, w1, w2, offs=ends, recipe=recipe)
            for rows in (PROBES, room // 2, room):
                chosen, places, offs = batch(rows, expert)
                held[:rows].copy_(x[chosen])
                ends.copy_(offs)
                graph.replay()
                assert same_bits(y[places], wanted[: len(places)])


@pytest.mark.parametrize("router_dtype", [None, torch.float32])
def test_a_module_with_its_router(router_dtype: torch.dtype | None) -> None:
    """One to many tokens, without gradients and, where its logits have 16 bits, with them."""
    torch.manual_seed(0)
    module = glulam.nn.MoE(
        HIDDEN, INTER, EXPERTS, TOP_K, shared_intermediate_size=INTER, shared_gate=True, router_dtype=router_dtype,
        device="cuda", dtype=BF16,
    )  # fmt: skip

    def layer(x: Tensor, logits: Tensor) -> Tensor:
        with glulam.batch_invariant():
            y = module(x)
            if router_dtype is None:
                with torch.enable_grad():
                    assert same_bits(module(x).detach(), y)
        return y

    check_tokens(layer, sizes_of("grouped_mlp", "bf16"))


def test_weight_gradients_depend_on_an_experts_rows_alone() -> None:
    """Compare one expert's rows beside any number of other experts' rows."""
    dy, x = batches.values(MOST, INTER, seed=1).cuda(), batches.values(MOST, HIDDEN, seed=2).cuda()
    own = 77
    with glulam.batch_invariant():
        wanted = None
        for before, after in ((0, 0), (1, 0), (63, 9), (500, 1000), (0, 7000)):
            rows = torch.cat(
                (torch.arange(own, own + before), torch.arange(own), torch.arange(own, own + after))
            ).cuda()
            offs = torch.tensor([before, before + own, before + own + after], dtype=torch.int32, device="cuda")
            made = glulam.grouped_wgrad(dy[rows], x[rows], offs=offs)[1]
            wanted = made.clone() if wanted is None else wanted
            assert same_bits(made, wanted) and made.abs().max() > 1


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_hyper_connections(dtype: torch.dtype) -> None:
    n, width = 4, 512
    x, weight = (
        torch.randn(2048, n, width, dtype=BF16).cuda(),
        torch.randn(n * n + 2 * n, n * width, dtype=dtype).cuda(),
    )
    others = [torch.ones(1).cuda() for _ in range(3)] + [torch.randn(n * n + 2 * n).cuda()]
    with glulam.batch_invariant():
        wanted = [one[:PROBES].clone() for one in glulam.mhc.project(x, weight, *others)]
        for tokens in (8, 9, 100, 600, 2047):
            for one, other in zip(glulam.mhc.project(x[:tokens].contiguous(), weight, *others), wanted, strict=True):
                assert same_bits(one[:PROBES], other)


def test_the_number_of_sms_is_no_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid of fewer CTAs deals the same tiles to them otherwise."""
    from glulam.host import device
    from glulam.host.plans import forget_plans

    w = batches.weights_of(EXPERTS, INTER, HIDDEN, seed=1).cuda()
    x = batches.rows_of(700, HIDDEN).cuda()
    offs = torch.tensor([0, 100, 101, 300, 300, 555, 600, 700], dtype=torch.int32, device="cuda")
    wanted = glulam.grouped_mm(x, w, offs=offs)
    found = device.gpu
    for sms in (2, 57, 100):
        monkeypatch.setattr(device, "gpu", lambda index, sms=sms: found(index)._replace(sm_count=sms))
        forget_plans()
        assert same_bits(glulam.grouped_mm(x, w, offs=offs), wanted)
    monkeypatch.undo()
    forget_plans()


def test_the_check_fails_for_a_tile_of_another_order() -> None:
    """Without the switch, weights in MXFP4 alone differ between batches: the reason for the switch."""
    if arch() != "sm_90a":
        pytest.skip("of Hopper's own kernels")
    problem = next(contract.problems("grouped_mm", RECIPES["mxfp4_weight_only"], arch(), rows=8, experts=EXPERTS))
    assert choose(problem, arch()).spec != choose(changed(problem, invariant=True), arch()).spec
    w = weight(RECIPES["mxfp4_weight_only"], INTER, HIDDEN, seed=1)
    with pytest.raises(AssertionError, match="of a batch of"):
        check_rows(
            lambda x, offs: [glulam.grouped_mm(x, w, offs=offs)], batches.rows_of(MOST, HIDDEN).cuda(), (8, 16, 100)
        )
