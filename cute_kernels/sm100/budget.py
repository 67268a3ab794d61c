"""Registers and stages of a tile's kernel. Plain Python, as Hopper's budget."""

from __future__ import annotations

from typing import NamedTuple

from ..formats import MXFP8
from ..sm90 import budget
from ..tiles import TileConfig

# Registers that a thread has if three or four warpgroups share an SM's 65,536.
LAUNCH_REGISTERS = {False: 168, True: 128}


class Registers(NamedTuple):
    """Registers of a thread of the first warpgroup, of an epilogue warpgroup, of the gathering one (0: none)."""

    roles: int
    epilogue: int
    gathering: int


def registers(roles: int, gathers: bool, brings_scales: bool) -> Registers:
    """Registers after redistribution. setmaxnreg hangs if their sum exceeds what the launch reserved."""
    gathering = gathers * (budget.LOADING_REGISTERS if brings_scales else budget.ALONG_REGISTERS)
    rest = LAUNCH_REGISTERS[gathers] * (3 + gathers) - roles - gathering
    return Registers(roles, rest // 2 // budget.REGISTERS_UNIT * budget.REGISTERS_UNIT, gathering)


def block_scaled_stages(tile: TileConfig, staging_bytes: int) -> int:
    """Stages of MXFP8 operands and their scales, a byte for 32 elements, beside `staging_bytes` of stores."""
    stage = (tile.m + tile.n) * (tile.k + tile.k // MXFP8.block)
    return (budget.SMEM_BYTES - budget.SMALL_BYTES - staging_bytes) // stage
