"""dp, the gradient of p = x weight^T, in shared memory as the backward of 16-bit streams reads it.

dp of a token tile lies in blocks of 8 tokens x 8 outputs; the two blocks of the tile's 16 tokens for the same outputs
are neighbours. The blocks of dp's rests (`split.py`) follow the blocks of the nearest numbers.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.warp_mma import read_matrices

BLOCK_WORDS = 32  # of 8 x 8 elements


def dp_words(blocks: cute.Pointer, dtype: type[cutlass.Numeric], steps: int, transpose: bool, part: int) -> list:
    """Return a lane's words of a part's blocks: of tokens 0 .. 7, then 8 .. 15 for the first 8 outputs, then for the
    next 8, and so on. blocks: where all parts begin. steps: K / 8. part: 0: the nearest numbers; 1: the rests."""
    lane = cute.arch.lane_idx()
    words: list = []
    blocks = blocks + part * (2 * steps * BLOCK_WORDS)
    for first in range(0, 2 * steps, 4):
        count = min(4, 2 * steps - first)
        block = first + lane // 8 % count
        made = read_matrices(blocks + (block * BLOCK_WORDS + lane % 8 * 4), dtype, count, transpose)
        words += [made[i] for i in range(count)]
    return words


def place_in_blocks(token: Int32, output: Int32) -> Int32:
    """Return the number of the element of a tile's token (0 .. 15) and output within a part."""
    return (output // 8 * 2 + token // 8) * 64 + token % 8 * 8 + output % 8
