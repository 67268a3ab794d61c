"""What a tile takes of an SM: registers, shared memory, columns of tensor memory. Plain Python, as Hopper's budget."""

from __future__ import annotations

from typing import NamedTuple

from ..sm90 import budget
from ..specs import Spec

# Registers that a thread has if three or four warpgroups share an SM's 65,536.
LAUNCH_REGISTERS = {False: 168, True: 128}


class Registers(NamedTuple):
    """Of a thread of the warpgroup of roles, of an epilogue's two, and of the one that gathers rows (0: none does)."""

    roles: int
    epilogue: int
    gathering: int


def registers(gathers: bool) -> Registers:
    """Registers after redistribution. setmaxnreg hangs if their sum exceeds what the launch reserved."""
    roles, gathering = budget.ACROSS_REGISTERS, budget.ALONG_REGISTERS if gathers else 0
    rest = LAUNCH_REGISTERS[gathers] * (3 + gathers) - roles - gathering
    return Registers(roles, rest // 2 // budget.REGISTERS_UNIT * budget.REGISTERS_UNIT, gathering)


def check(spec: Spec) -> None:
    """Raises SpecError where a kernel of the spec finds no room in shared memory."""
    budget.check(spec)
