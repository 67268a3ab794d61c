"""The rule that says which tiles of portable GEMMs are split along the contraction.

Plain Python, since the host needs the rule, too.
"""

from __future__ import annotations

from ..epilogue.sizes import ROWS, THREADS
from ..tiles import TileConfig

WARPS = THREADS // 32


def is_split(tile: TileConfig) -> bool:
    """Return True if each warp multiplies all rows of the tile over a quarter of each k-tile's depth.

    Otherwise each warp multiplies some of the rows over the whole depth.
    """
    return tile.m < ROWS
