"""Stepping of one unit: run a basic block for one group of lanes, then the instruction that ends the block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .faults import Fault

if TYPE_CHECKING:
    from .machine import Machine
    from .warps import Unit

MOST_BLOCKS = 64  # a unit's turn: enough to get far ahead of others, few enough that the others get theirs
SHORT_LOOP = 3  # blocks of a loop that does nothing but wait


def step(machine: Machine, u: Unit) -> bool:
    """Run a unit until it waits, spins or has used its turn. Return False if it only spun."""
    moved = False
    u.spun = False
    for done in range(MOST_BLOCKS):
        if not u.groups:
            return moved
        group = u.groups[0] if len(u.groups) == 1 else _lowest(u)
        at, lanes = group
        full = lanes is u.everyone
        run, count, end = machine.blocks[at]
        machine.reached.add(at)
        u.block = at
        try:
            run(u, True if full else lanes)
        except Exception as error:
            raise machine.fault(error, u) from error
        machine.instructions += count * (u.warps if full else int(lanes.reshape(-1, 32).any(1).sum()))
        machine.steps += 1
        if end is None:
            group[0] = at + 1
        else:
            _end_block(machine, u, group, end)
        if u.spun:
            u.spun_at = u.spun_at | {at}
            again, u.last_wait, u.spun = u.last_wait == at and done <= SHORT_LOOP, at, False
            return moved and not again
        moved = True
        if u.spun_at:
            u.spun_at = set()
    u.last_wait = -1
    return moved


def _lowest(u: Unit) -> list:
    """Merge groups of lanes that are at the same block; return the group at the lowest block, spinning ones last."""
    at = min(u.groups, key=lambda group: (group[0] in u.spun_at, group[0]))[0]
    same = [group for group in u.groups if group[0] == at]
    if len(same) == 1:
        return same[0]
    lanes = np.logical_or.reduce([group[1] for group in same])
    merged = [at, u.everyone if lanes.all() else lanes]
    u.groups = [group for group in u.groups if group[0] != at] + [merged]
    return merged


def _end_block(machine: Machine, u: Unit, group: list, end: tuple) -> None:
    """Run a block's last instruction: a branch, an exit or a barrier."""
    kind, guard, target = end
    at, lanes = group
    taken, stays = lanes, None
    if guard is not None:
        hit = u.p[guard[0]] ^ guard[1]
        full = lanes is u.everyone
        if not full:
            hit = hit & lanes
        number = int(np.count_nonzero(hit))
        if not number:
            group[0] = at + 1
            return
        if number < (u.n if full else int(np.count_nonzero(lanes))):
            taken, stays = hit, lanes & ~hit
    if kind == "bra" and stays is None:
        group[0] = target
        return
    u.groups = [other for other in u.groups if other is not group]
    if stays is not None:
        u.groups.append([at + 1, stays])
    if kind == "bra":
        u.groups.append([target, taken])
        return
    try:
        _synchronise(u, kind, target, at + 1, taken)
    except Fault as fault:
        raise machine.fault(fault, u) from None


def _synchronise(u: Unit, kind: str, target, at: int, lanes: np.ndarray) -> None:
    cta = u.cta
    if kind in ("ret", "exit"):
        cta.exited(u, lanes)
    elif kind == "trap":
        raise Fault("trap")
    elif kind in ("bar_sync", "bar_arrive", "bar_red"):
        number = _value(u, target[0], lanes)
        wanted = _value(u, target[1], lanes) if len(target) > 1 and target[1] is not None else None
        result = _Reduction(u, lanes, *target[2:]) if kind == "bar_red" else None
        if kind == "bar_arrive":
            if wanted is None:
                raise Fault("bar.arrive without a number of threads")
            u.groups.append([at, lanes])
        cta.arrive(u, number, wanted, lanes, None if kind == "bar_arrive" else (at, result))
    elif kind == "cluster_arrive":
        u.groups.append([at, lanes])
        cta.cluster.arrive(u, lanes)
    elif kind == "cluster_wait":
        cta.cluster.wait(u, at, lanes)
    elif kind == "warp_sync":
        _warp_barrier(u, _value(u, target[0], lanes) & 0xFFFFFFFF, at, lanes)
    else:
        raise Fault(f"{kind} is not modelled")


def _value(u: Unit, operand, lanes: np.ndarray) -> int:
    """Return an operand's value. The operand is a number, or a register as "b32[index]"."""
    if not isinstance(operand, str):
        return int(operand)
    values = u.b32[int(operand[4:-1])][lanes]
    if (values != values[0]).any():
        raise Fault("a barrier's operand differs between lanes")
    return int(values[0])


class _Reduction:
    """Computes bar.red's result: a count, "and" or "or" over all lanes' predicates."""

    def __init__(self, u: Unit, lanes: np.ndarray, op: str, to: tuple, source: tuple):
        self.u, self.lanes, self.op, self.to = u, lanes, op, to
        self.values = (u.p[source[0]] ^ source[1])[lanes]

    def __call__(self, everyone: list[_Reduction]) -> None:
        values = np.concatenate([one.values for one in everyone])
        result = {"popc": values.sum, "and": values.all, "or": values.any}[self.op]()
        getattr(self.u, self.to[0])[self.to[1]][self.lanes] = result


def _warp_barrier(u: Unit, mask: int, at: int, lanes: np.ndarray) -> None:
    """Wait for the lanes in `mask` in each warp (PTX ISA, "bar.warp.sync")."""
    named = np.tile(mask >> np.arange(32) & 1, u.warps).astype(bool)
    if (lanes & ~named).any():
        raise Fault(f"bar.warp.sync {mask:#x} by a lane that the mask does not name")
    wanted = named & ~u.exited & np.repeat(u.mask(lanes).any(1), 32)
    if (wanted & ~lanes).any():
        u.warp_waiting.append([at, lanes, mask])
        u.blocked.append(("bar.warp.sync", mask))
    else:
        u.groups.append([at, lanes])
        _synchronised(u, lanes)
        return
    here = [item for item in u.warp_waiting if item[2] == mask]
    arrived = np.logical_or.reduce([item[1] for item in here])
    ready = np.repeat(~u.mask(named & ~u.exited & ~arrived).any(1), 32)
    for item in here:
        goes = item[1] & ready
        if goes.any():
            _synchronised(u, goes)
            u.groups.append([item[0], goes])
            item[1] = item[1] & ~ready
            if not item[1].any():
                u.warp_waiting = [other for other in u.warp_waiting if other is not item]
                u.blocked.remove(("bar.warp.sync", mask))


def _synchronised(u: Unit, lanes: np.ndarray) -> None:
    if u.observer is not None:
        u.acting = lanes
        u.observer.fence(u, "bar.warp.sync")
