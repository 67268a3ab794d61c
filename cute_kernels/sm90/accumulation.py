"""The order in which Hopper's GEMMs add the products of one result element."""

from __future__ import annotations

from ..accumulation import Accumulation
from ..formats import OPERANDS
from ..specs import GemmSpec
from .by_words import multiplies_by_words

BY_WORDS = Accumulation("mma.sync", 16, "four from a word of each of four threads, 32 apart")
IN_16_BITS = Accumulation("wgmma", 16)


def accumulation(spec: GemmSpec) -> Accumulation:
    """Return the order in which a spec's GEMM adds products.

    GEMMs of FP8 rows (mainloop/fp8.py) start the sum of E4M3 products from zero in each k-tile, and add the scaled sum
    to a float32 accumulator. All other GEMMs keep one accumulator for the whole contraction. They use wgmma
    (IN_16_BITS), or mma.sync (BY_WORDS) if `multiplies_by_words`. Apart from this, tile widths, clusters and schedules
    do not change the order.
    """
    formats = OPERANDS[spec.operands]
    if formats.has_scaled_rows:
        return Accumulation("wgmma", 32, promoted=spec.tile.k)
    if formats.decodes and spec.tile.swapped and multiplies_by_words(formats.w, spec.tile):
        return BY_WORDS._replace(shares=spec.tile.splits)
    return IN_16_BITS._replace(shares=spec.tile.splits)
