"""Inputs that expose mistakes.

Every row, expert and block of K has another scale; rows after the last group are NaN.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from . import oracle
from .routing import ends as ends_of

K_BLOCK = 32


def _powers(count: int, spread: int, step: int, device: str) -> Tensor:
    """Return `count` powers of two from 2^-spread to 2^spread; neighbours differ much."""
    exponents = (torch.arange(count) * step) % (2 * spread + 1) - spread
    return torch.exp2(exponents.double()).to(device)


def matrix(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Return a random matrix [rows, columns].

    Scales differ over rows (2^-3 .. 2) and over blocks of K_BLOCK columns (2^-1 .. 2). float16 bounds the range:
    squared, weighted and summed twice, the largest value must stay below 65504.
    """
    values = _normal((rows, columns), device, seed)
    by_block = _powers(-(-columns // K_BLOCK), 1, 2, device).repeat_interleave(K_BLOCK)[:columns]
    return (values * 0.5 * _powers(rows, 2, 3, device)[:, None] * by_block).to(dtype)


def experts(count: int, rows: int, columns: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Return random weights [count, rows, columns] / sqrt(columns).

    Each expert has another scale than its neighbours (2^-1 .. 2).
    """
    values = _normal((count, rows, columns), device, seed) / math.sqrt(columns)
    return (values * _powers(count, 1, 2, device)[:, None, None]).to(dtype)


def _normal(shape: tuple[int, ...], device: str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).double()


@dataclasses.dataclass
class Case:
    """Tensors of one MLP. Rows from `rows` on belong to no group: they are NaN in x and row_scale."""

    x: Tensor
    w1: Tensor
    w2: Tensor
    b1: Tensor
    b2: Tensor
    row_scale: Tensor
    sizes: list[int]

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    @property
    def ends(self) -> list[int]:
        return ends_of(self.sizes)

    @property
    def offs(self) -> Tensor:
        return torch.tensor(self.ends, dtype=torch.int32, device=self.x.device)

    @property
    def addends(self) -> dict[str, Tensor]:
        """Return both biases and the row scale, as arguments of grouped_mlp."""
        return {"b1": self.b1, "b2": self.b2, "row_scale": self.row_scale}

    def splits(self, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(self.sizes, dtype=dtype, device=self.x.device)


def make_case(
    sizes: list[int], hidden: int, intermediate: int, *, gated: bool = True, tail: int = 0,
    dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0,
) -> Case:  # fmt: skip
    count, rows = len(sizes), sum(sizes)
    w1_rows = intermediate * (2 if gated else 1)
    x = matrix(rows + tail, hidden, dtype, device, seed)
    scale = (0.5 + _normal((rows + tail,), device, seed + 1).abs()).float()
    x[rows:], scale[rows:] = math.nan, math.nan
    return Case(
        x=x,
        w1=experts(count, w1_rows, hidden, dtype, device, seed + 2),
        w2=experts(count, hidden, intermediate, dtype, device, seed + 3),
        b1=experts(count, 1, w1_rows, dtype, device, seed + 4)[:, 0].mul(4).contiguous(),
        b2=experts(count, 1, hidden, dtype, device, seed + 5)[:, 0].mul(4).contiguous(),
        row_scale=scale,
        sizes=sizes,
    )


def gradient(c: Case, columns: int | None = None, seed: int = 77) -> Tensor:
    """Return an incoming gradient dy [T, columns], by default H columns; rows after the last group are NaN."""
    dy = matrix(c.x.shape[0], c.x.shape[1] if columns is None else columns, c.x.dtype, str(c.x.device), seed)
    dy[c.rows :] = math.nan
    return dy


def preactivation(c: Case) -> Tensor:
    """Return x w1_e^T in x's dtype, as a forward saves it; rows after the last group are NaN."""
    h = oracle.grouped_mm(c.x, c.w1, c.ends)
    return h.to(c.x.dtype)


def transposed(c: Case) -> tuple[Tensor, Tensor]:
    """Return w1 [E, H, 2I or I] and w2 [E, I, H], as models store them that compute x w."""
    return c.w1.mT.contiguous(), c.w2.mT.contiguous()


def apart(w1: Tensor, upside_down: bool = False, gap: int = 16) -> tuple[Tensor, Tensor]:
    """Return the two halves [E, I, H] of a w1 of layout "concat" as views of one buffer.

    Args:
        gap: number of elements between the two halves.
        upside_down: the second half lies first in memory.
    """
    halves = [half.contiguous() for half in w1.detach().chunk(2, dim=1)]
    size = halves[0].numel()
    memory = torch.empty(8 + 2 * size + gap, dtype=w1.dtype, device=w1.device)
    places = (memory[8:], memory[8 + size + gap :])
    first, second = (place[:size].view(halves[0].shape) for place in (places[::-1] if upside_down else places))
    return first.copy_(halves[0]), second.copy_(halves[1])


def scattered(packed: Tensor) -> list[Tensor]:
    """Return each expert in a separate allocation, with addresses in no order and odd gaps between them."""
    count, size = packed.shape[0], packed[0].numel()
    blocks = [torch.empty(size + 8 * (3 + e % 5), dtype=packed.dtype, device=packed.device) for e in range(count)]
    order = sorted(range(count), key=lambda e: (e * 5 + 3) % count)
    views = [blocks[e][8 * (e % 3) :][:size].view(packed[0].shape) for e in order]
    for view, source in zip(views, packed, strict=True):
        view.copy_(source)
    return views


def poisoned(rows: int, columns: int, like: Tensor, padding: int = 0) -> Tensor:
    """Return an output buffer full of NaN, with `padding` columns between its rows."""
    return torch.full((rows, columns + padding), math.nan, dtype=like.dtype, device=like.device)[:, :columns]


def poison_allocator(device: str, num_bytes: int = 64 << 20) -> None:
    """Fill the memory that the next allocations will reuse with NaN."""
    blocks: list[Any] = [torch.full((size // 4,), math.nan, device=device) for size in (num_bytes, 1 << 20, 1 << 16)]
    del blocks
