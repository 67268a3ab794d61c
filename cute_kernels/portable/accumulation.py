"""The order in which a portable GEMM adds; kernels with the same order give the same bits."""

from __future__ import annotations

from ..accumulation import Accumulation
from ..specs import GemmSpec
from .split import WARPS, is_split


def accumulation(spec: GemmSpec) -> Accumulation:
    """Return the order in which a GEMM adds. It depends only on the tile, not on the operands."""
    return Accumulation("mma.sync", 16, parts=WARPS if is_split(spec.tile) else 1)
