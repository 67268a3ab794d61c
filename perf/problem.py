"""Random tensors for a case, on the GPU, in as many copies as it takes to keep repeated calls out of L2."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch

from .cases import BYTES_PER_ELEMENT, Case
from .routing import group_sizes

ROTATION_BYTES = 2**30  # 17 times the L2 of an H200
MAX_COPIES = 8
TOKENS = 16  # that take turns, where a case is one token: an expert leaves L2 before it is read again


@dataclasses.dataclass(frozen=True)
class Buffers:
    """One set of inputs and outputs: x [T,H], w1 [E,2I,H], w2 [E,H,I], mid [T,I] (input of FC2), offs int32 [E],
    starts int32 [E+1] (offs with a leading 0), and outputs act [T,I], y [T,H].
    """

    x: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    mid: torch.Tensor
    offs: torch.Tensor
    starts: torch.Tensor
    act: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case with its data."""

    case: Case
    sizes: list[int]
    sets: list[Buffers]

    @property
    def active_experts(self) -> int:
        return sum(size > 0 for size in self.sizes)


def copies_needed(case: Case) -> int:
    """Buffer sets whose smallest operator (FC2) reads ROTATION_BYTES before it reads a byte again."""
    return min(max(math.ceil(ROTATION_BYTES / case.bytes("fc2", case.experts)), 1), MAX_COPIES)


def offsets(sizes: list[int], device: str) -> torch.Tensor:
    """Cumulative ends of the groups, int32 [E]."""
    return torch.tensor(list(itertools.accumulate(sizes)), dtype=torch.int32, device=device)


def normals(generator: torch.Generator, dtype: torch.dtype = torch.bfloat16) -> Callable[..., torch.Tensor]:
    """Return a function of a shape and a scale, 1 if not given, to normal random tensors of that scale."""

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device=generator.device)
        return made.normal_(0.0, scale, generator=generator)

    return random


def _starts(offs: torch.Tensor) -> torch.Tensor:
    return torch.cat([offs.new_zeros(1), offs])


def _buffers(case: Case, sizes: list[int], dtype: torch.dtype, device: str, generator: torch.Generator) -> Buffers:
    experts, hidden, inner, rows = case.experts, case.hidden, case.intermediate, case.rows

    random = normals(generator, dtype)
    offs = offsets(sizes, device)
    return Buffers(
        x=random(rows, hidden),
        w1=random(experts, 2 * inner, hidden, scale=hidden**-0.5),
        w2=random(experts, hidden, inner, scale=inner**-0.5),
        mid=random(rows, inner),
        offs=offs,
        starts=_starts(offs),
        act=torch.empty(rows, inner, dtype=dtype, device=device),
        y=torch.empty(rows, hidden, dtype=dtype, device=device),
    )


def _tokens(case: Case, layer: Buffers) -> list[Buffers]:
    """The same layer for one token after the other, each with experts of its own."""
    sets = []
    for token in range(TOKENS):
        offs = offsets(group_sizes(dataclasses.replace(case, seed=case.seed + token)), str(layer.offs.device))
        sets.append(dataclasses.replace(layer, offs=offs, starts=_starts(offs)))
    return sets


def make_problem(case: Case, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Problem:
    """The case's tensors, normal random with outputs of scale 1, the same for the same case and seed."""
    assert dtype.itemsize == BYTES_PER_ELEMENT
    generator = torch.Generator(device).manual_seed(case.seed)
    sizes = group_sizes(case)
    if case.routing.startswith("token"):
        return Problem(case, sizes, _tokens(case, _buffers(case, sizes, dtype, device, generator)))
    sets = [_buffers(case, sizes, dtype, device, generator) for _ in range(copies_needed(case))]
    return Problem(case, sizes, sets)
