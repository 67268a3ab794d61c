"""NVFP4 by its definition, in float64. Nothing here is shared with the code under test."""

from __future__ import annotations

import torch
from torch import Tensor

from .mxfp4 import NUMBERS

BLOCK = 16


def e4m3(byte: int) -> float:
    """The E4M3 number of eight bits: a sign, four bits of exponent with a bias of 7, three of significand."""
    sign, exponent, significand = byte >> 7, byte >> 3 & 15, byte & 7
    if (exponent, significand) == (15, 7):
        return float("nan")
    magnitude = (1 + significand / 8) * 2.0 ** (exponent - 7) if exponent else significand * 2.0**-9
    return -magnitude if sign else magnitude


SCALES = torch.tensor([e4m3(byte) for byte in range(256)], dtype=torch.float64)


def values(data: Tensor, scale: Tensor, global_scale: Tensor) -> Tensor:
    """float64 [..., N, K] of bytes [..., N, K/2], E4M3 bytes [..., N, K/16] and global scales of any shape."""
    data, scale, factor = data.cpu().long(), scale.cpu().view(torch.uint8).long(), global_scale.cpu().double()
    halves = torch.stack((data % 16, data // 16), dim=-1).flatten(-2)
    elements = NUMBERS[halves] * SCALES[scale].repeat_interleave(BLOCK, dim=-1)
    if factor.dim() == 2:
        factor = torch.cat([factor[:, half, None].expand(-1, data.shape[1] // 2) for half in (0, 1)], dim=1)[..., None]
    elif factor.dim() == 1:
        factor = factor[:, None, None]
    return elements * factor
