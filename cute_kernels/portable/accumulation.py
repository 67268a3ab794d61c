"""The order in which a portable GEMM adds its products. Kernels with equal orders give the same bits."""

from __future__ import annotations

from ..accumulation import Accumulation
from ..specs import GemmSpec
from .split import WARPS, is_split


def accumulation(spec: GemmSpec) -> Accumulation:
    """Return the order in which the GEMM of `spec` adds its products.

    The order depends only on the tile, not on the operands. In a split tile (split.py) each of the four warps has a sum
    of its own, and these sums are added at the end.
    """
    return Accumulation("mma.sync", 16, parts=WARPS if is_split(spec.tile) else 1)
