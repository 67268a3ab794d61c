"""The rule that says which GEMMs of 4-bit weights use the mainloop for few rows (mainloop/few_rows.py).

That mainloop decodes whole 32-bit words, eight elements each. Plain Python, because host code needs the rule, too.
"""

from __future__ import annotations

from ..formats import Format
from ..tiles import TileConfig

# With so few rows of x, shared memory is made small enough to leave the L1 cache one line for each weight row. The line
# keeps the row's scales, of which each k-tile reads 4 bytes. This costs a stage and saves 1 to 7 % of the time, since
# GEMMs with so few rows are bound by the bytes that L2 delivers to an SM: weights, scales and x.
FEW_ROWS = 32


def multiplies_by_words(weights: Format, tile: TileConfig) -> bool:
    """Return True if the GEMM's mainloop is `few_rows.FewRowsMainloop`.

    This is so if weights have less than 8 bits an element, and the tile has at most FEW_ROWS rows of x.
    """
    return weights.bits < 8 and tile.m <= FEW_ROWS and not tile.rules.in_order
