"""Whole experts as serving engines call them: a router's choices and tokens in, tokens out, in CUDA graphs.

Everybody gets the same tokens, ids and weights, and computes SwiGLU without biases. A sample is one replay, after a
read that evicts what L2 holds. Results are compared with float32 first: a peer that fails or is wrong is left out with
a warning, and we may not be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor

from ..cases import select
from ..contest import make_record, or_left_out
from ..options import Options, select_ops
from ..results import Record
from ..serving_cases import CASES, RECIPES, ServingCase
from ..serving_data import Batch, Call, Contestant, check, expected, in_format, make_batch, make_weights
from ..serving_peers import find_peers, ours
from ..timing import flushed_sampler, interleave
from .graph import capture

Competing = list[tuple[Contestant, Call]]


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

    def competing(self, recipe: str, peers: list[Contestant]) -> Competing:
        """Return those that have prepared their weights, we first; what another recipe read is freed before."""
        self.formats.clear()
        torch.cuda.empty_cache()
        mine = ours(recipe)
        found: Competing = [(mine, mine.make(self.case, *self.weights(recipe)[1]))]
        for peer in (one for one in peers if recipe in one.recipes):
            with or_left_out(f"{self.case.name}: {peer.name}"):
                found.append((peer, peer.make(self.case, *self.weights(peer.weights)[0])))
        return found


def _captured(
    contestant: Contestant, call: Call, b: Batch, reference: Tensor, pool: Any
) -> tuple[float, Callable[[], object]]:
    """Return the error of a replay and the replay. Raises RuntimeError if a call or a replay is wrong."""
    check(contestant, call, b, reference)
    results: list[Tensor] = []
    graph = capture(lambda: results.append(call(b)), pool)

    def replayed(_: Batch) -> Tensor:
        graph.replay()
        return results[-1]

    return check(contestant, replayed, b, reference), graph.replay


def _checked(model: Model, competing: Competing, b: Batch, label: str) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return each contestant's error and replay by its name, without those that are left out."""
    references: dict[str, Tensor] = {}
    found = {}
    pool = torch.cuda.graph_pool_handle()
    for contestant, call in competing:
        weights = contestant.weights
        if weights not in references:
            references[weights] = expected(b, *model.weights(weights)[0])
        with or_left_out(f"{label}: {contestant.name}", required=contestant is competing[0][0]):
            found[contestant.name] = _captured(contestant, call, b, references[weights], pool)
    return found


def _record(model: Model, case: ServingCase, recipe: str, competing: Competing, budget_s: float) -> Record:
    b = make_batch(case)
    found = _checked(model, competing, b, f"{case.label}, {recipe}")
    times = interleave({name: flushed_sampler(replay) for name, (_, replay) in found.items()}, budget_s)
    here = b.here
    errors = {name: error for name, (error, _) in found.items()}
    work: Record = case.work(recipe, here.numel(), here.unique().numel())
    return make_record(case, times, op=recipe, **work, errors=errors)


@torch.no_grad()
def run_serving(options: Options) -> list[Record]:
    """One record a case and recipe."""
    cases, recipes = select(CASES, options.case), select_ops(RECIPES, options.ops)
    budget_s = options.budget_s / len(cases) / len(recipes)
    by_model: dict[str, list[ServingCase]] = {}
    for case in cases:
        by_model.setdefault(case.name, []).append(case)
    records: list[Record] = []
    with Progress() as progress:
        bar = progress.add_task("compiling peers' kernels", total=len(cases) * len(recipes))
        peers = find_peers([of_model[0] for of_model in by_model.values()], recipes)
        for name, of_model in by_model.items():
            model = Model(of_model[0])
            for recipe in recipes:
                progress.update(bar, description=f"{name}, {recipe}")
                competing = model.competing(recipe, peers)
                for case in of_model:
                    records.append(_record(model, case, recipe, competing, budget_s))
                    progress.advance(bar)
                progress.console.print(f"measured {name}, {recipe}")  # where no bar shows
                del competing
            del model
    return records
