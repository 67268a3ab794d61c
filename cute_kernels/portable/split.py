"""Which tiles are split along the contraction. Plain Python: the host asks, too."""

from __future__ import annotations

from ..epilogue.sizes import ROWS, THREADS
from ..tiles import TileConfig

WARPS = THREADS // 32


def is_split(tile: TileConfig) -> bool:
    """Return True if each warp of a tile has a part of the depth, instead of rows."""
    return tile.m < ROWS
