"""FP8 with block scales by its definition, in float64, without any code under test.

A weight's element w[e, n, k] is data[e, n, k] * scale[e, g, k // 128], where g is the row of the scale grid. Usually g
is n // 128. In a gated w1 of layout "concat" each half of I rows has its own grid of ceil(I / 128) rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK = 128
E4M3 = torch.float8_e4m3fn


def blocks_of(size: int) -> int:
    return -(-size // BLOCK)


def grid_rows(rows: int, layout: str = "") -> Tensor:
    """Return the scale grid's row for each weight row, int64 [rows]. `layout`: the gate layout of a gated w1."""
    number = torch.arange(rows)
    if layout == "concat":
        half = rows // 2
        return number // half * blocks_of(half) + number % half // BLOCK
    return number // BLOCK


def halves(rows: int, layout: str) -> tuple[Tensor, Tensor]:
    """Return the rows of the gate's half and of the up-projection's half, int64 [rows / 2] each."""
    number = torch.arange(rows // 2)
    if layout == "concat":
        return number, number + rows // 2
    if layout == "interleaved":
        return 2 * number, 2 * number + 1
    first = number // 32 * 64 + number % 32
    return first, first + 32


class Weights(NamedTuple):
    """Quantised weights: data E4M3 [E, N, K], and scale float32 [E, grid rows, ceil(K / 128)].

    layout: the layout of a gated w1; "" for other weights.
    """

    data: Tensor
    scale: Tensor
    layout: str = ""

    def scales(self) -> Tensor:
        """Return the scale of each element, float32 [E, N, K]."""
        rows, k = self.data.shape[1:]
        return self.scale[:, grid_rows(rows, self.layout)][:, :, torch.arange(k) // BLOCK]

    def values(self) -> Tensor:
        """Return the values in float64."""
        return self.data.double() * self.scales().double()

    def in_bfloat16(self) -> Tensor:
        """Return each element times its scale, rounded to bfloat16."""
        return (self.data.float() * self.scales()).bfloat16()


class Rows(NamedTuple):
    """Quantised rows: data E4M3 [T, K]; scale float32 [T, ceil(K / 128)]."""

    data: Tensor
    scale: Tensor

    def values(self) -> Tensor:
        """Return the values in float64."""
        return self.data.double() * self.scale[:, torch.arange(self.data.shape[1]) // BLOCK].double()


def quantized_rows(x: Tensor) -> Rows:
    """Quantise float32 [T, C] with one scale for each 128 elements of a row."""
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK)).view(rows, -1, BLOCK)
    amax = padded.abs().amax(2)  # NaN where one is
    scale = (amax / 448).clamp(min=2.0**-126)
    scale = torch.where(amax == 0, 1.0, torch.where(torch.isfinite(amax), scale, torch.nan))
    data = (padded * (1 / scale)[:, :, None]).to(E4M3).view(rows, -1)[:, :columns]
    return Rows(data.contiguous(), scale)


def integers(random: np.random.Generator, *shape: int, most: int = 3) -> Tensor:
    return torch.from_numpy(random.integers(-most, most + 1, shape)).float()


def powers(random: np.random.Generator, *shape: int, most: int = 2) -> Tensor:
    """Return random powers of two, float32, from 2^-most to 2^most."""
    return torch.from_numpy(np.ldexp(np.float32(1.0), random.integers(-most, most + 1, shape)))


def exact_weights(random: np.random.Generator, experts: int, rows: int, k: int, layout: str = "") -> Weights:
    """Return weights of small integers times powers of two that differ by expert and block, so that sums are exact."""
    grid = int(grid_rows(rows, layout).max()) + 1
    return Weights(
        integers(random, experts, rows, k).to(E4M3), powers(random, experts, grid, blocks_of(k)), layout
    )  # fmt: skip


def exact_rows(random: np.random.Generator, rows: int, k: int) -> Rows:
    return Rows(integers(random, rows, k).to(E4M3), powers(random, rows, blocks_of(k)))


def any_weights(random: np.random.Generator, experts: int, rows: int, k: int, layout: str = "") -> Weights:
    """Return weights of random finite E4M3 numbers, with random float32 scales over several binades."""
    grid = int(grid_rows(rows, layout).max()) + 1
    codes = random.integers(0, 127, (experts, rows, k)) | random.integers(0, 2, (experts, rows, k)) << 7
    data = torch.from_numpy(codes.astype(np.uint8)).view(E4M3)
    scale = random.uniform(1.0, 2.0, (experts, grid, blocks_of(k))) * np.exp2(
        random.integers(-12, -4, (experts, grid, 1))
    )
    return Weights(data, torch.from_numpy(scale.astype(np.float32)), layout)


def product(x: Tensor, w: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Return rows of x times the transposes of their experts' w, float64; NaN after the last group."""
    result = torch.full((x.shape[0], w.shape[1]), torch.nan, dtype=torch.float64)
    first = 0
    for expert, size in enumerate(sizes):
        result[first : first + size] = x[first : first + size].double() @ w[expert].double().T
        first += size
    return result
