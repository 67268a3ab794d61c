"""NVFP4 by its definition, in float64, and weights in this format. No code under test is used."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import mxfp4

BLOCK = 16
NAN_SCALE = 0x7F
ELEMENTS, SCALES = 16, 127
"""The number of E2M1 codes, and of E4M3 bytes that are valid scales: neither negative nor NaN."""


def scale(byte: int) -> float:
    """Return the E4M3 number of a byte without sign.

    It has four bits of exponent with a bias of 7, and three bits of significand.
    """
    exponent, significand = byte >> 3, byte & 7
    if byte == NAN_SCALE:
        return math.nan
    return (1 + significand / 8) * 2.0 ** (exponent - 7) if exponent else significand / 8 * 2.0**-6


NUMBERS = torch.tensor([scale(byte) for byte in range(128)] + [math.nan] * 128, dtype=torch.float64)
"""The values that kernels decode from the 256 scale bytes; a byte with a sign is as invalid as NaN."""


def values(data: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return the values, float64 [..., N, K], of NVFP4 data.

    They are data bytes [..., N, K/2], E4M3 scale bytes [..., N, K/16], and global scales of any shape.
    """
    data, scale, factor = data.cpu().long(), scale.cpu().view(torch.uint8).long(), global_scale.cpu().double()
    halves = torch.stack((data % 16, data // 16), dim=-1).flatten(-2)
    elements = mxfp4.NUMBERS[halves] * NUMBERS[scale].repeat_interleave(BLOCK, dim=-1)
    if factor.dim() == 2:
        factor = torch.cat([factor[:, half, None].expand(-1, data.shape[1] // 2) for half in (0, 1)], dim=1)[..., None]
    elif factor.dim() == 1:
        factor = factor[:, None, None]
    return elements * factor


class Weights(NamedTuple):
    """Experts' weights: codes uint8 [E, N, K], scale bytes uint8 [E, N, K/16]."""

    codes: Tensor
    scale: Tensor

    @property
    def bytes(self) -> Tensor:
        """Return the elements as in checkpoints, uint8 [E, N, K/2]: the even element in the lower half."""
        low, high = self.codes.unflatten(-1, (-1, 2)).unbind(-1)
        return low | high << 4

    @property
    def values(self) -> Tensor:
        """Return the values, float64 [E, N, K], without global scales."""
        return mxfp4.NUMBERS[self.codes.long()] * NUMBERS[self.scale.long()].repeat_interleave(BLOCK, dim=-1)


def of_every_scale(experts: int, rows: int, columns: int) -> Weights:
    """Return weights whose blocks contain all 16 codes, shuffled in each block.

    Their scales cycle through all numbers.
    """
    blocks = experts * rows * (columns // BLOCK)
    assert blocks >= SCALES
    generator = torch.Generator().manual_seed(1)
    codes = torch.rand(blocks, BLOCK, generator=generator).argsort(dim=1).to(torch.uint8)
    scales = (torch.arange(blocks) * 5 % SCALES).to(torch.uint8)
    return Weights(codes.view(experts, rows, columns), scales.view(experts, rows, -1))


def of_exact_sums(experts: int, rows: int, columns: int, seed: int = 0) -> Weights:
    """Return weights with scales from 1/4 to 7.5, so that sums of products with 3-bit integers are exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(16, (experts, rows, columns), dtype=torch.uint8, generator=generator)
    scales = torch.randint(5 << 3, 10 << 3, (experts, rows, columns // BLOCK), generator=generator)
    return Weights(codes, scales.to(torch.uint8))
