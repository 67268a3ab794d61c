"""Which tiles of narrow weights are multiplied by words of eight elements. Plain Python: the host asks, too."""

from __future__ import annotations

from ..formats import Format
from ..tiles import TileConfig

# Tiles of so few rows of x leave the L1 cache a line for the scales of each weight row, read 4 bytes a k-tile. It costs
# a stage and saves 1 to 7 % of the time: what L2 gives an SM, scales and x beside the weights, is what bounds a decode.
FEW_ROWS = 32


def multiplies_by_words(weights: Format, tile: TileConfig) -> bool:
    """Return True if a tile's mainloop is `few_rows.FewRowsMainloop`: of weights of less than 8 bits, for few rows."""
    return weights.bits < 8 and tile.m <= FEW_ROWS
