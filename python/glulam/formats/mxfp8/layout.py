"""The constants of MXFP8, and the layouts of scales: plain, or swizzled in atoms of 128 x 4 scales.

Scales are bytes in this file, since few of torch's operators take float8_e8m0fnu. A matrix of scales has the dimensions
[outer, blocks]. Quantised along rows: `outer` counts rows, and `blocks` counts the blocks of a row. Quantised along
columns: `outer` counts columns, and `blocks` counts the blocks of a column.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...names import Axis, Block, ScaleLayout
from ..scaled import BLOCK

DATA_DTYPE = torch.float8_e4m3fn
AXES: tuple[Axis, ...] = get_args(Axis)
BLOCK_SIZES: dict[Block, int] = {"1x32": BLOCK, "1x128": 128}
"""Numbers of elements that share a scale. "1x128" stores each scale four times, once for each 32 elements."""
SCALE_LAYOUTS: tuple[ScaleLayout, ...] = get_args(ScaleLayout)
ATOM_OUTER, ATOM_BLOCKS = 128, 4
ATOM = ATOM_OUTER * ATOM_BLOCKS
GROUP_ALIGNMENT = 128
"""Groups quantised along columns begin at multiples of this many rows."""


def num_blocks(size: int) -> int:
    return -(-size // BLOCK)


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def outer_and_blocks(rows: int, columns: int, axis: str) -> tuple[int, int]:
    """Return (outer, blocks), the shape of the matrix of scales (top of this file) for a matrix [rows, columns].

    axis: "row" or "col", along which blocks lie.
    """
    return (rows, num_blocks(columns)) if axis == "row" else (columns, num_blocks(rows))


def scale_shape(rows: int, columns: int, axis: str, scale_layout: str) -> tuple[int, ...]:
    """Return the shape of the scales of a matrix [rows, columns]. Swizzled scales are a vector of whole atoms."""
    outer, blocks = outer_and_blocks(rows, columns, axis)
    if scale_layout == "swizzled":
        return (round_up(outer, ATOM_OUTER) * round_up(blocks, ATOM_BLOCKS),)
    return (outer, blocks) if axis == "row" else (blocks, outer)


def band_bytes(rows: int, groups: int, columns: int) -> int:
    """Return the bytes of swizzled scales for a matrix [rows, columns] whose groups are each quantised by columns.

    A band is 128 rows of one group. Each band has an atom of 512 scales for each 128 columns. There are at most
    rows // 128 + groups bands, since each group may leave its last band partly empty. Source:
    `cute_kernels.memory.scale_bands`.
    """
    return round_up(columns, ATOM_OUTER) // ATOM_OUTER * (rows // GROUP_ALIGNMENT + groups) * ATOM


def swizzled(scales: Tensor) -> Tensor:
    """Convert plain scale bytes [..., outer, blocks] to swizzled bytes [..., atoms * 512]; atoms are padded with 0.

    The scale of (i, j) goes to ((i/128) tiles + j/4) 512 + (i%32) 16 + ((i%128)/32) 4 + j%4, tiles = ceil(blocks/4).
    """
    *batch, outer, blocks = scales.shape
    whole = pad(scales, (0, -blocks % ATOM_BLOCKS, 0, -outer % ATOM_OUTER))
    parts: Tensor = whole.unflatten(-1, (-1, ATOM_BLOCKS)).unflatten(-3, (-1, ATOM_OUTER // 32, 32))
    return parts.movedim((-5, -2, -3, -4), (-5, -4, -3, -2)).reshape(*batch, -1)


def unswizzled(atoms: Tensor, outer: int, blocks: int) -> Tensor:
    """Convert swizzled scale bytes [..., atoms * 512] back to plain [..., outer, blocks]; the inverse of `swizzled`."""
    grid = -(-outer // ATOM_OUTER), -(-blocks // ATOM_BLOCKS)
    parts: Tensor = atoms.unflatten(-1, (*grid, 32, ATOM_OUTER // 32, ATOM_BLOCKS))
    whole: Tensor = parts.movedim((-5, -4, -3, -2), (-5, -2, -3, -4)).flatten(-5, -3).flatten(-2, -1)
    return whole[..., :outer, :blocks]
