"""The order in which each of the portable GEMMs adds."""

from __future__ import annotations

from ..accumulation import Accumulation
from ..specs import GemmSpec
from .split import WARPS, is_split


def accumulation(spec: GemmSpec) -> Accumulation:
    """Return the order of a GEMM, whatever its operands are."""
    return Accumulation("mma.sync", 16, parts=WARPS if is_split(spec.tile) else 1)
