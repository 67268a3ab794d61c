"""The order in which each of Hopper's GEMMs adds."""

from __future__ import annotations

from ..accumulation import Accumulation
from ..formats import OPERANDS
from ..specs import GemmSpec
from .by_words import multiplies_by_words

BY_WORDS = Accumulation("mma.sync", 16, "four from a word of each of four threads, 32 apart")
IN_16_BITS = Accumulation("wgmma", 16)


def accumulation(spec: GemmSpec) -> Accumulation:
    """Return the order of a GEMM. Widths of tiles, clusters and schedules do not change it.

    Sums of E4M3 products start from zero in each k-tile (mainloop/fp8.py); all other sums stay in one accumulator.
    """
    formats = OPERANDS[spec.operands]
    if formats.has_scaled_rows:
        return Accumulation("wgmma", 32, promoted=spec.tile.k)
    if formats.decodes and spec.tile.swapped and multiplies_by_words(formats.w, spec.tile):
        return BY_WORDS
    return IN_16_BITS
