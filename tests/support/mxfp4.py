"""MXFP4 by its definition, in float64; the reference and the kernels must match it bit for bit.

No code under test is used.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
NAN_SCALE = 0xFF
WORD = 0xFFFFFFFF


def number(code: int) -> float:
    """Return the E2M1 number of a 4-bit code: a sign, two bits of exponent with a bias of 1, one bit of significand."""
    sign, exponent, significand = code >> 3, code >> 1 & 3, code & 1
    magnitude = (1 + significand / 2) * 2.0 ** (exponent - 1) if exponent else significand / 2
    return -magnitude if sign else magnitude


NUMBERS = torch.tensor([number(code) for code in range(16)], dtype=torch.float64)


def values(data: Tensor, scale: Tensor) -> Tensor:
    """Return the values, float64 [..., K], of bytes [..., K/2] with E8M0 bytes [..., K/32]."""
    data, scale = data.cpu().long(), scale.cpu().view(torch.uint8).long()
    halves = torch.stack((data % 16, data // 16), dim=-1).flatten(-2)
    powers = torch.where(scale == NAN_SCALE, torch.nan, torch.exp2(scale.double() - 127))
    return NUMBERS[halves] * powers.repeat_interleave(BLOCK, dim=-1)


def bytes_of_word(word: Any) -> list[Any]:
    """Return the four checkpoint bytes that a kernel's word holds, an unsigned int or a tensor of such.

    They are read from the bits of the bfloat16 numbers to which the kernel decodes the word.
    """
    turned = (word << 10 | word >> 22) & WORD
    pairs = word, word << 4 & WORD, word >> 4 ^ turned, word >> 4 ^ (word << 6 & WORD)
    codes = [[(half >> 15 & 1) << 3 | half >> 6 & 7 for half in (pair & 0xFFFF, pair >> 16)] for pair in pairs]
    return [even | odd << 4 for even, odd in codes]


def bytes_of_words(words: Tensor) -> Tensor:
    """Return the checkpoint bytes, uint8 [..., K/2], of words [..., K/8].

    Word j of a block has bytes j, 4 + j, 8 + j and 12 + j; in blocks 2 and 3 of each four, the last two of these come
    first.
    """
    of_words = torch.stack(bytes_of_word(words.cpu().long() & WORD), dim=-1).to(torch.uint8)
    blocks = of_words.unflatten(-2, (-1, 4)).mT
    turns = torch.arange(blocks.shape[-3]) % 4 >= 2
    return torch.where(turns[:, None, None], blocks.roll(2, dims=-2), blocks).flatten(-3)


def quantized_block(block: list[float]) -> tuple[list[int], int]:
    """Return codes and the scale byte of 32 finite numbers: the nearest E2M1 numbers, ties to even codes."""
    amax = max(map(abs, block))
    byte = min(max(math.frexp(amax)[1] - 1 - 2 + 127, 0), 254) if amax else 0
    codes = []
    for value in block:
        scaled = abs(value) * 2.0 ** (127 - byte)
        nearest = min(range(8), key=lambda code: (abs(number(code) - min(scaled, 6.0)), code % 2))
        codes.append(nearest + 8 * (math.copysign(1, value) < 0))
    return codes, byte
