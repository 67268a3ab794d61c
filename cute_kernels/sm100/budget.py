"""Registers of a thread, and number of stages, in Blackwell's kernels. Plain Python, like sm90/budget.py."""

from __future__ import annotations

from typing import NamedTuple

from ..formats import MXFP8
from ..sm90 import budget
from ..tiles import TileConfig

# Registers of a thread at launch, by whether there is a gathering warpgroup: three or four warpgroups share an SM's
# 65,536.
LAUNCH_REGISTERS = {False: 168, True: 128}


class Registers(NamedTuple):
    """Registers of a thread in each kind of warpgroup.

    Attributes:
        roles: in the first warpgroup, whose warps have roles of their own.
        epilogue: in an epilogue warpgroup.
        gathering: in the warpgroup that gathers rows or brings scales; 0: there is none.
    """

    roles: int
    epilogue: int
    gathering: int


def registers(roles: int, gathers: bool, brings_scales: bool) -> Registers:
    """Return the registers of a thread of each warpgroup, for setmaxnreg.

    setmaxnreg hangs if the sum over all threads exceeds the registers that the launch reserved.

    Args:
        roles: registers of a thread of the first warpgroup.
        gathers: True if there is a gathering warpgroup.
        brings_scales: True if warps of the kernel bring scales to shared memory.
    """
    gathering = gathers * (budget.LOADING_REGISTERS if brings_scales else budget.ALONG_REGISTERS)
    rest = LAUNCH_REGISTERS[gathers] * (3 + gathers) - roles - gathering
    return Registers(roles, rest // 2 // budget.REGISTERS_UNIT * budget.REGISTERS_UNIT, gathering)


def block_scaled_stages(tile: TileConfig, staging_bytes: int) -> int:
    """Return how many stages of MXFP8 operands and their scales fit into shared memory.

    A scale is a byte for 32 elements. staging_bytes: bytes of the epilogue's staging slots.
    """
    stage = (tile.m + tile.n) * (tile.k + tile.k // MXFP8.block)
    return (budget.SMEM_BYTES - budget.SMALL_BYTES - staging_bytes) // stage
