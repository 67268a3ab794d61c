"""The order in which Blackwell's GEMMs add the products of one result element; kernels with the same order give the
same bits."""

from __future__ import annotations

from ..accumulation import Accumulation
from ..formats import OPERANDS
from ..portable.accumulation import accumulation as portable
from ..specs import GemmSpec


def accumulation(spec: GemmSpec) -> Accumulation:
    """Return the order in which a spec's GEMM adds products.

    If the tile's schedule is "warps", the kernel is a portable one and has the order of portable kernels.
    """
    if spec.tile.by_warps:
        return portable(spec)
    return Accumulation("tcgen05.mma", 32 if OPERANDS[spec.operands].multiplies_blocks else 16)
