"""Random experts' weights as serving engines store them, by the definition of each format, and the layer in float64.

No code under test is used. w13 is [E, 2I, H], gate rows first or interleaved, or [E, I, H] without a gate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import checkpoints, fp8_block, mxfp8_mlp, oracle

BF16 = torch.bfloat16
Rounding = Callable[[Tensor], Tensor]


class Held(NamedTuple):
    """A weight's parts stacked over experts, elements first, and its values in float64 [E, N, K]."""

    parts: tuple[Tensor, ...]
    values: Tensor


def _stacked(experts: int, make: Callable[[], tuple[dict[str, Tensor], Tensor]]) -> Held:
    made = [make() for _ in range(experts)]
    parts = zip(*([part for name, part in parts.items() if name != "input_scale"] for parts, _ in made), strict=True)
    return Held(tuple(torch.stack(part) for part in parts), torch.stack([values for _, values in made]))


def held(kind: str, experts: int, rows: int, columns: int, seed: int = 0, halves: int = 1) -> Held:
    """Return a random weight in a format.

    Args:
        kind: "bf16", "fp8_block", "mxfp8", "mxfp8_wide" (which cannot be folded), "mxfp4", "mxfp4_fp8" (whose scales
            are a few binades apart), "mxfp4_fp8_wide" (whose scales are further apart) or "nvfp4".
        halves: number of projections among the rows, each with its own parts.
    """
    random, shape = np.random.default_rng(seed), (rows // halves, columns)
    make = {
        "bf16": lambda: _in_16_bits(random, shape),
        "fp8_block": lambda: checkpoints.float_blocks(random, shape, "scale"),
        "mxfp8": lambda: _narrow_mxfp8(random, shape),
        "mxfp8_wide": lambda: checkpoints.mxfp8(random, shape, "scale"),
        "mxfp4": lambda: checkpoints.mxfp4_of_deepseek(random, shape),
        "mxfp4_fp8": lambda: checkpoints.mxfp4_of_deepseek(random, shape, binades=6),
        "mxfp4_fp8_wide": lambda: checkpoints.mxfp4_of_deepseek(random, shape, binades=20),
        "nvfp4": lambda: checkpoints.nvfp4(random, shape, checkpoints.MODELOPT, False),
    }[kind]
    whole = _stacked(experts * halves, make)
    by_expert = [part.unflatten(0, (experts, halves)) for part in whole.parts]
    parts = tuple((part.flatten(1, 2) if part.dim() > 2 else part.squeeze(1)).contiguous() for part in by_expert)
    return Held(parts, whole.values.view(experts, rows, columns))


def _in_16_bits(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    weight = torch.from_numpy(random.normal(0, shape[1] ** -0.5, shape)).to(BF16)
    return {"weight": weight}, weight.double()


def _narrow_mxfp8(random: np.random.Generator, shape: tuple[int, int]) -> tuple[dict[str, Tensor], Tensor]:
    """Return an MXFP8 weight of few binades, whose scales fold exactly."""
    data = torch.from_numpy(random.normal(0, 16, shape)).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(random.integers(112, 115, (shape[0], shape[1] // 32)).astype(np.uint8))
    wide = checkpoints.spread(torch.exp2(scale.double() - 127), shape, (1, 32))
    return {"weight": data, "scale": scale}, data.double() * wide


def interleaved(w13: Tensor) -> Tensor:
    """Return w13 with rows g0, u0, g1, u1, ... instead of gate rows first."""
    gate, up = w13.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2).contiguous()


def rounding(recipe: str) -> Rounding | None:
    """Return the function by which a recipe rounds rows before a GEMM; None: it does not round."""
    if recipe == "fp8_block":
        return lambda x: fp8_block.quantized_rows(x.float()).values()
    return (lambda x: mxfp8_mlp.rounded(x, 128)) if recipe in ("mxfp8", "mxfp4") else None


class Layer(NamedTuple):
    """Values of experts' weights in float64, and the activation between FC1 and FC2."""

    w1: Tensor
    w2: Tensor
    activation: str = "swiglu"
    layout: str = "concat"
    params: oracle.Params = oracle.DEFAULTS
    b1: Tensor | None = None
    b2: Tensor | None = None
    rounds: Rounding | None = None

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype = torch.float64, on_rows: bool = False
    ) -> Tensor:
        """Return the layer's result [N, H], computed choice by choice; ids outside 0 .. E - 1 add nothing."""
        out = torch.zeros(len(x), self.w2.shape[1], dtype=torch.float64)
        formula = oracle.activation if dtype == torch.float64 else oracle.torch_activation
        for expert in range(len(self.w2)):
            token, choice = torch.where(ids == expert)
            weight = weights[token, choice, None].to(dtype)
            rows = x[token].to(dtype) * (weight if on_rows else 1)
            h = self._round(rows, dtype) @ self.w1[expert].to(dtype).T
            h = h if self.b1 is None else h + self.b1[expert].to(dtype)
            counts = 1 if on_rows else weight  # before the rounding, as the operator does
            act = self._round(formula(h, self.activation, self.layout, self.params) * counts, dtype)
            y = act @ self.w2[expert].to(dtype).T
            y = y if self.b2 is None else y + self.b2[expert].to(dtype) * counts
            out.index_add_(0, token, y.double())
        return out.to(dtype)

    def _round(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        return rows if self.rounds is None or not len(rows) else self.rounds(rows).to(dtype)


class Tokens(NamedTuple):
    """Tokens x [N, H] and choices [N, K]; the last `padding` tokens are NaN and have ids of -1."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    padding: int


def tokens(count: int, hidden: int, experts: int, k: int, padding: int = 3, seed: int = 1) -> Tokens:
    """Return random tokens and choices.

    Expert 1 never occurs among the choices. In every third token one choice belongs to another rank.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count + padding, hidden, generator=generator)
    x = (x * torch.exp2(torch.arange(count + padding) % 5 - 2.0)[:, None]).to(BF16)
    filled = torch.tensor([e for e in range(experts) if e != 1])
    order = torch.rand(count + padding, len(filled), generator=generator).argsort(dim=1)
    ids = filled[order[:, :k]].to(torch.int32)
    if k > 1:
        ids[::3, 1] = -1
    x[count:], ids[count:] = torch.nan, -1
    return Tokens(x, ids, torch.rand(count + padding, k, generator=generator) + 0.5, padding)
