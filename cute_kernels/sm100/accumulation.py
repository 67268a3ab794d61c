"""The order in which each of Blackwell's GEMMs adds."""

from __future__ import annotations

from ..accumulation import Accumulation
from ..formats import OPERANDS
from ..portable.accumulation import accumulation as portable
from ..specs import GemmSpec


def accumulation(spec: GemmSpec) -> Accumulation:
    """Return the order of a GEMM: those of warps are portable ones."""
    if spec.tile.by_warps:
        return portable(spec)
    return Accumulation("tcgen05.mma", 32 if OPERANDS[spec.operands].multiplies_blocks else 16)
