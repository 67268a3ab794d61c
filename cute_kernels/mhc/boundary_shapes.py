"""Sizes of the boundary's kernels, on which the host (workspaces, launch arguments) and the kernels must agree. Plain
Python: imports no compiler."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..architectures import ARCHS
from .shapes import ROW_PADDING, TOKEN_TILE, outputs

COUNTS = (4,)
"""Numbers of streams for which boundary kernels exist: DeepSeek-V4.1 has four. The backward's sums are
products of two tokens' rows, eight in all. With 8 streams a thread of the first kernel
spills 984 bytes (sm_90a, DSL 4.8.1), and a warp of the second has too few lanes for a token's 82 sums and for the 64
elements of comb."""
BLOCK = 64
"""Columns of each stream in a block. Sums over columns are made by block, then over blocks in a fixed order. How many
blocks a CTA has depends on the number of tokens, but this order does not, so a token's results have the same bits in
every batch."""
MOST_BLOCKS = 8
WARPS = 8
SCALE_COLUMNS, WIDE_COLUMNS = 32, 128
"""Columns of x in MXFP8 that share a scale: in blocks of 1x32, and in blocks of 1x128, whose scale is stored four
times."""
RESERVED_BYTES = 1024  # which each CTA takes besides its own shared memory
GOOD_USE = 0.5
STATS = 2
"""Numbers of a token that forward keeps for backward besides p: the root mean square of the updated streams, and the
factor of u's norm, 1 / sqrt(mean u^2 + norm_eps)."""


class Cut(NamedTuple):
    """How columns and tokens are divided over CTAs. There is a CTA for each slice of columns and each group of tokens.

    Attributes:
        slices: number of slices of the columns.
        blocks: number of blocks (BLOCK columns of each stream) in a slice; the last slice may have fewer.
        merge: number of consecutive slices whose sums are added together first. blocks * merge is always as many
            blocks as fit into a CTA, so the order of additions does not depend on the cut.
        groups: number of groups of tokens.
    """

    slices: int
    blocks: int
    merge: int
    groups: int


def coefficient_floats(n: int) -> int:
    """Return the distance, in float32 numbers, from one token's coefficients to the next token's in shared memory.

    These are comb, post and pre, and 16 bytes of padding, with which the 16-byte reads of 8 tokens use all banks.
    """
    return n * n + 2 * n + 4


def row_bytes(n: int, blocks: int) -> int:
    """Return the distance in bytes between rows of a slice of the weight in shared memory, in 16-bit numbers."""
    return blocks * BLOCK * n * 2 + ROW_PADDING


def smem_bytes(n: int, blocks: int) -> int:
    """Return a CTA's bytes of shared memory: the coefficients of each warp's tokens, then the slice of the weight in
    two parts."""
    return WARPS * TOKEN_TILE * coefficient_floats(n) * 4 + 2 * outputs(n) * row_bytes(n, blocks)


def blocks_of_a_cta(arch: str, n: int) -> int:
    """Return how many blocks of the weight fit into a CTA's shared memory, at most MOST_BLOCKS."""
    room = ARCHS[arch].smem_bytes - RESERVED_BYTES
    return max(blocks for blocks in range(1, MOST_BLOCKS + 1) if smem_bytes(n, blocks) <= room)


def cut(arch: str, n: int, width: int, tokens: int, num_sms: int) -> Cut:
    """Return the cut for a number of tokens: slices as wide as a CTA can hold, or of one block each if tokens are so
    few that wide slices would leave most warps idle. width: D."""
    most, total, tiles = blocks_of_a_cta(arch, n), -(-width // BLOCK), -(-tokens // TOKEN_TILE)
    wide = -(-total // most)
    blocks, slices = most, wide
    if most > 1 and tiles * wide < GOOD_USE * num_sms * WARPS:
        blocks, slices = 1, total
    groups = max(1, min(-(-tiles // WARPS), num_sms // slices))  # registers leave room for one CTA an SM
    return Cut(slices, blocks, most // blocks, groups)


def mix_place(n: int, slices: Any, tokens: Any) -> Any:
    """Return where the mix u begins in the workspace, after the partial sums: in float32 elements, a multiple of 4 (16
    bytes). slices and tokens are Python integers or the compiler's.
    """
    return (slices * tokens * (outputs(n) + 2) + 3) // 4 * 4


def workspace(n: int, slices: int, tokens: int, mix_columns: int = 0) -> int:
    """Return the workspace of the forward in float32 elements: for each slice and token K products, the sum of the
    streams' squares and the sum of u's squares; then `mix_columns` columns of u in 16 bits."""
    return mix_place(n, slices, tokens) + tokens * mix_columns // 2
