"""The rule that says which tiles are split along the contraction. Plain Python, since the host needs it, too."""

from __future__ import annotations

from ..epilogue.sizes import ROWS, THREADS
from ..tiles import TileConfig

WARPS = THREADS // 32


def is_split(tile: TileConfig) -> bool:
    """Return True if each warp of a tile multiplies a part of the depth for all rows, instead of some rows over the
    whole depth."""
    return tile.m < ROWS
