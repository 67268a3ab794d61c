"""MXFP4 by its definition, in float64: what the reference and the kernels are compared with, bit for bit.

Nothing here is shared with the code under test.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 32
NAN_SCALE = 0xFF


def number(code: int) -> float:
    """The E2M1 number of four bits: a sign, two bits of exponent with a bias of 1, one of significand."""
    sign, exponent, significand = code >> 3, code >> 1 & 3, code & 1
    magnitude = (1 + significand / 2) * 2.0 ** (exponent - 1) if exponent else significand / 2
    return -magnitude if sign else magnitude


NUMBERS = torch.tensor([number(code) for code in range(16)], dtype=torch.float64)


def values(data: Tensor, scale: Tensor) -> Tensor:
    """float64 [..., K] of bytes [..., K/2] and E8M0 bytes [..., K/32]."""
    data, scale = data.cpu().long(), scale.cpu().view(torch.uint8).long()
    halves = torch.stack((data % 16, data // 16), dim=-1).flatten(-2)
    powers = torch.where(scale == NAN_SCALE, torch.nan, torch.exp2(scale.double() - 127))
    return NUMBERS[halves] * powers.repeat_interleave(BLOCK, dim=-1)


def quantized_block(block: list[float]) -> tuple[list[int], int]:
    """Codes and the scale byte of 32 finite numbers: the nearest E2M1 number, of two the one with an even code."""
    amax = max(map(abs, block))
    byte = min(max(math.frexp(amax)[1] - 1 - 2 + 127, 0), 254) if amax else 0
    codes = []
    for value in block:
        scaled = abs(value) * 2.0 ** (127 - byte)
        nearest = min(range(8), key=lambda code: (abs(number(code) - min(scaled, 6.0)), code % 2))
        codes.append(nearest + 8 * (math.copysign(1, value) < 0))
    return codes, byte
