"""dp, the gradient of p = x weight^T, in shared memory as the backward of 16-bit streams reads it.

dp of a token tile lies in blocks of 8 tokens x 8 outputs; the two blocks of the tile's 16 tokens for the same outputs
are neighbours. The blocks of dp's rests (`split.py`) follow the blocks of the nearest numbers.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.warp_mma import read_matrices

BLOCK_WORDS = 32  # 32-bit words of a block of 8 x 8 elements


def dp_words(blocks: cute.Pointer, dtype: type[cutlass.Numeric], steps: int, transpose: bool, part: int) -> list:
    """Load a lane's MMA operand words of dp with `ldmatrix`.

    Args:
        blocks: the start of dp in shared memory, with both parts.
        dtype: the dtype of dp.
        steps: K / 8.
        transpose: transpose each 8 x 8 block.
        part: 0: the nearest numbers; 1: the rests (`split.py`).

    Returns:
        2 `steps` words: for outputs 0 .. 7 the words of tokens 0 .. 7, then of tokens 8 .. 15; the same for each next 8
            outputs.
    """
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
    """Return the index, within a part, of the element for a tile's token (0 .. 15) and an output."""
    return (output // 8 * 2 + token // 8) * 64 + token % 8 * 8 + output % 8
