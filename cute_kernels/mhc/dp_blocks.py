"""Layout of dp in shared memory, in the backward of 16-bit streams. dp is the gradient of the projection p = x
weight^T.

A token has n residual streams, and K = n^2 + 2n outputs in p. A token tile's dp is [16 tokens, K outputs] of float32,
split into two 16-bit parts (`split.py`): the nearest 16-bit numbers, and the rests, which are what the nearest numbers
lack.

Each part lies in blocks of 8 tokens x 8 outputs. The block of tokens 8 .. 15 follows the block of tokens 0 .. 7 of the
same outputs. All blocks of the rests follow all blocks of the nearest numbers.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..device.warp_mma import read_matrices

BLOCK_WORDS = 32  # 32-bit words of a block of 8 x 8 elements


def dp_words(blocks: cute.Pointer, dtype: type[cutlass.Numeric], steps: int, transpose: bool, part: int) -> list:
    """Load this lane's words of one part of dp, as an operand of MMAs, with `ldmatrix`.

    Args:
        blocks: the start of dp in shared memory, with both parts.
        dtype: the 16-bit dtype of the parts.
        steps: K / 8, the number of groups of 8 outputs.
        transpose: transpose each 8 x 8 block.
        part: 0: the nearest numbers; 1: the rests.

    Returns:
        A list of 2 `steps` words of 32 bits. Words 2 s and 2 s + 1 belong to outputs 8 s .. 8 s + 7: the first to
        tokens 0 .. 7, the second to tokens 8 .. 15.
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
    """Return the index of dp's element for a token (0 .. 15) and an output (0 .. K - 1), within one part of dp (the
    nearest numbers or the rests)."""
    return (output // 8 * 2 + token // 8) * 64 + token % 8 * 8 + output % 8
