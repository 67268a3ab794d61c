"""Tensors of the serving suite: weights in each format, batches that a router chose experts for, and the reference; our
recipes, and other packages' experts where they can be imported.

N tokens, K choices a token, E experts here, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from glulam.layer.choices import moe_of_choices

from .cases import ServingCase
from .cells import OURS
from .contest import or_left_out
from .mlp import normals, swiglu, weights_of
from .quantised import quantised
from .targets import BF16

COMPARED = 64  # tokens, evenly spaced, the first and the last among them
ROWS_16_BITS, ROWS_FP8 = 0.02, 0.08
"""Bounds of a result's error. Rounding x and the activation to E4M3 makes 0.045, a wrong expert or scale about 1."""
PACKAGES = {"humming": "serving_humming", "vllm": "serving_vllm"}
"""Packages and the modules that call them, each with a function `peers` of models and recipes."""
FP8_ROWS = ("mxfp8", "mxfp4", "fp8_block")


@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens and their choices.

    Attributes:
        x: [N, H]. weights: float32 [N, K]. out: [N, H], a buffer of results.
        ids: int32 [N, K], places among the experts here, -1 of experts elsewhere.
        world_ids: int32 [N, K], of the experts of all GPUs. expert_map: int32 [world], their places here or -1; None
            if all experts are here.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor
    out: Tensor
    world_ids: Tensor
    expert_map: Tensor | None

    @property
    def here(self) -> Tensor:
        """The ids of experts here, one for each row."""
        return self.ids[self.ids >= 0]


Call = Callable[[Batch], Tensor]


@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts by one library.

    Attributes:
        recipes: ours that it stands beside. weights: the recipe whose checkpoint format it reads.
        make: prepares a model's weights w1 [E, 2I, H] and w2 [E, H, I] of that format, which it leaves as they are.
        bound: of the result's error.
    """

    name: str
    recipes: tuple[str, ...]
    weights: str
    make: Callable[[ServingCase, Any, Any], Call]
    bound: float = ROWS_16_BITS


def make_weights(case: ServingCase, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return w1 and w2 in bfloat16, which keep activations of order 1."""
    return weights_of(case, normals(torch.Generator(device).manual_seed(case.seed)))


def in_format(recipe: str, w1: Tensor, w2: Tensor) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Return both weights as a checkpoint of the recipe's format has them, and as our kernels read them."""
    if recipe == BF16:
        return (w1, w2), (w1, w2)
    (ready1, made1), (ready2, made2) = quantised(recipe, w1, is_gate=True), quantised(recipe, w2)
    return (made1, made2), (ready1, ready2)


def make_batch(case: ServingCase, device: str = "cuda") -> Batch:
    """Return tokens with the K best of a softmax over random logits, whose weights sum to 1.

    The first token has expert 0 among its choices, so that a single token has an expert here.
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
    """Results [compared tokens, H] in float32, of weights as their format has them and rows that nobody rounds."""

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
    """Return the largest norm of a compared token's error over the largest norm of a token."""
    got = result[compared(len(result))].float()
    return float((got - reference).norm(dim=1).max() / reference.norm(dim=1).max())


def ours(recipe: Any) -> Experts:
    """Return moe_of_choices by a recipe, as `ServedExperts` calls it, on weights as kernels read them."""

    def make(case: ServingCase, w1: Any, w2: Any) -> Call:
        return lambda b: moe_of_choices(
            b.x, b.ids, b.weights, case.experts, w1, w2, world_experts=case.world, recipe=recipe, out=b.out
        )

    return Experts(OURS, (recipe,), recipe, make, ROWS_FP8 if recipe in FP8_ROWS else ROWS_16_BITS)


def find_peers(models: Sequence[ServingCase], recipes: Sequence[str]) -> list[Experts]:
    """Return the peers of packages that can be imported. Warn of each package that is absent or cannot be."""
    found: list[Experts] = []
    for package, module in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            warnings.warn(f"{package} is left out: it is not installed", stacklevel=2)
            continue
        with or_left_out(package):
            found += importlib.import_module(f".{module}", __package__).peers(models, recipes)
    return found
