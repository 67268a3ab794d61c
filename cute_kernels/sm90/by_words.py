"""The rule by which tiles of 4-bit weights get a mainloop that decodes whole 32-bit words, eight elements each.

That mainloop is mainloop/few_rows.py. This module is plain Python, because host code asks for the rule, too.
"""

from __future__ import annotations

from ..formats import Format
from ..tiles import TileConfig

# Tiles of so few rows of x leave the L1 cache a line for the scales of each weight row, read 4 bytes a k-tile. It costs
# a stage and saves 1 to 7 % of the time: what L2 gives an SM, scales and x beside the weights, is what bounds a decode.
FEW_ROWS = 32


def multiplies_by_words(weights: Format, tile: TileConfig) -> bool:
    """Return True if the tile's mainloop is `few_rows.FewRowsMainloop`: weights have less than 8 bits an element, and
    the tile has at most FEW_ROWS rows of x.
    """
    return weights.bits < 8 and tile.m <= FEW_ROWS
