"""Whole experts as serving engines call them: a router's choices and tokens in, tokens out, in CUDA graphs.

Everybody gets the same tokens, ids and weights, and computes SwiGLU without biases. A sample is one replay, after a
read that evicts what L2 holds. Results are compared with float32 first: a peer that fails or is wrong is left out with
a warning, and we may not be.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from glulam.tuner.timing import Call, interleave

from ..cases import SERVING, SERVING_RECIPES, ServingCase, select
from ..cells import OURS
from ..contest import Contestant, Wrong, admitted, make_record, numbered, or_left_out
from ..options import Options, select_ops
from ..results import Record
from ..serving import Batch, Experts, error, expected, find_peers, in_format, make_batch, make_weights, ours
from ..serving import Call as OfBatch
from ..timing import capture, flushed_sampler

Competing = list[tuple[Experts, OfBatch]]


class Model:
    """A model's weights in 16 bits, and in the formats that contestants of one recipe read."""

    def __init__(self, case: ServingCase) -> None:
        self.case = case
        self.wide = make_weights(case)
        self.formats: dict[str, Any] = {}

    def weights(self, recipe: str) -> Any:
        """Both weights as a checkpoint has them, and as our kernels read them."""
        if recipe not in self.formats:
            self.formats[recipe] = in_format(recipe, *self.wide)
        return self.formats[recipe]

    def competing(self, recipe: str, peers: list[Experts]) -> Competing:
        """Return those that have prepared their weights, we first; what another recipe read is freed before."""
        self.formats.clear()
        torch.cuda.empty_cache()
        mine = ours(recipe)
        found: Competing = [(mine, mine.make(self.case, *self.weights(recipe)[1]))]
        for peer in (one for one in peers if recipe in one.recipes):
            with or_left_out(f"{self.case.name}: {peer.name}"):
                found.append((peer, peer.make(self.case, *self.weights(peer.weights)[0])))
        return found


def _captured(experts: Experts, call: OfBatch, b: Batch, reference: Tensor, pool: Any) -> Call:
    """Return the replay. The buffer holds NaN before each checked call, so that what nobody writes is an error. Raises
    Wrong if the call itself is wrong.
    """
    b.out.fill_(torch.nan)
    found = error(call(b), reference)
    if not found <= experts.bound:
        raise Wrong(f"wrong, relative error {found:.2g}")
    replay = numbered(capture(partial(call, b), pool))
    b.out.fill_(torch.nan)
    return replay


def contestants(model: Model, competing: Competing, b: Batch) -> Iterator[Contestant]:
    """Contestants of a batch, each held to the reference of the weights that it reads."""
    pool = torch.cuda.graph_pool_handle()
    references = functools.cache(lambda weights: expected(b, *model.weights(weights)[0]))
    for one, call in competing:
        reference = references(one.weights)
        build = partial(_captured, one, call, b, reference, pool)
        yield Contestant(one.name, build, partial(error, reference=reference), one.bound, one.name == OURS)


def _measure(model: Model, case: ServingCase, recipe: str, competing: Competing, budget_s: float) -> Record:
    b = make_batch(case)
    who = admitted(f"{case.label}, {recipe}", contestants(model, competing, b))
    samplers = {name: flushed_sampler(partial(replay, 0)) for name, replay in who.calls.items()}
    work: Record = case.work(recipe, b.here.numel(), b.here.unique().numel())
    return make_record(case, interleave(samplers, budget_s), op=recipe, **work, errors=who.errors)


@torch.no_grad()
def run_serving(options: Options) -> list[Record]:
    """One record a case and recipe."""
    cases, recipes = select(SERVING, options.case), select_ops(SERVING_RECIPES, options.ops)
    budget_s = options.budget_s / len(cases) / len(recipes)
    by_model = [list(group) for _, group in itertools.groupby(cases, lambda case: case.name)]
    records: list[Record] = []
    with Progress() as progress:
        bar = progress.add_task("compiling peers' kernels", total=len(cases) * len(recipes))
        peers = find_peers([of_model[0] for of_model in by_model], recipes)
        for of_model in by_model:
            model = Model(of_model[0])
            for recipe in recipes:
                what = f"{model.case.name}, {recipe}"
                progress.update(bar, description=what)
                competing = model.competing(recipe, peers)
                for case in of_model:
                    records.append(_measure(model, case, recipe, competing, budget_s))
                    progress.advance(bar)
                progress.console.print(f"measured {what}")  # where no bar shows
                del competing
            del model
    return records
