"""Sizes of the boundary's kernels, on which the host (workspaces, launch arguments) and the kernels must agree. Plain
Python: imports no compiler.

T tokens have n residual streams of D columns each. A boundary (boundary.py) takes a sublayer's output y [T, D]. It
makes the updated streams, their mix u [T, D], and their projection p with K = n^2 + 2n numbers a token. comb [n, n],
post [n] and pre [n] are a token's coefficients of the update and the mix.

A slice is a range of the D columns. A part (of the tokens) is a range of token tiles. There is a CTA for each pair of a
slice and a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..architectures import ARCHS
from .shapes import TOKEN_TILE, outputs

COUNTS = (4,)
"""Numbers of streams for which boundary kernels exist: four, as in DeepSeek-V4.1.

8 streams do not fit. The weight at a warp's columns would take 192 registers a lane. In forward's second kernel, a warp
has too few lanes for a token's 82 sums and for the 64 elements of comb. Backward multiplies rows of two tokens by each
other in one MMA, which has room for eight rows in all.
"""
WARP_COLUMNS = 16
"""Columns (of each stream) of a warp. With n = 4 streams, the weight at these columns takes 48 registers a lane. In
backward, the sums for the weight's gradient (K = n^2 + 2n numbers for each column) take another 48."""
ITEMSIZE = 2
CTA_TILES = 2
"""Time that a CTA needs to load the weight and to fill its ring, in units of the time of one token tile."""
MOST_PARTS = 64
SCALE_COLUMNS, WIDE_COLUMNS = 32, 128
"""Columns of x in MXFP8 that share a scale. SCALE_COLUMNS: in blocks of 1x32. WIDE_COLUMNS: in blocks of 1x128, whose
scale is stored four times."""
RESERVED_BYTES = 1024  # which each CTA takes besides its own shared memory
STATS = 2
"""Count of numbers that forward keeps of a token for backward, besides the projection p: the root mean square of the
updated streams, and the factor of the mix's norm, 1 / sqrt(mean u^2 + norm_eps)."""


class SliceCta(NamedTuple):
    """Sizes of a CTA that has a slice of the columns.

    Attributes:
        warps: number of warps, each with WARP_COLUMNS columns of every stream.
        stages: number of token tiles that the CTA's ring holds.
    """

    warps: int
    stages: int

    @property
    def columns(self) -> int:
        return self.warps * WARP_COLUMNS

    @property
    def array_bytes(self) -> int:
        """Bytes of a tile's columns of one array [T, D] in shared memory."""
        return TOKEN_TILE * self.columns * ITEMSIZE


CHOICES = (SliceCta(16, 4), SliceCta(16, 3), SliceCta(8, 2))
"""Sizes of a forward CTA, the best first."""


def first_that_fits(choices: tuple[SliceCta, ...], bytes_of: Callable[[SliceCta], int], room: int) -> SliceCta:
    """Return the first of `choices` that fits into `room` bytes of shared memory.

    bytes_of: a function that returns the bytes of shared memory of a choice.
    """
    return next(cta for cta in choices if bytes_of(cta) <= room)


def slices_of(cta: SliceCta, width: Any) -> Any:
    """Return the number of slices into which a stream's D columns are divided. A slice has at most `cta.columns`
    columns.

    width: D.
    """
    return (width + cta.columns - 1) // cta.columns


def tiles_of(tokens: Any) -> Any:
    """Return how many token tiles, of TOKEN_TILE tokens each, T tokens fill. tokens: T."""
    return (tokens + TOKEN_TILE - 1) // TOKEN_TILE


def parts_of(slices: int, tiles: int, slots: int, least: int, most: int) -> int:
    """Return the number of parts into which to divide the token tiles, so that the kernel takes the least time. The
    model of its time is: number of waves of CTAs, times (tiles of a part + CTA_TILES).

    There is a CTA for each pair of a slice of the columns and a part of the tokens. All slices of a part run at about
    the same time, so that neighbouring columns reach memory together.

    Args:
        slices: number of slices of the columns.
        tiles: number of token tiles.
        slots: number of CTAs that run on the GPU at the same time.
        least, most: the range of the result.
    """
    times = {
        parts: -(-slices * parts // slots) * (-(-tiles // parts) + CTA_TILES)
        for parts in range(least, max(least, min(most, tiles)) + 1)
    }
    return min(times, key=lambda parts: times[parts])


def coefficient_floats(n: int) -> int:
    """Return the distance, in float32 numbers, from one token's coefficients to the next token's in shared memory.

    A token has comb (n^2 numbers), post (n) and pre (n), and 16 bytes of padding. The padding lets the 16-byte reads of
    8 tokens use all banks.
    """
    return n * n + 2 * n + 4


def tile_sums(n: int) -> int:
    """Return how many sums over columns all tokens of a tile have together. Each token has n^2 + 2n + 2 sums: the
    elements of the projection p, the sum of the updated streams' squares, and the sum of the mix u's squares.

    First come the elements of p of all tokens, then the two sums of squares of each token.
    """
    return TOKEN_TILE * (outputs(n) + 2)


def smem_bytes(n: int, cta: SliceCta) -> int:
    """Return a forward CTA's bytes of shared memory. First come the ring's stages, each with a token tile's n streams,
    sublayer output y and coefficients. Then come each warp's sums over its columns."""
    stage = (n + 1) * cta.array_bytes + TOKEN_TILE * coefficient_floats(n) * 4
    return cta.stages * stage + cta.warps * tile_sums(n) * 4


def slice_cta(n: int, room: int) -> SliceCta:
    """Return the best sizes of a forward CTA that fit into `room` bytes of shared memory."""
    return first_that_fits(CHOICES, lambda cta: smem_bytes(n, cta), room)


def cta_of(arch: str, n: int) -> SliceCta:
    """Return the sizes of a forward CTA on an architecture."""
    return slice_cta(n, ARCHS[arch].smem_bytes - RESERVED_BYTES)


def cut(cta: SliceCta, width: int, tokens: int, num_sms: int) -> int:
    """Return the number of parts into which forward divides the tokens, if each SM holds one CTA. The number does not
    change any result.

    Args:
        cta: sizes of forward's CTA.
        width: D.
        num_sms: number of the GPU's SMs.
    """
    return parts_of(slices_of(cta, width), tiles_of(tokens), num_sms, 1, MOST_PARTS)


def mix_place(n: int, slices: Any, tokens: Any) -> Any:
    """Return the index, in float32 elements, at which the mix u begins in forward's workspace. u follows the sums of
    all slices, at a multiple of 4 elements (16 bytes).

    slices and tokens (T) are Python integers or the compiler's.
    """
    return slices * tiles_of(tokens) * tile_sums(n)


def workspace(n: int, slices: int, tokens: int, mix_columns: int = 0) -> int:
    """Return the size of forward's workspace in float32 elements. The workspace has the sums of each slice and token
    tile (`tile_sums`), then `mix_columns` columns of the mix u in 16 bits."""
    return mix_place(n, slices, tokens) + tokens * mix_columns // 2
