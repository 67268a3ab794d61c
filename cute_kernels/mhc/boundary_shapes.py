"""Sizes of the boundary's kernels, which host and kernels must agree on. Plain Python: imports no compiler."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..architectures import ARCHS
from .shapes import ROW_PADDING, TOKEN_TILE, outputs

COUNTS = (4,)
"""Numbers of streams that kernels exist for: DeepSeek-V4.1 has four."""
BLOCK = 64
"""Columns of each stream over which a partial sum runs. How many blocks a CTA has depends on the number of tokens, the
order of the sums does not, so a token's results have the same bits in every batch."""
MOST_BLOCKS = 8
WARPS = 8
RESERVED_BYTES = 1024  # which each CTA takes besides its own shared memory
GOOD_USE = 0.5
BACKWARD_WARPS = 4
NORM_CTAS_PER_SM = 3
"""Of the backward: each keeps 6 bytes a column and 256 an iteration and warp, 63 KB at D = 7168 and 20 iterations."""


class Cut(NamedTuple):
    """How the columns are cut.

    Attributes:
        slices: of the columns, with a CTA for each slice of each group of tokens.
        blocks: of a slice; the last slice may have fewer.
        merge: slices whose sums are added before any other is: then as many blocks are as a CTA may have.
        groups: of tokens.
    """

    slices: int
    blocks: int
    merge: int
    groups: int


def coefficient_floats(n: int) -> int:
    """Float32 numbers from one token's coefficients to the next token's in shared memory: comb, post and pre, and 16
    bytes more, with which the 16-byte reads of 8 tokens fall on all banks.
    """
    return n * n + 2 * n + 4


def row_bytes(n: int, blocks: int) -> int:
    """Bytes from row to row of a slice of the weight, of 16-bit numbers."""
    return blocks * BLOCK * n * 2 + ROW_PADDING


def smem_bytes(n: int, blocks: int) -> int:
    """Shared memory: the coefficients of each warp's tokens, then the slice of the weight in two parts."""
    return WARPS * TOKEN_TILE * coefficient_floats(n) * 4 + 2 * outputs(n) * row_bytes(n, blocks)


def blocks_of_a_cta(arch: str, n: int) -> int:
    """Blocks of the weight that fit shared memory."""
    room = ARCHS[arch].smem_bytes - RESERVED_BYTES
    return max(blocks for blocks in range(1, MOST_BLOCKS + 1) if smem_bytes(n, blocks) <= room)


def cut(arch: str, n: int, width: int, tokens: int, num_sms: int) -> Cut:
    """Slices as wide as a CTA may have, or of one block where few tokens would leave most warps idle."""
    most, total, tiles = blocks_of_a_cta(arch, n), -(-width // BLOCK), -(-tokens // TOKEN_TILE)
    wide = -(-total // most)
    blocks, slices = most, wide
    if most > 1 and tiles * wide < GOOD_USE * num_sms * WARPS:
        blocks, slices = 1, total
    groups = max(1, min(-(-tiles // WARPS), num_sms // slices))  # registers leave room for one CTA an SM
    return Cut(slices, blocks, most // blocks, groups)


def backward_smem(n: int, width: Any, iters: Any) -> Any:
    """Shared memory of the backward: two buffers of sums, the steps of each warp's matrix, and of each column u in 16
    bits and a sum in 32. Of Python integers or of the compiler's.
    """
    sums = -(-(2 * n + 2) * BACKWARD_WARPS * 2 * 4 // 16) * 16
    return iters * (BACKWARD_WARPS * 2 * 32 * 4) + width * 6 + sums


def workspace(n: int, slices: int, tokens: int) -> int:
    """Float32 elements: for each slice and token its products, and the squares of the streams and of the mix."""
    return slices * tokens * (outputs(n) + 2)
