"""mbarrier, fence, nanosleep (PTX ISA, section Parallel Synchronization and Communication Instructions).

Barriers of CTAs and clusters end a block, see translate.py.
"""

from __future__ import annotations

from ..emitter import instruction
from ..ptx import Imm, Unsupported
from .no_effect import ORDER, SCOPE

_METHODS = {"init": "mbar_init", "inval": "mbar_inval", "expect_tx": "mbar_expect", "complete_tx": "mbar_complete"}
_SPACES = ("shared", "shared::cta", "shared::cluster")


@instruction("mbarrier")
def mbarrier(e, ins, mods):
    mods.drop(ORDER, SCOPE)
    space = mods.choice(*_SPACES, default="generic")
    mods.require("b64")
    operation = mods.choice("init", "inval", "arrive", "expect_tx", "complete_tx", "try_wait", "test_wait")
    if operation == "arrive":
        _arrive(e, ins, mods, space)
    elif operation in ("try_wait", "test_wait"):
        _wait(e, ins, mods, operation)
    else:
        address, *count = e.operands(ins, 1 if operation == "inval" else 2)
        numbers = "".join(f"{e.read(each, 'b32')}, " for each in count)
        e.add(f"u.{_METHODS[operation]}({e.address(address, 'b32')}, {numbers}m)")


def _arrive(e, ins, mods, space):
    """Translate arrive, which returns a state for test_wait. The operand of .expect_tx is bytes; it counts one
    arrival.
    """
    expect = mods.flag("expect_tx")
    state, address, *count = e.operands(ins, 3) if expect else e.operands(ins, 2, 3)
    number = e.read(count[0] if count else Imm(1), "b32")
    arrive = f"u.mbar_arrive({e.address(address, 'b32')}, {number}, {expect}, m, {space == 'shared::cluster'})"
    if state is None:
        e.add(arrive)
    else:
        e.write(state, arrive, "b64")


def _wait(e, ins, mods, operation):
    """Translate test_wait and try_wait: test if the phase of a parity or of a state has ended. Sleep times are
    ignored.
    """
    by_parity = mods.flag("parity")
    p, address, phase, *_ = e.operands(ins, *((3, 4) if operation == "try_wait" else (3,)))
    method, view = ("mbar_try", "b32") if by_parity else ("mbar_test", "b64")
    e.write(p, f"u.{method}({e.address(address, 'b32')}, {e.read(phase, view)}, m)", "p")


_FENCES = {
    "fence.proxy.async",
    "fence.proxy.async.global",
    "fence.proxy.async.shared::cta",
    "fence.proxy.async.shared::cluster",
    "fence.mbarrier_init.release.cluster",
}


@instruction("fence")
def fence(e, ins, mods):
    """Pass a fence to the machine: proxy fences have an effect there, fences of memory order have none."""
    if ins.op not in _FENCES:
        mods.drop(ORDER, SCOPE)
        if mods.left:
            raise Unsupported(ins.op)
    mods.left = []
    e.operands(ins, 0)
    e.add(f"u.fence({ins.op!r}, m)")


@instruction("nanosleep")
def nanosleep(e, ins, mods):
    """Mark the unit as waiting, so that the scheduler runs another one."""
    mods.require("u32")
    e.operands(ins, 1)
    e.add("u.spun = True")
