"""Tensors of the serving suite: weights in each format, batches that a router chose experts for, and the reference.

N tokens, K choices a token, E experts here, H hidden, I intermediate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .quantised import quantised
from .serving_cases import ServingCase
from .targets import BF16

COMPARED = 64  # tokens, evenly spaced, the first and the last among them
ROWS_16_BITS, ROWS_FP8 = 0.02, 0.08
"""Bounds of a result's error. Rounding x and the activation to E4M3 makes 0.045, a wrong expert or scale about 1."""

Call = Callable[["Batch"], Tensor]


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


@dataclasses.dataclass(frozen=True)
class Contestant:
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


def _generator(case: ServingCase, device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(case.seed)


def make_weights(case: ServingCase, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Return w1 and w2 in bfloat16, which keep activations of order 1."""
    generator = _generator(case, device)
    sizes = case.hidden, case.intermediate
    shapes = (case.experts, 2 * sizes[1], sizes[0]), (case.experts, *sizes)
    w1, w2 = (
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0.0, shape[-1] ** -0.5, generator=generator)
        for shape in shapes
    )
    return w1, w2


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
    generator = _generator(case, device)
    logits = torch.empty(case.tokens, case.world, device=device).normal_(generator=generator)
    logits[0, 0] = logits[0].amax()
    weights, chosen = logits.softmax(dim=1).topk(case.top_k)
    places = torch.arange(case.world, dtype=torch.int32, device=device)
    places[case.experts :] = -1
    x = torch.empty(case.tokens, case.hidden, device=device).normal_(generator=generator).to(torch.bfloat16)
    return Batch(
        x=x,
        ids=places[chosen],
        weights=weights / weights.sum(dim=1, keepdim=True),
        out=torch.empty_like(x),
        world_ids=chosen.int(),
        expert_map=places if case.is_part else None,
    )


def compared(tokens: int) -> list[int]:
    """Return the tokens whose results are compared."""
    count = min(tokens, COMPARED)
    return [token * (tokens - 1) // max(count - 1, 1) for token in range(count)]


def expected(b: Batch, w1: Any, w2: Any) -> Tensor:
    """Results [compared tokens, H] in float32, of weights as their format has them and rows that nobody rounds."""
    tokens = compared(len(b.x))
    x, ids, weights = b.x[tokens].float(), b.ids[tokens], b.weights[tokens]
    y = torch.zeros_like(x)
    for expert in ids[ids >= 0].unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], _matrix(w1, expert)).chunk(2, dim=1)
        y[token] += weights[token, choice, None] * F.linear(F.silu(gate) * up, _matrix(w2, expert))
    return y


def _matrix(w: Any, expert: int) -> Tensor:
    return w[expert].float() if isinstance(w, Tensor) else w[expert].dequantize(torch.float32)


def check(contestant: Contestant, call: Call, b: Batch, reference: Tensor) -> float:
    """Return the largest norm of a compared token's error over the largest norm of a token.

    The buffer holds NaN before the call, so that results that nobody writes are errors. Raises RuntimeError above the
    contestant's bound.
    """
    b.out.fill_(float("nan"))
    got = call(b)[compared(len(b.x))].float()
    error = float((got - reference).norm(dim=1).max() / reference.norm(dim=1).max())
    if not error <= contestant.bound:
        bound = f"rounding makes at most {contestant.bound}"
        raise RuntimeError(f"{contestant.name}: error {error:.2g} against float32, {bound}; nothing was timed")
    return error
