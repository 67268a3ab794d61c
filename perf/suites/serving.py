"""Whole experts as serving engines call them: a router's choices and tokens in, tokens out, in CUDA graphs.

All contestants get the same tokens, ids and weights, and compute SwiGLU without biases. A sample is one replay, after a
read that evicts what L2 holds. Results are first compared with float32: a peer that fails or is wrong is left out with
a warning; if ours fails or is wrong, the run ends.

N tokens, K choices a token, E experts here, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glulam.layer.choices import moe_of_choices
from glulam.tuner.timing import Call

from ..cases import SERVING, SERVING_RECIPES, ServingCase, select
from ..cells import OURS
from ..contest import Contestant, contest, numbered, or_left_out, records_of, within
from ..mlp import normals, swiglu, weights_of
from ..options import Options, select_ops
from ..quantised import quantised
from ..results import Record
from ..targets import BF16
from ..timing import Times, capture, flushed_sampler, in_turns

COMPARED = 64  # tokens, evenly spaced, the first and the last among them
ROWS_16_BITS, ROWS_FP8 = 0.02, 0.08
"""Bounds of a result's error. Rounding x and the activation to E4M3 makes 0.045, a wrong expert or scale about 1."""
PACKAGES = {"humming": "serving_humming", "vllm": "serving_vllm"}
"""Packages, and the modules that call them; each module has a function `peers(models, recipes)`."""
FP8_ROWS = ("mxfp8", "mxfp4", "fp8_block")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens and their choices.

    Attributes:
        x: tokens [N, H].
        ids: int32 [N, K], the chosen experts, numbered among the experts on this GPU; -1: the expert is elsewhere.
        weights: float32 [N, K].
        out: [N, H], buffer for the result.
        world_ids: int32 [N, K], the chosen experts, numbered over all GPUs.
        expert_map: int32 [number of experts on all GPUs]: for each its number on this GPU, or -1. None: all experts
            are here.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor
    world_ids: Tensor
    expert_map: Tensor | None

    @property
    def here(self) -> Tensor:
        """Return the ids of the choices whose experts are on this GPU, as a vector with one for each row."""
        return self.ids[self.ids >= 0]


OfBatch = Callable[[Batch], Tensor]


@dataclasses.dataclass(frozen=True)
class Experts:
    """One library's implementation of the experts.

    Attributes:
        recipes: our recipes with which it is compared.
        weights: the recipe whose checkpoint format it reads.
        make: function (case, w1 [E, 2I, H], w2 [E, H, I]), with weights of that format, which stay unchanged. It
            prepares them, and returns a function that computes a Batch.
        bound: the largest error of a result that rounding explains.
    """

    name: str
    recipes: tuple[str, ...]
    weights: str
    make: Callable[[ServingCase, Any, Any], OfBatch]
    bound: float = ROWS_16_BITS


Competing = list[tuple[Experts, OfBatch]]


def make_weights(case: ServingCase, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return w1 and w2 in bfloat16, scaled so that activations are of order 1."""
    return weights_of(case, normals(torch.Generator(device).manual_seed(case.seed)))


def in_format(recipe: str, w1: Tensor, w2: Tensor) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return ((w1, w2) as a checkpoint of the recipe's format has them, (w1, w2) as our kernels read them)."""
    if recipe == BF16:
        return (w1, w2), (w1, w2)
    (ready1, made1), (ready2, made2) = quantised(recipe, w1, is_gate=True), quantised(recipe, w2)
    return (made1, made2), (ready1, ready2)


def make_batch(case: ServingCase, device: str = "cuda") -> Batch:
    """Return random tokens, with the K best of a softmax over random logits as their choices; weights sum to 1.

    The first token has expert 0 among its choices, so that even a single token has an expert on this GPU.
    """
    generator = torch.Generator(device).manual_seed(case.seed)
    logits = normals(generator, torch.float32)(case.tokens, case.world)
    logits[0, 0] = logits[0].amax()
    weights, chosen = logits.softmax(dim=1).topk(case.top_k)
    places = torch.arange(case.world, dtype=torch.int32, device=device)
    places[case.experts :] = -1
    x = normals(generator)(case.tokens, case.hidden)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return Batch(x, places[chosen], weights, torch.empty_like(x), chosen.int(), places if case.is_part else None)


def compared(tokens: int) -> list[int]:
    """Return the tokens whose results are compared."""
    count = min(tokens, COMPARED)
    return [token * (tokens - 1) // max(count - 1, 1) for token in range(count)]


def expected(b: Batch, w1: Any, w2: Any) -> Tensor:
    """Return the right results [., H] of the tokens in `compared`, in float32, with dequantised weights.

    Rows are never rounded.
    """

    def matrix(w: Any, expert: int) -> Tensor:
        return w[expert].float() if isinstance(w, Tensor) else w[expert].dequantize(torch.float32)

    tokens = compared(len(b.x))
    x, ids, weights = b.x[tokens].float(), b.ids[tokens], b.weights[tokens]
    y = torch.zeros_like(x)
    for expert in ids[ids >= 0].unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        act = swiglu(F.linear(x[token], matrix(w1, expert)))
        y[token] += weights[token, choice, None] * F.linear(act, matrix(w2, expert))
    return y


def error(result: Tensor, reference: Tensor) -> float:
    """Return the largest norm of a token's error, divided by the largest norm of a token (among `compared` tokens)."""
    got = result[compared(len(result))].float()
    return float((got - reference).norm(dim=1).max() / reference.norm(dim=1).max())


def ours(recipe: Any) -> Experts:
    """Return our contestant: `moe_of_choices` with a recipe, on prepared weights, as `ServedExperts` calls it."""

    def make(case: ServingCase, w1: Any, w2: Any) -> OfBatch:
        experts, more = (case.experts, w1, w2), {"world_experts": case.world, "recipe": recipe}
        return lambda b: moe_of_choices(b.x, b.ids, b.weights, *experts, **more, out=b.out)

    return Experts(OURS, (recipe,), recipe, make, ROWS_FP8 if recipe in FP8_ROWS else ROWS_16_BITS)


def find_peers(models: Sequence[ServingCase], recipes: Sequence[str]) -> list[Experts]:
    """Return the peers of packages that can be imported. Warn of each package that is absent or cannot be."""
    found: list[Experts] = []
    for package, module in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            warnings.warn(f"{package} is left out: it is not installed", stacklevel=2)
            continue
        with or_left_out(package):
            found += importlib.import_module(f"..{module}", __package__).peers(models, recipes)
    return found


class Model:
    """A model's weights in 16 bits, and in the formats that contestants of one recipe read."""

    def __init__(self, case: ServingCase) -> None:
        self.case = case
        self.wide = make_weights(case)
        self.formats: dict[str, Any] = {}

    def weights(self, recipe: str) -> Any:
        """Return ((w1, w2) as a checkpoint of the recipe's format has them, (w1, w2) as our kernels read them)."""
        if recipe not in self.formats:
            self.formats[recipe] = in_format(recipe, *self.wide)
        return self.formats[recipe]

    def competing(self, recipe: str, peers: list[Experts]) -> Competing:
        """Return the contestants whose weights could be prepared, ours first; other recipes' weights are freed."""
        self.formats.clear()
        torch.cuda.empty_cache()
        mine = ours(recipe)
        found: Competing = [(mine, mine.make(self.case, *self.weights(recipe)[1]))]
        for peer in (one for one in peers if recipe in one.recipes):
            with or_left_out(f"{self.case.name}: {peer.name}"):
                found.append((peer, peer.make(self.case, *self.weights(peer.weights)[0])))
        return found


def _captured(experts: Experts, call: OfBatch, b: Batch, reference: Tensor, pool: Any) -> Call:
    """Capture a call as a graph, and return the graph's replay. Raises Wrong if the result is wrong.

    The buffer for the result holds NaN before each checked call, so that unwritten elements count as errors.
    """
    b.out.fill_(torch.nan)
    within(error(call(b), reference), experts.bound)
    replay = numbered(capture(partial(call, b), pool))
    b.out.fill_(torch.nan)
    return replay


def contestants(model: Model, competing: Competing, b: Batch) -> Iterator[Contestant]:
    """Yield the contestants of a batch, each compared with the reference of the weights that it reads."""
    pool = torch.cuda.graph_pool_handle()
    references = functools.cache(lambda weights: expected(b, *model.weights(weights)[0]))
    for one, call in competing:
        reference = references(one.weights)
        build = partial(_captured, one, call, b, reference, pool)
        yield Contestant(one.name, build, partial(error, reference=reference), one.bound, one.name == OURS)


def _cold(replays: dict[str, Call], budget_s: float) -> Times:
    return in_turns({name: flushed_sampler(replay) for name, replay in replays.items()}, budget_s)


def _measure(
    of_model: Sequence[ServingCase], recipes: Sequence[str], peers: list[Experts], budget_s: float
) -> Iterator[Record]:
    """Yield a record of a model for each recipe and number of tokens."""
    model, share = Model(of_model[0]), budget_s / len(recipes) / len(of_model)
    for recipe in recipes:
        competing = model.competing(recipe, peers)
        for case in of_model:
            b = make_batch(case)
            fields: Record = {"op": recipe, **case.work(recipe, b.here.numel(), b.here.unique().numel())}
            yield contest(case, contestants(model, competing, b), share, where=recipe, measure=_cold, **fields)
        print(f"measured {model.case.name}, {recipe}", flush=True)  # it takes minutes, and a bar shows models alone
        del competing


@torch.no_grad()
def run_serving(options: Options) -> list[Record]:
    """Measure and return one record for each case and recipe."""
    cases, recipes = select(SERVING, options.case), select_ops(SERVING_RECIPES, options.ops)
    by_model = [list(group) for _, group in itertools.groupby(cases, lambda case: case.name)]
    peers = find_peers([of_model[0] for of_model in by_model], recipes)
    return records_of("serving", [partial(_measure, of, recipes, peers) for of in by_model], options.budget_s)
