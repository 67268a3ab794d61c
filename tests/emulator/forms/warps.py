"""Warp instructions (PTX ISA, sections shfl.sync, vote.sync, match.sync, redux.sync, elect.sync, activemask)."""

from __future__ import annotations

from .. import members
from ..emitter import VIEW, instruction
from ..ptx import Imm, Unsupported
from .no_effect import ALIGNED

_ALL = 0xFFFFFFFF


def _is_all(mask) -> bool:
    return isinstance(mask, Imm) and mask.value & _ALL == _ALL


def _members(e, ins, mask) -> str:
    """Emit a check that all lanes of the membermask are active; return Python source of the mask's value."""
    value = e.read(mask, "b32")
    check = e.constant(members.check)
    if _is_all(mask):
        e.add(f"if m is not True: {check}(u, {value}, m, {ins.op!r})")
    else:
        e.add(f"{check}(u, {value}, m, {ins.op!r})")
    return value


@instruction("shfl")
def shfl(e, ins, mods):
    mods.require("sync", "b32")
    mode = mods.choice("up", "down", "bfly", "idx")
    result, a, b, c, mask = e.operands(ins, 5)
    d, p = result if isinstance(result, list) else (result, None)
    _members(e, ins, mask)
    found = e.temporary(f"u.shfl({mode!r}, {', '.join(e.read(each, 'b32') for each in (a, b, c))})")
    e.write(d, f"{found}[0]", "b32")
    e.write(p, f"{found}[1]", "p")


@instruction("vote")
def vote(e, ins, mods):
    mods.require("sync")
    mode = mods.choice("all", "any", "uni", "ballot")
    view = VIEW[mods.type("b32" if mode == "ballot" else "pred")]
    d, a, mask = e.operands(ins, 3)
    if mode == "uni":
        raise Unsupported(ins.op)
    members_ = _members(e, ins, mask)
    if _is_all(mask):
        e.write(d, f"u.vote({mode!r}, {e.read(a, 'p')}, m)", view)
    else:
        e.write(d, f"{e.constant(members.vote)}(u, {mode!r}, {e.read(a, 'p')}, {members_})", view)


@instruction("match")
def match(e, ins, mods):
    mods.require("any", "sync", "b32")
    d, a, mask = e.operands(ins, 3)
    value = _members(e, ins, mask)
    if _is_all(mask):
        e.write(d, f"u.match_any({e.read(a, 'b32')}, m)", "b32")
    else:
        e.write(d, f"{e.constant(members.match_any)}(u, {e.read(a, 'b32')}, {value})", "b32")


@instruction("activemask")
def activemask(e, ins, mods):
    mods.require("b32")
    e.write(*e.operands(ins, 1), "u.vote('ballot', np.ones(u.n, bool), m)", "b32")


@instruction("redux")
def redux(e, ins, mods):
    mods.require("sync")
    operation = mods.choice("add", "min", "max", "and", "or", "xor")
    view = VIEW[mods.type(*(("u32", "s32") if operation in ("add", "min", "max") else ("b32",)))]
    d, a, mask = e.operands(ins, 3)
    e.write(d, f"{e.constant(members.redux)}(u, {operation!r}, {e.read(a, view)}, {_members(e, ins, mask)})", view)


@instruction("elect")
def elect(e, ins, mods):
    """Elect the lowest lane of the membermask."""
    mods.require("sync")
    mods.drop(ALIGNED)
    (lane, who), mask = e.operands(ins, 2)
    if not _is_all(mask):
        raise Unsupported(f"{ins.op} of some lanes")
    _members(e, ins, mask)
    if lane is not None:
        e.write(lane, "u.elect_lane(m)", "b32")
    e.write(who, "u.elect(m)", "p")
